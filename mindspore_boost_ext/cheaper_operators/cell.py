"""The base of what replaces a layer or an operator; it may pass inputs on to that one."""

from __future__ import annotations

from typing import ClassVar

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import copy_settings
from mindspore_boost_ext.runtime.compiling import is_known


@ops.constexpr(check=False)  # a shape that a graph does not know is None here
def is_ranked(shape: tuple[int, ...] | None) -> bool:
    """Return whether the number of axes is known."""
    return shape is not None and -2 not in shape


@_compat.not_rewritten
class CheaperCell(nn.Cell):
    """Computes an operator or layer by others, for float32; other dtypes use MindSpore's own."""

    counted_as: ClassVar[str]  # in the report
    least: ClassVar[int] = 0  # size of an input from which on it saves time
    one_step = True  # for less_bn: this is one layer, not a Cell to look into

    def __init__(self, plain: nn.Cell | ops.Primitive) -> None:
        nn.Cell.__init__(self, auto_prefix=False)  # not the constructor of the layer's class
        copy_settings(plain, self)
        self.plain, self.step_name = plain, type(plain).__name__
        self.fp16 = self.bf16 = False  # to_float and mixed precision set them, now or later
        if isinstance(plain, nn.Cell):
            self.add_flags(**plain.get_flags())

    def is_plain(self, x: Tensor) -> bool:
        """Return whether MindSpore's own operator must compute an input."""
        return x.dtype != mstype.float32 or self.fp16 or self.bf16

    def is_small(self, x: Tensor) -> bool:
        """Return whether an input is so small that more operators would take longer."""
        # Where nothing is small, it is not asked: functions of ms.jit by bytecode hang there.
        return self.least > 0 and is_known(x.shape) and x.size < self.least
