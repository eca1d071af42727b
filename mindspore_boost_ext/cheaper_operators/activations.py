"""Activations by vectorised operators; MindSpore's kernels compute these value by value."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.base.sums import DIVIDE
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell

# gelu(x) = x / 2 * (1 + tanh(u)) = x * sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x**3)
_LINEAR = 1.5957691216057308  # 2 * sqrt(2 / pi)
_CUBIC = 0.044715 * _LINEAR
# selu(x) = scale * x above 0, scale * alpha * (exp(x) - 1) below
_SELU = 1.0507009873554805
_SELU_HEIGHT = 1.6732632423543772 * _SELU


class _Gelu(nn.Cell):
    """Keeps only its input for the gradient, as MindSpore's operator does."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(x * (_LINEAR + _CUBIC * (x * x)))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        square = x * x
        share = ops.sigmoid(x * (_LINEAR + _CUBIC * square))
        return (dout * (share + out * (1 - share) * (_LINEAR + 3 * _CUBIC * square)),)


class CheaperActivation(CheaperCell):
    """Computes an activation by a Cell that has a gradient of its own."""

    core: type[nn.Cell]

    def __init__(self, plain: nn.Cell | ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient = self.core(auto_prefix=False)

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation, of the shape of ``x``."""
        if self.is_plain(x) or self.is_small(x):
            return self.plain(x)
        return self.with_gradient(x)


class CheaperGelu(CheaperActivation):
    """The tanh form of GELU by a sigmoid; MindSpore computes the tanh in it value by value."""

    counted_as = "gelu"
    core = _Gelu


class CheaperGeluLayer(CheaperGelu, nn.GELU):
    """The same for the layer; networks that check the class still find an ``nn.GELU``."""


def is_gentle(alpha: float) -> bool:
    """Return whether a leaky ReLU of this slope can be computed in the other form."""
    return 0 < alpha < 1  # else an infinite value would be multiplied by 0, or subtracted


def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    """Return a leaky ReLU by a ReLU, whose gradient is vectorised."""
    return (1 - alpha) * ops.relu(x) + alpha * x


class CheaperLeakyRelu(CheaperCell, nn.LeakyReLU):
    """A leaky ReLU in another form.

    At 0 its slope is that of the negative side; MindSpore's is the mean of both.
    """

    counted_as = "leaky_relu"

    def construct(self, x: Tensor) -> Tensor:
        """Return the activation, of the shape of ``x``."""
        if self.is_plain(x):
            return self.plain(x)
        return leaky_relu(x, self.alpha)


def _below(x: Tensor) -> Tensor:
    """Return ``x`` where it is below 0, and 0 elsewhere. NaN stays NaN; a ReLU makes it 0."""
    return x - ops.ReLU()(x)


class _Elu(nn.Cell):
    """x above 0, and ``height * (exp(x / height) - 1)`` below."""

    height = 1.0

    def construct(self, x: Tensor) -> Tensor:
        low = ops.exp(DIVIDE(_below(x), self.height)) - 1
        return ops.ReLU()(x) + self.height * low

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout * ops.exp(DIVIDE(_below(x), self.height)),)


class CheaperElu(CheaperActivation):
    """An ELU by an exponential, which is vectorised."""

    counted_as, least = "elu", 32768
    core = _Elu


class CheaperCelu(CheaperElu):
    """A CELU, an ELU of another height."""

    counted_as, least = "celu", 0

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.with_gradient.height = plain.alpha


class _Selu(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        low = ops.exp(_below(x)) - 1
        return _SELU * ops.ReLU()(x) + _SELU_HEIGHT * low

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        above = ops.cast(x >= 0, mstype.float32)
        slope = _SELU_HEIGHT * ops.exp(_below(x)) + (_SELU - _SELU_HEIGHT) * above
        return (dout * slope,)


class CheaperSelu(CheaperActivation):
    """A SELU with the gradient of its formula; MindSpore's gradient differs below 0."""

    counted_as = "selu"
    core = _Selu
