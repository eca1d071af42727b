"""The whole suite on every supported MindSpore, each in a virtual environment of its own.

    python examples/benchmarks/versions.py
    python examples/benchmarks/versions.py --versions 2.7.0 2.10.0 -- tests/test_contract.py -x

Makes the environments under ``--folder`` (or uses those that are there), installs MindSpore and
this checkout with its test extra, runs ``python -m pytest`` in each, and prints a table. Arguments
after ``--`` go to pytest. Each version takes about 1.5 GB of disk and the time of a whole suite.
The exit code is 1 if anything failed anywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.7.0", "2.8.0", "2.9.0", "2.10.0")
HEADINGS = "MindSpore | passed | failed | errors | skipped | minutes | first failure"


class Result(NamedTuple):
    """How the suite ended under one version."""

    passed: int = 0  # tests; all numbers are 0 if pytest could not run
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    failure: str = ""  # the first test that failed, or what went wrong


def main() -> int:
    """Run the suite under each version; print the table."""
    parser = argparse.ArgumentParser(description="Run the test suite on several MindSpores.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs", help="of environments")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    print(f"| {HEADINGS} |\n{'|---' * 7}|", flush=True)
    code = 0
    for version in options.versions:
        result, seconds = run(version, options)
        *counts, failure = result
        code = code or int(bool(failure))
        cells = [version, *map(str, counts), f"{seconds / 60:.1f}", failure or "-"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return code


def run(version: str, options: argparse.Namespace) -> tuple[Result, float]:
    """Run the suite under one version; return how it ended, and its seconds."""
    try:
        python = environment(options.folder / f"ms{version}", version, options.python)
    except subprocess.CalledProcessError as error:
        return Result(failure=f"no environment: {' '.join(error.cmd[:6])} failed"), 0.0
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", f"--junitxml={report}", *options.pytest]
        started = time.perf_counter()
        ended = subprocess.run(command, cwd=ROOT, env=variables(), stdout=sys.stderr, check=False)
        seconds = time.perf_counter() - started
        if not report.exists():
            return Result(failure=f"pytest ended with {ended.returncode}"), seconds
        return read_report(report), seconds


def environment(folder: Path, version: str, python: str) -> Path:
    """Return the interpreter of a virtual environment, which is made if it is not there."""
    interpreter = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        packages = [f"mindspore=={version}", f"{ROOT}[test]"]
        install = [str(interpreter), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, stdout=sys.stderr)
    return interpreter


def variables() -> dict[str, str]:
    """Return the variables under which this checkout is tested, whatever is installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def read_report(report: Path) -> Result:
    """Return what a JUnit report of pytest says."""
    tree = ElementTree.parse(report)
    cases, *ended = (
        [f"{one.get('classname')}::{one.get('name')}" for one in tree.iterfind(f".//testcase{end}")]
        for end in ("", "[failure]", "[error]", "[skipped]")
    )
    failed, errors, skipped = ended
    first = next(iter([*failed, *errors]), "") if cases else "no test was run"
    passed = len(cases) - len({*failed, *errors, *skipped})
    return Result(passed, *map(len, ended), first)


if __name__ == "__main__":
    sys.exit(main())
