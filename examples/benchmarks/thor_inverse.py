"""How THOR inverts: time and error of its two ways and of MindSpore's operators alone.

    python examples/benchmarks/thor_inverse.py

Each way inverts the same damped Gram matrix in a compiled graph; the error is against float64. At
the end MindSpore's Cholesky and THOR's get a matrix that is not positive definite, though its
diagonal and all its 2 x 2 minors are positive.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import harness
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.thor.inverse import ByCholesky, by_lu, damped_inverse

FLOOR = 16 * float(np.finfo(np.float32).eps)  # of THOR's damping, over the norm of the factor
SIZES, CONDITION = (64, 256, 512), 1e4
NOT_POSITIVE = np.float32([[1.0, -0.6, -0.6], [-0.6, 1.0, -0.6], [-0.6, -0.6, 1.0]])


class Way(nn.Cell):
    """One way to invert, compiled; THOR's own ways damp by the same amount themselves."""

    def __init__(self, function: Callable[..., Any], damps: bool = False) -> None:
        super().__init__()
        self.function, self.damps = function, damps

    def construct(self, matrix: Tensor) -> Tensor:
        """Return the inverse."""
        if self.damps:
            return self.function(matrix, Tensor(0.0, ms.float32))[0]
        damping = FLOOR * ops.abs(matrix).sum(-1).max()
        return self.function(matrix + damping * ops.eye(len(matrix), len(matrix), ms.float32))


def operators_cholesky(matrix: Tensor) -> Tensor:
    """Return the inverse by MindSpore's Cholesky."""
    return ops.cholesky_inverse(ops.cholesky(matrix))


WAYS: dict[str, Callable[[], nn.Cell]] = {
    "THOR on CPU: Cholesky on the host": lambda: Way(ByCholesky(), damps=True),
    "THOR elsewhere: LU and its checks": lambda: Way(by_lu, damps=True),
    "operators: LU": lambda: Way(ops.inverse),
    "operators: Cholesky": lambda: Way(operators_cholesky),
}


def gram(size: int) -> np.ndarray:
    """Return a symmetric float32 matrix of that size."""
    generator = np.random.default_rng(size)
    rotation, _ = np.linalg.qr(generator.normal(size=(size, size)))
    matrix = (rotation * np.logspace(0, -np.log10(CONDITION), size)) @ rotation.T
    return ((matrix + matrix.T) / 2).astype(np.float32)


def print_inverses() -> None:
    """Print the table of times and errors."""
    rows = []
    for size in SIZES:
        plain = gram(size)
        damping = FLOOR * np.abs(plain).sum(-1).max()
        exact = np.linalg.inv(np.float64(plain) + damping * np.eye(size))
        for name, function in WAYS.items():
            way, matrix = function(), Tensor(plain)
            error = np.abs(way(matrix).asnumpy() - exact).max() / np.abs(exact).max()
            took = harness.seconds_of(lambda: way(matrix).asnumpy(), 10)  # noqa: B023
            rows.append(f"{size} | {name} | {took * 1e3:.2f} | {error:.1e}")
    title = f"Inverse of one factor of condition {CONDITION:g}"
    harness.print_table(title, "n | way | ms | error", rows)


def ending() -> str:
    """Return what a compiled Cholesky does with a matrix that is not positive definite."""
    try:
        return f"returned {Way(operators_cholesky)(Tensor(NOT_POSITIVE)).asnumpy().tolist()}"
    except RuntimeError as error:
        return f"RuntimeError, {str(error).strip().splitlines()[0]}"


def main() -> None:
    """Print the table, and how both end."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    print_inverses()
    print(f"\nMindSpore's Cholesky of a matrix that is not positive definite: {ending()}")
    _, used, good = damped_inverse(NOT_POSITIVE, 0.0)
    print(f"THOR's: damping raised to {used:.2g}, good: {good}")


if __name__ == "__main__":
    main()
