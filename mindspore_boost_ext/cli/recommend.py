"""``python -m mindspore_boost_ext recommend``: which settings bring a script to its goal soonest.

Each candidate runs the script in a process of its own, with the same seed and a bounded number of
steps. The goal is the accuracy that the plain run ends with, or the loss if the script measures no
accuracy; the time of compilation counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspore_boost_ext.callbacks.display import Display, make_display
from mindspore_boost_ext.callbacks.history import Record
from mindspore_boost_ext.cli.compare import (
    PROGRESS_HELP,
    count,
    in_several_processes,
    problem_of_script,
    run_trial,
    saved,
    writable,
)
from mindspore_boost_ext.cli.launcher import INTERRUPTED
from mindspore_boost_ext.cli.results import (
    NOT_RUN,
    RAN,
    Outcome,
    about_models,
    changed_nothing,
    for_good,
    number,
    times_to_accuracy,
)
from mindspore_boost_ext.cli.run import Trial
from mindspore_boost_ext.cli.trial_settings import PLAIN, only
from mindspore_boost_ext.recipes import recipe
from mindspore_boost_ext.report import markdown

_SMOOTHED = 0.05  # share of the plain run's steps over which a loss is averaged
_PLAIN_SHARE = 0.11  # of the minutes: the others share the rest, and each gets more than plain
_SAME = 0.02  # a loss that is above the goal by at most this share counts as reached
_CLEAR = 0.95  # of plain's time; what takes longer is within the noise of one run
CAUTION = (
    "Each ran once: repeat it, or compare with several seeds, before you rely on a difference of "
    "a few per cent."
)
_NO_ACCURACY = "Loss is not accuracy: check the accuracy on data that was not trained on."


@dataclass(frozen=True)
class Racer:
    """One candidate, and how it did."""

    name: str  # what it is called
    level: str  # given to the script's Models, like ``config``
    config: dict[str, Any]
    outcome: Outcome = Outcome("", NOT_RUN)  # of the run, or that there was none yet
    steps: int = 0  # that were made
    planned: int = 0  # steps of the trainings that have begun; 0 if unknown
    reached: float | None = None  # seconds, with compilation, to the goal; None: never
    goal: str = "loss"  # it, or a metric, is to become as good as at plain's end
    idle: bool = False  # whether nothing could be applied: it was plain training once more


def candidates(updates: int, eager: bool = False) -> list[Racer]:
    """Return what is tried beside the plain run of ``updates`` steps, the length of schedules.

    ``eager`` says whether the script trains in PYNATIVE_MODE.
    """
    prefix = {"schedule": "cubic", "prefix_fraction": 0.7, "total_steps": updates}
    half = {"schedule": "step", "prefix_start": 0.1, "prefix_fraction": 0.5, "total_steps": updates}
    alone = {"fn_flag": False, "gc_flag": False}
    compiled = [Racer("compiled step", "O1", only("compiled_step"))] if eager else []
    return [
        *compiled,
        Racer("cheaper operators", "O1", only("cheaper_operators")),
        Racer("level O1", "O1", {"grad_freeze": {"total_steps": updates}}),
        Racer("cubic prefix", "O1", only("grad_freeze", grad_freeze=prefix)),
        Racer("half frozen from 10 % on", "O1", only("grad_freeze", grad_freeze=half)),
        *(Racer(f"recipe {name}", "O1", recipe(name, updates)) for name in ("fast", "fastest")),
        Racer("fewer BatchNorms", "O1", only("less_bn", less_bn=alone)),
    ]


class _NoGoalError(ValueError):
    """The plain run gives nothing that others could reach."""


def recommend(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Run the command; ``write`` takes the lines for standard output.

    Returns:
        int, the exit code: 0 with a recommendation, 1 if the plain run failed or the file could not
        be written, 130 after Ctrl-C.
    """
    options = _options(argv)
    racers: list[Racer] = []
    ended = False
    with contextlib.closing(make_display(options.progress)) as display:
        try:
            for racer in _race_all(options, display):
                if not racers and (remarks := about_models(racer.outcome)):
                    write(f"the script: {remarks}")
                racers.append(racer)
                display.line(f"{racer.name}: {_words(racer)}")
            ended = True
        except _NoGoalError as error:
            write(str(error))
            return 1
        except KeyboardInterrupt:
            if not racers:
                raise
            display.line(f"interrupted after {len(racers)} of the runs")
    winner, cut_short = _winner(racers), "" if ended else "Interrupted; from these runs alone: "
    caution = CAUTION if racers[0].goal != "loss" else f"{CAUTION} {_NO_ACCURACY}"
    stopped = _stopped(racers[0], options.minutes)
    write(f"{_table(racers)}\n\n{stopped}{cut_short}{_sentence(winner, racers[0])}\n{caution}")
    # Before the end it is not known whether plain wins.
    has_winner = ended or winner is not racers[0]
    written = has_winner and _write(winner, options.json, racers[0].steps, write)
    return int(not written) if ended else INTERRUPTED


