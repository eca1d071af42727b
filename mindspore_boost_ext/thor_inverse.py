"""Inverse of a damped factor: the only place where THOR inverts, whatever the device.

What it does: X = (F + dI)⁻¹ for a symmetric F, whole or in diagonal blocks, with a damping d that
is raised where F cannot be inverted as it is, and never a NaN.

Rule: d = max(damping, 16·eps·‖F‖∞) + (‖F‖∞ if F is seen to be indefinite); X by LU, symmetrised.
F is seen to be indefinite when a 2 × 2 minor is negative: a diagonal entry below 0, or F[i,j]²
above F[i,i]·F[j,j]. The result is good when all is finite, MX is near I and every X[i,i]·M[i,i] is
at least 1/2 (it is at least 1 for a positive definite M). A Newton step X(2I − MX) would double the
work and gain nothing: in float32 its residual carries the same rounding as X.

Why not Cholesky: its CPU kernel raises RuntimeError for a matrix that is not positive definite. A
graph cannot catch that, so training would stop where the damping should rise. No guard before it is
both cheap and safe: 2 × 2 minors let indefinite matrices through, and a damping for which all
Gershgorin circles are positive is far above λ where activations are correlated. Nor is it faster:
LU against ``cholesky`` and ``cholesky_inverse``, condition 1e4, on 2 loaded cores: 0.47 and 0.55 ms
for n = 64, 3.1 and 7.5 ms for 256, 24 and 27 ms for 512; errors 7e-5 and 1e-4 of the largest entry
(``examples/benchmarks/thor_inverse.py``). ``cholesky_inverse`` takes no batch of blocks.
Cost: about 2·n³ flops for the inverse, 2·n³ for its check. Devices and modes: run on CPU in
GRAPH_MODE and PYNATIVE_MODE; written, not run, for GPU and Ascend.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops

_EPS = 2.0**-23
_FLOOR, _MINOR, _RESIDUAL = 16.0, 1.01, 0.1


def invert(matrix: Tensor) -> Tensor:
    """Return the inverse over the last two axes; a device with its own operator plugs in here."""
    return 1.0 / matrix if matrix.shape[-1] == 1 else ops.inverse(matrix)  # no 1 x 1 on CPU


def damped_inverse(factor: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inverse of ``factor + damping·I``, the damping used, and whether it is good.

    Args:
        factor: float32 [n, n] or [blocks, b, b], symmetric.
        damping: float32 [], at least 0.

    Returns:
        Tensors: the inverse in the shape of ``factor``; float32 []; bool []. An inverse that is not
        good must not be used; it holds finite numbers all the same where ``factor`` does not.
    """
    eye = ops.eye(factor.shape[-1], factor.shape[-1], ms.float32)
    finite = ops.isfinite(factor).all()
    factor = ops.where(finite, (factor + _transposed(factor)) * 0.5, ops.ones_like(factor) * eye)
    norm = ops.abs(factor).sum(-1).max()
    used = ops.maximum(damping, norm * (_FLOOR * _EPS))
    used = used + norm * ops.cast(_indefinite(factor, eye), ms.float32)
    matrix = factor + eye * used
    inverse = invert(matrix)
    inverse = (inverse + _transposed(inverse)) * 0.5
    good = ops.logical_and(finite, _is_inverse(matrix, inverse, eye))
    return inverse, used, good


def _transposed(matrix: Tensor) -> Tensor:
    return ops.swapaxes(matrix, -1, -2)


def _indefinite(factor: Tensor, eye: Tensor) -> Tensor:
    """Tell whether a 2 × 2 minor is negative: bool []."""
    diagonal = (factor * eye).sum(-1)
    products = ops.expand_dims(diagonal, -1) * ops.expand_dims(diagonal, -2)
    negative = ops.less(diagonal, 0.0).any()
    return ops.logical_or(negative, ops.greater(ops.square(factor), products * _MINOR).any())


def _is_inverse(matrix: Tensor, inverse: Tensor, eye: Tensor) -> Tensor:
    residual = ops.abs(ops.matmul(matrix, inverse) - eye).max()
    products = ((matrix * eye).sum(-1) * (inverse * eye).sum(-1)).min()
    # Comparisons with NaN are False: a residual that is no number is not good.
    return ops.logical_and(ops.less(residual, _RESIDUAL), ops.greater(products, 0.5))


__all__ = ["damped_inverse", "invert"]
