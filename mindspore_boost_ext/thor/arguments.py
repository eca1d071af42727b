"""The arguments of THOR that take more than a rule of one line to check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.config.rules import integer, real, shown


def checked_split(indices: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the numbers of the layers that end a group, or None."""
    if indices is None:
        return None
    rule = integer(0)
    good = isinstance(indices, (list, tuple)) and all(rule.accepts(one) for one in indices)
    if not good or any(one >= two for one, two in zip(indices, indices[1:])):
        raise ValueError(
            f"THOR.split_indices must be None or a list of ints >= 0 in rising order, got "
            f"{shown(indices)}"
        )
    return tuple(int(one) for one in indices)


def checked_rule(rule: Any) -> tuple[float, float] | None:
    """Return the two bounds of the trace rule, or None."""
    if rule is None:
        return None
    number = real("[0, inf)")
    pair = isinstance(rule, (list, tuple)) and len(rule) == 2 and all(map(number.accepts, rule))
    if not pair or rule[0] < rule[1]:
        raise ValueError(
            f"THOR.trace_rule must be None or two numbers w1 >= w2 >= 0, got {shown(rule)}"
        )
    return float(rule[0]), float(rule[1])


def checked_damping(damping: Any) -> Any:
    """Return the damping as a schedule (Cell), or as float32 [steps]."""
    if isinstance(damping, nn.Cell):
        return damping
    values = damping.asnumpy() if isinstance(damping, Tensor) else damping
    if isinstance(values, (str, bytes, dict)) or values is None or isinstance(values, bool):
        raise TypeError(
            "THOR.damping must be a number, a list of numbers, a Tensor or a "
            f"LearningRateSchedule, got {shown(damping)}"
        )
    try:
        values = np.atleast_1d(np.asarray(values, np.float32))
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(
            f"THOR.damping must be finite and >= 0 in every step, got {shown(damping)}"
        )
    return Tensor(values, ms.float32)
