"""Second order: stale Kronecker factors in front of momentum."""

from mindspore_boost_ext.thor.optimizer import THOR, thor

__all__ = ["THOR", "thor"]
