"""Calls functions with the entries of tuples, inside the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

Tensors = tuple[Tensor, ...]

# each(function, *tuples) returns the tuple of function(*entries). In a graph MindSpore makes new
# graphs for every pass of a Python loop, about 10 ms each to compile; this takes 0.1 ms.
each = ops.HyperMap()


def call(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return ``function(*inputs)``.

    If in a graph a method passes a tuple that it was given, such as its own ``*inputs``, with a
    star to another Cell or method, MindSpore never frees its Cell. A function does no harm.
    """
    return function(*inputs)


def gradients_of(
    grad: Callable[..., Any],
    network: nn.Cell,
    weights: Sequence[Parameter],
    inputs: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return ``grad(network, weights)(*inputs)``; ``call`` cannot make the second call.

    A derivative that is passed as an argument needs all inputs of the network, even optional ones.
    ``grad`` is a ``GradOperation`` by inputs or by Parameters. ``inputs`` are those of the network,
    and the gradient of its output if ``grad`` takes it.
    """
    return grad(network, weights)(*inputs)


def entry(values: tuple[Any, ...], place: int) -> Any:
    """Return ``values[place]``; ``each(ops.partial(entry, values), places)`` picks entries."""
    return values[place]


def size(value: Tensor) -> Any:
    """Return how many numbers a tensor has."""
    return value.size
