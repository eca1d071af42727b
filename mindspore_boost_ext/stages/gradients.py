"""Scales and clips gradients between the backward pass and the update."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext._compat import RowTensor
from mindspore_boost_ext.base.mapping import each
from mindspore_boost_ext.base.sums import factor_to_norm, filled, sum_of_squares


def filled_like(outputs: Any, value: float) -> Any:
    """Return ``value`` in shape and dtype of a network's output, or of each of its outputs."""
    if isinstance(outputs, (list, dict)):
        raise ValueError(
            "the network returns a list or a dict of losses: a Tensor, or a tuple of Tensors, is "
            "needed by what is switched on, which report() of the step shows"
        )
    if not isinstance(outputs, tuple):
        return _filled(value, outputs)
    return each(ops.partial(_filled, value), outputs)


def _filled(value: float, output: Tensor) -> Tensor:
    return filled(output.dtype, output.shape, value)


def multiplied(factor: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient, dense or row-sparse, times a float32 scalar, in its own dtype.

    It multiplies in float32 or float64: one over a large loss scale is 0 in float16.
    """
    if isinstance(gradient, Tensor):
        return ops.cast(_wide(gradient) * factor, gradient.dtype)
    values = ops.cast(_wide(gradient.values) * factor, gradient.values.dtype)
    return RowTensor(gradient.indices, values, gradient.dense_shape)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == ms.float64 else ops.cast(values, ms.float32)


def unscaled_all(gradients: tuple[Any, ...], scale: Tensor) -> tuple[Any, ...]:
    """Return all gradients divided by one float32 scalar.

    It multiplies by the inverse: on CPU a division takes twenty times as long. The inverse is exact
    for powers of two, which most loss scales are.
    """
    return each(ops.partial(multiplied, 1.0 / scale), gradients)


def _squared(gradient: Tensor) -> Tensor:
    return ops.cast(sum_of_squares(_wide(gradient)), ms.float32)


def clipped(gradients: tuple[Any, ...], norm: float) -> tuple[Any, ...]:
    """Return the gradients, shrunk by one factor so that their global norm is at most ``norm``.

    The global norm is the 2-norm of all (dense) gradients together.
    Source: Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013.
    """
    factor = factor_to_norm(each(_squared, gradients), norm)
    return each(ops.partial(multiplied, factor), gradients)


def check_dense(network: nn.Cell, asked_by: str) -> None:
    """Raise a ``ValueError`` for a network with row-sparse gradients, before it is compiled.

    The message names ``asked_by``, the settings that need dense ones.
    """
    for name, cell in network.cells_and_names():
        if any(operator.name == "SparseGatherV2" for operator in _compat.primitives(cell).values()):
            raise ValueError(
                f"{asked_by} needs dense gradients, but {name or 'the network'} "
                f"({type(cell).__name__}) uses a sparse lookup, whose gradient is sparse: switch "
                "that setting off, or use nn.Embedding"
            )
