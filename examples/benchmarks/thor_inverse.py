"""Why THOR inverts by LU: time and error of the ways to invert a factor, and how Cholesky ends.

    python examples/benchmarks/thor_inverse.py
    python examples/benchmarks/thor_inverse.py --sizes 64 256 --condition 1e5

Each way inverts the same damped Gram matrix; the error is against float64. At the end Cholesky gets
a matrix that is not positive definite, though its diagonal and all its 2 x 2 minors are positive.
"""

from __future__ import annotations

import harness  # sets the oneDNN variable, so it comes first

# isort: split
import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

NOT_POSITIVE = [[1.0, -0.6, -0.6], [-0.6, 1.0, -0.6], [-0.6, -0.6, 1.0]]


def newton(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Return the inverse after one Newton step."""
    eye = ops.eye(matrix.shape[0], matrix.shape[0], ms.float32)
    return ops.matmul(inverse, 2.0 * eye - ops.matmul(matrix, inverse))


def lu_newton(matrix: Tensor) -> Tensor:
    """Return the inverse by LU and one Newton step."""
    return newton(matrix, ops.inverse(matrix))


def by_cholesky(matrix: Tensor) -> Tensor:
    """Return the inverse by Cholesky."""
    return ops.cholesky_inverse(ops.cholesky(matrix))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "LU": ops.inverse,
    "LU, Newton": lu_newton,
    "Cholesky alone": ops.cholesky,
    "Cholesky, cholesky_inverse": by_cholesky,
}


def gram(size: int, condition: float) -> np.ndarray:
    """Return a symmetric float32 matrix of that size and condition."""
    generator = np.random.default_rng(size)
    rotation, _ = np.linalg.qr(generator.normal(size=(size, size)))
    matrix = (rotation * np.logspace(0, -np.log10(condition), size)) @ rotation.T
    return ((matrix + matrix.T) / 2).astype(np.float32)


def milliseconds(way: Callable[[Tensor], Tensor], matrix: Tensor, times: int) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        way(matrix).asnumpy()
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e3


def table(sizes: Sequence[int], condition: float, times: int) -> None:
    """Print the table of times and errors."""
    rows = []
    for size in sizes:
        plain = gram(size, condition)
        exact = np.linalg.inv(np.float64(plain))
        for name, function in WAYS.items():
            way = ms.jit(function)
            found = way(Tensor(plain)).asnumpy()
            error = np.abs(found - exact).max() / np.abs(exact).max()
            shown = "" if name == "Cholesky alone" else f"{error:.1e}"
            rows.append((size, name, f"{milliseconds(way, Tensor(plain), times):.2f}", shown))
    harness.print_table(
        f"Inverse of one factor of condition {condition:g}", ("n", "way", "ms", "error"), rows
    )


def ending() -> str:
    """Return what a compiled Cholesky does with a matrix that is not positive definite."""
    way = ms.jit(by_cholesky)
    try:
        return f"returned {way(Tensor(NOT_POSITIVE, ms.float32)).asnumpy().tolist()}"
    except RuntimeError as error:
        return f"RuntimeError, {str(error).strip().splitlines()[0]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--condition", type=float, default=1e4)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    table(args.sizes, args.condition, args.times)
    print(f"\nCholesky of a matrix that is not positive definite: {ending()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
