"""Settings of MindSpore's CPU backend that have no public name."""

from __future__ import annotations

import threading
from typing import Any

import mindspore as ms

from mindspore_boost_ext._compat import VERSION, graph_api

ONEDNN_LACKS_AVX512 = VERSION in ((2, 9), (2, 10))


def no_cpu_training(may_change: bool) -> str:
    """Return why training is not surely on CPU; empty if it is.

    Args:
        may_change: whether another device, where there is one, may still be chosen.
    """
    from mindspore._c_expression import MSContext

    target = ms.get_context("device_target")
    if target != "CPU":
        return f"the device is {target}"
    others = [
        one for one in ("Ascend", "GPU") if MSContext.get_instance().is_pkg_support_device(one)
    ]
    return f"{others[0]} may be chosen before the first Model" if others and may_change else ""


def launches_blocking() -> bool:
    """Return whether PYNATIVE_MODE waits for each operator, whoever asked for that."""
    from mindspore._c_expression import RuntimeConf

    blocking = RuntimeConf.get_instance().is_launch_blocking()
    return bool(blocking or ms.get_context("pynative_synchronize"))


def set_blocking_launch(blocking: bool) -> None:
    """Let PYNATIVE_MODE wait for each operator, or not.

    ``ms.runtime.launch_blocking`` cannot be taken back, and ``ms.set_context`` of this warns.
    """
    from mindspore._c_expression import MSContext, ms_ctx_param

    MSContext.get_instance().set_param(ms_ctx_param.pynative_synchronize, blocking)


_Executor = type(graph_api()._pynative_executor)
_HANDED_ON = _Executor.grad_jit
_NAMED: Any = getattr(_Executor, "set_jit_compile_phase", None)  # 2.7 has none
# MindSpore's queue runs a function at a time, and finds it by one name that all threads write.
_IN_TURNS, _MINE = threading.RLock(), threading.local()


def can_run_at_once() -> bool:
    """Return whether this MindSpore, as 2.10, can do without the queues between its threads."""
    return bool(_NAMED) and hasattr(_Executor, "disable_frontend_and_bprop_pipeline")


def runs_functions_at_once() -> bool | None:
    """Return whether functions of ``ms.jit`` run in the thread that calls them; None if unknown."""
    return {_HANDED_ON: False, _run_at_once: True}.get(_Executor.grad_jit)


def run_functions_at_once(at_once: bool) -> None:
    """Let functions of ``ms.jit`` run in the thread that calls them, or hand them on, as before."""
    _Executor.grad_jit = _run_at_once if at_once else _HANDED_ON
    _Executor.set_jit_compile_phase = _name_in_turn if at_once else _NAMED


def _name_in_turn(self: Any, phase: str) -> None:
    """Name the function of this thread that runs next, while no other thread runs one."""
    _MINE.phase = phase
    with _IN_TURNS:
        _NAMED(self, phase)


def _run_at_once(self: Any, *inputs: object) -> object:
    """Run a compiled function, after what is queued already, without a queue of its own."""
    with _IN_TURNS:
        was_off = None  # nobody knows, should Ctrl-C come in between
        try:
            was_off = self.disable_frontend_and_bprop_pipeline()
            if hasattr(_MINE, "phase"):
                _NAMED(self, _MINE.phase)  # another thread may have named its own meanwhile
            return _HANDED_ON(self, *inputs)
        finally:
            if not was_off:
                self.enable_frontend_and_bprop_pipeline()
