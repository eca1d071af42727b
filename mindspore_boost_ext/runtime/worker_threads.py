"""Gives each of MindSpore's threads that compute a core of its own. Linux only."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# MindSpore's names of the threads that run operators on CPU; they share large ones.
_WORKER = re.compile(r"(Actor|Kernel)Thread_\d+")
_THREADS = Path("/proc/self/task")
_SHORTEST_PAUSE, _LONGEST_PAUSE, _SHARE = 0.05, 1.0, 0.01  # seconds; share of the time waited


class Placement:
    """Puts each worker on a core of its own, once MindSpore has started as many as there are cores.

    MindSpore starts them with the first operator or graph, and does not say so. A thread looks for
    them now and then, and ends when they are there. Workers that are bound already stay there.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.placed: dict[int, int] = {}  # thread -> core
        self._bound = False  # by somebody else
        self._process = os.getpid()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._look, name="worker_threads", daemon=True).start()

    def _look(self) -> None:
        began = time.monotonic()
        while not self._place():
            waited = (time.monotonic() - began) * _SHARE
            if self._ended.wait(min(max(waited, _SHORTEST_PAUSE), _LONGEST_PAUSE)):
                return

    def _place(self) -> bool:
        """Place the workers if all have started; return whether there is nothing to wait for."""
        with self._lock:
            workers = worker_threads()
            if self._ended.is_set() or len(workers) < len(self.cores):
                return self._ended.is_set()
            self._bound = any(_cores_of(worker) != set(self.cores) for worker in workers)
            if not self._bound and len(workers) == len(self.cores):
                self.placed = dict(zip(workers, self.cores))
            for thread, core in self.placed.items():
                _move(thread, [core])
            return True

    def is_of_parent(self) -> bool:
        """Return whether this is about the threads of the process that has forked this one."""
        return os.getpid() != self._process

    def in_force(self) -> bool:
        """Return whether the workers are on their own cores, or will be put there."""
        there = (_cores_of(thread) in (set(), {core}) for thread, core in self.placed.items())
        return not self._bound and all(there)

    def undo(self) -> None:
        """Stop looking, and let the workers run on all cores unless somebody has moved them."""
        with self._lock:
            self._ended.set()
            if self.in_force():
                for thread in self.placed:
                    _move(thread, self.cores)


def worker_threads() -> list[int]:
    """Return the ids of the threads that compute, in the order of their names."""
    found = []
    for folder in _THREADS.iterdir():
        try:
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        if _WORKER.fullmatch(name):
            found.append((name, int(folder.name)))
    return [thread for _, thread in sorted(found)]


def _cores_of(thread: int) -> set[int]:
    """Return the cores on which a thread may run; none if it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return set()


def _move(thread: int, cores: Sequence[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)
