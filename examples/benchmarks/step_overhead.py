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
from collections.abc import Callable

import mindspore as ms
from harness import MODES, paired, print_table
from mindspore import nn
from networks import NETWORKS, momentum, waiting, with_loss

from mindspore_boost_ext import BoostTrainOneStepCell

IMPORTS = """
import time
import mindspore
start = time.perf_counter()
import mindspore_boost_ext
print(time.perf_counter() - start)
"""


def step(cell_class: type, network: Callable[[], nn.Cell]) -> Callable[[], object]:
    """Return a function that trains one step with a step cell of that class, and waits for it."""
    net = network()
    return waiting(cell_class(with_loss(net), momentum(net)))


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
            ratio = paired(step(BoostTrainOneStepCell, network), step(nn.TrainOneStepCell, network))
            rows.append(f"{name} | {mode} | {ratio.row}")
    headings = "network | mode | plain step, ms | ratio | quartiles"
    print_table("Step with nothing switched on, over nn.TrainOneStepCell", headings, rows)
    print(f"\nimport mindspore_boost_ext adds {import_seconds():.3f} s to import mindspore")


if __name__ == "__main__":
    main()
