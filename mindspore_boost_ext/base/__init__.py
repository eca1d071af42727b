"""What several rooms share: optimizers made anew, centralization, sums, and the Cells of a network."""

from mindspore_boost_ext.base.rebuild import OptimizerProcess, ParameterProcess

__all__ = ["OptimizerProcess", "ParameterProcess"]
