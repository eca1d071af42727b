"""Gives each of MindSpore's threads that compute a core of its own, or all of them one.

Linux only.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspore_boost_ext.runtime import one_core
from mindspore_boost_ext.runtime.other_processes import STATISTICS, Usage

# MindSpore's names of the threads that run operators on CPU; they share large ones.
_WORKER = re.compile(r"(Actor|Kernel)Thread_\d+")
_THREADS = Path("/proc/self/task")
_SHORTEST_PAUSE, _LONGEST_PAUSE, _SHARE = 0.05, 1.0, 0.01  # seconds; share of the time waited
_LOOK_EVERY = 1.0  # seconds
_BUSY, _QUIET = 0.4, 0.2  # cores that other processes use


class Placement:
    """Puts each worker on a core of its own, once MindSpore has started as many as there are cores.

    MindSpore starts them with the first operator or graph, and does not say so. A thread looks for
    them now and then. Workers that are bound already stay there. Later it looks at what other
    processes use: on a core that one of them keeps busy, a worker waits for it in each operator,
    and all threads wait for that worker. All of them on one core are then much faster, and leave
    the rest to the others.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.placed: dict[int, int] = {}  # thread -> core
        self._before: set[int] = set()  # threads that were there when the workers came together
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
        if self.placed and STATISTICS.exists():
            self._follow_others()

    def _follow_others(self) -> None:
        """Give the workers one core while other processes keep the cores busy."""
        usage, chance, goes_on = Usage(self.cores), random.Random(), True
        while goes_on and not self._ended.wait(_LOOK_EVERY):
            with contextlib.suppress(OSError):  # too many open files, for a moment
                goes_on = self._follow(usage, chance)

    def _follow(self, usage: Usage, chance: random.Random) -> bool:
        """Look once; return whether to go on."""
        core = core_for_all(*usage.look(), one_core.shared.core, chance)
        with self._lock:
            goes_on = not self._ended.is_set() and self.in_force()
            if not goes_on:
                self._end_sharing()
            elif core != one_core.shared.core:
                self._share(core)
        return goes_on

    def _share(self, core: int | None) -> None:
        """Put all workers on one core, or each on its own."""
        self._end_sharing()
        self._before = set(_threads())
        cores = self.cores if core is None else [core] * len(self.placed)
        self.placed = dict(zip(self.placed, cores))
        for thread, its_core in self.placed.items():
            _move(thread, [its_core])
        one_core.share(core)

    def _end_sharing(self) -> None:
        """Let steps run on all cores, and the threads that they have started, which inherit one."""
        core = one_core.shared.core
        one_core.share(None)
        for thread in set(_threads()) - self._before - set(self.placed):
            if _cores_of(thread) == {core}:
                _move(thread, self.cores)

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

    def is_shared(self) -> bool:
        """Return whether all workers share a core, because other processes use the others."""
        return len(set(self.placed.values())) < len(self.placed)

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
            self._end_sharing()


def core_for_all(
    busy: Mapping[int, float], own: float, now: int | None, chance: random.Random
) -> int | None:
    """Return the core that all workers should share, or None if each should have its own.

    Args:
        busy: how busy each core was: core -> share.
        own: how much of that was this process, in cores.
        now: the core that they share now, or None.
        chance: decides where two trainings would otherwise do the same at the same time.
    """
    others = sum(busy.values()) - own
    if others < (_BUSY if now is None else _QUIET):
        return None
    if now is None:
        return chance.choice(list(busy))
    # All that this process does is on this core, or nearly so.
    left = {core: share - own * (core == now) for core, share in busy.items()}
    least = min(left, key=left.__getitem__)
    is_better = left.get(now, 0.0) - left[least] > _BUSY
    return least if is_better and chance.random() < 0.5 else now


def worker_threads() -> list[int]:
    """Return the ids of the threads that compute, in the order of their names."""
    found = ((name, thread) for thread, name in _threads().items() if _WORKER.fullmatch(name))
    return [thread for _, thread in sorted(found)]


def _threads() -> dict[int, str]:
    """Return the names of this process's threads, by their ids."""
    found = {}
    for folder in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def _cores_of(thread: int) -> set[int]:
    """Return the cores on which a thread may run; none if it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return set()


def _move(thread: int, cores: Sequence[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)
