"""The results of the runs of ``compare``: figures from histories, as table, picture and data.

Definitions. *Loss*: mean over the steps of the last epoch. *Metrics*: the last that were measured.
A step *compiles* when it takes more than five times the median step and at least 0.05 s longer;
*compile time* is what the first step and every such step took beyond the median; *step time* is the
mean of all other steps (data loading included). *Memory*: peak of the process's resident memory.
*Time to accuracy*: seconds of the steps, compilation included, until a run reaches the first run's
final accuracy (or loss, if it has none) and never loses it again, checked after each epoch. What
is measured twice without a step between is of two datasets: the second has a name of its own.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspore_boost_ext.callbacks.history import Record, new_figure
from mindspore_boost_ext.report import APPLIED, SKIPPED, markdown

_COMPILES_TIMES, _COMPILES_SECONDS = 5.0, 0.05
RAN, FAILED, NOT_RUN = "ran", "failed", "not run"
CAUTION = (
    "Each time is of a single run: on a machine that does other work, too, times differ by tens "
    "of per cent without a reason."
)


@dataclass(frozen=True)
class Outcome:
    """One run: what it was, how it ended, and its figures (None where there is none)."""

    name: str  # what the run is called
    status: str  # RAN, FAILED or NOT_RUN
    note: str = ""  # why it failed or was not run; else what was applied
    loss: float | None = None  # the last epoch's
    metrics: dict[str, float] = field(default_factory=dict)  # the last ones, name -> number
    steps: int = 0  # how many
    step_ms: float | None = None  # mean time in milliseconds without those that compile
    compile_s: float | None = None  # seconds
    peak_mib: float | None = None  # MiB
    seconds: float | None = None  # of the run without the imports
    report: str = ""  # of a bundled run
    models: int = 0  # how many a script has trained; 0 if unknown
    replaced: bool = False  # whether they had a level or settings of their own
    stopped: bool = False  # whether the seconds that a script was given have ended its training
    ended: bool = False  # whether the script asked for another training after that
    losses: list[float] = field(default_factory=list)  # mean of each epoch
    curves: dict[str, list[float]] = field(default_factory=dict)  # each metric after each epoch
    # Seconds of the steps when each value of the curves was measured; "loss" for the losses.
    clocks: dict[str, list[float]] = field(default_factory=dict)

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Return seconds and values of a metric, or, for ``"loss"``, of the loss."""
        values = self.losses if key == "loss" else self.curves.get(key, [])
        return self.clocks.get(key, [])[: len(values)], values


def outcome(name: str, history: Sequence[Record], result: dict[str, Any]) -> Outcome:
    """Return the figures of a run that ended without an error, from its BoostMonitor's records.

    ``result`` is what its process has written: ``peak_mib``, ``seconds``, ``report``, ``models``,
    ``replaced``, ``stopped`` and ``ended``.
    """
    steps: list[float] = []
    losses: list[float] = []
    curves: dict[str, list[float]] = {}
    clocks: dict[str, list[float]] = {}
    now = 0.0
    measured: Counter[str] = Counter()  # since the last step
    for record in history:
        if record["event"] == "step":
            measured.clear()
            steps.append(record["seconds"])
            now += record["seconds"]
        elif record["event"] == "epoch" and record.get("loss") is not None:
            losses.append(record["loss"])
            clocks.setdefault("loss", []).append(now)
        for key, value in (record.get("metrics") or {}).items():
            if isinstance(value, (int, float)):
                name_of_metric = "validation loss" if key == "loss" else key
                measured[key] += 1
                if measured[key] > 1 and curves[name_of_metric][-1] == value:
                    continue  # fit has measured it already
                if measured[key] > 1:
                    name_of_metric += f" (evaluation {measured[key]})"
                curves.setdefault(name_of_metric, []).append(float(value))
                clocks.setdefault(name_of_metric, []).append(now)
    step_s, compile_s = step_and_compile_seconds(steps)
    return Outcome(
        name,
        RAN,
        applied(history),
        loss=losses[-1] if losses else None,
        metrics={key: values[-1] for key, values in curves.items()},
        steps=len(steps),
        step_ms=None if step_s is None else step_s * 1e3,
        compile_s=compile_s,
        losses=losses,
        curves=curves,
        clocks=clocks,
        **result,
    )


