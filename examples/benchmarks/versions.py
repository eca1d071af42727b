"""The whole suite on every supported MindSpore, each in a virtual environment of its own.

    python examples/benchmarks/versions.py
    python examples/benchmarks/versions.py --versions 2.7.0 2.10.0 -- tests/test_contract.py -x

Makes the environments under ``--folder`` (or uses those that are there), installs MindSpore and
this checkout with its test extra, runs ``python -m pytest`` in each, and prints a table with its
last line, which counts the tests. Arguments after ``--`` go to pytest. Each version takes about 1.5
GB of disk and the time of a whole suite. The exit code is 1 if anything failed anywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.7.0", "2.8.0", "2.9.0", "2.10.0")
HEADINGS = "MindSpore | tests | minutes"


def main() -> int:
    """Run the suite under each version; print the table."""
    parser = argparse.ArgumentParser(description="Run the test suite on several MindSpores.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs", help="of environments")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    print(f"| {HEADINGS} |\n{'|---' * 3}|", flush=True)
    failed = False
    for version in options.versions:
        started = time.perf_counter()
        code, tests = run(version, options)
        failed |= code != 0
        minutes = (time.perf_counter() - started) / 60
        print(f"| {version} | {tests} | {minutes:.1f} |", flush=True)
    return int(failed)


def run(version: str, options: argparse.Namespace) -> tuple[int, str]:
    """Run the suite under one version; return pytest's exit code and its last line."""
    try:
        python = environment(options.folder / f"ms{version}", version, options.python)
    except subprocess.CalledProcessError as error:
        return 1, f"no environment: {' '.join(error.cmd[:6])} failed"
    command, line = [str(python), "-m", "pytest", *options.pytest], ""
    with subprocess.Popen(
        command, cwd=ROOT, env=variables(), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
    return process.returncode, line.strip("= \n") or f"pytest ended with {process.returncode}"


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


if __name__ == "__main__":
    sys.exit(main())
