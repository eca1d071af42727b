"""What gradient freezing costs in time: unfrozen steps, and what half a run saves.

    python examples/benchmarks/freezing_speed.py

Demanded: an unfrozen step among 10 groups at most 1.03 times the plain one; a run that freezes half
the network 0.8; a micro-step of accumulation 1.05. GRAPH mode, ratios of paired runs in one
process. What the groups cost in compilation is in ``first_steps.py``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import mindspore as ms
from freezing import GROUPS, SCHEDULES, take_turns, trainee
from harness import paired, print_table
from networks import SmallResNet, batch, ours, plain_step, waiting

WINDOW = 4


def half_run(steps: int = 100) -> tuple[float, float]:
    """Return the ratios of a run that freezes half the network, without and with compilation."""
    images = [batch(seed=seed) for seed in range(8)]
    pair = [trainee(SmallResNet, SCHEDULES[name], steps, 1, 0) for name in ("plain", "step")]
    take_turns(pair, (images[index % len(images)] for index in range(steps)))
    reference, frozen = pair
    return frozen.over(reference)[:2]


def speed_rows() -> list[str]:
    """Return the table of speeds."""
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
