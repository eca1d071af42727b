"""What takes the place of a layer or an operator, and may hand inputs on to it."""

from __future__ import annotations

from typing import ClassVar

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import copy_settings
from mindspore_boost_ext.runtime.compiling import is_known


@ops.constexpr(check=False)  # a shape that a graph does not know is None here
def is_ranked(shape: tuple[int, ...] | None) -> bool:
    """Return whether it is known how many axes there are."""
    return shape is not None and -2 not in shape


@_compat.not_rewritten
class CheaperCell(nn.Cell):
    """An operator or layer by other operators, for float32; other dtypes take MindSpore's own."""

    counted_as: ClassVar[str]  # in the report
    least: ClassVar[int] = 0  # from how many numbers on it saves time
    one_step = True  # for less_bn, which looks for what it knows

    def __init__(self, plain: nn.Cell | ops.Primitive) -> None:
        nn.Cell.__init__(self, auto_prefix=False)  # not that of the layer's class
        copy_settings(plain, self)
        self.plain, self.step_name = plain, type(plain).__name__
        self.fp16 = self.bf16 = False  # to_float and mixed precision set them, now or later
        if isinstance(plain, nn.Cell):
            self.add_flags(**plain.get_flags())

    def is_plain(self, x: Tensor) -> bool:
        """Return whether MindSpore's own operator takes an input."""
        return x.dtype != mstype.float32 or self.fp16 or self.bf16

    def is_small(self, x: Tensor) -> bool:
        """Return whether an input is so small that more operators would take longer."""
        return is_known(x.shape) and x.size < self.least
