"""Callbacks of ``ms.Model``, and what they write."""

from mindspore_boost_ext.callbacks.monitor import BoostMonitor, FlushAccumulation

__all__ = ["BoostMonitor", "FlushAccumulation"]
