"""What plugging in costs: a step with nothing switched on.

    python examples/benchmarks/step_overhead.py

Prints the step time of BoostTrainOneStepCell over nn.TrainOneStepCell (demanded: at most 1.02).
Takes 3 minutes. What the import costs is in ``import_time.py``.
"""

from __future__ import annotations

import argparse

import mindspore as ms
from harness import MODES, paired, print_table
from networks import NETWORKS, momentum, plain_step, waiting, with_loss

from mindspore_boost_ext import BoostTrainOneStepCell


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description="What plugging in costs; takes no options.").parse_args()
    rows = []
    for mode, value in MODES.items():
        ms.set_context(mode=value)
        for name, network in NETWORKS.items():
            ms.set_seed(0)
            net = network()
            ours = BoostTrainOneStepCell(with_loss(net), momentum(net))
            ratio = paired(waiting(ours), plain_step(network()))
            rows.append(f"{name} | {mode} | {ratio.row}")
    headings = "network | mode | plain step, ms | ratio | quartiles"
    print_table("Step with nothing switched on, over nn.TrainOneStepCell", headings, rows)


if __name__ == "__main__":
    main()
