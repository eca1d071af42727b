"""Long runs: does memory grow, does a step slow down, are graphs compiled without end?

    python examples/benchmarks/soak.py                        # every algorithm, 20,000 steps
    python examples/benchmarks/soak.py grad_freeze plain --steps 3000 --mode pynative
    python examples/benchmarks/soak.py --models 30            # are Models that are dropped freed?

LeNet-5 on the bundled digits, each algorithm in a process of its own, AdaSum in two under msrun.
Demanded: resident memory grows by no more than 2 % after the warm-up (the first tenth), the number
of compiled graphs does not grow, and the step time drifts by less than it varies: the medians of
the first and of the last fifth after the warm-up differ by less than the distance of the first
fifth's quartiles. Prints a Markdown table; the exit code is 1 if a demand is not met.

With ``--models``, one Model after the other trains two steps and is dropped; then the garbage is
collected. The growth of resident memory per Model, over the second half, is compared with that of
plain training; AdaSum's with that of plain training in two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence

import mindspore as ms
from harness import MODES, print_table, seconds
from mindspore import Tensor
from networks import cross_entropy, momentum, wait
from processes import apart

from mindspore_boost_ext import TrajectorySampler
from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.cli.trial_settings import (
    LENET,
    PLAIN,
    Setup,
    configuration,
    runs,
    settings_of,
)

ADASUM, RANKS = "adasum", 2
GROWTH_LIMIT = 0.02
HEADINGS = "run | MiB after warm-up | MiB at the end | growth | step at first, ms"
HEADINGS += " | step at last, ms | quartiles at first | graphs | graphs at the end | steady"
MODELS_STEPS = 2
MODELS_HEADINGS = "run | KiB a Model | over plain | graphs left a Model"


def resident_mib() -> float:
    """Return the resident memory of this process in MiB (Linux)."""
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def model_of(name: str, steps: int, snapshots: str) -> ms.Model:
    """Return a Model of LeNet-5 with one algorithm; the rate is small, so that it stays finite."""
    ms.set_seed(0)
    net, arguments = settings_of(name).parts(LENET)
    level, config = configuration(name, Setup(LENET, steps, snapshots))
    return ms.Model(
        net,
        cross_entropy(),
        momentum(net, [1e-3] * steps),
        boost_level=level,
        boost_config_dict=config,
        **arguments,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return one epoch of the digits in batches of 32."""
    train, _ = digits_datasets(32)
    return [tuple(batch) for batch in train.create_tuple_iterator(num_epochs=1)]


@contextlib.contextmanager
def set_up(name: str, mode: str) -> Iterator[str]:
    """Set the mode, and data parallelism in a rank; yield a folder, with snapshots if needed."""
    ms.set_context(mode=MODES[mode.upper()])
    if "MS_ROLE" in os.environ:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if settings_of(name).snapshots:
            train, _ = digits_datasets(32)
            model = model_of(PLAIN, 5 * train.get_dataset_size(), "")
            model.train(5, train, callbacks=[TrajectorySampler(folder, 5, "step")])
        yield folder


def soak(name: str, steps: int, mode: str) -> tuple[str, bool]:
    """Train for so many steps; return the table's row, and whether all three demands are met."""
    with set_up(name, mode) as folder:
        step = model_of(name, steps, folder).train_network
    data, times = batches(), []
    warm_up = steps // 10
    for number, batch in enumerate(itertools.islice(itertools.cycle(data), steps)):
        if number == warm_up:
            memory, graphs = resident_mib(), compiled_graphs()
        times.append(seconds(lambda: wait(step(*batch))) * 1e3)  # noqa: B023
    memory_left, graphs_left = resident_mib(), compiled_graphs()
    growth = memory_left / memory - 1
    fifth = (steps - warm_up) // 5
    low, median, high = statistics.quantiles(times[warm_up : warm_up + fifth], n=4)
    last = statistics.median(times[-fifth:])
    steady = growth <= GROWTH_LIMIT and graphs_left <= graphs and last - median <= high - low
    row = (
        f"{name} | {memory:.1f} | {memory_left:.1f} | {growth:+.2%} | {median:.2f} | {last:.2f} | "
        f"{low:.2f} to {high:.2f} | {graphs} | {graphs_left} | {'yes' if steady else 'NO'}"
    )
    return row, steady


def left_by_models(name: str, mode: str, models: int) -> tuple[float, float]:
    """Make and drop Models; return KiB and compiled graphs that each of the second half left."""
    with set_up(name, mode) as folder:
        data, half = batches()[:MODELS_STEPS], models // 2
        for number in range(models):
            if number == half:
                memory, graphs = resident_mib(), compiled_graphs()
            model = model_of(name, MODELS_STEPS, folder)
            for batch in data:
                wait(model.train_network(*batch))
            del model
            gc.collect()
    count = models - half
    return (resident_mib() - memory) * 1024 / count, (compiled_graphs() - graphs) / count


def rows_of_models(names: Sequence[str], mode: str, models: int) -> Iterator[str]:
    """Yield the row of each run, measured in a process of its own, or on rank 0 of several."""
    plain = {1: apart(left_by_models, PLAIN, mode, models)}
    for name in (one for one in names if mode in settings_of(one).modes):
        ranks = RANKS if name == ADASUM else 1
        if ranks not in plain:
            plain[ranks] = apart(left_by_models, PLAIN, mode, models, ranks=ranks)
            yield f"plain, {ranks} ranks | {plain[ranks][0]:.0f} | 1.00 | {plain[ranks][1]:.1f}"
        left = plain[1] if name == PLAIN else apart(left_by_models, name, mode, models, ranks=ranks)
        yield f"{name} | {left[0]:.0f} | {left[0] / plain[ranks][0]:.2f} | {left[1]:.1f}"


def main() -> int:
    """Soak the chosen algorithms and print the table."""
    others = [one for one in runs() if one == ADASUM or LENET in settings_of(one).networks]
    suited = [PLAIN, *others]
    parser = argparse.ArgumentParser(description="Look for leaks and drift in long runs.")
    parser.add_argument("names", nargs="*", default=suited, help=f"of {', '.join(suited)}")
    parser.add_argument("--steps", type=int, default=20_000, help="at least 50")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--models", type=int, help="at least 4, in place of the long runs")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(suited))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.steps < 50 or (options.models is not None and options.models < 4):
        parser.error("--steps must be at least 50, --models at least 4")
    if options.models:
        title = f"{options.models} Models of LeNet, {MODELS_STEPS} steps each, {options.mode}"
        lines = rows_of_models(options.names, options.mode, options.models)
        print_table(title, MODELS_HEADINGS, lines)
        return 0
    steady: list[bool] = []

    def rows() -> Iterator[str]:
        for name in options.names:
            ranks = RANKS if name == ADASUM else 1  # each with memory that is nobody else's
            row, good = apart(soak, name, options.steps, options.mode, ranks=ranks)
            steady.append(good)
            yield row

    print_table(f"{options.steps} steps of LeNet, {options.mode}", HEADINGS, rows())
    return int(not all(steady))


if __name__ == "__main__":
    sys.exit(main())