def _race_all(options: argparse.Namespace, display: Display) -> Iterator[Racer]:
    """Run plain, then all others, and yield each with its figures."""
    script, *args = options.script
    base = Trial(PLAIN, seed=options.seed, script=os.path.abspath(script), args=args)
    seconds = options.minutes * 60
    plain, history = _race(base, Racer(PLAIN, "O0", {}), seconds * _PLAIN_SHARE, 0, display)
    goal, seconds_to_goal = _goal(plain, history)
    yield replace(plain, goal=goal, reached=seconds_to_goal(plain, history))
    eager = any(record.get("mode") == "PYNATIVE_MODE" for record in history)
    others = candidates(plain.steps, eager)
    share = seconds * (1 - _PLAIN_SHARE) / len(others)
    for one in others:
        racer, history = _race(base, one, share, plain.steps, display)
        yield replace(racer, goal=goal, reached=seconds_to_goal(racer, history))


def _goal(
    plain: Racer, history: Sequence[Record]
) -> tuple[str, Callable[[Racer, Sequence[Record]], float | None]]:
    """Return the name of the goal, and what gives the seconds until a run stays at it."""
    if plain.outcome.status != RAN:
        raise _NoGoalError(f"the plain run of the script failed: {plain.outcome.note}")
    if not plain.steps:
        raise _NoGoalError(
            "the plain run of the script gives no goal: no loss of its steps is one number"
        )
    width = max(1, round(plain.steps * _SMOOTHED))
    goal = _smoothed(_curve(history)[1], width)[-1]
    if not math.isfinite(goal):
        raise _NoGoalError(f"the plain run of the script ends with the loss {goal}: fix that first")
    key, _ = times_to_accuracy([plain.outcome])
    if key in plain.outcome.metrics and math.isfinite(plain.outcome.metrics[key]):
        return key, lambda racer, _: times_to_accuracy([plain.outcome, racer.outcome])[1][1]
    return "loss", lambda _, history: _reached(history, width, goal)


def _write(winner: Racer, path: Path, steps: int, write: Callable[[str], None]) -> bool:
    """Write the settings of the winner, and say so; return whether they could be written."""
    settings = json.dumps(winner.config or {"boost": {"mode": "disable_all"}}, indent=1) + "\n"
    if problem := saved(path, lambda file: file.write_text(settings, "utf-8")):
        write(problem)
        return False
    quoted = shlex.quote(str(path))
    write(f"written: {path} (python -m mindspore_boost_ext --config {quoted} ...)")
    if "total_steps" in settings:
        write(
            f"its total_steps is {steps}, the steps of the plain run here: if your whole training "
            "has more updates, set it to their number"
        )
    return True


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspore_boost_ext recommend",
        description="Run a script plainly and with sensible settings; report which settings reach "
        "plain's accuracy first, or its loss if the script measures no accuracy, compilation "
        "included, and write these as a configuration.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="minutes for all runs together (10)")
    add("--seed", type=int, default=0, help="for ms.set_seed before the script (0)")
    add("--progress", type=count, metavar="STEPS", help=PROGRESS_HELP)
    text = "where to write the best settings (recommended.json; a file there is replaced)"
    add("--json", type=writable, default="recommended.json", metavar="FILE", help=text)
    add("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # says what to do
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="script and arguments")
    options = parser.parse_args(argv)
    words = options.script if options.module is None else ["-m"]
    if problem := in_several_processes("recommend") or problem_of_script(words):
        parser.error(problem)
    if not 0 < options.minutes <= 10_000:
        parser.error(f"--minutes must be in (0, 10000], got {options.minutes:g}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be in 0..2**32-1, got {options.seed}")
    return options


