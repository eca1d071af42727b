"""Tells every rank which rank the others wait for: a thread watches their processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass

from mindspore_boost_ext.runtime.processes import (
    PROGRESS,
    how_it_failed,
    is_stopped,
    progress_of,
    ranks_beside,
    updates_in,
)

NAME = "boost.watch"
PATIENCE = 5.0  # seconds in which msrun should have ended this process; it looks every second
STOPPED_PATIENCE = 60.0  # seconds in which somebody may continue a stopped rank
LOOK = 1.0  # seconds between two looks at what sends no event
STOPPED_NOTICE = 2.0  # seconds; shorter stops are not reported
WAITING_NOTICE = 10.0  # seconds in one update, after which a rank that is behind is named


def watch_ranks() -> Watch | None:
    """Watch the other ranks on this machine, if this process is a rank that msrun started.

    Return the thread, started now or before; None where there is nothing to watch.
    """
    if os.environ.get("MS_ROLE") != "MS_WORKER" or not hasattr(os, "pidfd_open"):
        return None
    for thread in threading.enumerate():
        if isinstance(thread, Watch):
            return thread
    others = ranks_beside(os.getppid())
    if not others:
        return None
    PROGRESS.show()
    watch = Watch(others)
    watch.start()
    return watch


@dataclass
class _Rank:
    """Another rank: its process, how many updates it has begun, and since when it is stopped."""

    number: int
    pid: int
    progress: mmap.mmap | None = None
    stopped_since: float | None = None
    named_as_stopped: bool = False

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid})"

    def updates(self) -> int | None:
        """Return how many updates it has begun; None if it does not show that."""
        if self.progress is None:
            self.progress = progress_of(self.pid)
        return updates_in(self.progress)


class Watch(threading.Thread):
    """A thread that looks at other ranks, given by their process ids, until all have ended."""

    def __init__(self, others: dict[int, int]) -> None:
        super().__init__(name=NAME, daemon=True)
        self._poll = select.poll()
        self._alive: dict[int, _Rank] = {}
        self._ended_well: list[_Rank] = []
        # The update in which this rank is, since when, and whether that was said.
        self._update, self._since, self._was_said = 0, time.monotonic(), False
        for number, pid in others.items():
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                self._poll.register(handle, select.POLLIN)
                self._alive[handle] = _Rank(number, pid)

    def meet(self) -> None:
        """Open the counts of all ranks; call this when all have reached the same place."""
        for rank in list(self._alive.values()):
            rank.updates()

    def run(self) -> None:
        """Look until this process ends, or must end."""
        while self._alive or self._ended_well:
            self.look()

    def look(self) -> None:
        """Look once at all other ranks; end this process if the run cannot go on."""
        for handle, _ in self._poll.poll(LOOK * 1000):
            self._look_at_ended(handle)
        for rank in self._alive.values():
            self._look_at_stopped(rank)
        self._look_for_missing()
        self._look_at_waiting()

    def _look_at_ended(self, handle: int) -> None:
        rank = self._alive.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        if how := how_it_failed(rank.pid):
            _end(f"{rank} {how}; the run cannot go on without it")
        elif rank.progress is not None:
            self._ended_well.append(rank)

    def _look_for_missing(self) -> None:
        """End this process if it has begun an update that needs a rank that has ended."""
        for rank in list(self._ended_well):
            updates = rank.updates()
            if updates is not None and PROGRESS.updates > updates:
                self._ended_well.remove(rank)
                _end(
                    f"{rank} ended with exit code 0 after {updates} updates, and update "
                    f"{updates + 1} of this rank needs it; give every rank the same number of "
                    "batches, and stop none during the training"
                )

    def _look_at_stopped(self, rank: _Rank) -> None:
        rank.updates()  # opens the count while the process exists
        if not is_stopped(rank.pid):
            rank.stopped_since, rank.named_as_stopped = None, False
            return
        now = time.monotonic()
        rank.stopped_since = rank.stopped_since or now
        if now - rank.stopped_since >= STOPPED_NOTICE and not rank.named_as_stopped:
            rank.named_as_stopped = True
            _say(
                f"{rank} is stopped, and all others wait for it: continue it with 'kill -CONT "
                f"{rank.pid}', or the run ends within {STOPPED_PATIENCE:g} seconds"
            )
        if now - rank.stopped_since >= STOPPED_PATIENCE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)  # a stopped process heeds no other signal
            _end(f"{rank} was stopped for {STOPPED_PATIENCE:g} seconds; the run ends")

    def _look_at_waiting(self) -> None:
        """Say once which rank is behind if this one stays long in an update."""
        now = time.monotonic()
        if PROGRESS.updates != self._update:
            self._update, self._since, self._was_said = PROGRESS.updates, now, False
        if self._was_said or now - self._since < WAITING_NOTICE:
            return
        for rank in self._alive.values():
            updates = rank.updates()
            if updates is not None and updates < self._update and not rank.stopped_since:
                self._was_said = True
                _say(
                    f"this rank has been in update {self._update} for {WAITING_NOTICE:g} seconds, "
                    f"and {rank} has begun only {updates}: it may have had fewer batches, or it "
                    "does something else, for which MS_NODE_TIMEOUT seconds (30) are allowed"
                )


def _say(message: str) -> None:
    sys.stderr.write(f"mindspore_boost_ext: {message}\n")
    sys.stderr.flush()


def _end(message: str) -> None:
    _say(message)
    time.sleep(PATIENCE)
    os._exit(1)  # the main thread may wait in a collective for ever
