"""Functions of a script in a process of their own, or in several ranks on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def apart(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 1,
    quiet: bool = False,
    timeout: float | None = None,
) -> Any:
    """Call a function of a script in a new process, or in several ranks; return (rank 0's) result.

    Arguments and result are sent as JSON: tuples become lists. What a single process prints is
    shown unless it is ``quiet``; several ranks write logs.

    Raises:
        RuntimeError: if it fails; with the end of every rank's log, or a quiet process's errors.
        TimeoutExpired: after ``timeout`` seconds; with several ranks after two hours.
    """
    module = Path(function.__code__.co_filename).stem
    script = os.path.abspath(sys.argv[0])
    call = script, module, function.__name__, json.dumps(arguments)
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="apart-") as folder:
        answer, command = Path(folder, "answer"), [sys.executable]
        if ranks > 1:  # else a process may compare MindSpore without this package
            from mindspore_boost_ext.runtime.processes import launcher

            command = launcher(ranks, folder)
        rank = str(Path(__file__).with_name("rank.py"))
        ended = subprocess.run(
            [*command, rank, *call, str(answer)],
            cwd=folder if ranks > 1 else None,
            env={**os.environ, "PATH": search},
            capture_output=quiet or ranks > 1,
            text=True,
            timeout=timeout if ranks == 1 else 7200,
        )
        if ended.returncode:
            logs = [one.read_text()[-2000:] for one in sorted(Path(folder).glob("worker_*.log"))]
            raise RuntimeError("\n".join(logs) or ended.stderr or f"failed: {' '.join(call)}")
        return json.loads(answer.read_text("utf-8"))
