"""Sums, columns and tensors of one number in the step, by operators that take a CPU little time."""

from __future__ import annotations

import numbers
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

_NARROWEST, _WIDEST = 64, 1024  # rows that are summed up fast, without losing digits
# Of 2**30 finite float32 values, each times this, the sum is finite.
_SMALL = 2.0**-40
_fill = ops.FillV2()


@ops.constexpr
def _width(size: int) -> int:
    """Return the length of the rows into which so many values can be divided, or their number."""
    fitting = (width for width in range(_WIDEST, _NARROWEST - 1, -1) if size % width == 0)
    return next(fitting, size)


def sum_of_squares(value: Tensor) -> Tensor:
    """Return the sum of the squares of a float32 tensor: float32, shape ().

    Row by row: as one matrix product it would be as fast, and lose 2 % of 2**24 equal values.
    """
    rows = ops.reshape(value, (-1, _width(value.size)))
    squares = rows * rows
    if rows.shape[1] > _WIDEST:  # a row so long loses digits, a sum of all does not
        return squares.sum()
    return squares.sum(-1).sum()


def factor_to_norm(squares: tuple[Tensor, ...], norm: float) -> Tensor:
    """Return the factor that makes gradients' global norm at most ``norm``: float32, shape ().

    ``squares`` are the sums of their squares; where these are NaN, it is 1 on CPU.
    """
    return norm / ops.maximum(ops.sqrt(ops.addn(squares)), norm)


def finite_sums(value: Tensor) -> Tensor:
    """Return float32 numbers, shape (n, 1), that are finite just if all of a tensor are. On CPU.

    ``value`` is float32, of shape :math:`(N, ...)` and at most 2**30 values.
    """
    rows = ops.reshape(value, (value.shape[0] if value.ndim > 1 else 1, -1))
    return ops.MatMul()(rows, filled(ms.float32, (rows.shape[1], 1), _SMALL))


def filled(dtype: Any, shape: tuple[int, ...], value: float | numbers.Number) -> Tensor:
    """Return a tensor of one number; ``ops.fill`` casts it in the graph, which compiles long."""
    return _fill(shape, _number(value, dtype))


@ops.constexpr
def _number(value: Any, dtype: Any) -> Tensor:
    return Tensor(value, dtype)


def outer(column: Tensor, row: Tensor) -> Tensor:
    """Return the products [n, m] of a column [n, 1] and a row [m, 1], both float32 or float64.

    A product by 1.0 is exact. On CPU an operator of two shapes keeps buffers of several times its
    result for good, and takes longer than this and an operator of equal shapes together.
    """
    return ops.MatMul(transpose_b=True)(column, row)


def over_columns(column: Tensor, count: int) -> Tensor:
    """Return what an operator takes for a column [n, 1], float32 or float64, beside a matrix.

    That is the column itself, or it spread over so many columns.
    """
    # Matrix products of other devices may round to 16 bits, and buffers are a matter of CPU.
    return outer(column, ops.ones((count, 1), column.dtype)) if _is_on_cpu() else column


@ops.constexpr
def _is_on_cpu() -> bool:
    return bool(ms.get_context("device_target") == "CPU")
