"""Models made and dropped in one process: how much memory does each leave behind?

    python examples/benchmarks/models_memory.py                   # every algorithm, both modes
    python examples/benchmarks/models_memory.py plain grad_freeze --mode graph --models 40

A Model of LeNet-5 trains two steps and is dropped, again and again, each algorithm in a process of
its own, AdaSum in two, beside plain training in two. After each the garbage is collected; the
growth of resident memory over the second half, per Model, is compared with plain training's.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness import print_table
from networks import wait
from processes import apart
from soak import (
    ADASUM,
    RANKS,
    batches,
    leave_snapshots,
    model_of,
    resident_mib,
    set_up,
)

from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.cli.trial_settings import LENET, PLAIN, runs, settings_of

STEPS = 2
HEADINGS = "mode | run | KiB a Model | over plain | graphs left a Model"


class Left(NamedTuple):
    """What each Model left behind: KiB of resident memory, and compiled graphs."""

    kib: float
    graphs: float


def measured(name: str, mode: str, models: int) -> Left:
    """Make and drop Models in this process; return what each of the second half left."""
    set_up(mode)
    data, half = batches()[:STEPS], models // 2
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        if settings_of(name).snapshots:
            leave_snapshots(folder, data)
        for number in range(models):
            if number == half:
                before = resident_mib(), compiled_graphs()
            model = model_of(name, STEPS, folder)
            for batch in data:
                wait(model.train_network(*batch))
            del model
            gc.collect()
    after = resident_mib(), compiled_graphs()
    count = models - half
    return Left((after[0] - before[0]) * 1024 / count, (after[1] - before[1]) / count)


def shown(left: Left, plain: Left) -> str:
    """Return the figures of a row."""
    return f"{left.kib:.0f} | {left.kib / plain.kib:.2f} | {left.graphs:.1f}"


def in_own_process(name: str, mode: str, models: int, ranks: int = 1) -> Left:
    """Return what one run left, measured in a process of its own, or on rank 0 of several."""
    return Left(*apart(measured, name, mode, models, ranks=ranks))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen runs and print the table."""
    suited = [PLAIN, *(one for one in runs() if LENET in settings_of(one).networks), ADASUM]
    parser = argparse.ArgumentParser(description="Measure the memory that dropped Models leave.")
    parser.add_argument("names", nargs="*", default=suited, help=f"of {', '.join(suited)}")
    parser.add_argument("--mode", choices=("graph", "pynative"), action="append")
    parser.add_argument("--models", type=int, default=30, help="at least 4")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(suited))
    if unknown or options.models < 4:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "--models must be at least 4")

    def rows() -> Iterator[str]:
        for mode in options.mode or ("graph", "pynative"):
            plain = in_own_process(PLAIN, mode, options.models)
            for name in (one for one in options.names if mode in settings_of(one).modes):
                beside, ranks = plain, 1
                if name == ADASUM:
                    beside, ranks = in_own_process(PLAIN, mode, options.models, RANKS), RANKS
                    yield f"{mode} | plain, {RANKS} ranks | {shown(beside, beside)}"
                left = in_own_process(name, mode, options.models, ranks) if name != PLAIN else plain
                yield f"{mode} | {name} | {shown(left, beside)}"

    print_table(f"{options.models} Models of LeNet, {STEPS} steps each", HEADINGS, rows())


if __name__ == "__main__":
    main()
