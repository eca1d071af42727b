"""The watch over other ranks: whom it finds, and which process it names when all wait for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mindspore_boost_ext.runtime import processes, watch

# From the module's file: the package around it would import MindSpore, for seconds.
BEGINS_UPDATES = f"""
import runpy, sys
progress = runpy.run_path({processes.__file__!r})["PROGRESS"]
progress.show()
for _ in range(int(sys.argv[1])):
    progress.begin_update()
print(flush=True)
sys.stdin.readline()
"""


class Ends(Exception):
    """Stands for the end of this process."""


@pytest.fixture
def this_rank(monkeypatch):
    """Return the count of this rank, begun anew; the end of the process is an exception."""

    def end(code):
        raise Ends(code)

    monkeypatch.setattr(watch.os, "_exit", end)
    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    monkeypatch.setattr(watch, "LOOK", 0.01)
    count = processes.Progress()
    monkeypatch.setattr(watch, "PROGRESS", count)
    return count


def ended(code):
    """Run a process to its end without asking for its status; return it."""
    process = subprocess.Popen([sys.executable, "-c", code])
    while processes.stat_of(process.pid)[0] != "Z":
        time.sleep(0.01)
    return process


@pytest.fixture
def other():
    """Return a function that starts a process which has begun some updates and waits."""
    started = []

    def start(updates):
        process = subprocess.Popen(
            [sys.executable, "-c", BEGINS_UPDATES, str(updates)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", ""),
        ("import os; os._exit(3)", "ended with exit code 3: its log says why"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
    ],
)
def test_it_says_what_ended_a_process(code, said):
    process = ended(code)
    assert processes.how_it_failed(process.pid) == said
    process.wait()
    assert processes.how_it_failed(process.pid) == ""  # nobody knows any more


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
        beside = processes.ranks_beside(os.getpid())
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


def test_a_rank_that_dies_is_named_and_ends_the_process(this_rank, capsys):
    good, bad = ended(""), ended("import os; os._exit(2)")
    with pytest.raises(Ends, match="1"):
        watch.Watch({0: good.pid, 7: bad.pid}).run()
    said = f"rank 7 (process {bad.pid}) ended with exit code 2"
    assert said in capsys.readouterr().err
    for process in (good, bad):
        process.wait()


def left_after(process):
    """Watch rank 1, a process that ends as if all were well; nobody asks for its status."""
    look = watch.Watch({1: process.pid})
    look.meet()
    process.stdin.write(b"\n")
    process.stdin.flush()
    while processes.stat_of(process.pid)[0] != "Z":
        time.sleep(0.01)
    return process, look


def test_a_rank_that_leaves_in_mid_training_is_named_and_ends_the_process(this_rank, other, capsys):
    process, look = left_after(other(4))
    for _ in range(5):
        this_rank.begin_update()
    with pytest.raises(Ends, match="1"):
        look.run()
    said = f"rank 1 (process {process.pid}) ended with exit code 0 after 4 updates, and update 5 "
    assert said in capsys.readouterr().err


def test_a_rank_that_leaves_when_the_training_is_over_is_no_concern(this_rank, other, capsys):
    _, look = left_after(other(4))
    for _ in range(4):
        this_rank.begin_update()
    for _ in range(3):
        look.look()  # this rank may go on for long: evaluation, files
    assert capsys.readouterr().err == ""


def test_a_stopped_rank_is_named_killed_and_ends_the_process(this_rank, other, capsys, monkeypatch):
    monkeypatch.setattr(watch, "STOPPED_NOTICE", 0.05)
    monkeypatch.setattr(watch, "STOPPED_PATIENCE", 0.2)
    process = other(1)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(Ends, match="1"):
        watch.Watch({3: process.pid}).run()
    said = capsys.readouterr().err
    assert f"rank 3 (process {process.pid}) is stopped" in said
    assert f"kill -CONT {process.pid}" in said
    assert "was stopped for 0.2 seconds; the run ends" in said
    assert process.wait(5) == -signal.SIGKILL


def test_a_rank_that_was_stopped_and_goes_on_is_left_alone(this_rank, other, monkeypatch):
    process = other(1)
    look = watch.Watch({3: process.pid})
    monkeypatch.setattr(watch, "STOPPED_PATIENCE", 0.2)
    for _ in range(3):  # never long enough, but in sum
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            look.look()
        os.kill(process.pid, signal.SIGCONT)
        while processes.is_stopped(process.pid):
            time.sleep(0.01)
        look.look()
    assert process.poll() is None


def stopped(process):
    os.kill(process.pid, signal.SIGSTOP)
    while not processes.is_stopped(process.pid):
        time.sleep(0.01)


def test_a_rank_that_is_stopped_again_is_named_again(this_rank, other, capsys, monkeypatch):
    monkeypatch.setattr(watch, "STOPPED_NOTICE", 0.0)
    process = other(1)
    look = watch.Watch({3: process.pid})
    for _ in range(2):
        stopped(process)
        look.look()
        look.look()
        os.kill(process.pid, signal.SIGCONT)
        while processes.is_stopped(process.pid):
            time.sleep(0.01)
        look.look()
    assert capsys.readouterr().err.count(f"rank 3 (process {process.pid}) is stopped") == 2


def test_of_a_stopped_rank_it_is_not_said_that_it_is_behind(this_rank, other, capsys, monkeypatch):
    monkeypatch.setattr(watch, "WAITING_NOTICE", 0.0)
    process = other(1)
    stopped(process)
    this_rank.begin_update()
    this_rank.begin_update()
    watch.Watch({3: process.pid}).look()
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_behind_is_named_once(this_rank, other, capsys, monkeypatch):
    monkeypatch.setattr(watch, "WAITING_NOTICE", 0.0)
    slow, level = other(1), other(2)
    look = watch.Watch({1: slow.pid, 2: level.pid})
    this_rank.begin_update()
    this_rank.begin_update()
    for _ in range(3):
        look.look()
    said = capsys.readouterr().err
    assert said.count("this rank has been in update 2") == 1
    assert f"rank 1 (process {slow.pid}) has begun only 1:" in said


def test_a_process_that_shows_no_count_has_none(this_rank):
    assert processes.progress_of(os.getppid()) is None
    assert processes.updates_in(None) is None


def test_a_count_that_has_no_size_yet_is_not_there_yet():
    """As another rank may see it while it is being made."""
    script = f"import os, sys; os.memfd_create({processes._PROGRESS!r}); print(); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert processes.progress_of(process.pid) is None
        process.stdin.close()
