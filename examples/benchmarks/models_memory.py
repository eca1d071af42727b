"""Models made and dropped in one process: how much memory does each leave behind?

    python examples/benchmarks/models_memory.py                   # every algorithm, both modes
    python examples/benchmarks/models_memory.py plain grad_freeze --mode graph --models 40

A Model of LeNet-5 trains two steps and is dropped, again and again, each algorithm in a process of
its own. After each the garbage is collected; the growth of resident memory over the second half,
per Model, is compared with plain training's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mindspore as ms
from harness import MODES, print_table
from soak import batches, leave_snapshots, model_of, resident_mib

from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.cli.trial_settings import LENET, PLAIN, TRIAL_SETTINGS, TrialSettings, runs

STEPS = 2
HEADINGS = ("mode", "run", "KiB a Model", "over plain", "graphs left a Model")


class Left(NamedTuple):
    """What each Model left behind: KiB of resident memory, and compiled graphs."""

    kib: float
    graphs: float


def measured(name: str, mode: str, models: int) -> Left:
    """Make and drop Models in this process; return what each of the second half left."""
    ms.set_context(mode=MODES[mode.upper()])
    data, half = batches()[:STEPS], models // 2
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        if settings_of(name).snapshots:
            leave_snapshots(folder, data)
        for number in range(models):
            if number == half:
                before = resident_mib(), compiled_graphs()
            train(name, folder, data)
            gc.collect()
    after = resident_mib(), compiled_graphs()
    count = models - half
    return Left((after[0] - before[0]) * 1024 / count, (after[1] - before[1]) / count)


def settings_of(name: str) -> TrialSettings:
    """Return how a run is set up; plain training has no settings of its own."""
    return TRIAL_SETTINGS.get(name, TrialSettings())


def train(name: str, folder: str, data: list[tuple[ms.Tensor, ms.Tensor]]) -> None:
    """Make a Model, train it, and drop it."""
    model = model_of(name, STEPS, folder)
    for batch in data:
        outputs = model.train_network(*batch)
        (outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy()


def in_own_process(name: str, mode: str, models: int) -> Left:
    """Return what one run left, measured in a process of its own."""
    arguments = [name, "--one", "--mode", mode, "--models", str(models)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return Left(*json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen runs and print the table."""
    suited = [PLAIN, *(one for one in runs() if LENET in settings_of(one).networks)]
    parser = argparse.ArgumentParser(description="Measure the memory that dropped Models leave.")
    parser.add_argument("names", nargs="*", default=suited, help=f"of {', '.join(suited)}")
    parser.add_argument("--mode", choices=("graph", "pynative"), action="append")
    parser.add_argument("--models", type=int, default=30, help="at least 4")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - set(suited))
    if unknown or options.models < 4:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "--models must be at least 4")
    if options.one:
        print(json.dumps(measured(options.names[0], options.mode[0], options.models)))
        return 0

    def rows() -> Iterator[tuple[object, ...]]:
        for mode in options.mode or ("graph", "pynative"):
            plain = in_own_process(PLAIN, mode, options.models)
            for name in (one for one in options.names if mode in settings_of(one).modes):
                left = in_own_process(name, mode, options.models) if name != PLAIN else plain
                yield (
                    mode,
                    name,
                    f"{left.kib:.0f}",
                    f"{left.kib / plain.kib:.2f}",
                    f"{left.graphs:.1f}",
                )

    print_table(f"{options.models} Models of LeNet, {STEPS} steps each", HEADINGS, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
