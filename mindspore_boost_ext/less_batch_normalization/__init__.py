"""Residual blocks with fewer BatchNorms, and a normalised head."""

from mindspore_boost_ext.less_batch_normalization.cell import LessBN
from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN

__all__ = ["CommonHeadLastFN", "LessBN"]
