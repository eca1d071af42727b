"""Says on every rank which rank has died: a thread watches the processes of the other ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

NAME = "boost.watch"
PATIENCE = 5.0  # seconds in which msrun should have ended this process; it looks every second
_PARENT, _SESSION, _EXIT_STATUS = 1, 3, 49  # places in /proc/PID/stat, from the one after the name


def watch_ranks() -> threading.Thread | None:
    """Watch the other ranks on this machine, if this process is a rank that msrun started.

    Returns:
        threading.Thread, the watch, a daemon; None where there is nothing to watch, or a watch.
    """
    if os.environ.get("MS_ROLE") != "MS_WORKER" or not hasattr(os, "pidfd_open"):
        return None
    if any(thread.name == NAME for thread in threading.enumerate()):
        return None
    others = ranks_beside(os.getppid())
    if not others:
        return None
    watch = threading.Thread(target=_watch, args=(others,), name=NAME, daemon=True)
    watch.start()
    return watch


def ranks_beside(parent: int) -> dict[int, int]:
    """Return the process ids of the other ranks under a launcher, by rank.

    Args:
        parent (int): process id of the launcher.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError, ValueError):
            stat = _stat(pid)
            # A rank has a session of its own; the "tail" that shows its log has not.
            is_rank = int(stat[_PARENT]) == parent and int(stat[_SESSION]) == pid
            if is_rank and pid != os.getpid():
                rank = _variable(folder, "MS_NODE_ID")
                if rank and _variable(folder, "MS_ROLE") == "MS_WORKER":
                    found[int(rank)] = pid
    return found


def how_it_ended(pid: int) -> str:
    """Return what ended a process that its parent has not asked yet; empty if all was well."""
    try:
        status = int(_stat(pid)[_EXIT_STATUS])
    except (OSError, ValueError, IndexError):
        return ""  # already forgotten: nobody can tell
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return f"ended with exit code {code}: its log says why" if code else ""


def _watch(others: dict[int, int]) -> None:
    poll, names = select.poll(), {}
    for rank, pid in others.items():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            poll.register(handle, select.POLLIN)
            names[handle] = rank, pid
    while names:
        for handle, _ in poll.poll():
            rank, pid = names.pop(handle)
            poll.unregister(handle)
            if how := how_it_ended(pid):
                _end(f"rank {rank} (process {pid}) {how}; the run cannot go on without it")
            os.close(handle)


def _end(message: str) -> None:
    sys.stderr.write(f"mindspore_boost_ext: {message}\n")
    sys.stderr.flush()
    time.sleep(PATIENCE)
    os._exit(1)  # the main thread may wait in a collective for ever


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _variable(folder: Path, name: str) -> str:
    """Return a variable of the environment with which a process was started."""
    for entry in (folder / "environ").read_bytes().split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == name.encode():
            return value.decode()
    return ""


__all__ = ["how_it_ended", "ranks_beside", "watch_ranks"]
