"""What THOR's steps cost: over momentum, over a model of their flops and bytes, and in memory.

    python examples/benchmarks/thor_speed.py --pairs 20

The model of a refresh counts flops of matrix products and inverses, and bytes that im2col moves. It
divides them by the rates that the same operators reach here on arrays of the same sizes. The second
table shows where the seconds go in a training that refreshes its factors every 20 steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import harness
import mindspore as ms
import networks
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import THOR, BoostTrainOneStepCell
from mindspore_boost_ext.thor.inverse import ByCholesky, damped_inverse
from mindspore_boost_ext.thor.layers import CONV

DAMPING = 0.03
STEPS, REFRESHES = 160, 8  # about those of LeNet at frequency 20 in README.md's table
INVERSE = 8 / 3  # n³: Cholesky and the inverse of its factor a third each, their product two


def refresh_work(optimizer: THOR, positions: Sequence[int]) -> tuple[float, float, float]:
    """Return what a refresh does: flops of matrix products and of inverses, bytes that it moves.

    Products: 2·M·n² for the Gram matrix of each factor; inverses: 8/3·n³ by Cholesky; bytes: the
    patches of a convolution are written by im2col, read and written once more in the order of the
    product, its output gradients read and written. ``positions`` holds each layer's M, the rows.
    """
    products = inverses = moved = 0.0
    for plan, rows in zip(optimizer.curvature.plans, positions):
        for size in (plan.a_size, plan.g_size):
            products += 2.0 * rows * size**2
            inverses += INVERSE * size**3
        if plan.kind == CONV:
            moved += 4.0 * rows * (3 * plan.a_size + 2 * plan.g_size)
    return products, inverses, moved


def rows_of_layers(net: nn.Cell, optimizer: THOR, images: Tensor) -> list[int]:
    """Return for each preconditioned layer the rows of its output in one forward pass."""
    layers = [plan.layer for plan in optimizer.curvature.plans]
    called = networks.outputs_of(layers, net, images)
    rows = {id(cell): output.size // output.shape[1] for cell, output in called}
    return [rows[id(layer)] for layer in layers]


def rate_of(run: Callable[[], Tensor], work: float, times: int = 20) -> float:
    """Return the work per second of an operator, as the median over ``times`` calls."""
    return work / harness.seconds_of(lambda: run().asnumpy(), times, warm_up=1)


def machine_rates(size: int = 256) -> tuple[float, float, float]:
    """Return the rates here: flops/s of products and of inverses, bytes/s of a transposition."""
    matrix = Tensor(np.eye(size, dtype=np.float32) + 0.01)
    product = rate_of(lambda: ops.matmul(matrix, matrix), 2.0 * size**3)
    invert, damping = ByCholesky(), Tensor(0.0, ms.float32)
    inverse = rate_of(lambda: invert(matrix, damping)[0], INVERSE * size**3)
    patches = Tensor(np.ones((32, 72, 1024), np.float32))
    moving = rate_of(lambda: ops.transpose(patches, (1, 0, 2)), 2.0 * patches.nbytes)
    return product, inverse, moving


def speed(pairs: int) -> None:
    """Print the cost of THOR's steps over plain momentum, and of a refresh over its model."""
    rows, shares = [], []
    for name, network in networks.NETWORKS.items():
        batch, own = networks.batch(), network()
        plain = networks.plain(network())
        optimizer = THOR(own, 1e-3, DAMPING, 0.9, frequency=10**6)
        step = BoostTrainOneStepCell(networks.with_loss(own), optimizer).set_train()
        rows_of = rows_of_layers(own, optimizer, batch[0])
        # To compile all variants: THOR has a step that captures, and one that does not.
        own_step, plain_step = networks.waiting(step, batch), networks.waiting(plain, batch)
        begun = harness.seconds(plain_step)
        compiled = harness.seconds(own_step, 2)
        ratio = harness.paired(own_step, plain_step, pairs)
        refreshes = []
        for _ in range(max(pairs // 4, 3)):
            ops.assign(optimizer.next_refresh, Tensor(0, ms.int32))
            refreshes.append(harness.seconds(own_step))
        refresh = statistics.median(refreshes)
        momentum = ratio.reference_ms / 1e3
        ordinary = ratio.median * momentum
        work = refresh_work(optimizer, rows_of)
        model = sum(amount / rate for amount, rate in zip(work, machine_rates()))
        at_hundred = (99 * ordinary + refresh) / 100 / momentum
        inverting = inversions(optimizer)
        added = (
            compiled - refresh - begun,
            (STEPS - REFRESHES) * (ordinary - momentum),
            REFRESHES * inverting,
            REFRESHES * (refresh - inverting - momentum),
        )
        shares.append(" | ".join([name, *(f"{one:.2f}" for one in (STEPS * momentum, *added))]))
        rows.append(
            f"{name} | {ratio.reference_ms:.1f} | "
            f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) | {at_hundred:.3f} | "
            f"{refresh * 1e3:.1f} | {(refresh - ordinary) / model:.2f} | "
            f"{memory_ratio(step, plain, optimizer):.3f}"
        )
    headings = (
        "network | momentum, ms | ordinary step / momentum | mean at frequency 100 | refresh, ms | "
        "refresh / model | memory / estimate"
    )
    harness.print_table("Speed and memory of THOR, GRAPH mode", headings, rows)
    title = (
        f"Seconds of {STEPS} steps, {REFRESHES} of them refreshes: momentum's, and what THOR adds"
    )
    parts = "compilation | ordinary steps | inversions | capturing"
    harness.print_table(title, f"network | momentum | {parts}", shares)


def inversions(optimizer: THOR) -> float:
    """Return how many seconds inverting all factors takes, as the step does it on the host."""
    factors = [one.asnumpy() for one in optimizer.factors if one.ndim > 1]
    return harness.seconds_of(lambda: [damped_inverse(one, DAMPING) for one in factors], 5)


def memory_ratio(step: nn.Cell, plain: nn.Cell, optimizer: THOR) -> float:
    """Return the bytes that THOR's step holds beyond momentum's, over the report's estimate."""
    thor, momentum = (
        sum(int(one.nbytes) for one in cell.get_parameters()) for cell in (step, plain)
    )
    return (thor - momentum) / optimizer.counts()["bytes"]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of the timing")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    speed(args.pairs)


if __name__ == "__main__":
    main()
