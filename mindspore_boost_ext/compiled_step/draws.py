"""Refuses code that draws random numbers by Python or NumPy while it is compiled."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)


@contextlib.contextmanager
def drawing_nothing() -> Iterator[None]:
    """In the context, raise a ``ValueError`` if this thread draws a number by Python or NumPy.

    A graph would keep for all steps what is drawn while it is compiled, and so train some blocks of
    a network with stochastic depth always, and others never. Other threads may draw: some make
    batches. In one of those MindSpore evaluates branches on a Tensor, so there nothing is detected.
    """
    if sys.getprofile() is not None:  # cProfile's cannot be set again
        yield
        return
    drawn: list[str] = []

    def look(_: FrameType, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        # ``secrets`` and ``random.SystemRandom`` draw by os.urandom.
        if event == "c_call" and (isinstance(owner, _GENERATORS) or function is os.urandom):
            drawn.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{function.__name__}")
            raise ValueError  # ends the compilation; what comes out of MindSpore is replaced below

    sys.setprofile(look)
    try:
        yield
    except Exception:
        if not drawn:
            raise
        raise ValueError(
            f"the step draws a number by {drawn[0]}, which the graph of compiled_step would keep "
            "for all steps: draw by ops.rand or a dropout, make constants in __init__, or leave "
            "compiled_step out"
        ) from None
    finally:
        sys.setprofile(None)
