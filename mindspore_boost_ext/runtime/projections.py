"""The projections of ``nn.MultiheadAttention`` by the operators of ``nn.Dense``."""

from __future__ import annotations

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.function.nn_func import linear as ORIGINAL

from mindspore_boost_ext.runtime.compiling import is_known

_OF_ROWS = ops.MatMul(transpose_b=True)
_BIAS_OF_ROWS = ops.BiasAdd()


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """Return ``x @ w.T + b``, shape (..., M), for x (..., K), w (M, K) and b (M,) or None.

    MindSpore transposes the matrix, and adds the bias as a tensor of any shape: slow in
    PYNATIVE_MODE, where ``ops.BiasAdd`` is fast, and so is its gradient in both modes.
    """
    if x.dtype != mstype.float32 or w.dtype != mstype.float32 or not is_known(x.shape):
        return ORIGINAL(x, w, b)
    if b is not None and (b.dtype != mstype.float32 or b.shape != w.shape[:1]):
        return ORIGINAL(x, w, b)
    if x.shape[-1] != w.shape[-1]:
        return ORIGINAL(x, w, b)  # raises
    rows = _OF_ROWS(x.reshape((-1, x.shape[-1])), w)
    if b is not None:
        rows = _BIAS_OF_ROWS(rows, b)
    return rows.reshape((*x.shape[:-1], w.shape[0]))
