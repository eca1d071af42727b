"""Sums as matrix products: on CPU these take a sixth of the time that a reduction takes."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops

# Of 2**30 finite float32 values, each times this, the sum is finite.
_SMALL = 2.0**-40


@ops.constexpr
def _on_cpu() -> bool:
    """Return whether products have all bits of float32; elsewhere they may have fewer."""
    return bool(ms.get_context("device_target") == "CPU")


def sum_of_squares(value: Tensor) -> Tensor:
    """Return the sum of the squares of a float32 tensor: float32, shape ()."""
    if not _on_cpu():
        return ops.square(value).sum()
    row = ops.reshape(value, (1, -1))
    return ops.reshape(ops.MatMul(transpose_b=True)(row, row), ())


def finite_sums(value: Tensor) -> Tensor:
    """Return float32 numbers, shape (n, 1), that are finite just if all of a tensor are. On CPU.

    Args:
        value (Tensor): float32, shape :math:`(N, ...)`, at most 2**30 values.
    """
    rows = ops.reshape(value, (value.shape[0] if value.ndim > 1 else 1, -1))
    return ops.MatMul()(rows, ops.fill(ms.float32, (rows.shape[1], 1), _SMALL))


__all__ = ["finite_sums", "sum_of_squares"]
