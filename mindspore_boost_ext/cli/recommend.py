"""``python -m mindspore_boost_ext recommend``: which settings bring a script to its loss soonest.

Each candidate runs the script in a process of its own, with the same seed and a bounded number of
steps. The race is to the loss with which the plain run ends; compilation counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspore_boost_ext.callbacks.display import make_display
from mindspore_boost_ext.callbacks.history import Record
from mindspore_boost_ext.cli.compare import PROGRESS_HELP, count, run_trial, writable
from mindspore_boost_ext.cli.results import (
    RAN,
    Outcome,
    changed_nothing,
    for_good,
    markdown,
    several_models,
)
from mindspore_boost_ext.cli.run import Trial
from mindspore_boost_ext.config.parse import ALGORITHMS
from mindspore_boost_ext.recipes import recipe

PLAIN = "plain"
_PROGRAM = "python -m mindspore_boost_ext recommend"
_SMOOTHED = 0.05  # share of the plain run's steps over which a loss is averaged
_PLAIN_SHARE = 0.11  # of the minutes: the others share the rest, and each gets more than plain
_SAME = 0.02  # a loss that is nearer to the plain one's than this counts as reached
_CLEAR = 0.95  # of plain's time; what takes longer is within the noise of one run
CAUTION = (
    "One run each: repeat it, or compare with several seeds, before you rely on a difference of "
    "some per cent. A loss is no accuracy: look at the accuracy on data that was not trained on."
)


@dataclass(frozen=True)
class Racer:
    """One candidate, and how it did.

    Attributes:
        name: what it is called.
        level, config: what the script's Models are given.
        outcome: figures of the run, once it has been.
        reached: seconds, with compilation, until the plain run's loss was there; None if never.
        idle: whether nothing of it could be applied, so that it was plain training once more.
    """

    name: str
    level: str
    config: dict[str, Any]
    outcome: Outcome | None = None
    reached: float | None = None
    idle: bool = False


def candidates(updates: int, eager: bool = False) -> list[Racer]:
    """Return what is tried beside the plain run.

    Args:
        updates (int): steps of the plain run, along which schedules are stretched.
        eager (bool): whether the script trains in PYNATIVE_MODE. Default: False.
    """
    off = dict.fromkeys(ALGORITHMS, False)

    def alone(name: str, **sections: Any) -> dict[str, Any]:
        return {"boost": {"mode": "manual", **off, name: True}, **sections}

    prefix = {"schedule": "cubic", "prefix_fraction": 0.7, "total_steps": updates}
    half = {"schedule": "step", "prefix_start": 0.1, "prefix_fraction": 0.5, "total_steps": updates}
    compiled = [Racer("compiled step", "O1", alone("compiled_step"))] if eager else []
    return [
        *compiled,
        Racer("cheaper operators", "O1", alone("cheaper_operators")),
        Racer("level O1", "O1", {"grad_freeze": {"total_steps": updates}}),
        Racer("cubic prefix", "O1", alone("grad_freeze", grad_freeze=prefix)),
        Racer("half frozen from 10 % on", "O1", alone("grad_freeze", grad_freeze=half)),
        *(Racer(f"recipe {name}", "O1", recipe(name, updates)) for name in ("fast", "fastest")),
        Racer("fewer BatchNorms", "O1", alone("less_bn", less_bn={"fn_flag": False})),
    ]


def recommend(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Run the command.

    Args:
        argv: its words.
        write: takes the lines for standard output.

    Returns:
        int, the exit code: 0 with a recommendation, 1 if the plain run failed.
    """
    options = _options(argv)
    seconds, display = options.minutes * 60, make_display(options.progress)
    base = Trial(PLAIN, script=os.path.abspath(options.script[0]), args=options.script[1:])
    base = replace(base, seed=options.seed)
    try:
        plain, history = _race(base, Racer(PLAIN, "O0", {}), seconds * _PLAIN_SHARE, None, display)
        losses = _losses(history)
        if plain.outcome is None or plain.outcome.status != RAN or not losses:
            note = plain.outcome.note if plain.outcome else "it trained nothing"
            write(f"the plain run of the script failed: {note}")
            return 1
        goal = _goal(losses)
        if not math.isfinite(goal):
            write(f"the plain run of the script ends with the loss {goal}: mend that first")
            return 1
        if told := several_models(plain.outcome):
            write(f"the script: {told}")
        racers = [_with_time(plain, losses, goal, len(losses))]
        eager = any(record.get("mode") == "PYNATIVE_MODE" for record in history)
        others = candidates(len(losses), eager)
        for one in others:
            share = seconds * (1 - _PLAIN_SHARE) / len(others)
            racer, history = _race(base, one, share, len(losses), display)
            racers.append(_with_time(racer, _losses(history), goal, len(losses)))
            display.line(f"{one.name}: {_words(racers[-1])}")
    finally:
        display.close()
    winner = _winner(racers)
    write(f"{_table(racers)}\n\n{_sentence(winner, racers[0])}\n{CAUTION}")
    options.json.write_text(json.dumps(_settings(winner), indent=1) + "\n", encoding="utf-8")
    write(f"written: {options.json} (python -m mindspore_boost_ext --config {options.json} ...)")
    if "total_steps" in options.json.read_text(encoding="utf-8"):
        write(
            f"its total_steps is {len(losses)}, the steps of the plain run here: set it to the "
            "updates of your whole training if there are more"
        )
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Run a script plain and with sensible settings; say what reaches plain's loss "
        "first, compilation counted, and write that as a configuration.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="for all runs together (10)")
    add("--seed", type=int, default=0, help="for ms.set_seed in front of the script (0)")
    add("--progress", type=count, metavar="STEPS", help=PROGRESS_HELP)
    add("--json", type=writable, default="recommended.json", metavar="FILE", help="the winner")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="all that follows is its")
    options = parser.parse_args(argv)
    if not options.script or not os.path.isfile(options.script[0]):
        parser.error(f"cannot open the script {' '.join(options.script[:1])!r}")
    if not 0 < options.minutes <= 10_000:
        parser.error(f"--minutes must be in (0, 10000], got {options.minutes:g}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be in 0..2**32-1, got {options.seed}")
    return options


