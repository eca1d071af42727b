"""The marker between groups of loss scales: a factor on the gradient, and a record of overflow."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

_Table = tuple[tuple[Tensor, ...], ...]  # of pairs of layers


class Marker(nn.Cell):
    """Identity forwards; backwards a factor, and a record of overflow as gradient of ``probe``."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.dtype = None

    def construct(
        self, x: Tensor, scales: Tensor, probe: Tensor, pick: Tensor, rows: Tensor
    ) -> Tensor:
        """Return ``x``."""
        return x

    def bprop(
        self,
        x: Tensor,
        scales: Tensor,
        probe: Tensor,
        pick: Tensor,
        rows: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> tuple[Any, ...]:
        """Scale the gradient of ``out`` and record overflow."""
        dtype = dout.dtype if self.dtype is None else self.dtype
        return scaled_and_recorded(dout, scales, pick, rows, dtype)


@ms.jit  # one by one, these operators would cost more in PYNATIVE_MODE than the layers around them
def scaled_and_recorded(
    dout: Tensor, scales: Tensor, pick: Tensor, rows: Tensor, dtype: ms.Type
) -> tuple[Any, ...]:
    """Scale in float32, so that large ratios and small gradients are not lost; record overflow."""
    one, other = ops.unstack(ops.gather(scales, pick, 0))  # exact, unlike a product in HF32
    dx = ops.cast(ops.cast(dout, ms.float32) * (one / other), dtype)
    finite = _finite(dout)
    # One for each column of the rows that marker_constants describes.
    unseen = ops.stack((finite, _finite(dx), finite, Tensor(False)))
    record = rows * ops.cast(ops.logical_not(unseen), ms.float32)
    unused = ops.zeros_like(scales), ops.zeros_like(pick), ops.zeros_like(rows)
    return ops.cast(dx, dout.dtype), unused[0], record, unused[1], unused[2]


def _finite(values: Tensor) -> Tensor:
    """Return whether all values are finite: bool, shape (). Kernels want float32 and one axis."""
    return ops.isfinite(ops.reshape(ops.cast(values, ms.float32), (-1,))).all()


def marker_constants(count: int) -> tuple[_Table, _Table]:
    """Return the constants of the marker of each pair of layers.

    Returns:
        picks int32 [2], the places of the two scales; rows float32 [count, 4], where the records
        go. Columns: layer2 passed on a gradient that is not finite; one entered layer1; another
        group made it so, before the ratio; any gradient entered layer1.
    """
    unit = np.eye(count, dtype=np.float32)
    everyone = range(count)
    picks = tuple(tuple(Tensor([one, two], ms.int32) for two in everyone) for one in everyone)

    def rows(one: int, two: int) -> Tensor:
        if one == 0:  # nothing below is trained: what the first group passes on is not used
            return Tensor(np.zeros((count, 4), np.float32))
        by_others = unit[one] if two < count - 1 else np.zeros(count, np.float32)
        return Tensor(np.stack((unit[two], unit[one], by_others, unit[one]), axis=1))

    return picks, tuple(tuple(rows(one, two) for two in everyone) for one in everyone)