def times_to_accuracy(outcomes: Sequence[Outcome]) -> tuple[str, list[float | None]]:
    """Return the name of the goal, and the seconds until each run has reached it for good.

    The goal is the last value of the first run's first accuracy, or of its loss if it has none.
    """
    first = next((one for one in outcomes if one.status == RAN), Outcome("", FAILED))
    names = [key for key in first.metrics if "acc" in key.lower()]
    accuracies = [key for key in names if not re.search("loss|error", key, re.IGNORECASE)]
    key = accuracies[0] if accuracies else "loss"
    sign = 1.0 if accuracies else -1.0
    values = first.curve(key)[1]
    goal = sign * values[-1] if values else math.inf
    return key, [for_good(*one.curve(key), lambda value: sign * value >= goal) for one in outcomes]


def for_good(
    seconds: Sequence[float], values: Sequence[float], met: Callable[[float], bool]
) -> float | None:
    """Return the seconds from which on all values meet a condition; None if the last does not.

    Examples:
        >>> from mindspore_boost_ext.cli.results import for_good
        >>> for_good([1, 2, 3, 4], [0.9, 0.5, 0.9, 1.0], lambda value: value > 0.8)
        3
    """
    found = None
    for second, value in zip(reversed(seconds), reversed(values)):
        if not met(value):
            break
        found = second
    return found


