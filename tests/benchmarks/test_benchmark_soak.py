"""The soak and version benchmarks: their arithmetic, and one short run."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402
import versions  # noqa: E402

STEADY = soak.Soak("x", (100.0, 101.5), (1.0, 2.0, 3.0), (2.0, 4.0, 9.0), (3, 3))


@pytest.mark.parametrize(
    ("change", "steady"),
    [
        ({}, True),
        ({"memory": (100.0, 102.5)}, False),
        ({"graphs": (3, 4)}, False),
        ({"last": (2.0, 4.5, 9.0)}, False),
        ({"last": (0.5, 1.0, 2.0)}, True),
    ],
)
def test_what_counts_as_steady(change, steady):
    assert STEADY._replace(**change).steady == steady


def test_a_short_soak_prints_its_table():
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "grad_accumulation", "--steps", "60"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode in (0, 1), ended.stderr  # so few steps may well drift
    row = [cell.strip() for cell in ended.stdout.splitlines()[-1].split("|")[1:-1]]
    assert len(row) == len(soak.HEADINGS)
    assert row[0] == "grad_accumulation"
    assert row[-3] == row[-2]  # no more graphs at the end
    assert int(row[-2]) >= 1


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure/></testcase>
<testcase classname="a" name="three"><error/></testcase>
<testcase classname="a" name="four"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_is_counted():
    result = versions.read_report("2.7.0", REPORT, 90.0)
    assert result.row() == "| 2.7.0 | 1 | 1 | 1 | 1 | 1.5 | a::two |"
    nothing = versions.read_report("2.7.0", "<testsuites/>", 1.0)
    assert nothing.failure == "no test was run"


def test_an_environment_that_is_there_is_used_and_its_failure_told(tmp_path):
    interpreter = tmp_path / "ms2.7.0" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to("/bin/false")
    options = argparse.Namespace(folder=tmp_path, python="no-such-python", pytest=[])
    assert versions.run("2.7.0", options).failure == "pytest ended with 1"


def test_an_environment_that_cannot_be_made_is_told(tmp_path):
    options = argparse.Namespace(folder=tmp_path, python="/bin/false", pytest=[])
    assert versions.run("2.7.0", options).failure.startswith("no environment: /bin/false -m venv")
