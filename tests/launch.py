"""Starts a script on several real processes with MindSpore's launcher, bounded in time."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

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
    # A session of its own: what is left after the time is ended with it.
    with open(f"{folder}/launcher.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        finally:
            end_session(process.pid)
            process.wait()
    logs = sorted(pathlib.Path(folder).glob("*.log"))
    return process.returncode, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


def end_session(session):
    """End every process of a session that this module started."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            # Field 6 of stat is the session; the name in field 2 may hold spaces.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(entry.name), 9)
        except (OSError, ValueError):
            continue
