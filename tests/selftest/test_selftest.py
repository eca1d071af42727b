"""The selftest passes here, and sees what is wrong."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import Tensor, ops

from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext.boost_cell_wrapper import train_step
from mindspore_boost_ext.grad_accumulation import window
from mindspore_boost_ext.selftest import checks, worker
from mindspore_boost_ext.selftest.checks import CHECKS
from mindspore_boost_ext.selftest.worker import FAILED, MODES, NOT_POSSIBLE, PASSED, result
from mindspore_boost_ext.stages import overflow

MANY_RANKS = {"adasum", "adasum in halves"}


def run(capsys, *words):
    """Run the command; return the exit code, the rows of its table as lists of cells, the end."""
    code = main(["selftest", *words])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return code, rows[2:], lines[-1 - ("--json" in words)]


def test_chosen_checks_in_both_modes_with_a_file(capsys, tmp_path):
    path = tmp_path / "report.json"
    words = ("--check", "grad_accumulation", "--check", "adasum", "--json", str(path))
    code, rows, end = run(capsys, *words)
    assert code == 0
    assert [row[:3] for row in rows] == [
        ["grad_accumulation", "graph", PASSED],
        ["adasum", "graph", NOT_POSSIBLE],
        ["grad_accumulation", "pynative", PASSED],
        ["adasum", "pynative", NOT_POSSIBLE],
    ]
    report = json.loads(path.read_text())
    assert report["surroundings"]["mindspore"] == ms.__version__
    (process,) = report["surroundings"]["processes"]
    assert process["facts"]["target"] == "CPU"
    assert process["overflow detection"].startswith("cpu_finite: ")
    assert [one["status"] for one in report["results"]] == [row[2] for row in rows]
    assert report["results"][0]["off"] < 1e-4
    assert end.endswith("2 passed, 0 failed, 2 not possible here")


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_check_passes_here(capsys, ranks):
    code, rows, _end = run(capsys, "--ranks", str(ranks))
    left_out = MANY_RANKS if ranks == 1 else set()
    expected = [
        [name, mode, NOT_POSSIBLE if name in left_out else PASSED]
        for mode in MODES
        for name in CHECKS
    ]
    assert [row[:3] for row in rows] == expected
    assert code == 0


def test_a_device_that_is_not_there_is_not_possible(capsys):
    code, rows, _end = run(capsys, "--device", "GPU", "--check", "plain step", "--mode", "graph")
    assert code == 1
    assert rows[0][2] == NOT_POSSIBLE
    assert "Unsupported device target GPU" in rows[0][5]


def test_what_takes_too_long_has_failed(capsys):
    code, rows, _end = run(capsys, "--timeout", "1", "--check", "plain step", "--mode", "graph")
    assert code == 1
    assert rows[0][2] == FAILED
    assert rows[0][5].startswith("not finished after 1 s")


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_passes_in_this_process(name):
    """In PYNATIVE_MODE, where little compiles; the slow test runs them as the command does."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    line = result(name, "pynative", 1e-4)
    assert line["status"] == (NOT_POSSIBLE if name in MANY_RANKS else PASSED), line


# What is put in the place of a part, and the check that must see it.
BROKEN = {
    "gradients.clip_norm": (train_step, "clipped", lambda gradients, bound: gradients),
    "grad_accumulation": (window.GradientAccumulation, "clear", lambda self: True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_part_that_does_nothing_is_found_out(monkeypatch, name):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert result(name, "pynative", 1e-4)["status"] == PASSED
    monkeypatch.setattr(*BROKEN[name])
    line = result(name, "pynative", 1e-4)
    assert line["status"] == FAILED
    assert "of their change" in line["reason"]


class FirstOnly(overflow.CPUFiniteDetector):
    def any_non_finite(self, gradients):
        return super().any_non_finite(gradients[:1])


class BlindTo16Bits(overflow.CPUFiniteDetector):
    def any_non_finite(self, gradients):
        return super().any_non_finite([one for one in gradients if one.dtype == ms.float32])

    def any_value_non_finite(self, values):
        return super().any_value_non_finite(values) if values else Tensor(False)


class BlindToNan(overflow.CPUFiniteDetector):
    def any_value_non_finite(self, values):
        return super().any_value_non_finite(tuple(ops.nan_to_num(one, nan=0.0) for one in values))


@pytest.mark.parametrize("detector", [FirstOnly, BlindTo16Bits, BlindToNan])
def test_a_detector_that_misses_an_overflow_is_found_out(monkeypatch, detector):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setattr(checks, "choose_detector", detector)
    line = result("overflow detection", "pynative", 1e-4)
    assert line["status"] == FAILED
    assert "that overflows in gradient" in line["reason"]


@pytest.mark.parametrize("off", [float("nan"), float("inf")])
def test_a_file_is_json_whatever_a_check_gives(monkeypatch, off):
    monkeypatch.setattr(worker, "CHECKS", {"plain step": lambda: off})
    line = json.loads(json.dumps(result("plain step", "graph", 1e-4), allow_nan=False))
    assert (line["status"], line["off"]) == (FAILED, None)
    assert "differ by" in line["reason"]


def test_a_limit_of_a_device_is_no_failure(monkeypatch):
    def refuses():
        raise NotImplementedError("not in saturation mode")

    monkeypatch.setattr(worker, "CHECKS", {"loss_scale_group": refuses})
    assert result("loss_scale_group", "graph", 1e-4)["status"] == NOT_POSSIBLE


class Hanging(subprocess.Popen):
    """Is not done when its ranks have begun."""

    def wait(self, timeout=None):
        if timeout is None:
            return super().wait()
        started = Path(self.folder)
        while len(list(started.glob("rank_*"))) < 2:
            time.sleep(0.1)
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_no_rank_outlives_the_command(capsys, monkeypatch, tmp_path):
    """MindSpore's launcher gives each a session of its own."""
    sleeper = tmp_path / "one" / "two" / "sleeper.py"
    sleeper.parent.mkdir(parents=True)
    rank = f"pathlib.Path({str(tmp_path)!r}, 'rank_' + os.environ['MS_NODE_ID']).touch()"
    sleeper.write_text(f"import os, pathlib, time\n{rank}\ntime.sleep(300)\n")
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    monkeypatch.setattr(worker, "__file__", str(sleeper))
    monkeypatch.setattr(Hanging, "folder", tmp_path, raising=False)
    monkeypatch.setattr(subprocess, "Popen", Hanging)
    code, rows, _end = run(capsys, "--ranks", "2", "--mode", "graph")
    assert code == 1
    assert {row[2] for row in rows} == {FAILED}
    folders = Path("/proc").glob("[0-9]*")
    assert not [one for one in folders if str(tmp_path).encode() in environment_of(one)]


def environment_of(folder):
    with contextlib.suppress(OSError):
        return (folder / "environ").read_bytes()
    return b""


def test_an_error_in_a_check_is_its_reason(monkeypatch):
    def fails(*args):
        raise RuntimeError("no such kernel")

    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setattr(train_step, "clipped", fails)
    line = result("gradients.clip_norm", "pynative", 1e-4)
    assert (line["status"], line["reason"]) == (FAILED, "RuntimeError: no such kernel")
