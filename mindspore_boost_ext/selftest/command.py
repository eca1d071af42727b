"""``python -m mindspore_boost_ext selftest``: the processes, the table and the file."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mindspore_boost_ext.callbacks.monitor import versions
from mindspore_boost_ext.cli.compare import count, in_several_processes, writable
from mindspore_boost_ext.report import markdown
from mindspore_boost_ext.runtime.processes import launcher, ranks_beside
from mindspore_boost_ext.selftest import worker
from mindspore_boost_ext.selftest.checks import CHECKS
from mindspore_boost_ext.selftest.worker import FAILED, MODES, PASSED

_END = 2000  # characters of the last output of a process that died


def selftest(argv: Sequence[str], write: Callable[[str], None]) -> int:
    """Run the command; ``write`` takes the lines for standard output.

    Returns:
        int, the exit code: 0 if something passed and nothing failed, else 1.
    """
    options = _options(argv)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="selftest-") as folder:
        of_ranks, said = _run(options, Path(folder))
        surroundings = _surroundings(options, Path(folder))
    rows = [
        max(lines, key=lambda line: (line["status"] == FAILED, line.get("off") or 0.0))
        for lines in zip(*of_ranks)
    ]
    headings = ("check", "mode", "result", "off by", "seconds", "reason")
    write(markdown(headings, [_cells(row) for row in rows]))
    counts = {status: [row["status"] for row in rows].count(status) for status in (PASSED, FAILED)}
    left = len(rows) - sum(counts.values())
    write(
        f"\n{options.device}, {options.ranks} rank(s), {time.perf_counter() - started:.0f} s: "
        f"{counts[PASSED]} passed, {counts[FAILED]} failed, {left} not possible here"
    )
    if counts[FAILED] and said:
        write(f"Last output of the process:\n{said}")
    if options.json:
        report = {"surroundings": surroundings, "results": rows, "said": said}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write(f"For a bug report: {options.json}")
    return 0 if counts[PASSED] and not counts[FAILED] else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspore_boost_ext selftest",
        description="Train small networks with every algorithm in both modes on a device, and "
        "compare the results with NumPy in float64.",
    )
    chosen = f"one of: {', '.join(CHECKS)}; may be repeated (all)"
    add = parser.add_argument
    add("--device", choices=("Ascend", "GPU", "CPU"), default="CPU")
    add("--ranks", type=count, default=1, metavar="N", help="number of processes (1)")
    add("--mode", choices=sorted(MODES), action="append", help="default: both")
    add("--check", choices=list(CHECKS), action="append", metavar="NAME", help=chosen)
    add("--json", metavar="FILE", type=writable, help="write all results to this file")
    add("--timeout", type=count, default=600, metavar="SECONDS", help="for all checks (600)")
    if problem := in_several_processes("selftest"):
        parser.error(f"{problem}; for several ranks give --ranks N")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace, folder: Path) -> tuple[list[list[dict[str, Any]]], str]:
    """Do the checks in other processes; return each one's lines, and the last output on failure."""
    order = {
        "device": options.device,
        "ranks": options.ranks,
        "modes": list(dict.fromkeys(options.mode or MODES)),
        "checks": list(dict.fromkeys(options.check or CHECKS)),
    }
    path = folder / "order.json"
    path.write_text(json.dumps(order), encoding="utf-8")
    command = [sys.executable] if options.ranks == 1 else launcher(options.ranks, folder)
    command += [worker.__file__, str(path)]  # the launcher takes scripts, no modules
    package = str(Path(worker.__file__).parents[2])
    found_in = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    log = folder / "said.log"
    with log.open("w", encoding="utf-8") as file:
        # A session of its own, so that all that belongs to it can be ended at once.
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": found_in},
            start_new_session=True,
        )
        try:
            code = process.wait(options.timeout)
            why = f"the process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            code, why = 1, f"not finished after {options.timeout} s"
        finally:
            for rank in ranks_beside(process.pid).values():  # ranks have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    of_ranks = sorted(folder.glob("worker_*.log")) or [log]
    said = "\n".join(one.read_text(encoding="utf-8", errors="replace")[-_END:] for one in of_ranks)
    files = (folder / f"results_{rank}.jsonl" for rank in range(options.ranks))
    return [_lines_of_rank(one, order, why) for one in files], said if code else ""


def _lines_of_rank(path: Path, order: dict[str, Any], why: str) -> list[dict[str, Any]]:
    """Return a line for each check that was ordered; a missing one has failed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    written = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    last = {(one["check"], one["mode"]): one for one in written}
    lines = []
    for mode, check in itertools.product(order["modes"], order["checks"]):
        line = last.get((check, mode), {"check": check, "mode": mode})
        if "status" not in line:
            reason = f"{why} {'in' if (check, mode) in last else 'before'} this check"
            line = {**line, "status": FAILED, "reason": reason, "seconds": 0.0}
        lines.append(line)
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    off = "" if row.get("off") is None else f"{row['off']:.1e}"
    reason = " ".join(row["reason"].split())
    short = reason if len(reason) <= 200 else f"{reason[:200]} ..."
    return row["check"], row["mode"], row["status"], off, f"{row['seconds']:.1f}", short


def _surroundings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found = sorted(folder.glob("surroundings_*.json"))
    return {
        **versions(),
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": options.device,
        "ranks": options.ranks,
        "processes": [json.loads(one.read_text(encoding="utf-8")) for one in found],
    }
