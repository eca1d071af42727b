"""Runs a network on a batch before training, and leaves the network as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import leaves
from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.base.randomness import kept_random_numbers
from mindspore_boost_ext.runtime.eval_copy import EvalCopy

_ROUNDING = 1e-3  # relative error of a loss, also in float16
_ORDER = 5e-6  # relative change of a loss, above rounding; a new LSTM hardly depends on time
_FEWEST = 4  # samples: they are divided into quarters


class Outcome(NamedTuple):
    """The result of a run: shapes of all outputs, whether these are finite, and the loss."""

    shapes: list[tuple[int, ...]]
    is_finite: bool
    loss: float | None  # sum of the first output: a step minimises the sum of several values
    rounding: float  # relative, of the first output


Run = Callable[..., Outcome]


@contextlib.contextmanager
def on_trial(network: nn.Cell) -> Iterator[Run]:
    """Yield a function that runs the network in evaluation mode, and returns its outcome.

    Losses, Cells of the class ``nn.LossBase``, act as in training unless the function is called
    with ``losses_train=False``. At the end, buffers, Parameters without gradient and all Parameters
    of a loss have their old values, and the random numbers of Python and NumPy go on where they
    were. Lists in a loss, and the state of its own random numbers, are not restored.
    """
    kept = [(one, host_array(one).copy()) for one in _written(network)]
    with _compat.running_eagerly(), kept_random_numbers():
        copies: dict[bool, Any] = {}

        def run(*inputs: object, losses_train: bool = True) -> Outcome:
            if losses_train not in copies:
                copies[losses_train] = _evaluating(network, losses_train)
            with _compat.forgetting_failures():
                return _outcome(copies[losses_train](*inputs))

        try:
            yield run
        finally:
            for one, value in kept:
                if not np.array_equal(host_array(one), value, equal_nan=True):
                    ops.assign(one, Tensor(value, one.dtype))


def batch_behind(part: nn.Cell | None, *inputs: Any) -> tuple[Any, ...]:
    """Return a batch as the network sees it: as a copy of ``batch_part`` changes it.

    A part that cannot be copied, or runs in a graph only, is not tried.
    """
    if part is None:
        return inputs
    with _compat.running_eagerly(), kept_random_numbers():
        try:
            found = copy.deepcopy(part)(*inputs)  # it may count, or draw numbers of its own
        except Exception:  # the user's part
            return inputs
    return tuple(found) if isinstance(found, (tuple, list)) else inputs


def _written(network: nn.Cell) -> list[Tensor]:
    """Return the Tensors that a network may change by itself while it runs."""
    found = {id(one): one for one in network.get_parameters() if not one.requires_grad}
    for _, cell in network.cells_and_names():
        own = list(cell.buffers(recurse=False))
        own += cell.get_parameters() if isinstance(cell, nn.LossBase) else []
        found.update({id(one): one for one in own})
    return list(found.values())


def _evaluating(network: nn.Cell, losses_train: bool) -> nn.Cell:
    """Return a copy in evaluation mode; its losses may train: some compare samples only then."""
    evaluating = EvalCopy(network, [network]).network
    cells = [cell for _, cell in evaluating.cells_and_names()]
    losses = [cell for cell in cells if isinstance(cell, nn.LossBase)]
    for cell in losses if losses_train else ():
        nn.Cell.add_flags(cell, training=True)  # its own add_flags keeps it in evaluation mode
    return evaluating


def _outcome(outputs: object) -> Outcome:
    """Return the outcome for a network's outputs; wait until they are computed."""
    values = [host_array(one) for one in leaves(outputs) if isinstance(one, Tensor)]
    finite = all(np.isfinite(one).all() for one in values if np.issubdtype(one.dtype, np.floating))
    loss = float(values[0].astype(np.float64).sum()) if values else None
    is_real = bool(values) and np.issubdtype(values[0].dtype, np.floating)
    rounding = float(np.finfo(values[0].dtype).eps) if is_real else 0.0
    return Outcome([value.shape for value in values], finite, loss, rounding)


def mixes_samples(run: Run, first: Tensor, *others: object, may_add_up: bool = True) -> bool:
    """Return whether the loss of a batch is neither mean nor sum of the losses of its halves.

    Contrastive losses are like that: they take the other samples of a batch for wrong answers.
    Unless it ``may_add_up``, only a mean will do.
    The result is False for fewer than four samples, or if the loss differs from run to run. So the
    loss is tried in evaluation mode, too, in which its own dropout does not act.
    """
    runs = run, functools.partial(run, losses_train=False)
    return any(_mixes(each, may_add_up, first, *others) for each in runs)


def _mixes(run: Run, may_add_up: bool, first: Tensor, *others: object) -> bool:
    samples, inputs = first.shape[0], (first, *others)
    if samples < _FEWEST:
        return False
    half, quarter = samples // 2, samples // 4
    ends = (0, samples), (0, samples), (0, half), (half, samples), (0, quarter), (quarter, half)
    found = [run(*_some(inputs, np.arange(*each))).loss for each in ends]
    losses = [one for one in found if one is not None and np.isfinite(one)]
    if len(losses) < len(ends):
        return False
    whole, again, one, other, *quarters = losses
    slack = _ROUNDING * max(map(abs, losses))
    is_mean = min(one, other) - slack <= whole <= max(one, other) + slack
    # A constant, such as a penalty on weights, may be added to a sum.
    is_sum = may_add_up and abs((whole - one - other) - (one - sum(quarters))) <= slack
    return not (is_mean or is_sum or abs(whole - again) > slack)


def depends_on_order(run: Run, *inputs: Any) -> bool:
    """Return whether the loss changes if samples come in the reverse order.

    That is so if the first axis is time. It is False if the loss differs from run to run.
    """
    backwards = _some(inputs, np.arange(inputs[0].shape[0])[::-1])
    orders = inputs, inputs, backwards
    found = [run(*each, losses_train=False) for each in orders]
    whole, again, other = (math.nan if one.loss is None else one.loss for one in found)
    slack = max(_ORDER, 2 * found[0].rounding) * abs(whole)
    return abs(whole - again) <= slack < abs(whole - other)


def _some(inputs: Sequence[Any], samples: np.ndarray) -> list[Any]:
    """Return the inputs of some samples; labels may have a row for each place of a sample."""
    count, length = inputs[0].shape[0], (*inputs[0].shape, 0)[1]
    rows = (samples[:, None] * length + np.arange(length)).reshape(-1)
    rows_of = {count * length: rows, count: samples}
    return [
        Tensor(host_array(one)[rows_of[one.shape[0]]], one.dtype)
        if isinstance(one, Tensor) and one.ndim and one.shape[0] in rows_of
        else one
        for one in inputs
    ]
