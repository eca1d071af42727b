"""Calls of functions with the entries of tuples, in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, nn, ops

# each(function, *tuples) returns the tuple of function(*entries). In a graph MindSpore makes every
# turn of a Python loop graphs of its own, which takes about 10 ms to compile; here 0.1 ms.
each = ops.HyperMap()


def call(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return ``function(*inputs)``.

    MindSpore never frees a Cell in whose graph one of its methods passes a tuple that it was given,
    above all its own ``*inputs``, with a star to another Cell or method. A function does no harm.
    """
    return function(*inputs)


def gradients_of(
    grad: Callable[..., Any],
    network: nn.Cell,
    weights: Sequence[Parameter],
    inputs: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return ``grad(network, weights)(*inputs)``, of which ``call`` cannot do the second half.

    A derivative that was given away as an argument takes all inputs of a network, optional ones
    too. ``grad`` is a ``GradOperation`` by inputs or by Parameters; ``inputs`` are those of the
    network, and the gradient of its output if ``grad`` takes it.
    """
    return grad(network, weights)(*inputs)


def entry(values: tuple[Any, ...], place: int) -> Any:
    """Return ``values[place]``; ``each(ops.partial(entry, values), places)`` picks entries."""
    return values[place]
