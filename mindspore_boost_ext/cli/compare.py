"""``python -m mindspore_boost_ext compare``: train with each algorithm and without, side by side.

A bundled network learns the bundled digits, plain and with each algorithm and recipe; or a script
runs at each level or with each configuration. Runs follow each other, each in its own process
(``run.py``): memory and compile time belong to it alone. ``results.py`` makes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.callbacks.display import Display, make_display
from mindspore_boost_ext.callbacks.history import PICTURES, Record, read_history, strict_json
from mindspore_boost_ext.callbacks.monitor import versions
from mindspore_boost_ext.cli import results as comparison
from mindspore_boost_ext.cli.launcher import INTERRUPTED, problem_of_file
from mindspore_boost_ext.cli.results import FAILED, NOT_RUN, Outcome
from mindspore_boost_ext.cli.run import HISTORY, MODES, OUTPUT, RESULT, Trial
from mindspore_boost_ext.cli.trial_settings import LENET, NETWORKS, PLAIN, runs, settings_of
from mindspore_boost_ext.config.parse import LEVELS, BoostConfig
from mindspore_boost_ext.config.rules import described, launched_processes

BUNDLED = {"network": LENET, "epochs": 10, "batch_size": 32, "seed": 0, "mode": "graph"}
_CHOICES = {"mode": MODES, "network": NETWORKS}
_POLL_SECONDS = 0.1
# What MindSpore prints after the error of a graph.
_ADVICE = re.compile(r"- (The Traceback of Net Construct Code|C\+\+ Call Stack)|.*analyze_fail\.ir")
PROGRESS_HELP = "without a terminal: also print a line every STEPS steps"

_NO_STEP = (
    "no step was seen: these commands see the steps of ms.Model alone. Give the network of a loop "
    "of your own to ms.Model for them, or try settings by hand in make_train_step"
)


def compare(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Run the command; ``write`` takes the lines for standard output.

    Returns:
        int, the exit code: 0 when every run went well, 1 when one failed or a file could not be
        written, 130 after Ctrl-C; argparse leaves with 2.
    """
    options = _options(argv)
    trials = _trials(options)
    outcomes = _outcomes(trials, options.progress)
    if not outcomes:
        return INTERRUPTED
    # Files first: they are kept even if the table cannot be printed.
    text = _as_json(options, outcomes)
    unwritten = saved(options.json, lambda path: path.write_text(text, "utf-8"))
    undrawn = saved(options.plot, lambda path: comparison.draw(outcomes, path))
    if options.report:
        write("".join(f"{one.name}: {one.report}\n\n" for one in outcomes[1:] if one.report))
    write(f"{comparison.table(outcomes)}\n\n{comparison.CAUTION}")
    if options.plot and not undrawn:
        write(f"\ndrawn: {options.plot}")
    for problem in filter(None, (unwritten, undrawn)):
        write(f"\n{problem}")
    if len(outcomes) < len(trials):
        return INTERRUPTED
    failed = any(outcome.status == FAILED for outcome in outcomes)
    return int(failed or bool(unwritten or undrawn))


def saved(path: Path | None, save: Callable[[Path], object]) -> str:
    """Write a file if one is asked for; return why that failed, or an empty text."""
    try:
        if path:
            save(path)
    except Exception as error:  # a library that draws may raise anything
        return f"cannot write {path}: {getattr(error, 'strerror', None) or described(error)}"
    return ""


