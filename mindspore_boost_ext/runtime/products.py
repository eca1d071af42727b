"""``ops.matmul`` of a batch and one matrix as one product: graphs copy the matrix for each."""

from __future__ import annotations

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.function.math_func import matmul as ORIGINAL

from mindspore_boost_ext.runtime.compiling import is_compiling, is_known

_OF_MATRICES = ops.MatMul()


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return what ``ops.matmul`` returns, up to rounding; in graphs in less time.

    For an input of shape (..., N, K) and another of shape (K, M), a graph of MindSpore on CPU
    multiplies each (N, K) by a copy of the other.
    """
    if not (_is_batch_and_matrix(input, other) and is_compiling()):
        return ORIGINAL(input, other)
    is_fit = is_known(input.shape) and is_known(other.shape) and input.shape[-1] == other.shape[0]
    if not is_fit:
        return ORIGINAL(input, other)  # which raises if the shapes do not fit
    rows = _OF_MATRICES(input.reshape((-1, input.shape[-1])), other)
    return rows.reshape((*input.shape[:-1], other.shape[1]))


def _is_batch_and_matrix(input: object, other: object) -> bool:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return False
    if input.dtype != mstype.float32 or other.dtype != mstype.float32:
        return False
    return input.ndim > 2 and other.ndim == 2
