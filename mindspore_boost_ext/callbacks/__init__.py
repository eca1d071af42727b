"""Callbacks of ``ms.Model``, and what they write."""

from mindspore_boost_ext.callbacks.flush import FlushAccumulation
from mindspore_boost_ext.callbacks.monitor import BoostMonitor

__all__ = ["BoostMonitor", "FlushAccumulation"]
