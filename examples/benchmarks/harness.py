"""Timing by pairs: two steps take turns in one process, and only their ratio is reported.

A machine's speed drifts by far more than the few per cent to be seen here. Within one pair it
hardly does, so the median over many pairs is steady where two separate timings are not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

# The import tunes the machine, for the plain steps too.
from mindspore_boost_ext.cli.run import peak_mib

MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}


class Ratio(NamedTuple):
    """Result of a paired timing: median and quartiles of time(candidate) / time(reference)."""

    median: float
    low: float
    high: float
    reference_ms: float  # median time of one step

    @property
    def shown(self) -> str:
        """Median and quartiles, as they stand in tables."""
        return f"{self.median:.3f} | {self.low:.3f} to {self.high:.3f}"

    @property
    def row(self) -> str:
        """The same, after the milliseconds of the reference."""
        return f"{self.reference_ms:.1f} | {self.shown}"


def paired(
    candidate: Callable[[], object],
    reference: Callable[[], object],
    pairs: int = 40,
    steps: int = 5,
    warm_up: int = 5,
) -> Ratio:
    """Time two steps by turns, and return the median ratio; each step must wait for its end.

    A pair is ``steps`` steps of each; the order within a pair alternates. Compilation happens in
    the ``warm_up`` steps before the first pair.
    """
    for _ in range(warm_up):
        candidate()
        reference()
    timed = [functools.partial(seconds, step, steps) for step in (reference, candidate)]
    references, candidates = by_turns(timed, pairs)
    ratios = [here / there for there, here in zip(references, candidates)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high, statistics.median(references) / steps * 1e3)


def by_turns(runs: Sequence[Callable[[], Any]], rounds: int) -> list[tuple[Any, ...]]:
    """Call each once a round, in alternating order; return for each what its calls gave."""
    orders = [slice(None, None, -1 if number % 2 else 1) for number in range(rounds)]
    return list(zip(*([run() for run in runs[order]][order] for order in orders)))


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Return the time of so many calls that wait for their results."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def seconds_of(run: Callable[[], object], times: int, warm_up: int = 0) -> float:
    """Return the median time of ``times`` calls, after ``warm_up`` others."""
    return statistics.median([seconds(run) for _ in range(warm_up + times)][warm_up:])


def added_mib(run: Callable[[], object]) -> float:
    """Return by how much three calls raise the peak memory of this process, in MiB."""
    before = peak_mib()
    for _ in range(3):
        run()
    after = peak_mib()
    if before is None or after is None:
        raise RuntimeError("the peak of a process's memory cannot be read on this system")
    return after - before


def print_table(title: str, headings: str, rows: Iterable[str]) -> None:
    """Print a Markdown table, with the machine above it; each line is its cells between " | "."""
    print(f"\n{title}\n")
    print(
        f"MindSpore {ms.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n"
    )
    print(f"| {headings} |")
    print("|" + "---|" * len(headings.split(" | ")))
    for row in rows:
        print(f"| {row} |", flush=True)


@contextlib.contextmanager
def drawn(
    path: Path, count: int = 1, width: float = 5, height: float = 4, **settings: bool
) -> Iterator[list[Any]]:
    """Yield ``count`` panels, their size in inches, to draw on; write the picture at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    yield list(figure.subplots(1, count, squeeze=False, **settings)[0])
    figure.savefig(path, dpi=130)
