"""Functions of ``ms.jit`` that run in the thread that calls them, without MindSpore's queue."""

from __future__ import annotations

import threading
from typing import Any

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime import one_core

_Executor: Any = _compat.executor_class()
_HANDED_ON = _Executor.grad_jit
_NAMED: Any = getattr(_Executor, "set_jit_compile_phase", None)  # 2.7 has none
# MindSpore's queue runs one function at a time; it finds it by a single name that all threads set.
_IN_TURNS, _MINE = threading.RLock(), threading.local()


def is_possible() -> bool:
    """Return whether this MindSpore can bypass its threads' queues, as 2.8 to 2.10 can."""
    return bool(_NAMED) and hasattr(_Executor, "disable_frontend_and_bprop_pipeline")


def is_in_place() -> bool | None:
    """Return whether functions of ``ms.jit`` run in the thread that calls them; None if unknown."""
    return {_HANDED_ON: False, _run_at_once: True}.get(_Executor.grad_jit)


def put_in_place(at_once: bool) -> None:
    """Let functions of ``ms.jit`` run in the thread that calls them, or in the queue as before."""
    if is_in_place() is None:
        return
    _Executor.grad_jit = _run_at_once if at_once else _HANDED_ON
    _Executor.set_jit_compile_phase = _name_in_turn if at_once else _NAMED


def _name_in_turn(self: Any, phase: str) -> None:
    """Name the function of this thread that runs next, while no other thread runs one."""
    _MINE.phase = phase
    with _IN_TURNS:
        _NAMED(self, phase)


def _run_at_once(self: Any, *inputs: object) -> object:
    """Run a compiled function without the queue, after everything that is queued already."""
    with _IN_TURNS:
        was_off = None  # unknown if Ctrl-C interrupts the next call
        try:
            was_off = self.disable_frontend_and_bprop_pipeline()
            if hasattr(_MINE, "phase"):
                _NAMED(self, _MINE.phase)  # another thread may have set its own name meanwhile
            with one_core.beside_workers():
                return _HANDED_ON(self, *inputs)
        finally:
            if not was_off:
                self.enable_frontend_and_bprop_pipeline()
