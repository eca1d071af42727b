"""Training on images that are moved a little, each by chance."""

from mindspore_boost_ext.random_shift.algorithm import ShiftedImages

__all__ = ["ShiftedImages"]
