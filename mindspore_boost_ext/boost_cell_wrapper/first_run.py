"""What happens when a step runs for the first time: who is told, and how long it takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import nn

from mindspore_boost_ext.report import APPLIED, Row

FIRST_RUN: list[Callable[[Any], None]] = []  # called with a step that runs for the first time


@contextlib.contextmanager
def timing_the_first(step: nn.Cell) -> Iterator[None]:
    """Report how long the first run of a variant took, compilation included."""
    start = time.perf_counter()
    yield
    if step._variant:
        step._first_runs.append(f"{step._variant}: {time.perf_counter() - start:.1f} s")
        step._variant = ""
        step.report().put(Row("first steps", "-", APPLIED, "; ".join(step._first_runs)))
