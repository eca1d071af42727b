"""Models in several threads: what MindSpore does for one thread at a time is done in turns.

MindSpore compiles and differentiates for one thread at a time. And whoever asks a dataset for its
size ends every data iterator that another thread has opened meanwhile; that thread then crashes, or
waits for ever. So a Model is built, a training is started, a step is made and a Model is evaluated
by one thread while the others wait. Trainings go on side by side, step by step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

ONE_AT_A_TIME = threading.RLock()


class _Starting(threading.local):
    """How many trainings this thread has begun, each in a callback of the one before."""

    count = 0


_starting = _Starting()


@contextlib.contextmanager
def start_of_training() -> Iterator[None]:
    """Let other threads wait from here to the first step, or to the end if there is none."""
    ONE_AT_A_TIME.acquire()
    _starting.count += 1
    try:
        yield
    finally:
        end_of_start()


def end_of_start() -> None:
    """Let other threads go on: this one has opened its data."""
    while _starting.count:
        _starting.count -= 1
        ONE_AT_A_TIME.release()


__all__ = ["ONE_AT_A_TIME", "end_of_start", "start_of_training"]
