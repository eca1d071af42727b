"""Steps that train only the later layers."""

from mindspore_boost_ext.grad_freeze.freezing import GradientFreeze, freeze_cell
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt

__all__ = ["FreezeOpt", "GradientFreeze", "freeze_cell"]
