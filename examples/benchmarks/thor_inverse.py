"""How THOR inverts: time and error of its two ways and of MindSpore's operators alone.

    python examples/benchmarks/thor_inverse.py
    python examples/benchmarks/thor_inverse.py --sizes 64 256 --condition 1e5

Each way inverts the same damped Gram matrix in a compiled graph; the error is against float64. At
the end MindSpore's Cholesky and THOR's get a matrix that is not positive definite, though its
diagonal and all its 2 x 2 minors are positive.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import harness
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.thor.inverse import ByCholesky, by_lu, damped_inverse

FLOOR = 16 * float(np.finfo(np.float32).eps)  # of THOR's damping, over the norm of the factor
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


def gram(size: int, condition: float) -> np.ndarray:
    """Return a symmetric float32 matrix of that size and condition."""
    generator = np.random.default_rng(size)
    rotation, _ = np.linalg.qr(generator.normal(size=(size, size)))
    matrix = (rotation * np.logspace(0, -np.log10(condition), size)) @ rotation.T
    return ((matrix + matrix.T) / 2).astype(np.float32)


def table(sizes: Sequence[int], condition: float, times: int) -> None:
    """Print the table of times and errors."""
    rows = []
    for size in sizes:
        plain = gram(size, condition)
        damping = FLOOR * np.abs(plain).sum(-1).max()
        exact = np.linalg.inv(np.float64(plain) + damping * np.eye(size))
        for name, function in WAYS.items():
            way, matrix = function(), Tensor(plain)
            error = np.abs(way(matrix).asnumpy() - exact).max() / np.abs(exact).max()
            took = harness.seconds_of(lambda: way(matrix).asnumpy(), times)  # noqa: B023
            rows.append(f"{size} | {name} | {took * 1e3:.2f} | {error:.1e}")
    title = f"Inverse of one factor of condition {condition:g}"
    harness.print_table(title, "n | way | ms | error", rows)


def ending() -> str:
    """Return what a compiled Cholesky does with a matrix that is not positive definite."""
    try:
        return f"returned {Way(operators_cholesky)(Tensor(NOT_POSITIVE)).asnumpy().tolist()}"
    except RuntimeError as error:
        return f"RuntimeError, {str(error).strip().splitlines()[0]}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--condition", type=float, default=1e4)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    table(args.sizes, args.condition, args.times)
    print(f"\nMindSpore's Cholesky of a matrix that is not positive definite: {ending()}")
    _, used, good = damped_inverse(NOT_POSITIVE, 0.0)
    print(f"THOR's: damping raised to {used:.2g}, good: {good}")


if __name__ == "__main__":
    main()
