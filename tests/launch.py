"""Starts a script on several real processes with MindSpore's launcher, bounded in time."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import dim_reduce_worker
import psutil

TESTS = pathlib.Path(__file__).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def results(ranks, folder):
    """Run the worker of all tests on ``ranks`` processes; return what each rank found, by mode."""
    if ranks == 2:
        dim_reduce_worker.prepare(folder)
        kill_a_rank(folder / "killed", "pynative", "python", "-m", "mindspore_boost_ext")
    code, logs = launch(ranks, folder, TESTS / "distributed_worker.py", folder, timeout=600)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert (code, len(found)) == (0, ranks), logs
    return found


def kill_a_rank(folder, mode, *launcher):
    """Run a script of two ranks whose rank 1 is killed; write down how the launcher has ended."""
    folder.mkdir()
    words = (*launcher, TESTS / "dying_worker.py", mode, folder, 1)
    try:
        ended = launch(2, folder, *words, timeout=150, environment={"MS_NODE_TIMEOUT": "10"})
    except subprocess.TimeoutExpired as error:  # the test of this fails, not all that use ranks
        ended = None, str(error)
    (folder / "end.json").write_text(json.dumps(ended), encoding="utf-8")


def launch(ranks, folder, *command, timeout=240, environment=None):
    """Run a script, or a command, on ``ranks`` processes; return exit code and the logs' ends."""
    interpreter = pathlib.Path(sys.executable).parent
    launcher = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}"),
        *(f"--local_worker_num={ranks}", f"--master_port={free_port()}"),
        *(f"--log_dir={folder}", "--join=True", *map(str, command)),
    ]
    own = {"PATH": f"{interpreter}{os.pathsep}{os.environ['PATH']}", **(environment or {})}
    with open(f"{folder}/launcher.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            launcher,
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
            preexec_fn=use_all_cores,
        )
        try:
            process.wait(timeout)
        finally:
            end(process)
    logs = sorted(pathlib.Path(folder).glob("*.log"))
    return process.returncode, "\n".join(log.read_text(errors="replace")[-20_000:] for log in logs)


def use_all_cores():
    """Take this process off the one core on which ``conftest.py`` has put the tests."""
    if "TEST_CORES" in os.environ:
        os.sched_setaffinity(0, map(int, os.environ["TEST_CORES"].split(",")))


def end(process):
    """End the launcher and every process under it, if they still run."""
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
    process.wait()
