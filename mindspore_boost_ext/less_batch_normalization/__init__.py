"""Residual blocks with fewer BatchNorms, and a normalised head."""

from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN
from mindspore_boost_ext.less_batch_normalization.rewrite import LessBN

__all__ = ["CommonHeadLastFN", "LessBN"]