def _race(
    base: Trial, racer: Racer, seconds: float, steps: int | None, display: Any
) -> tuple[Racer, Sequence[Record]]:
    """Run one candidate; return it with its figures, and its history."""
    config = json.dumps(racer.config) if racer.config else ""
    trial = replace(base, name=racer.name, level=racer.level, config=config, most_seconds=seconds)
    trial = replace(trial, most_steps=steps or 0)
    outcome, history = run_trial(trial, racer.name, display)
    return replace(racer, outcome=outcome, idle=changed_nothing(history)), history


def _losses(history: Sequence[Record]) -> list[tuple[float, float]]:
    """Return, for each step, the seconds since the first one began, and the loss."""
    found, now = [], 0.0
    for record in history:
        if record["event"] == "step" and isinstance(record.get("loss"), (int, float)):
            now += record["seconds"]
            found.append((now, float(record["loss"])))
    return found


def _smoothed(losses: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Return means over the last ``width`` steps, from the first that has so many."""
    values = [loss for _, loss in losses]
    return [
        (losses[end - 1][0], statistics.fmean(values[end - width : end]))
        for end in range(width, len(values) + 1)
    ]


def _width(steps: int) -> int:
    return max(1, round(steps * _SMOOTHED))


def _goal(losses: Sequence[tuple[float, float]]) -> float:
    """Return the loss with which the plain run ends."""
    return _smoothed(losses, _width(len(losses)))[-1][1]


def _with_time(
    racer: Racer, losses: Sequence[tuple[float, float]], goal: float, steps: int
) -> Racer:
    """Take down when the goal was reached, and kept to the end of the run."""
    seconds, smooth = [list(part) for part in zip(*_smoothed(losses, _width(steps)))] or [[], []]
    reached = for_good(seconds, smooth, lambda loss: loss <= goal + _SAME * abs(goal))
    return replace(racer, reached=reached)


def _winner(racers: Sequence[Racer]) -> Racer:
    """Return who was clearly faster than plain, else plain."""
    plain = racers[0]
    limit = (plain.reached or 0.0) * _CLEAR
    able = [one for one in racers[1:] if not one.idle]
    faster = [one for one in able if one.reached is not None and one.reached < limit]
    return min(faster, key=lambda one: one.reached or 0.0, default=plain)


def _words(racer: Racer) -> str:
    if racer.outcome is None or racer.outcome.status != RAN:
        return f"failed: {racer.outcome.note if racer.outcome else ''}"
    if racer.idle:
        return "changed nothing here: all of it was skipped"
    if racer.reached is None and racer.outcome.stopped:
        return "did not reach plain's loss in its share of the minutes"
    if racer.reached is None:
        return "did not reach plain's loss"
    return f"reached plain's loss after {racer.reached:.1f} s"


def _table(racers: Sequence[Racer]) -> str:
    headings = ["run", "seconds to plain's loss", "over plain", "step, ms", "compile, s"]
    rows, first = [], racers[0].reached
    for one in racers:
        figures = one.outcome or Outcome(one.name, RAN)
        reached = None if one.idle else one.reached
        ratio = reached / first if first and reached is not None else None
        rows.append(
            [
                one.name,
                f"{reached:.1f}" if reached is not None else _words(one),
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if figures.step_ms is None else f"{figures.step_ms:.2f}",
                "-" if figures.compile_s is None else f"{figures.compile_s:.1f}",
                "-" if figures.peak_mib is None else f"{figures.peak_mib:.0f}",
            ]
        )
    return markdown([*headings, "peak memory, MiB"], rows)


def _sentence(winner: Racer, plain: Racer) -> str:
    if winner is plain:
        return "Plain training wins: nothing that was tried was clearly faster to its loss."
    share = (winner.reached or 0.0) / (plain.reached or 1.0)
    words = f"Recommended: {winner.name}, {share:.2f} of plain's time to plain's loss."
    saved = (plain.reached or 0.0) - (winner.reached or 0.0)
    if _compilation(plain) - _compilation(winner) > saved / 2:
        words += " Most of that is compilation, which a longer training has but once."
    return words


def _compilation(racer: Racer) -> float:
    return (racer.outcome.compile_s if racer.outcome else None) or 0.0


def _settings(winner: Racer) -> dict[str, Any]:
    return winner.config if winner.name != PLAIN else {"boost": {"mode": "disable_all"}}
