"""Training on labels that give a small share to every class."""

from mindspore_boost_ext.label_smoothing.algorithm import SmoothedLoss

__all__ = ["SmoothedLoss"]
