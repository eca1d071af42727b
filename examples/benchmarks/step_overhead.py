"""What plugging in costs: a step with nothing switched on, and the import.

    python examples/benchmarks/step_overhead.py

Prints the step time of BoostTrainOneStepCell over nn.TrainOneStepCell (demanded: at most 1.02), and
the seconds that the import adds to ``import mindspore`` (demanded: at most 0.15). Takes 3 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import mindspore as ms
from harness import MODES, paired, print_table
from networks import NETWORKS, momentum, plain_step, waiting, with_loss

from mindspore_boost_ext import BoostTrainOneStepCell

IMPORTS = """
import time
import mindspore
start = time.perf_counter()
import mindspore_boost_ext
print(time.perf_counter() - start)
"""


def import_seconds(runs: int = 9) -> float:
    """Return the median time that the import takes after MindSpore's own."""
    times = [
        float(
            subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=True).stdout
        )
        for _ in range(runs)
    ]
    return statistics.median(times)


def main() -> None:
    """Print both tables."""
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
    print(f"\nimport mindspore_boost_ext adds {import_seconds():.3f} s to import mindspore")


if __name__ == "__main__":
    main()
