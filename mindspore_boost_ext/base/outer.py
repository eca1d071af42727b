"""Columns and rows spread over matrices, in which an operator of equal shapes can use them."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def outer(column: Tensor, row: Tensor) -> Tensor:
    """Return the products of a column and a row: a product by 1.0 is exact.

    On CPU an operator of two shapes keeps buffers of several times its result for good, and takes
    longer than this and an operator of equal shapes together.

    Args:
        column (Tensor): ``[n, 1]``, float32 or float64.
        row (Tensor): ``[m, 1]``, of the same dtype.

    Returns:
        Tensor, ``[n, m]``.
    """
    return ops.MatMul(transpose_b=True)(column, row)


def over_columns(column: Tensor, count: int) -> Tensor:
    """Return what an operator takes for a column beside a matrix: it, or it spread over columns.

    Args:
        column (Tensor): ``[n, 1]``, float32 or float64.
        count (int): how many columns they have.
    """
    # Matrix products of other devices may round to 16 bits, and buffers are a matter of CPU.
    return outer(column, ops.ones((count, 1), column.dtype)) if _is_on_cpu() else column


@ops.constexpr
def _is_on_cpu() -> bool:
    return bool(ms.get_context("device_target") == "CPU")
