"""What compiling each method costs: first steps over MindSpore's own, in GRAPH_MODE on one core.

    taskset -c 0 python examples/benchmarks/first_steps.py [--runs 5] [--network "small ResNet"]

Each step is made anew and run as often as it has variants (THOR: one that refreshes its factors,
then an ordinary one), batch 32; the seconds of these runs are those of compiling it, but for some
hundredths. Plain steps and the others by turns, medians and ranges. Takes 6 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from harness import print_table

# isort: split
import mindspore as ms
from least_cost import grouped, ours
from mindspore import nn
from networks import NETWORKS, MarkedLeNet, MarkedResNet, momentum, waiting, with_loss

MARKED = {"LeNet": MarkedLeNet, "small ResNet": MarkedResNet}
FREEZE = {"total_steps": 1000}
# Name -> the step for a network's name, and how many of its variants are run.
CASES: dict[str, tuple[Callable[[str], nn.Cell], int]] = {
    "nothing switched on": (lambda name: ours(network=NETWORKS[name]()), 1),
    "clip_norm": (lambda name: ours(network=NETWORKS[name](), gradients={"clip_norm": 1.0}), 1),
    "dynamic scale": (
        lambda name: ours(ms.DynamicLossScaleManager(), network=NETWORKS[name]()),
        1,
    ),
    "a scale for each of two groups": (lambda name: grouped(MARKED[name]), 1),
    "accumulation": (
        lambda name: ours(
            network=NETWORKS[name](), grad_accumulation={"grad_accumulation_step": 4}
        ),
        1,
    ),
    "less_bn": (lambda name: ours(network=NETWORKS[name](), less_bn={}), 1),
    "grad_freeze, first variant": (
        lambda name: ours(network=NETWORKS[name](), grad_freeze=FREEZE),
        1,
    ),
    "THOR, refresh": (lambda name: ours(network=NETWORKS[name](), thor={"damping": 0.1}), 1),
    "THOR, both variants": (lambda name: ours(network=NETWORKS[name](), thor={"damping": 0.1}), 2),
}


def plain(name: str) -> nn.Cell:
    """Return MindSpore's own step."""
    network = NETWORKS[name]()
    return nn.TrainOneStepCell(with_loss(network), momentum(network))


def seconds(step: nn.Cell, runs: int) -> float:
    """Return how long the first runs of a step take."""
    run = waiting(step)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return time.perf_counter() - start


def row(network: str, case: str, runs: int) -> str:
    """Return a line of the table."""
    make, variants = CASES[case]
    pairs = [(seconds(plain(network), 1), seconds(make(network), variants)) for _ in range(runs)]
    ratios = [ours / reference for reference, ours in pairs]
    reference, here = (statistics.median(column) for column in zip(*pairs))
    spread = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{network} | {case} | {reference:.2f} | {here:.2f} | {spread}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What compiling each method costs.")
    parser.add_argument("--runs", type=int, default=5, help="of each step (5)")
    parser.add_argument("--network", choices=list(NETWORKS), help="one of them (all)")
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    names = [options.network] if options.network else list(NETWORKS)
    for name in names:
        seconds(plain(name), 1)  # the very first one also loads what all share
    headings = "network | step | plain, s | here, s | ratio | range"
    lines = (row(name, case, options.runs) for name in names for case in CASES)
    print_table("First steps over the plain one", headings, lines)


if __name__ == "__main__":
    main()
