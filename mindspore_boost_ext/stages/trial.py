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
    kept = [(one, one.copy()) for one in network.get_parameters() if not one.requires_grad]
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
                ops.assign(one, value)


def _outcome(outputs: Any) -> Outcome:
    """Return what a network gave, when it has been computed."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    values = [_on_host(one) for one in outputs]
    finite = all(np.isfinite(one).all() for one in values if np.issubdtype(one.dtype, np.floating))
    return [one.shape for one in values], finite


def _on_host(output: Tensor) -> np.ndarray:
    value: np.ndarray = (output.float() if output.dtype == ms.bfloat16 else output).asnumpy()
    return value


__all__ = ["on_trial"]
