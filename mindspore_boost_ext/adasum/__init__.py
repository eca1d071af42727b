"""Adaptive summation of the steps of several servers."""

from mindspore_boost_ext.adasum.cell import AdaSum

__all__ = ["AdaSum"]
