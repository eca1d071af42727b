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


def test_rows_of_a_group_are_printed_as_one_for_each_status():
    report = Report("boost level O1")
    report.put(Row("less_bn", "-", "inactive", "not in level O1"))
    report.put(Row("machine: a", "import", "applied", "two cores"))
    report.put(Row("machine: b", "import", "skipped", "set by the user"))
    report.put(Row("machine: c", "import", "applied", "linear time"))
    report.put(Row("mine: d", "-", "applied", "so"), Row("mine: e", "-", "applied", "and so"))
    names = [line.split()[0] for line in str(report).splitlines()[3:]]
    assert names == ["less_bn", "machine", "machine:", "mine:", "mine:"]
    assert "a, c (python -m mindspore_boost_ext --env says why)" in str(report)
    assert [row.algorithm for row in report.rows][1:4] == ["machine: a", "machine: b", "machine: c"]


def test_rows_of_a_group_keep_a_reason_that_they_share():
    report = Report("boost level O1")
    report.put(*(Row(f"machine: {name}", "import", "inactive", "the device is X") for name in "ab"))
    assert "a, b (the device is X)" in str(report)


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
