"""Scripts run as several ranks on this machine, by MindSpore's own launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def run_ranks(script: str, count: int, arguments: Sequence[str], timeout: float = 900) -> None:
    """Run a script with these arguments as ``count`` ranks, and wait for their end.

    Raises:
        RuntimeError: with the end of every rank's log, if one of them fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = [
            *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
            *(f"--worker_num={count}", f"--local_worker_num={count}"),
            *(f"--master_port={port}", f"--log_dir={folder}", "--join=True", script, *arguments),
        ]
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if ended.returncode:
            logs = sorted(Path(folder).glob("worker_*.log"))
            raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
