"""Fewer updates, with the whole learning-rate schedule compressed into them."""

from mindspore_boost_ext.short_schedule.algorithm import FasterSchedule

__all__ = ["FasterSchedule"]
