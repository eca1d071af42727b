"""Levels, modes and settings; nothing in here imports MindSpore."""

from mindspore_boost_ext.config.parse import BoostConfig, BoostConfigError

__all__ = ["BoostConfig", "BoostConfigError"]
