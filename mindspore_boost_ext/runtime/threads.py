"""Models in several threads take turns where MindSpore can serve only one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

ONE_AT_A_TIME = threading.RLock()


class _Starting(threading.local):
    """The number of trainings that this thread has begun and whose data is not open yet."""

    count = 0


_starting = _Starting()


@contextlib.contextmanager
def start_of_training() -> Iterator[None]:
    """Let other threads wait until ``end_of_start``, or the end of the context."""
    ONE_AT_A_TIME.acquire()
    _starting.count += 1
    try:
        yield
    finally:
        end_of_start()


def is_starting() -> bool:
    """Return whether this thread has begun a training whose data is not open yet."""
    return _starting.count > 0


def end_of_start() -> None:
    """Let other threads go on: this one has opened its data."""
    while _starting.count:
        _starting.count -= 1
        ONE_AT_A_TIME.release()
