"""Training in the few main directions of an earlier training."""

from mindspore_boost_ext.dim_reduce.p_bfgs import DimReduce
from mindspore_boost_ext.dim_reduce.sampler import TrajectorySampler

__all__ = ["DimReduce", "TrajectorySampler"]
