"""Operators along an axis, computed by faster sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.base.sums import outer
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell

_Three = tuple[Tensor, Tensor, Tensor]


def axis_of(plain: ops.Primitive) -> int:
    """Return the axis of an operator that works along one axis."""
    return plain.axis[0] if isinstance(plain.axis, Sequence) else plain.axis


# No branches below: MindSpore has no second gradient through a branch in a ``bprop``.
def _sums_of_rows(x: Tensor, axis: int) -> Tensor:
    """Return for each place of ``x`` the sum along the last axis, by matrix products."""
    width = x.shape[-1]
    ones = ops.ones((width, 1), mstype.float32)
    sums = ops.MatMul()(x.reshape((-1, width)), ones)
    return outer(sums, ones).reshape(x.shape)


def sums_along(x: Tensor, axis: int) -> Tensor:
    """Return for each place of ``x`` the sum along an axis."""
    return ops.broadcast_to(ops.ReduceSum(keep_dims=True)(x, axis), x.shape)


class _AlongAxis(nn.Cell):
    """MindSpore's operator, with a gradient computed by ``sums`` along its axis."""

    def __init__(self, plain: ops.Primitive, sums: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__(auto_prefix=False)
        self.plain, self.sums, self.axis = plain, sums, axis_of(plain)
        self.epsilon = getattr(plain, "epsilon", None)  # a graph cannot read it from an operator
        self.to_float(mstype.float32)  # mixed precision "auto" takes matrix products in float16

    def construct(self, x: Tensor) -> Tensor:
        return self.plain(x)


class _Softmax(_AlongAxis):
    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        product = out * dout
        return (product - out * self.sums(product, self.axis),)


class _LogSoftmax(_AlongAxis):
    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout - ops.exp(out) * self.sums(dout, self.axis),)


class _L2Normalize(_AlongAxis):
    def construct(self, x: Tensor) -> Tensor:
        squares = self.sums(x * x, self.axis)
        return x * ops.rsqrt(ops.maximum(squares, self.epsilon))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        squares = self.sums(x * x, self.axis)
        is_long = ops.cast(squares > self.epsilon, mstype.float32)
        along = self.sums(out * dout, self.axis) * is_long
        return ((dout - out * along) * ops.rsqrt(ops.maximum(squares, self.epsilon)),)


class CheaperAlongAxis(CheaperCell):
    """An operator along an axis, whose gradient sums up fast."""

    core: type[_AlongAxis]

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.one_axis = axis_of(plain)
        self.of_rows = self.core(plain, _sums_of_rows)
        self.of_others = self.core(plain, sums_along)

    def construct(self, x: Tensor) -> Tensor:
        """Return what the operator does, of the shape of ``x``."""
        if self.is_plain(x) or self.is_small(x) or x.ndim == 0 or 0 in x.shape:
            return self.plain(x)
        if not -x.ndim <= self.one_axis < x.ndim:
            # It raises; inside the Cells below, the process would stay in float32 after that.
            return self.plain(x)
        return self.of_rows(x) if self.one_axis in (-1, x.ndim - 1) else self.of_others(x)


class CheaperSoftmax(CheaperAlongAxis):
    """A softmax with MindSpore's values."""

    counted_as, least = "softmax", 16384
    core = _Softmax


class CheaperLogSoftmax(CheaperAlongAxis):
    """The logarithms of a softmax, with MindSpore's values."""

    counted_as, least = "log_softmax", 16384
    core = _LogSoftmax


class CheaperL2Normalize(CheaperAlongAxis):
    """Scales vectors to length 1 in linear time; MindSpore's gradient takes quadratic time.

    The gradient is always that of the formula. For vectors so short that ``epsilon`` is the
    divisor, MindSpore's gradient divides by their own length.
    """

    counted_as = "l2_normalize"
    core = _L2Normalize


class _LayerNorm(nn.Cell):
    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(auto_prefix=False)
        self.plain, self.epsilon = plain, plain.epsilon
        self.to_float(mstype.float32)  # mixed precision "auto" takes matrix products in float16

    def construct(self, x: Tensor, gamma: Tensor, beta: Tensor) -> _Three:
        return self.plain(x, gamma, beta)

    def bprop(self, x: Tensor, gamma: Tensor, beta: Tensor, out: _Three, dout: _Three) -> _Three:
        width = x.shape[-1]
        dy = dout[0].reshape((-1, width))
        mean, variance, dmean, dvariance = (
            one.reshape((-1, 1)) for one in (out[1], out[2], dout[1], dout[2])
        )
        column, ones = gamma.reshape((width, 1)), ops.ones((width, 1), mstype.float32)
        inverse = ops.rsqrt(variance + self.epsilon)
        centered = x.reshape((-1, width)) - outer(mean, ones)
        product = dy * centered
        # x changes its row's mean and variance, too; these are also outputs of their own.
        by_mean = (dmean - inverse * ops.MatMul()(dy, column)) / width
        by_spread = (2 * dvariance - inverse**3 * ops.MatMul()(product, column)) / width
        dx = dy * outer(inverse, column) + centered * outer(by_spread, ones)
        dx = dx + outer(by_mean, ones)
        dgamma = ops.MatMul(transpose_a=True)(inverse, product)
        dbeta = ops.MatMul(transpose_a=True)(ops.OnesLike()(inverse), dy)
        return dx.reshape(x.shape), dgamma.reshape((width,)), dbeta.reshape((width,))


class CheaperLayerNorm(CheaperCell):
    """A LayerNorm over the last axis with MindSpore's values, whose gradient sums up fast."""

    counted_as, least = "layer_norm", 16384

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient = _LayerNorm(plain)

    def construct(self, x: Tensor, gamma: Tensor, beta: Tensor) -> _Three:
        """Return the normalised values, and mean and variance with a last axis of 1."""
        if self.is_plain(x) or self.is_small(x):
            return self.plain(x, gamma, beta)
        if self.is_plain(gamma) or gamma.shape != x.shape[-1:]:
            return self.plain(x, gamma, beta)
        return self.with_gradient(x, gamma, beta)
