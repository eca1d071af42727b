"""What gradient freezing costs in time: first steps, unfrozen steps, and what half a run saves.

    python examples/benchmarks/freezing_speed.py

Demanded: first step with 10 groups at most 2.5 times the plain first step; an unfrozen step among
10 groups 1.03; a run that freezes half the network 0.8; a micro-step of accumulation 1.05. GRAPH
mode, ratios of paired runs in one process; first steps run in processes of their own and include
compilation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import mindspore as ms
from freezing import GROUPS, SCHEDULES, take_turns, trainee
from harness import paired, print_table
from mindspore import Tensor, nn
from networks import SmallResNet, batch, ours, plain, plain_step, waiting
from processes import apart

WINDOW = 4


class Within(nn.Cell):
    """A Cell around a step cell, in whose graph the group is chosen."""

    def __init__(self, step: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return self.step(images, labels)


def first_step_seconds(kind: str) -> float:
    """Build a step cell and run it once; return the seconds of both, compilation included.

    Args:
        kind: ``"plain"``; ``"first"`` of 10 groups; ``"every"`` group's first step, in a row; or
            ``"graph"``, the first of 10 groups with the choice made in the graph of a Cell around.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    network, inputs = SmallResNet(), batch()
    start = time.perf_counter()
    if kind == "plain":
        cell = plain(network)
    else:
        schedule = {"schedule": list(range(GROUPS))} if kind == "every" else {}
        cell = ours(network, grad_freeze={"param_groups": GROUPS, **schedule})
    cell = Within(cell).set_train() if kind == "graph" else cell
    for _ in range(GROUPS if kind == "every" else 1):
        cell(*inputs).asnumpy()
    return time.perf_counter() - start


def first_steps(kinds: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median seconds of first steps, each in a process of its own, by turns."""
    turns = [[apart(first_step_seconds, kind) for kind in kinds] for _ in range(rounds)]
    return dict(zip(kinds, map(statistics.median, zip(*turns))))


def half_run(steps: int = 100) -> tuple[float, float]:
    """Return the ratios of a run that freezes half the network, without and with compilation."""
    images = [batch(seed=seed) for seed in range(8)]
    pair = [trainee(SmallResNet, SCHEDULES[name], steps, 1, 0) for name in ("plain", "step")]
    take_turns(pair, (images[index % len(images)] for index in range(steps)))
    reference, frozen = pair
    return frozen.over(reference)[:2]


def speed_rows() -> list[str]:
    """Return the table of speeds."""
    seconds = first_steps(("plain", "first"), 5)
    more = first_steps(("every", "graph"), 2)
    others = {kind: value / seconds["plain"] for kind, value in more.items()}
    settings = {"param_groups": GROUPS, "schedule": [*range(1, GROUPS), *[0] * 9999]}
    unfrozen = waiting(ours(SmallResNet(), grad_freeze=settings))
    full = paired(unfrozen, plain_step(SmallResNet()), pairs=30, steps=2, warm_up=GROUPS + 2)
    runs = [half_run() for _ in range(3)]
    settings = {"grad_accumulation_step": WINDOW}
    accumulating = waiting(ours(SmallResNet(), grad_accumulation=settings))
    window = paired(accumulating, plain_step(SmallResNet()), pairs=24, steps=WINDOW, warm_up=WINDOW)
    without, including = (statistics.median(one) for one in zip(*runs))
    ranges = [f"{min(one):.3f} to {max(one):.3f}" for one in zip(*runs)]
    return [
        f"first step, {GROUPS} groups | {seconds['first'] / seconds['plain']:.2f} |  | 2.50",
        f"first step of every group, together | {others['every']:.2f} |  | ",
        f"first step, groups chosen in the graph | {others['graph']:.2f} |  | ",
        f"unfrozen step among {GROUPS} groups | {full.shown} | 1.03",
        f"100 steps, half the network frozen from 10 on | {without:.3f} | {ranges[0]} | 0.80",
        f"the same with compilation | {including:.3f} | {ranges[1]} | ",
        f"micro-step of accumulation, window {WINDOW} | {window.shown} | 1.05",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    argparse.ArgumentParser(description="Measure the speed of freezing.").parse_args(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    headings = "over plain | ratio | quartiles (of runs: range) | demanded at most"
    print_table("Speed, small ResNet, batch 32, GRAPH mode", headings, speed_rows())


if __name__ == "__main__":
    main()
