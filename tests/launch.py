"""Starts a script on several real processes with MindSpore's launcher, bounded in time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import psutil

TESTS = pathlib.Path(__file__).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(ranks, folder, script, *arguments, timeout=240, environment=None):
    """Run ``script`` on ``ranks`` processes; return the finished launcher and the logs' ends."""
    interpreter = pathlib.Path(sys.executable).parent
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}"),
        *(f"--local_worker_num={ranks}", f"--master_port={free_port()}"),
        *(f"--log_dir={folder}", "--join=True", str(script), *map(str, arguments)),
    ]
    own = {"PATH": f"{interpreter}{os.pathsep}{os.environ['PATH']}", **(environment or {})}
    with open(f"{folder}/launcher.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
        )
        try:
            process.wait(timeout)
        finally:
            end(process)
    logs = sorted(pathlib.Path(folder).glob("*.log"))
    return process.returncode, "\n".join(log.read_text(errors="replace")[-20_000:] for log in logs)


def end(process):
    """End the launcher and every process under it, if they still run."""
    if process.poll() is None:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
    process.wait()