def _race(
    base: Trial, racer: Racer, seconds: float, steps: int, display: Display
) -> tuple[Racer, Sequence[Record]]:
    """Run one candidate; return it with its figures, and its history."""
    trial = replace(base, name=racer.name, level=racer.level, config=racer.config)
    trial = replace(trial, most_seconds=seconds, most_steps=steps)
    outcome, history = run_trial(trial, racer.name, display)
    idle = racer.level != "O0" and changed_nothing(history)
    starts = [one for one in history if one["event"] == "start"]
    planned = sum((start.get("epochs") or 0) * start.get("steps_per_epoch", 0) for start in starts)
    racer = replace(racer, outcome=outcome, steps=len(_curve(history)[1]), planned=planned)
    return replace(racer, idle=idle), history


def _curve(history: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return, for each step, the seconds from the start of the first to its end, and its loss."""
    steps = [
        record
        for record in history
        if record["event"] == "step" and isinstance(record.get("loss"), (int, float))
    ]
    seconds = itertools.accumulate(record["seconds"] for record in steps)
    return list(seconds), [float(record["loss"]) for record in steps]


def _smoothed(losses: Sequence[float], width: int) -> list[float]:
    """Return the means over the last ``width`` steps, from step ``width`` on."""
    return [math.fsum(losses[end - width : end]) / width for end in range(width, len(losses) + 1)]


def _reached(history: Sequence[Record], width: int, goal: float) -> float | None:
    """Return the seconds after which the run stays at the goal to its end; None if it does not."""
    seconds, losses = _curve(history)
    limit = goal + _SAME * abs(goal)
    return for_good(seconds[width - 1 :], _smoothed(losses, width), lambda loss: loss <= limit)


def _winner(racers: Sequence[Racer]) -> Racer:
    """Return the fastest candidate if it was clearly faster than plain, else plain."""
    plain = racers[0]
    limit = (plain.reached or 0.0) * _CLEAR
    able = [racer for racer in racers[1:] if not racer.idle]
    faster = [one for one in able if one.reached is not None and one.reached < limit]
    return min(faster, key=lambda one: one.reached or 0.0, default=plain)


def _words(racer: Racer) -> str:
    if racer.outcome.status != RAN:
        return f"failed: {racer.outcome.note}"
    if racer.idle:
        return "changed nothing: none of it was applied"
    if racer.reached is None and racer.outcome.stopped:
        return f"did not reach plain's {racer.goal} in its share of the time"
    if racer.reached is None:
        return f"did not reach plain's {racer.goal}"
    return f"reached plain's {racer.goal} after {racer.reached:.1f} s"


def _table(racers: Sequence[Racer]) -> str:
    goal, first = racers[0].goal, racers[0].reached
    last = [] if goal == "loss" else [goal]
    headings = ["run", f"seconds to plain's {goal}", "over plain", *last, "step, ms", "compile, s"]
    rows = []
    for racer in racers:
        reached = None if racer.idle else racer.reached
        ratio = reached / first if first and reached is not None else None
        rows.append(
            [
                racer.name,
                _words(racer) if reached is None else number(reached, ".1f"),
                number(ratio, ".2f"),
                *(number(racer.outcome.metrics.get(key)) for key in last),
                number(racer.outcome.step_ms, ".2f"),
                number(racer.outcome.compile_s, ".1f"),
                number(racer.outcome.peak_mib, ".0f"),
            ]
        )
    return markdown([*headings, "peak memory, MiB"], rows)


def _stopped(plain: Racer, minutes: float) -> str:
    """Return what to say if the minutes have ended the plain run; else an empty text."""
    if not plain.outcome.stopped:
        return ""
    has_more = plain.planned > plain.steps > 0 and not plain.outcome.ended
    most = f" of {plain.planned}" if has_more else ""
    enough = f": --minutes {math.ceil(minutes * plain.planned / plain.steps)}" if has_more else ""
    return (
        f"Plain was stopped after {plain.steps}{most} steps by its share of the minutes, so these "
        "are beginnings: the goal is how far plain had come then, at a learning rate that a whole "
        "training lowers later; the recipes' schedules end within these steps. Give plain the time "
        f"to end{enough}.\n"
    )


def _sentence(winner: Racer, plain: Racer) -> str:
    if winner is plain:
        return f"Plain training wins: none of the others was clearly faster to its {plain.goal}."
    before, after = plain.reached or 1.0, winner.reached or 0.0
    share = f"in {after / before:.2f} of plain's time to plain's {plain.goal}"
    words = f"Recommended: {winner.name}, {share}."
    compiling, other = (one.outcome.compile_s or 0.0 for one in (plain, winner))
    if compiling - other > (before - after) / 2:
        words += " Most of the difference is compilation, which a longer training does only once."
    return words
