"""Keeps the thread that trains or evaluates on the core that MindSpore's workers share."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import nn

_MINE = threading.local()  # the cores that this thread gets back after a step


class _Shared:
    """The core that all workers share, or None while each has its own."""

    core: int | None = None


shared = _Shared()


def share(core: int | None) -> None:
    """Let steps run on this core from now on; None is for all cores."""
    shared.core = core
    for kind, call in _CALLS.items():
        if core is not None and "__call__" not in vars(kind):  # the script may have its own
            kind.__call__ = call
        elif core is None and vars(kind).get("__call__") is call:
            del kind.__call__


def _in_child() -> None:
    """Give a forked process all cores: it has no workers yet."""
    share(None)
    if cores := getattr(_MINE, "cores", None):  # it was forked within a step
        os.sched_setaffinity(0, cores)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def beside_workers() -> Iterator[None]:
    """Let this thread run only where the workers do, as long as they share a core.

    On the core of another process it would wait for that, and they for it. It gets its cores back
    after each step, because what a script starts, processes and threads, inherits them.
    """
    core = shared.core
    before = set() if core is None else os.sched_getaffinity(0)
    if core is None or core not in before:  # the script has put this thread elsewhere
        yield
        return
    outer = getattr(_MINE, "cores", None)  # of the step in which this one runs
    _MINE.cores = outer or before
    os.sched_setaffinity(0, (core,))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        _MINE.cores = outer


def _call_of(kind: type[nn.Cell]) -> Callable[..., object]:
    """Return a function that runs a Cell of this kind, in either mode."""

    def call(self: nn.Cell, *inputs: object, **kwargs: object) -> object:
        run: Callable[..., object] = super(kind, self).__call__
        with beside_workers():
            return run(*inputs, **kwargs)

    return call


# What ms.Model runs.
_CALLS: dict[Any, Any] = {kind: _call_of(kind) for kind in (nn.TrainOneStepCell, nn.WithEvalCell)}
