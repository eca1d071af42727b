"""Steps that train only the later layers."""

from mindspore_boost_ext.grad_freeze.adaptive import AdaptiveFreezeOpt
from mindspore_boost_ext.grad_freeze.freezing import GradientFreeze, freeze_cell
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt

CONTINUOUS_STRATEGY, INTERVAL_STRATEGY = 0, 1  # upstream's names of the freeze types

__all__ = ["AdaptiveFreezeOpt", "FreezeOpt", "GradientFreeze", "freeze_cell"]
