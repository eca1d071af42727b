"""A compiled step in PYNATIVE_MODE, over a plain one there and over a step of GRAPH_MODE.

    python examples/benchmarks/compiled_step.py --rounds 5

Networks and plain runs are those of ``machine.py``: each run is a process of its own, by turns,
plain without this package, the step of GRAPH_MODE with its import. ``--isa AVX2`` gives all of them
oneDNN's instruction set, as on a processor without AVX-512. Prints medians of the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

from harness import print_table
from machine import in_own_process

NETWORKS = ("LeNet", "ResNet-20")


def row(network: str, rounds: int, isa: str) -> str:
    """Return a line of the table."""
    runs = {
        "plain": (network, "plain"),
        "graph": (f"{network} in GRAPH_MODE", "tuned"),
        "compiled": (network, "compiled"),
    }
    cores = len(os.sched_getaffinity(0))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in (*runs,) if number % 2 else reversed((*runs,)):
            times[name].append(in_own_process(*runs[name], cores, isa=isa)["seconds"])
    found = [f"{statistics.median(times[name]) * 1e3:.1f}" for name in runs]
    for reference in ("plain", "graph"):
        ratios = [own / other for own, other in zip(times["compiled"], times[reference])]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        found += [f"{statistics.median(ratios):.3f}", spread]
    return " | ".join([network, *found])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="A compiled step in PYNATIVE_MODE.")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--isa", default="", help="oneDNN's instruction set in all processes")
    options = parser.parse_args(argv)
    print_table(
        f"Compiled step in PYNATIVE_MODE, {options.rounds} rounds",
        "network | plain, ms | GRAPH_MODE, ms | compiled, ms | over plain | range | "
        "over GRAPH_MODE | range",
        (row(network, options.rounds, options.isa) for network in options.networks),
    )


if __name__ == "__main__":
    main()
