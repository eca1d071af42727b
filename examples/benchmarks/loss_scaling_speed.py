"""What a loss-scaled step takes over nn.TrainOneStepCell, both in float32.

    python examples/benchmarks/loss_scaling_speed.py [--modes GRAPH]

One dynamic scale, and a scale for each of two groups of layers. Demanded: at most 1.10 in GRAPH
mode and 1.25 in PYNATIVE.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import mindspore as ms
from harness import MODES, paired, print_table
from mindspore import nn
from networks import NETWORKS, grouped, ours, plain_step, waiting

DEMANDED = {"GRAPH": 1.10, "PYNATIVE": 1.25}


def dynamic(name: str) -> nn.Cell:
    """Return the step of a network with one dynamic scale."""
    return ours(NETWORKS[name](), manager=ms.DynamicLossScaleManager(2**16, 2, 1000))


STEPS = {"dynamic": dynamic, "grouped": lambda name: grouped(name, 2.0**16)}


def speed_rows(modes: Sequence[str]) -> list[str]:
    """Return the table of step times, one row for each mode, network and kind of scale."""
    rows = []
    for mode in modes:
        ms.set_context(mode=MODES[mode])
        for name, network in NETWORKS.items():
            for scheme, make in STEPS.items():
                ms.set_seed(0)
                ratio = paired(waiting(make(name)), plain_step(network()))
                rows.append(f"{name} | {mode} | {scheme} | {ratio.row} | {DEMANDED[mode]:.2f}")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Measure what loss scales cost.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args(argv)
    headings = "network | mode | scale | plain step, ms | ratio | quartiles | demanded"
    rows = speed_rows(args.modes)
    print_table("Loss-scaled step over nn.TrainOneStepCell, float32", headings, rows)


if __name__ == "__main__":
    main()
