"""Operators along an axis, by sums that are fast."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.base.outer import outer
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell


def axis_of(plain: ops.Primitive) -> int:
    """Return the axis of an operator of one axis."""
    return plain.axis[0] if isinstance(plain.axis, Sequence) else plain.axis


class _Sums(nn.Cell):
    """Sums along an axis, for each of its places: along the last one by matrix products.

    In float32 also under mixed precision "auto", which takes products in float16.
    """

    def __init__(self, axis: int) -> None:
        super().__init__(auto_prefix=False)
        self.axis = axis
        self.to_float(mstype.float32)

    def construct(self, x: Tensor) -> Tensor:
        if self.axis not in (-1, x.ndim - 1):
            sums = ops.ReduceSum(keep_dims=True)(x, self.axis)
            return ops.broadcast_to(sums, x.shape)
        width = x.shape[-1]
        ones = ops.ones((width, 1), mstype.float32)
        sums = ops.MatMul()(x.reshape((-1, width)), ones)
        return outer(sums, ones).reshape(x.shape)


class _Softmax(nn.Cell):
    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(auto_prefix=False)
        self.plain, self.sums = plain, _Sums(axis_of(plain))

    def construct(self, x: Tensor) -> Tensor:
        return self.plain(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        product = out * dout
        return (product - out * self.sums(product),)


class _LogSoftmax(_Softmax):
    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout - ops.exp(out) * self.sums(dout),)


class CheaperSoftmax(CheaperCell):
    """A softmax with MindSpore's values, whose gradient sums up fast."""

    core: type[_Softmax] = _Softmax

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient = self.core(plain)

    def construct(self, x: Tensor) -> Tensor:
        """Return the shares, of the shape of ``x``."""
        if self.is_plain(x) or x.ndim == 0:
            return self.plain(x)
        return self.with_gradient(x)


class CheaperLogSoftmax(CheaperSoftmax):
    """The logarithms of a softmax, likewise."""

    core = _LogSoftmax


class _L2Normalize(nn.Cell):
    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(auto_prefix=False)
        self.epsilon, self.sums = plain.epsilon, _Sums(axis_of(plain))

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(ops.maximum(self.sums(x * x), self.epsilon))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        squares = self.sums(x * x)
        along = self.sums(out * dout) * ops.cast(squares > self.epsilon, mstype.float32)
        return ((dout - out * along) * ops.rsqrt(ops.maximum(squares, self.epsilon)),)


class CheaperL2Normalize(CheaperCell):
    """Vectors of length 1, in time linear in their length: MindSpore's gradient is quadratic.

    The gradient is that of the formula also for vectors so short that ``epsilon`` divides them;
    there MindSpore divides by their own length.
    """

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient = _L2Normalize(plain)

    def construct(self, x: Tensor) -> Tensor:
        """Return the vectors, of the shape of ``x``."""
        return self.plain(x) if self.is_plain(x) else self.with_gradient(x)


class _LayerNorm(nn.Cell):
    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(auto_prefix=False)
        self.plain, self.epsilon = plain, plain.epsilon
        self.to_float(mstype.float32)  # mixed precision "auto" takes matrix products in float16

    def construct(self, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.plain(x, gamma, beta)

    def bprop(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        out: tuple[Tensor, Tensor, Tensor],
        dout: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = x.shape[-1]
        dy = dout[0].reshape((-1, width))
        mean, variance, dmean, dvariance = (
            one.reshape((-1, 1)) for one in (out[1], out[2], dout[1], dout[2])
        )
        column, ones = gamma.reshape((width, 1)), ops.ones((width, 1), mstype.float32)
        inverse = ops.rsqrt(variance + self.epsilon)
        centered = x.reshape((-1, width)) - outer(mean, ones)
        product = dy * centered
        # x moves its row's mean and variance, too; those are outputs of their own besides.
        by_mean = (dmean - inverse * ops.MatMul()(dy, column)) / width
        by_spread = (2 * dvariance - inverse**3 * ops.MatMul()(product, column)) / width
        dx = dy * outer(inverse, column) + centered * outer(by_spread, ones)
        dx = dx + outer(by_mean, ones)
        dgamma = ops.MatMul(transpose_a=True)(inverse, product)
        dbeta = ops.MatMul(transpose_a=True)(ops.OnesLike()(inverse), dy)
        return dx.reshape(x.shape), dgamma.reshape((width,)), dbeta.reshape((width,))


class CheaperLayerNorm(CheaperCell):
    """A LayerNorm over the last axis with MindSpore's values, whose gradient sums up fast."""

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient = _LayerNorm(plain)

    def construct(self, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalised values, and mean and variance with a last axis of 1."""
        if self.is_plain(x) or self.is_plain(gamma) or gamma.shape != x.shape[-1:]:
            return self.plain(x, gamma, beta)
        return self.with_gradient(x, gamma, beta)
