"""Keeps the thread that trains or evaluates on the core that MindSpore's workers share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from mindspore import nn

_KINDS: tuple[Any, ...] = (nn.TrainOneStepCell, nn.WithEvalCell)  # what ms.Model runs


class _Shared:
    """The core that all workers share, or None while each has its own."""

    core: int | None = None


shared = _Shared()


def share(core: int | None) -> None:
    """Let steps run on this core from now on; None is for all cores."""
    shared.core = core
    for kind in _KINDS:
        if core is not None and "__call__" not in vars(kind):  # the script may have its own
            kind.__call__ = _call
        elif core is None and vars(kind).get("__call__") is _call:
            del kind.__call__


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: share(None))  # it has no workers yet


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
    os.sched_setaffinity(0, (core,))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _call(self: nn.Cell, *inputs: object, **kwargs: object) -> object:
    """Run a step, in either mode."""
    with beside_workers():
        return nn.Cell.__call__(self, *inputs, **kwargs)