def step_and_compile_seconds(steps: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the steps that do not compile, and what the others took beyond the median.

    Examples:
        >>> from mindspore_boost_ext.cli.results import step_and_compile_seconds
        >>> step_and_compile_seconds([2.25, 0.25, 0.25, 1.75, 0.25])
        (0.25, 3.5)
    """
    if len(steps) < 2:
        return None, None
    median = float(np.median(steps[1:]))  # not statistics: the user may have a module of that name
    limit = max(_COMPILES_TIMES * median, median + _COMPILES_SECONDS)
    usual = [seconds for seconds in steps[1:] if seconds <= limit]
    compiling = [steps[0], *(seconds for seconds in steps[1:] if seconds > limit)]
    return math.fsum(usual) / len(usual), sum(max(0.0, seconds - median) for seconds in compiling)


def applied(history: Sequence[Record]) -> str:
    """Return what the last report in a history says was applied, and what was skipped."""
    shown = []
    for row in _asked_for(history):
        counts = ", ".join(f"{key}={value}" for key, value in (row.get("counts") or {}).items())
        status = "" if row["status"] == APPLIED else f" {row['status']}: {row.get('reason')}"
        shown.append(f"{row['algorithm']}{status}" + (f" ({counts})" if counts else ""))
    return "; ".join(shown)


def changed_nothing(history: Sequence[Record]) -> bool:
    """Return whether every training ended with nothing applied of what was asked for."""
    starts = [place for place, one in enumerate(history) if one.get("event") == "start"]
    trainings = [history[start:end] for start, end in zip(starts, [*starts[1:], len(history)])]
    rows = [row for training in trainings for row in _asked_for(training)]
    is_known = any("report" in record for record in history)
    return is_known and all(row["status"] == SKIPPED for row in rows)


def why_nothing(history: Sequence[Record]) -> str:
    """Return why the report lists nothing that was asked for, not even as skipped."""
    report = _last_report(history)
    steps = [row for row in report.get("rows", []) if row.get("algorithm") == "step"]
    why = "the settings switch nothing on"
    if steps:
        why = steps[0].get("reason", "")
    elif str(report.get("title", "")).startswith("boost level O0"):
        why = "the script's Models ignore the level and settings from outside"
    return f"nothing was applied: {why}"


def _asked_for(history: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows of the last report that were asked for: applied or skipped."""
    return [
        row
        for row in _last_report(history).get("rows", [])
        # Other rows were not asked for, or are details, such as what was done to one layer. Every
        # run has rows on the tuning of the machine and on the seconds of compiling.
        if row.get("status") in (APPLIED, SKIPPED) and row.get("asked by") not in ("import", "-")
    ]


def _last_report(history: Sequence[Record]) -> dict[str, Any]:
    report = next((one["report"] for one in reversed(history) if "report" in one), None)
    return report if isinstance(report, dict) else {}


def about_models(one: Outcome) -> str:
    """Return what to say of a script's own settings, and of several Models; empty without both."""
    remarks = []
    if one.replaced:
        remarks.append(
            "its own level and settings are replaced by those of the run: remove them before you "
            "give it a file by --config, or they take precedence"
        )
    if one.models > 1:
        remarks.append(
            f"it trains {one.models} Models, whose steps are counted as one training here, so that "
            "loss, accuracy and times are those of none of them; give a script that trains one"
        )
    return "; ".join(remarks)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return all runs as a Markdown table, and their notes below it.

    Times are also given as multiples of the first run's.
    """
    metrics = list(dict.fromkeys(key for one in outcomes for key in one.metrics))
    goal, reached = times_to_accuracy(outcomes)
    steps = [one.step_ms for one in outcomes]
    columns = [
        ("loss", ".4f", [one.loss for one in outcomes]),
        *((key, ".4g", [one.metrics.get(key) for one in outcomes]) for key in metrics),
        ("step, ms", ".2f", steps),
        ("step ratio", ".2f", _ratios(steps)),
        ("peak memory, MiB", ".0f", [one.peak_mib for one in outcomes]),
        ("compile, s", ".1f", [one.compile_s for one in outcomes]),
        ("run, s", ".1f", [one.seconds for one in outcomes]),
        (f"time to {goal}, s", ".1f", reached),
        ("time ratio", ".2f", _ratios(reached)),
    ]
    cells = [[number(value, form) for value in values] for _, form, values in columns]
    rows = list(zip((one.name for one in outcomes), *cells))
    headings = ["run", *(heading for heading, _, _ in columns)]
    notes = [line for one in outcomes for line in _notes(one)]
    return "\n".join([markdown(headings, rows), *([""] if notes else []), *notes])


def _notes(one: Outcome) -> list[str]:
    note = one.note if one.status == RAN else f"{one.status}: {one.note}"
    return [f"- {one.name}: {text}" for text in (note, about_models(one)) if text]


def _ratios(values: Sequence[float | None]) -> list[float | None]:
    """Return each value as a multiple of the first one that is neither None nor 0."""
    first = next(filter(None, values), None)
    return [value / first if first and value else None for value in values]


def number(value: float | None, form: str = ".4g") -> str:
    """Return a figure as the cell of a table."""
    return "-" if value is None else format(value, form)


def draw(outcomes: Sequence[Outcome], path: str | os.PathLike[str]) -> None:
    """Draw loss and metrics over the seconds of the steps; bars of step, memory and compile time.

    Runs without steps are left out. The suffix of the path chooses the format. Without matplotlib
    it raises an ``ImportError``.
    """
    figure = new_figure("the picture")
    ran = [one for one in outcomes if one.steps]
    metrics = list(dict.fromkeys(key for one in ran for key in one.metrics))
    bars = {"step, ms": "step_ms", "peak memory, MiB": "peak_mib", "compile, s": "compile_s"}
    columns = max(1 + len(metrics), len(bars))
    figure.set_size_inches(4.2 * columns, 6.4)
    for position, key in enumerate(["loss", *metrics], start=1):
        axes = figure.add_subplot(2, columns, position)
        for index, one in enumerate(ran):  # there are ten colours
            style = ("-", "--", ":")[index // 10 % 3]
            axes.plot(*one.curve(key), marker=".", linestyle=style, label=one.name)
        axes.set(title=key, xlabel="seconds, compilation included")
        axes.grid(alpha=0.3)
    for position, (title, attribute) in enumerate(bars.items(), start=columns + 1):
        axes = figure.add_subplot(2, columns, position)
        values = [getattr(one, attribute) or 0.0 for one in ran]
        places = range(len(ran))
        hatches = [("", "///", "...")[index // 10 % 3] for index in places]
        axes.barh(places, values, color=[f"C{index % 10}" for index in places], hatch=hatches)
        axes.set_yticks(places, [one.name for one in ran])
        axes.invert_yaxis()
        axes.set_title(title)
    if ran:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)))
    figure.savefig(os.fspath(path), dpi=150)
