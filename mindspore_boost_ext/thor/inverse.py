"""Inverse of a damped factor. THOR inverts only here, on all devices."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from mindspore_boost_ext.base.sums import chosen

_EPS = float(np.finfo(np.float32).eps)
# The damping is at least 16 rounding errors of the norm. So the condition is at most 1 / (16 eps),
# and an inverse that float32 can compute is off by up to about 1/16, which is below the bound.
_FLOOR, _RESIDUAL = 16.0, 0.1
_MINOR = 1.01  # in a minor of equal rows, which is 0, rounding may make the square the larger part
_RAISE = 10.0  # from 16 eps to the whole norm in at most six trials
_SMALL = 64  # up to this size, a triangular matrix is inverted like any other


def inverse_for_device() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the inverter for this device: a function or a Cell, called like :func:`by_lu`."""
    target = ms.get_context("device_target")
    if target == "CPU":
        return ByCholesky()
    return by_lu_on_ascend if target == "Ascend" else by_lu


# ---- on the host ----


class ByCholesky(nn.Cell):
    """Does what :func:`by_lu` does, by Cholesky on the host."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.on_host = ops.Custom(
            _inverse_in_float32,
            out_shape=lambda factor, damping: (factor, (1,), (1,)),
            out_dtype=lambda factor, damping: (factor, ms.float32, ms.bool_),
            func_type="pyfunc",
        )

    def construct(self, factor: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what :func:`by_lu` does."""
        return self.on_host(factor, damping)


def _inverse_in_float32(
    factor: np.ndarray, damping: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inverse, used, good = damped_inverse(factor, float(np.asarray(damping).reshape(())))
    with np.errstate(over="ignore"):  # an overflow of float32 is flagged
        inverse = inverse.astype(np.float32)
    good = good and bool(np.isfinite(inverse).all())
    return inverse, np.array([used], np.float32), np.array([good])


def damped_inverse(factor: np.ndarray, damping: float) -> tuple[np.ndarray, float, bool]:
    """Return what :func:`by_lu` does, the inverse in float64.

    The bool is False, and the inverse the identity, if an input is not finite or Cholesky fails.
    """
    eye = np.eye(factor.shape[-1])
    if not (np.isfinite(factor).all() and np.isfinite(damping)):
        return np.broadcast_to(eye, factor.shape), damping, False
    matrix = factor.astype(np.float64)
    matrix = (matrix + np.swapaxes(matrix, -1, -2)) / 2
    norm = float(np.abs(matrix).sum(-1).max())
    used = max(damping, _FLOOR * _EPS * norm)
    while True:
        try:
            lower = np.linalg.cholesky(matrix + used * eye)
        except np.linalg.LinAlgError:
            if used >= norm:
                return np.broadcast_to(eye, factor.shape), used, False
            used *= _RAISE
            continue
        half = inverse_of_lower(lower)
        return np.swapaxes(half, -1, -2) @ half, used, True


def inverse_of_lower(lower: np.ndarray) -> np.ndarray:
    """Return the inverse of lower triangular matrices (the last two axes), half by half."""
    size = lower.shape[-1]
    if size <= _SMALL:
        return np.linalg.inv(lower)
    half = size // 2
    result = np.zeros_like(lower)
    first = result[..., :half, :half] = inverse_of_lower(lower[..., :half, :half])
    second = result[..., half:, half:] = inverse_of_lower(lower[..., half:, half:])
    result[..., half:, :half] = -second @ lower[..., half:, :half] @ first
    return result


# ---- on other devices ----


def by_lu_on_ascend(factor: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as :func:`by_lu`, with the operator that is documented for Ascend."""
    return by_lu(factor, damping, mint.inverse)


def by_lu(
    factor: Tensor, damping: Tensor, invert: Callable[[Tensor], Tensor] = ops.inverse
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inverse of ``factor + damping·I``, the damping used, and whether it is good.

    Args:
        factor: float32 [n, n] or [blocks, b, b], symmetric.
        damping: float32 [], at least 0.
        invert: the operator that inverts.

    Returns:
        Tensors: the inverse in the shape of ``factor``; float32 [1]; bool [1]. An inverse that is
        not good must not be used; it is finite even if ``factor`` is not.
    """
    eye = ops.eye(factor.shape[-1], factor.shape[-1], ms.float32)
    finite = ops.logical_and(ops.isfinite(factor).all(), ops.isfinite(damping))
    factor = chosen(finite, (factor + _transposed(factor)) * 0.5, ops.ones_like(factor) * eye)
    norm = ops.abs(factor).sum(-1).max()
    used = ops.maximum(damping, norm * (_FLOOR * _EPS))
    used = used + norm * ops.cast(_indefinite(factor, eye), ms.float32)
    matrix = factor + eye * used
    inverse = 1.0 / matrix if matrix.shape[-1] == 1 else invert(matrix)  # no 1 x 1 on CPU
    inverse = (inverse + _transposed(inverse)) * 0.5
    good = ops.logical_and(finite, _is_inverse(matrix, inverse, eye))
    return inverse, ops.reshape(used, (1,)), ops.reshape(good, (1,))


def _transposed(matrix: Tensor) -> Tensor:
    return ops.swapaxes(matrix, -1, -2)


def _indefinite(factor: Tensor, eye: Tensor) -> Tensor:
    """Return whether a 2 × 2 minor is negative: bool []."""
    diagonal = (factor * eye).sum(-1)
    products = ops.expand_dims(diagonal, -1) * ops.expand_dims(diagonal, -2)
    negative = ops.less(diagonal, 0.0).any()
    return ops.logical_or(negative, ops.greater(ops.square(factor), products * _MINOR).any())


def _is_inverse(matrix: Tensor, inverse: Tensor, eye: Tensor) -> Tensor:
    residual = ops.abs(ops.matmul(matrix, inverse) - eye).max()
    products = ((matrix * eye).sum(-1) * (inverse * eye).sum(-1)).min()
    # Comparisons with NaN are False, so a residual of NaN is not good.
    return ops.logical_and(ops.less(residual, _RESIDUAL), ops.greater(products, 0.5))
