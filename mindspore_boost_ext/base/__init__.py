"""Optimizers made anew, and gradient centralization."""

from mindspore_boost_ext.base.rebuild import OptimizerProcess, ParameterProcess

__all__ = ["OptimizerProcess", "ParameterProcess"]
