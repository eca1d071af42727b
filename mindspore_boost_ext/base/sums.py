"""Sums, columns and constant tensors in the step, by operators that are fast on CPU."""

from __future__ import annotations

import numbers
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

_NARROWEST, _WIDEST = 64, 1024  # lengths of rows that are summed up fast and keep their digits
# If 2**30 finite float32 values are each multiplied by this, their sum is finite.
_SMALL = 2.0**-40
_fill = ops.FillV2()
# If the divisor is one number, "/" on CPU keeps buffers of several times its result for good, and
# in PYNATIVE_MODE takes longer.
DIVIDE = ops.RealDiv()
_SELECT = ops.Select()


@ops.constexpr
def _width(size: int) -> int:
    """Return a row length that divides ``size`` values; if there is none, ``size``."""
    fitting = (width for width in range(_WIDEST, _NARROWEST - 1, -1) if size % width == 0)
    return next(fitting, size)


def sum_of_squares(value: Tensor) -> Tensor:
    """Return the sum of the squares of a float32 tensor: float32, shape ().

    It sums row by row. One matrix product is as fast, but loses 2 % of 2**24 equal values.
    """
    rows = ops.reshape(value, (-1, _width(value.size)))
    squares = rows * rows
    if rows.shape[1] > _WIDEST:  # sums of long rows lose digits; the sum of all values does not
        return squares.sum()
    return squares.sum(-1).sum()


def factor_to_norm(squares: tuple[Tensor, ...], norm: float) -> Tensor:
    """Return the factor that makes gradients' global norm at most ``norm``: float32, shape ().

    ``squares`` are the sums of their squares. If these are NaN, the factor is 1 on CPU.
    """
    return norm / ops.maximum(ops.sqrt(ops.addn(squares)), norm)


def finite_sums(value: Tensor) -> Tensor:
    """Return float32 sums, shape (n, 1), all finite exactly if all values are. For CPU.

    ``value`` is float32, of shape :math:`(N, ...)` and at most 2**30 values.
    """
    rows = ops.reshape(value, (value.shape[0] if value.ndim > 1 else 1, -1))
    return ops.MatMul()(rows, filled(ms.float32, (rows.shape[1], 1), _SMALL))


def filled(dtype: Any, shape: tuple[int, ...], value: float | numbers.Number) -> Tensor:
    """Return a tensor filled with a number; the cast in ``ops.fill`` takes long to compile."""
    return _fill(shape, _number(value, dtype))


@ops.constexpr
def _number(value: Any, dtype: Any) -> Tensor:
    return Tensor(value, dtype)


def chosen(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return one of two Tensors of equal shapes, by a bool [] or [1]."""
    # If the condition has another shape, the CPU kernel never frees buffers of seven such Tensors.
    return _SELECT(ops.broadcast_to(condition, one.shape), one, other)


def outer(column: Tensor, row: Tensor) -> Tensor:
    """Return the products [n, m] of a column [n, 1] and a row [m, 1], both float32 or float64.

    A product by 1.0 is exact. On CPU an operator on two different shapes takes longer than this and
    an operator on equal shapes together. It also keeps buffers several times its result for good.
    """
    return ops.MatMul(transpose_b=True)(column, row)


def over_columns(column: Tensor, count: int) -> Tensor:
    """Return a column [n, 1], float32 or float64, in the form to combine with a matrix.

    On CPU that is a matrix of ``count`` such columns, elsewhere the column itself.
    """
    # Other devices may round matrix products to 16 bits, and only CPU keeps the buffers.
    return outer(column, ops.ones((count, 1), column.dtype)) if is_on_cpu() else column


@ops.constexpr
def is_on_cpu() -> bool:
    """Return whether the step runs on a CPU; also in a graph."""
    return bool(ms.get_context("device_target") == "CPU")
