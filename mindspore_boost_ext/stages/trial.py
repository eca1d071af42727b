"""A network run on a batch before training, without a mark on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.eval_copy import eval_copy

Outcome = tuple[list[tuple[int, ...]], bool]


@contextlib.contextmanager
def on_trial(network: nn.Cell) -> Iterator[Callable[..., Outcome]]:
    """Give a function that runs the network in evaluation mode, and returns what comes of it.

    That are the shapes of the outputs, and whether all of them are finite. What the network writes
    into Parameters without gradient is taken back.

    Args:
        network (Cell): the network, which gives its loss.
    """
    kept = [
        (one, _on_host(one).copy()) for one in network.get_parameters() if not one.requires_grad
    ]
    with _compat.running_eagerly():
        copy: Any = None

        def run(*inputs: object) -> Outcome:
            nonlocal copy
            copy = eval_copy(network, [network]) if copy is None else copy
            with _compat.forgetting_failures():
                return _outcome(copy(*inputs))

        try:
            yield run
        finally:
            for one, value in kept:
                if not np.array_equal(_on_host(one), value, equal_nan=True):
                    ops.assign(one, Tensor(value, one.dtype))


def _outcome(outputs: object) -> Outcome:
    """Return what a network gave, when it has been computed."""
    values = list(_values(outputs))
    finite = all(np.isfinite(one).all() for one in values if np.issubdtype(one.dtype, np.floating))
    return [one.shape for one in values], finite


def _values(outputs: object) -> Iterator[np.ndarray]:
    """Yield the Tensors in what a network gave, which may be nested."""
    if isinstance(outputs, Tensor):
        yield _on_host(outputs)
    elif isinstance(outputs, dict):
        yield from _values(list(outputs.values()))
    elif isinstance(outputs, (tuple, list)):
        for one in outputs:
            yield from _values(one)


def _on_host(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
