"""Looks at the processes of the other ranks on this machine, and shows them how far this one is."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
from pathlib import Path

_PROGRESS = "mindspore_boost_ext.updates"
_COUNT = struct.Struct("=q")
_STATE, _PARENT, _SESSION, _EXIT_STATUS = 0, 1, 3, 49  # places in /proc/PID/stat, behind the name


def launcher(ranks: int, logs: str | os.PathLike[str]) -> list[str]:
    """Return the command, up to the script, that runs it in several ranks on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # free now
    many = (f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}")
    module = "mindspore.parallel.cluster.run"
    return [sys.executable, "-m", module, *many, f"--log_dir={logs}", "--join=True"]


class Progress:
    """How many updates a rank has begun, in memory that others can read.

    The memory is a nameless file (``memfd``): nothing has to be removed. A process that has opened
    it can read it even when this one has ended.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self.updates = 0  # that have begun

    def show(self) -> None:
        """Let others read the count from now on."""
        if self._memory is None:
            handle = os.memfd_create(_PROGRESS)
            os.ftruncate(handle, _COUNT.size)
            self._memory = mmap.mmap(handle, _COUNT.size)
            _COUNT.pack_into(self._memory, 0, self.updates)

    def begin_update(self) -> None:
        """Count an update that begins."""
        self.updates += 1
        if self._memory is not None:
            _COUNT.pack_into(self._memory, 0, self.updates)


PROGRESS = Progress()


def progress_of(pid: int) -> mmap.mmap | None:
    """Open the count of another process; None if it shows none (yet)."""
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile; has no size yet
                if os.readlink(handle).startswith(f"/memfd:{_PROGRESS}"):
                    with open(handle, "rb") as file:
                        return mmap.mmap(file.fileno(), _COUNT.size, prot=mmap.PROT_READ)
    return None


def updates_in(memory: mmap.mmap | None) -> int | None:
    """Return the number of updates in an opened count; None without one."""
    return None if memory is None else int(_COUNT.unpack_from(memory, 0)[0])


def ranks_beside(parent: int) -> dict[int, int]:
    """Return the process ids of the other ranks by rank; ``parent`` is the launcher's own id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError, ValueError):
            stat = stat_of(pid)
            # A rank has a session of its own; the "tail" that shows its log has none.
            is_rank = int(stat[_PARENT]) == parent and int(stat[_SESSION]) == pid
            if is_rank and pid != os.getpid():
                text = (folder / "environ").read_text(encoding="utf-8", errors="replace")
                variables = dict(one.split("=", 1) for one in text.split("\0") if "=" in one)
                rank = variables.get("MS_NODE_ID")
                if rank and variables.get("MS_ROLE") == "MS_WORKER":
                    found[int(rank)] = pid
    return found


def how_it_failed(pid: int) -> str:
    """Return how a process failed that its parent has not asked yet; empty if it did not fail."""
    try:
        status = int(stat_of(pid)[_EXIT_STATUS])
    except (OSError, ValueError, IndexError):
        return ""  # the parent has asked: the status is gone
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return f"ended with exit code {code}: its log says why" if code else ""


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process (a debugger does it in another way)."""
    try:
        return stat_of(pid)[_STATE] == "T"
    except OSError:
        return False


def stat_of(pid: int) -> list[str]:
    """Return the words of ``/proc/PID/stat`` behind the name; ``OSError`` without the process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
