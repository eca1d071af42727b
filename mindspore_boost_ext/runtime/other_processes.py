"""Measures how much other processes use the cores of this one. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STATISTICS = Path("/proc/stat")
_IDLE = slice(3, 5)  # its columns idle and iowait, in ticks
_STOLEN = 7  # by the host: nobody here can use it


class Usage:
    """Measures the time that cores were busy, and the share of it that was this process's."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._names = {f"cpu{core}": core for core in cores}
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._last = self._now()

    def _now(self) -> tuple[float, float, dict[int, float]]:
        lines = (line.split() for line in STATISTICS.read_text().splitlines())
        found = {self._names[line[0]]: line[1:9] for line in lines if line[0] in self._names}
        busy = {core: self._busy([int(one) for one in line]) for core, line in found.items()}
        return time.monotonic(), time.process_time(), busy

    def _busy(self, columns: list[int]) -> float:
        """Return the seconds in which a core has computed."""
        ticks = sum(columns) - sum(columns[_IDLE]) - sum(columns[_STOLEN:])
        return ticks / self._ticks

    def look(self) -> tuple[Mapping[int, float], float]:
        """Return how busy each core was since the last look, and this process's share of all.

        1.0 is one core, all the time. Both are rounded to ticks, of 10 ms on most systems.
        """
        then, mine_then, busy_then = self._last
        now, mine, busy = self._last = self._now()
        span = max(now - then, 1.0 / self._ticks)
        shares = {core: (busy[core] - busy_then.get(core, 0.0)) / span for core in busy}
        return shares, (mine - mine_then) / span
