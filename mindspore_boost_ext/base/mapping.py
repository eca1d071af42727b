"""Calls of functions with the entries of tuples, in the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

# each(function, *tuples) returns the tuple of function(*entries). In a graph MindSpore makes every
# turn of a Python loop graphs of its own, which takes about 10 ms to compile; here 0.1 ms.
each = ops.HyperMap()


def call(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return ``function(*inputs)``.

    MindSpore never frees a Cell in whose graph one of its methods passes a tuple that it was given,
    above all its own ``*inputs``, with a star to another Cell or method. A function does no harm.
    """
    return function(*inputs)


def entry(values: tuple[Any, ...], place: int) -> Any:
    """Return ``values[place]``; ``each(ops.partial(entry, values), places)`` picks entries."""
    return values[place]


__all__ = ["call", "each", "entry"]
