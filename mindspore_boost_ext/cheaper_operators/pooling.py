"""Maximum pooling and padding of images, by operators that are faster."""

from __future__ import annotations

import copy
from typing import Any

from mindspore import Tensor, ops

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.runtime.compiling import is_known
from mindspore_boost_ext.runtime.padding import pad


class CheaperMaxPool(CheaperCell):
    """A maximum pooling that remembers where the maxima lay, for the gradient."""

    counted_as = "max_pool"

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.kernel: tuple[int, int] = plain.kernel_size[2:]
        self.strides: tuple[int, int] = plain.strides[2:]
        self.pads = plain.pad_mode == "SAME"
        self.pool = ops.MaxPoolWithArgmax(self.kernel, self.strides, plain.pad_mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheaperMaxPool:
        """Make another one: MindSpore's operator cannot be copied."""
        other = CheaperMaxPool(copy.deepcopy(self.plain, memo))
        other.add_flags(**self.get_flags())
        return other.set_train(self.training)

    def construct(self, x: Tensor) -> Tensor:
        """Return the maxima, [N, C, H, W]."""
        if self.is_plain(x) or self._is_other(x.shape):
            return self.plain(x)
        return self.pool(x)[0]

    def _is_other(self, shape: tuple[int, ...]) -> bool:
        """Return whether MaxPoolWithArgmax gives another result, or none for small images."""
        if not self.pads:
            return shape[2] < self.kernel[0] or shape[3] < self.kernel[1]
        # Half of several rows or columns belong in front; on CPU that operator adds all at the end.
        rows = _padding(shape[2], self.kernel[0], self.strides[0])
        columns = _padding(shape[3], self.kernel[1], self.strides[1])
        return rows > 1 or columns > 1


def may_fit(plain: ops.Primitive) -> bool:
    """Return whether images of some size can be pooled by MaxPoolWithArgmax."""
    # "same" adds at least this many rows and columns; of several, half belong in front.
    added = [kernel - stride for kernel, stride in zip(plain.kernel_size[2:], plain.strides[2:])]
    return plain.format == "NCHW" and (plain.pad_mode != "SAME" or max(added) <= 1)


def _padding(size: int, kernel: int, stride: int) -> int:
    """Return by how much "same" enlarges an axis; the smaller half of it comes first."""
    outputs = (size + stride - 1) // stride
    return (outputs - 1) * stride + kernel - size


class CheaperPad(CheaperCell):
    """A padding with zeros, which are joined to the input."""

    counted_as = "pad"

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        # As ops.pad takes them: the last axis first.
        self.widths = tuple(width for pair in reversed(plain.paddings) for width in pair)

    def construct(self, x: Tensor, paddings: object = None) -> Tensor:
        """Return the input with zeros around it.

        ``paddings`` is never given, but mixed precision O1 reads the call for other modes, too.
        """
        if self.is_plain(x) or not is_known(x.shape) or 2 * x.ndim != len(self.widths):
            return self.plain(x)
        return pad(x, self.widths)
