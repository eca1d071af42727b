"""The report as a table and as data."""

from __future__ import annotations

import json
import os

import pytest

from mindspore_boost_ext.report import BoostWarning, Report, Row, is_main_process, warn


def test_a_report_reads_as_an_aligned_table():
    report = Report("title")
    report.put(Row("less_bn", "level O1", "applied", "as asked", {"removed": 11, "kept": 9}))
    report.put(Row("adasum", "-", "inactive"))
    assert repr(report) == str(report)  # what a notebook shows
    assert str(report).splitlines() == [
        "title",
        "algorithm  asked by  status    reason    counts",
        "---------  --------  --------  --------  ------------------",
        "less_bn    level O1  applied   as asked  removed=11, kept=9",
        "adasum     -         inactive  -         -",
    ]


def test_a_later_row_takes_the_place_of_the_earlier():
    report = Report("title")
    report.put(Row("less_bn", "level O1", "applied"))
    report.put(Row("adasum", "-", "inactive"))
    report.put(Row("less_bn", "level O1", "skipped", "no residual block"))
    assert [row.algorithm for row in report] == ["less_bn", "adasum"]
    assert tuple(report) == report.rows
    assert report["less_bn"].reason == "no residual block"


def test_a_report_is_plain_data():
    report = Report("title")
    report.put(Row("less_bn", "level O1", "applied", counts={"removed": 2}))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["rows"][0]["counts"] == {"removed": 2}
    assert data["rows"][0]["status"] == "applied"


def test_rank_zero_speaks_for_the_job(monkeypatch):
    monkeypatch.delenv("RANK_ID", raising=False)
    assert is_main_process()
    monkeypatch.setenv("RANK_ID", "0")
    assert is_main_process()
    monkeypatch.setenv("RANK_ID", "3")
    assert not is_main_process()


def test_a_warning_points_at_the_script_also_in_a_folder_called_mindspore():
    """Such as ``~/mindspore/train.py``: the folder is not MindSpore's package."""
    path = os.path.join(os.sep, "home", "mindspore", "train.py")
    with pytest.warns(BoostWarning) as seen:
        exec(compile("warn('careful')", path, "exec"), {"warn": warn})
    assert seen[0].filename == path
