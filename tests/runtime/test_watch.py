"""The watch over other ranks: whom it finds, and what it says of how a process ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from mindspore_boost_ext.runtime import watch


def ended(code):
    """Run a process to its end without asking for its status; return it."""
    process = subprocess.Popen([sys.executable, "-c", code])
    while watch._stat(process.pid)[0] != "Z":
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", ""),
        ("import os; os._exit(3)", "ended with exit code 3: its log says why"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
    ],
)
def test_it_says_what_ended_a_process(code, told):
    process = ended(code)
    assert watch.how_it_ended(process.pid) == told
    process.wait()
    assert watch.how_it_ended(process.pid) == ""  # nobody knows any more


def test_it_finds_the_workers_of_its_launcher():
    def start(own_session=True, **variables):
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=own_session,
        )
        process.stdout.readline()  # it runs, with its environment
        return process

    workers = [start(MS_ROLE="MS_WORKER", MS_NODE_ID=str(rank)) for rank in (0, 3)]
    others = [start(MS_ROLE="MS_SCHED", MS_NODE_ID="1"), start(MS_ROLE="MS_WORKER")]
    others.append(start(own_session=False, MS_ROLE="MS_WORKER", MS_NODE_ID="3"))
    try:
        beside = watch.ranks_beside(os.getpid())
        assert beside == {0: workers[0].pid, 3: workers[1].pid}
    finally:
        for process in (*workers, *others):
            process.kill()
            process.communicate()


def test_a_process_that_is_no_rank_watches_nothing(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    assert watch.watch_ranks() is None
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    assert watch.watch_ranks() is None  # alone under its launcher


def test_a_rank_that_dies_is_told_and_ends_the_process(monkeypatch, capsys):
    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    codes = []
    monkeypatch.setattr(watch.os, "_exit", codes.append)
    good, bad = ended(""), ended("import os; os._exit(2)")
    watch._watch({0: good.pid, 7: bad.pid})
    assert codes == [1]
    told = f"rank 7 (process {bad.pid}) ended with exit code 2"
    assert told in capsys.readouterr().err
    for process in (good, bad):
        process.wait()
