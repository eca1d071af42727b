"""THOR, a second-order optimizer: stale Kronecker factors before momentum."""

from mindspore_boost_ext.thor.optimizer import THOR, thor

__all__ = ["THOR", "thor"]