def _outcomes(trials: Sequence[Trial], progress: int | None) -> list[Outcome]:
    """Return the figures of all runs, or of those that are done when Ctrl-C ends them."""
    outcomes: list[Outcome] = []
    with contextlib.closing(make_display(progress)) as display:
        try:
            for number, trial in enumerate(trials, start=1):
                one, _ = run_trial(trial, f"{trial.name} ({number}/{len(trials)})", display)
                display.line(f"{one.name}: {one.status}" + (f", {one.note}" if one.note else ""))
                outcomes.append(one)
        except KeyboardInterrupt:
            display.line(f"interrupted after {len(outcomes)} of {len(trials)} runs")
    return outcomes


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspore_boost_ext compare",
        description="Train plainly and with each algorithm; compare loss, accuracy, time, memory.",
        epilog=f"Algorithms and recipes: {', '.join(runs())}. The command demo is this one with "
        "the words: --network resnet --report fast.",
    )
    add = parser.add_argument
    text = "algorithms and recipes to run besides plain training (all)"
    add("algorithms", nargs="*", metavar="ALGORITHM", help=text)
    kinds: dict[str, Callable[[str], Any]] = {"network": str, "mode": str, "seed": _seed}
    for name, default in BUNDLED.items():
        whose = "each run" if name == "seed" else "the bundled run"
        text, choices = f"of {whose} ({default})", _CHOICES.get(name)
        add(f"--{name.replace('_', '-')}", type=kinds.get(name, count), choices=choices, help=text)
    text = "also print the report of each boosted bundled run"
    add("--report", action="store_true", default=None, help=text)
    add("--progress", type=count, metavar="STEPS", help=PROGRESS_HELP)
    add("--json", type=writable, metavar="FILE", help="write the results to this file")
    add("--plot", type=_picture, metavar="FILE.png", help="draw the results (needs matplotlib)")
    add("--levels", nargs="+", choices=LEVELS, help="levels for --script (O0 O1 O2)")
    add("--configs", nargs="+", metavar="FILE.json", help="for --script: O0, then O1 per file")
    text = "run this script instead of the bundled network; later words belong to the script"
    add("--script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help=text)
    # Split by hand: argparse would end the words of the script at a "--" among them.
    place = list(argv).index("--script") if "--script" in argv else len(argv)
    options = parser.parse_args(argv[:place])
    options.script = list(argv[place + 1 :]) if place < len(argv) else options.script
    problem = _problem(options)
    if problem:
        parser.error(problem)
    for name, default in BUNDLED.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def _problem(options: argparse.Namespace) -> str:
    """Return what is wrong with the combination of options; empty if nothing."""
    if several := in_several_processes("compare"):
        return several
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        return '--plot needs matplotlib: pip install "mindspore_boost_ext[plot]"'
    if options.script is None:
        if options.levels or options.configs:
            return "--levels and --configs need --script SCRIPT"
        unknown = [name for name in options.algorithms if name not in (PLAIN, *runs())]
        if unknown:
            return f"unknown: {', '.join(unknown)}; known are {', '.join(runs())}"
        try:
            digits_datasets(options.batch_size or 1)
        except ValueError as error:
            return f"--batch-size: {error}"
        return ""
    given = [
        f"--{name.replace('_', '-')}"
        for name in (*BUNDLED, "report")
        if name != "seed" and getattr(options, name) is not None
    ]
    if given:
        return (
            f"{', '.join(given)}: for the bundled networks only; give options of a script after "
            "its name"
        )
    if options.algorithms:
        return "name algorithms, or give --script SCRIPT, not both"
    if wrong := problem_of_script(options.script):
        return wrong
    return "; ".join(filter(None, map(_problem_of, options.configs or ())))


def in_several_processes(command: str) -> str:
    """Return an error text if msrun runs a command in several processes; else an empty one."""
    # msrun starts its scheduler with the command, too, and waits for it.
    started = os.environ.get("MS_ROLE") in ("MS_WORKER", "MS_SCHED")
    if not started or launched_processes() < 2:
        return ""
    return f"run {command} in one process, without msrun: it starts a process for each of its runs"


def problem_of_script(words: Sequence[str]) -> str:
    """Return what is wrong with the words of a script; empty if nothing."""
    if not words:
        return "name a script to run, followed by its own arguments"
    if words[0].startswith("-m"):
        return (
            "-m is not supported, only the file of a script: for a module write one of two lines, "
            "import runpy and runpy.run_module('package.module', run_name='__main__')"
        )
    return problem_of_file(words[0])


def _problem_of(path: str) -> str:
    try:
        BoostConfig.parse("O1", path)
    except ValueError as error:
        _, *several = str(error).splitlines()
        return f"{path}: {'; '.join(map(str.strip, several)) or error}"
    return ""


def count(text: str) -> int:
    """Read a word of the command line as a positive integer."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer in 0..2**32-1, got {text!r}")
    return int(text)


def _picture(text: str) -> Path:
    path = writable(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(PICTURES)}, got {text!r}")
    return path


def writable(text: str) -> Path:
    """Read a word of the command line as a file that can be written."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"give a file in a writable folder, not {text!r}")
    return path


def _trials(options: argparse.Namespace) -> list[Trial]:
    if options.script is None:
        settings = tuple(getattr(options, name) for name in BUNDLED)
        names = dict.fromkeys((PLAIN, *(options.algorithms or runs())))
        return [Trial(name, *settings) for name in names]
    script, *args = options.script
    path = os.path.abspath(script)
    levels = options.levels or (["O0"] if options.configs else LEVELS)
    chosen = [(level, level, "") for level in levels]
    chosen += [(one, "O1", os.path.abspath(one)) for one in options.configs or ()]
    return [
        Trial(name, seed=options.seed, script=path, args=args, level=level, config=config)
        for name, level, config in chosen
    ]


def run_trial(trial: Trial, title: str, display: Display) -> tuple[Outcome, list[Record]]:
    """Do one run in a process of its own; return its outcome and its history."""
    settings = settings_of(trial.name)
    suits = trial.network in settings.networks and trial.mode in settings.modes
    if not (trial.script or suits):
        return Outcome(trial.name, NOT_RUN, settings.unsuited), []
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        display.begin_run(title)
        code = _watch(_start(trial, folder), folder / HISTORY, title, display)
        history = read_history(folder / HISTORY) if (folder / HISTORY).exists() else []
        if code:
            return Outcome(trial.name, FAILED, _why(code, folder / OUTPUT)), history
        if not any(record["event"] == "step" for record in history):
            return Outcome(trial.name, FAILED, _NO_STEP), []
        written = folder / RESULT  # missing after os._exit
        result = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
        found = comparison.outcome(trial.name, history, result)
        is_idle = trial.level != "O0" and not found.note and comparison.changed_nothing(history)
        note = comparison.why_nothing(history) if trial.script and is_idle else found.note
        return replace(found, note=note), history


def _start(trial: Trial, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process; what it prints goes to a file."""
    here = str(Path(__file__).resolve().parents[2])
    # After the user's own paths: for an installed package, this is the folder of all packages.
    paths = filter(None, [os.environ.get("PYTHONPATH"), here])
    description = folder / "trial.json"
    description.write_text(json.dumps(asdict(trial)), encoding="utf-8")
    command = [sys.executable, "-m", "mindspore_boost_ext.cli.run", str(description)]
    command += filter(None, [trial.script])  # for the machine's tuning, which looks at scripts
    with open(folder / OUTPUT, "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            # A failed compilation leaves files behind; a script expects the user's own folder.
            cwd=None if trial.script else folder,
        )


def _watch(process: subprocess.Popen[bytes], history: Path, title: str, display: Display) -> int:
    """Show the progress of a run until it ends; return its exit code."""
    step = 0
    try:
        for record in _records(process, history):
            if record["event"] == "start":
                step = 0
                display.begin_epoch(title, (record["epochs"] or 1) * record["steps_per_epoch"])
            elif record["event"] == "step":
                step, loss = step + 1, record["loss"]
                text = f"{loss:.4g}" if isinstance(loss, float) else str(loss)
                display.step(step, f"loss {text}")
    finally:
        process.kill()  # no effect on one that has ended
        process.wait()
    return process.returncode


def _records(process: subprocess.Popen[bytes], history: Path) -> Iterator[Record]:
    """Yield the records that a process writes, as they come, until it ends."""
    read, runs = 0, True
    while runs:
        time.sleep(_POLL_SECONDS)
        runs = process.poll() is None  # before the last look
        if history.exists():
            with open(history, "rb") as file:
                file.seek(read)
                whole, newline, _ = file.read().rpartition(b"\n")
            read += len(whole) + len(newline)
            yield from map(json.loads, whole.splitlines())


def _why(code: int, output: Path) -> str:
    """Return why a process failed: its error, or its exit code and its last line of output."""
    last = _last_line(output)
    if code == 1 and last:  # an exception, or ``sys.exit("a sentence")``
        return last
    return f"exit code {code}" + (f", last output: {last}" if last else "")


def _last_line(path: Path) -> str:
    """Return the last line of a process's output that holds more than spaces and dashes.

    If MindSpore's advice follows an error, it is the first line of that error instead.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.strip(" -")]
    if any(_ADVICE.match(line) for line in said):
        begins = [number for number, line in enumerate(said) if line.startswith("Traceback (")]
        behind = said[begins[-1] + 1 :] if begins else said
        error = [line for line in behind if not line.startswith(" ")][:3]
        # "RuntimeError:" alone may be followed by a heading, and then by what is wrong.
        taken = len(error) if error and error[0].rstrip().endswith(":") else 1
        return " ".join(line.strip(" -") for line in error[:taken]) or said[-1].strip()
    return said[-1].strip() if said else ""


def _as_json(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> str:
    names = BUNDLED if options.script is None else ["script"]
    document = {
        "versions": versions(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "settings": {name: getattr(options, name) for name in names},
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(strict_json(document), allow_nan=False, indent=1) + "\n"
