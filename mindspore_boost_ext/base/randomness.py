"""The random numbers of Python and NumPy, which a look at a network must not use up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Let ``random`` and ``numpy.random`` go on, at the end, as if nobody had asked them."""
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
