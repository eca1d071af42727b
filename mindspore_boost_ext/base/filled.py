"""Tensors full of one number, in the step."""

from __future__ import annotations

import numbers
from typing import Any

from mindspore import Tensor, ops

_fill = ops.FillV2()


@ops.constexpr
def _number(value: Any, dtype: Any) -> Tensor:
    return Tensor(value, dtype)


def filled(dtype: Any, shape: tuple[int, ...], value: float | numbers.Number) -> Tensor:
    """Return a tensor of one number; ``ops.fill`` casts it in the graph, which compiles long."""
    return _fill(shape, _number(value, dtype))
