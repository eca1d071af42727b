"""Cells with the values and the gradients of MindSpore's operators, to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.filled import filled
from mindspore_boost_ext.runtime.cells import copy_settings

# gelu(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x**3)
_LINEAR = 1.5957691216057308  # 2 * sqrt(2 / pi)
_CUBIC = 0.044715 * _LINEAR


def _row_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, shape (n, 1): a matrix product is faster than a reduction."""
    return ops.MatMul()(rows, ops.ones((rows.shape[1], 1), ms.float32))


class _RowSums(nn.Cell):
    """The same in float32 also under mixed precision "auto", which takes products in float16."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.to_float(ms.float32)

    def construct(self, rows: Tensor) -> Tensor:
        return _row_sums(rows)


@_compat.not_rewritten
class CheaperCell(nn.Cell):
    """An operator by other operators, for float32; other dtypes take MindSpore's own.

    Args:
        plain: the operator or Cell that it stands for.
    """

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
        return x.dtype != ms.float32 or self.fp16 or self.bf16


class CheaperGelu(CheaperCell):
    """The tanh form of GELU by a sigmoid; MindSpore's tanh there is computed value by value."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation, of the shape of ``x``."""
        if self.is_plain(x):
            return self.plain(x)
        return x * ops.sigmoid(x * (_LINEAR + _CUBIC * (x * x)))


class CheaperGeluLayer(CheaperGelu, nn.GELU):
    """The same for the layer, whose class a network may ask for."""


class CheaperLeakyRelu(CheaperCell, nn.LeakyReLU):
    """A leaky ReLU by a ReLU, whose gradient is vectorised.

    At 0 its slope is that of the negative side; MindSpore's is the mean of both.
    """

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation, of the shape of ``x``."""
        if self.is_plain(x):
            return self.plain(x)
        return (1 - self.alpha) * ops.relu(x) + self.alpha * x


class CheaperSoftmax(CheaperCell):
    """A softmax over the last axis, whose gradient sums up by a matrix product."""

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.of_rows = _SoftmaxOfRows(plain)

    def construct(self, x: Tensor) -> Tensor:
        """Return the shares, of the shape of ``x``."""
        if self.is_plain(x) or x.ndim == 0:
            return self.plain(x)
        return self.of_rows(x)


class _SoftmaxOfRows(nn.Cell):
    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(auto_prefix=False)
        self.plain = plain

    def construct(self, x: Tensor) -> Tensor:
        return self.plain(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        product = out * dout
        sums = _row_sums(product.reshape((-1, x.shape[-1])))
        return (product - out * sums.reshape((*x.shape[:-1], 1)),)


class CheaperLayerNorm(CheaperCell):
    """A LayerNorm over the last axis; its outputs are those of ``ops.LayerNorm`` on CPU.

    Of a row with inf, or with values above 1e38, all three are NaN or infinite.
    """

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.row_sums = _RowSums()

    def construct(self, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised values, and mean and variance with a last axis of 1."""
        if self.is_plain(x) or self.is_plain(gamma) or gamma.shape != x.shape[-1:]:
            return self.plain(x, gamma, beta)
        of_rows, width = (*x.shape[:-1], 1), x.shape[-1]
        rows = x.reshape((-1, width))
        # Seen from about their mean: the sum of a row far from 0 would round away what it varies.
        origin = ops.stop_gradient(self._about_the_mean(rows))
        rows = rows - origin
        mean = self.row_sums(rows) / width
        centered = rows - mean
        variance = self.row_sums(centered * centered) / width
        values = centered * ops.rsqrt(variance + self.epsilon) * gamma + beta
        mean = mean + origin
        return values.reshape(x.shape), mean.reshape(of_rows), variance.reshape(of_rows)

    def _about_the_mean(self, rows: Tensor) -> Tensor:
        """Return the mean of each row, shape (n, 1), seen from its first value: of equals exact."""
        if rows.size == 0:  # MindSpore's slice of an empty Tensor ends the process
            return filled(ms.float32, (1, 1), 0.0)
        first = rows[:, :1]
        return first + self.row_sums(rows - first) / rows.shape[1]


class CheaperMaxPool(CheaperCell):
    """A maximum pooling that remembers where the maxima lay, for the gradient."""

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
        if self.is_plain(x) or (self.pads and self._pads_in_front(x.shape)):
            return self.plain(x)
        return self.pool(x)[0]

    def _pads_in_front(self, shape: tuple[int, ...]) -> bool:
        """Return whether padding comes first: MaxPoolWithArgmax on CPU puts it all to the end."""
        rows = _padding(shape[2], self.kernel[0], self.strides[0])
        columns = _padding(shape[3], self.kernel[1], self.strides[1])
        return rows > 1 or columns > 1


def _padding(size: int, kernel: int, stride: int) -> int:
    """Return by how much "same" enlarges an axis; the smaller half of it comes first."""
    outputs = (size + stride - 1) // stride
    return (outputs - 1) * stride + kernel - size


def _is_over_last_axis(plain: ops.Primitive) -> bool:
    return plain.axis in (-1, (-1,))


def _is_of_last_axis(plain: ops.Primitive) -> bool:
    return bool(plain.begin_norm_axis == plain.begin_params_axis == -1)


def _is_channels_first(plain: ops.Primitive) -> bool:
    return bool(plain.format == "NCHW")


def _is_bent(plain: nn.Cell) -> bool:
    # Else an infinite value would be multiplied by 0, or subtracted.
    return bool(0 < plain.alpha < 1)


class Known(NamedTuple):
    """An operator that is replaced.

    Attributes:
        name: in the report.
        fits: whether it is one whose values the replacement has.
        replacement: the Cell that takes its place.
        eagerly: whether it does in PYNATIVE_MODE, too. Default: True.
    """

    name: str
    fits: Callable[[Any], bool]
    replacement: type[CheaperCell]
    eagerly: bool = True


# By exact type: a subclass of the user's may compute something else.
KNOWN: Mapping[type, Known] = MappingProxyType(
    {
        nn.GELU: Known("gelu", lambda plain: plain.approximate == "tanh", CheaperGeluLayer),
        ops.GeLU: Known("gelu", lambda plain: True, CheaperGelu),
        nn.LeakyReLU: Known("leaky_relu", _is_bent, CheaperLeakyRelu),
        ops.Softmax: Known("softmax", _is_over_last_axis, CheaperSoftmax),
        # Eagerly it is slower, and MindSpore differentiates it wrongly the second time: a view of a
        # computed value loses its gradient there.
        ops.LayerNorm: Known("layer_norm", _is_of_last_axis, CheaperLayerNorm, eagerly=False),
        ops.MaxPool: Known("max_pool", _is_channels_first, CheaperMaxPool),
    }
)
