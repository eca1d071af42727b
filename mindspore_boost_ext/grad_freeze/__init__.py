"""Steps that train only the later layers."""

from mindspore_boost_ext.grad_freeze.adaptive import AdaptiveFreezeOpt
from mindspore_boost_ext.grad_freeze.freezing import GradientFreeze, freeze_cell
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt

__all__ = ["AdaptiveFreezeOpt", "FreezeOpt", "GradientFreeze", "freeze_cell"]
