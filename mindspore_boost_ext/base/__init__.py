"""What rooms share: optimizers made anew, centralization, sums, and a network's Cells."""

from mindspore_boost_ext.base.rebuild import OptimizerProcess, ParameterProcess

__all__ = ["OptimizerProcess", "ParameterProcess"]
