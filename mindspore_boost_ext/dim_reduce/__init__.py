"""Training in the few directions that an earlier training has moved along."""

from mindspore_boost_ext.dim_reduce.p_bfgs import DimReduce
from mindspore_boost_ext.dim_reduce.sampler import TrajectorySampler

__all__ = ["DimReduce", "TrajectorySampler"]
