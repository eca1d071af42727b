"""The learning rate of an optimizer, read without touching the optimizer."""

from __future__ import annotations

import numbers
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.cells import parameters_in_lists


def read_learning_rate(
    optimizer: nn.Optimizer, step: int | None = None
) -> float | list[float] | None:
    """Read the learning rate that the next update of `optimizer` will use, and change nothing.

    Args:
        optimizer (nn.Optimizer): A MindSpore optimizer, or a Cell that wraps one as ``opt`` or
            ``optimizer`` (``nn.LARS``), or any object that has ``learning_rate`` and
            ``global_step``, or ``param_groups``.
        step (int, optional): The step whose rate to read, where the rate has a schedule. Default:
            None, the next one.

    Returns:
        float; list[float] when parameter groups have their own rates: one for each distinct rate in
        the order of the parameters, so groups that share the default rate count once; ``None`` when
        the object has no learning rate or computes it inside the update (``nn.AdaFactor`` with
        ``relative_step=True``).

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.base.learning_rate import read_learning_rate
        >>> read_learning_rate(nn.SGD(nn.Dense(2, 2).trainable_params(), [0.5, 0.25]))
        0.5
    """
    for name in ("opt", "optimizer"):
        inner = getattr(optimizer, name, None)
        if getattr(inner, "learning_rate", None) is not None:
            return read_learning_rate(inner, step)
    groups = getattr(optimizer, "param_groups", ())  # of mindspore.experimental.optim
    # mint's SGD updates by the second one, and no scheduler changes it.
    held = [group for group in groups if isinstance(group, dict) and "lr" in group]
    rate: Any = [one.get("lr_float", one["lr"]) for one in held]
    rate = rate[0] if len(rate) == 1 else rate or getattr(optimizer, "learning_rate", None)
    if rate is None or getattr(optimizer, "relative_step", False):
        return None
    if isinstance(rate, (list, tuple, nn.CellList)):
        # MindSpore keeps one entry for each parameter; those of a group are the same object.
        distinct = {id(entry): entry for entry in rate}.values()
        return [_rate_at(entry, optimizer, step) for entry in distinct]
    return _rate_at(rate, optimizer, step)


def _rate_at(rate: Any, optimizer: nn.Optimizer, step: int | None) -> float:
    if isinstance(rate, nn.Cell):
        # `construct` runs the operators eagerly in both modes; calling the Cell would compile a
        # second graph for it. A copy of the step keeps the optimizer's own Parameter out of it.
        place = Tensor(optimizer.global_step.asnumpy() if step is None else [step], ms.int32)
        counts = [*rate.get_parameters(), *parameters_in_lists(rate)]  # they may count calls
        before = [host_array(count).copy() for count in counts]
        rate = np.copy(host_array(rate.construct(place)))
        for one, value in zip(counts, before):
            if not np.array_equal(value, host_array(one)):
                ops.assign(one, Tensor(value, one.dtype))
    return float(np.reshape(host_array(rate), ()))


def take_in_rates(optimizer: nn.Cell) -> None:
    """Write the rates that a script has set in ``param_groups`` into the optimizer's Parameters.

    ``optimizer.param_groups[0]["lr"] = 0.01``, of ``mindspore.experimental.optim``, puts a number
    in the place of the Parameter, and graphs and checkpoints know the Parameter only. A Parameter
    of the script's own stays: the script may change it later.
    """
    groups = getattr(optimizer, "param_groups", ())
    for group, held in zip(groups, getattr(optimizer, "lrs", ())):
        given = group.get("lr") if isinstance(group, dict) else None
        if isinstance(given, Parameter) or not isinstance(held, Parameter):
            continue
        if isinstance(given, (numbers.Real, Tensor, np.ndarray)):
            rate = host_array(given)
            if rate.size == 1:
                ops.assign(held, Tensor(rate.reshape(()), held.dtype))
                group["lr"] = held


def host_array(value: object) -> np.ndarray:
    """Return a Tensor or number as a NumPy array; bfloat16 becomes float32."""
    if isinstance(value, Tensor) and value.dtype == ms.bfloat16:
        value = value.astype(ms.float32)  # NumPy has no bfloat16
    return value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
