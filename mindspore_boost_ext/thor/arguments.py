"""The argument of THOR that takes more than a rule of one line to check."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.config.rules import shown


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
