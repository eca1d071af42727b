"""Trainings that take a share of their steps, their rates' schedule compressed to it."""

from mindspore_boost_ext.short_schedule.algorithm import FasterSchedule

__all__ = ["FasterSchedule"]
