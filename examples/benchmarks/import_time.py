"""What importing the package adds to importing MindSpore.

    python examples/benchmarks/import_time.py [--runs 15]

Each import runs in a process of its own, after MindSpore's import. In one case Python finds the
bytecode that pip writes when it installs (demanded: at most 0.15 s), in the other it compiles the
sources anew. Prints medians and quartiles. Takes a minute.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import print_table

PACKAGE = Path(__file__).resolve().parents[2] / "mindspore_boost_ext"
TIMED = """
import time, mindspore
start = time.perf_counter()
import mindspore_boost_ext
print(time.perf_counter() - start)
"""


def seconds(folder: str) -> float:
    """Return how long the package of a folder takes to import, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,  # comes before all other places in the path
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return float(done.stdout.splitlines()[-1])


def row(name: str, folder: str, runs: int) -> str:
    """Return a row of the table."""
    seconds(folder)  # reading from the disk does not count
    low, median, high = statistics.quantiles([seconds(folder) for _ in range(runs)], n=4)
    return f"{name} | {median:.3f} | {low:.3f} to {high:.3f}"


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description="Measure what importing the package adds.")
    parser.add_argument("--runs", type=int, default=15, help="for each row, at least 2")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="import-") as folder:
        copy = Path(folder, PACKAGE.name)
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        rows = [row("none", folder, options.runs)]
        compileall.compile_dir(copy, quiet=1)
        rows.append(row("there", folder, options.runs))
    title = "import mindspore_boost_ext over import mindspore"
    print_table(title, "bytecode | seconds | quartiles", rows)


if __name__ == "__main__":
    main()
