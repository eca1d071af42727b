"""Settings of MindSpore's CPU backend that have no public name."""

from __future__ import annotations

import mindspore as ms

from mindspore_boost_ext._compat import VERSION

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
