"""What several folders share: rebuilt optimizers, centralization, sums, a network's Cells."""

from mindspore_boost_ext.base.rebuild import OptimizerProcess, ParameterProcess

__all__ = ["OptimizerProcess", "ParameterProcess"]
