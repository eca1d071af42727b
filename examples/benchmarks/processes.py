"""Functions of a script in a process of their own, or in several ranks on this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def apart(function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> Any:
    """Call a function of a script in a new process; return its result, of several ranks rank 0's.

    The result comes as JSON: tuples as lists.

    Raises:
        RuntimeError: with the end of every rank's log, if one of them fails.
    """
    if ranks == 1:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return json.loads(pool.submit(_answer, function, arguments).result())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        answer = Path(folder, "answer")
        script = Path(function.__code__.co_filename).stem
        command = [
            *(sys.executable, "-m", "mindspore.parallel.cluster.run"),
            *(f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}"),
            *(f"--log_dir={folder}", "--join=True", str(Path(__file__).with_name("rank.py"))),
            *(script, function.__name__, json.dumps(arguments), str(answer)),
        ]
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": search},
            capture_output=True,
            text=True,
            timeout=7200,
        )
        if ended.returncode:
            logs = sorted(Path(folder).glob("worker_*.log"))
            raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
        return json.loads(answer.read_text("utf-8"))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    return json.dumps(function(*arguments))
