"""What compiling each method costs: first steps over MindSpore's own, in GRAPH_MODE on one core.

    taskset -c 0 python examples/benchmarks/first_steps.py [--runs 5]

Each step of LeNet and the small ResNet, batch 32, is made anew and run once for each variant (THOR:
one that refreshes its factors, then an ordinary one). Nearly all seconds of these runs, except some
hundredths, are those of compiling. Plain steps and the others take turns. Prints medians and
ranges. Takes 6 minutes.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import mindspore as ms
from harness import print_table, seconds
from mindspore import nn
from networks import NETWORKS, grouped, ours, plain_step, waiting

GROUPED = "a scale for each of two groups"
THOR = {"thor": {"damping": 0.1}}
# Name -> the sections of the step's settings, and the number of variants to run.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "nothing switched on": ({}, 1),
    "clip_norm": ({"gradients": {"clip_norm": 1.0}}, 1),
    "dynamic scale": ({"manager": ms.DynamicLossScaleManager()}, 1),
    GROUPED: ({}, 1),
    "accumulation": ({"grad_accumulation": {"grad_accumulation_step": 4}}, 1),
    "less_bn": ({"less_bn": {}}, 1),
    "grad_freeze, first variant": ({"grad_freeze": {"total_steps": 1000}}, 1),
    "THOR, refresh": (THOR, 1),
    "THOR, both variants": (THOR, 2),
}


def make(network: str, case: str) -> nn.Cell:
    """Return the step of a case."""
    if case == GROUPED:
        return grouped(network)
    return ours(NETWORKS[network](), **CASES[case][0])


def row(network: str, case: str, runs: int) -> str:
    """Return a line of the table."""
    variants = CASES[case][1]
    pairs = [
        (seconds(plain_step(NETWORKS[network]())), seconds(waiting(make(network, case)), variants))
        for _ in range(runs)
    ]
    ratios = [ours / reference for reference, ours in pairs]
    reference, here = (statistics.median(column) for column in zip(*pairs))
    spread = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{network} | {case} | {reference:.2f} | {here:.2f} | {spread}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What compiling each method costs.")
    parser.add_argument("--runs", type=int, default=5, help="of each step (5)")
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    for name in NETWORKS:
        seconds(plain_step(NETWORKS[name]()))  # the very first one also loads what all share
    headings = "network | step | plain, s | here, s | ratio | range"
    lines = (row(name, case, options.runs) for name in NETWORKS for case in CASES)
    print_table("First steps over the plain one", headings, lines)


if __name__ == "__main__":
    main()
