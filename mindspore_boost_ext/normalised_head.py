"""CommonHeadLastFN: a classifier of cosines, in which neither features nor weights have a length.

What it does: divides every row of features and of weights by its length before they are multiplied,
and scales the cosines by one learned number m.

Update rule, for features x ``[batch, inputs]`` and weights W ``[outputs, inputs]``::

    v^ = v / sqrt(max(sum v^2, 1e-4))   on rows
    y  = m * (x^ W^T + bias)            then the activation, if there is one

When it helps: with few BatchNorms, where the scale of features is not controlled. When it hurts: y
lies in [-m, m], so that cross-entropy over n classes cannot go below log(1 + (n-1) exp(-m n/(n-1)))
unless m grows: 1.377 for m = 1 and n = 10. Start with a larger ``multiplier`` (10, say) when the
training is short, or where outputs are no logits.
Measured effect: see :mod:`mindspore_boost_ext.less_batch_normalization`.
Cost: about ten small operators more than ``nn.Dense``; one Parameter.
Devices and modes: run on CPU in GRAPH_MODE and PYNATIVE_MODE; written, not run, for GPU and Ascend.
How it combines: with everything. Lengths are computed in float32 whatever the type of the features;
under mixed precision the product has their type.
Reference: Wang et al., NormFace, ACM Multimedia 2017; the form of ``mindspore.boost``.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindspore_boost_ext._rules import check, real, shown

EPSILON = 1e-4


@ms.jit  # one call from PYNATIVE_MODE instead of twelve
def scaled_cosines(rows: Tensor, weight: Tensor, multiplier: Tensor) -> Tensor:
    """Return the cosines of the angles between two sets of rows, times a number.

    Lengths are computed in float32. Only the features are divided before the product: dividing its
    columns instead of the weight is cheaper, and the product stays within the length of a weight.

    Args:
        rows (Tensor): floating ``[batch, length]``, features.
        weight (Tensor): floating ``[outputs, length]``.
        multiplier (Tensor): float32 ``[1]``.

    Returns:
        Tensor ``[batch, outputs]``, of the type of ``rows``.
    """
    wide = ops.cast(rows, ms.float32)
    lengths = ops.transpose(_reciprocal_length(ops.cast(weight, ms.float32)), (1, 0))
    unit = ops.cast(wide * _reciprocal_length(wide), rows.dtype)
    product = ops.MatMul(transpose_b=True)(unit, ops.cast(weight, rows.dtype))
    return product * ops.cast(multiplier * lengths, rows.dtype)


def _reciprocal_length(rows: Tensor) -> Tensor:
    """Return 1 / length of each row, ``[count, 1]``; 100 for rows shorter than 0.01."""
    square = ops.ReduceSum(keep_dims=True)(rows * rows, 1)
    return ops.rsqrt(ops.maximum(square, EPSILON))


class _Outputs(nn.Cell):
    """The computation of the head.

    In a class of its own because mixed precision O1 rewrites the source of user Cells, and leaves
    the methods that they inherit alone.
    """

    def outputs(self, x: Tensor) -> Tensor:
        """Return ``activation(m * (cosines + bias))``, of the type of ``x``."""
        rows = x if x.ndim == 2 else x.reshape((-1, self.in_channels))
        result = scaled_cosines(rows, self.weight, self.multiplier)
        if self.bias is not None:
            result = result + ops.cast(self.multiplier * self.bias, result.dtype)
        if x.ndim != 2:
            result = result.reshape((*x.shape[:-1], self.out_channels))
        return result if self.activation is None else self.activation(result)


class CommonHeadLastFN(_Outputs):
    r"""Dense layer over features and weights of length one.

    Args:
        in_channels (int): length of the features, >= 1.
        out_channels (int): number of outputs, >= 1.
        weight_init: the weight as a Tensor; or how to make it, a name, Initializer or number as for
            ``initializer``; a ``Parameter`` is taken itself. Default: ``'normal'``.
        bias_init: the bias, likewise. Default: ``'zeros'``.
        has_bias (bool): whether there is a bias, added to the cosines before they are multiplied.
            Default: ``True``.
        activation (Union[Cell, Primitive, None]): applied to the result. Default: None.
        multiplier (float): where m starts, > 0. Default: ``1.0``.

    Inputs:
        - **x** (Tensor) - floating ``[..., in_channels]``.

    Outputs:
        Tensor ``[..., out_channels]``, of the type of ``x``.

    Attributes:
        weight (Parameter): ``[out_channels, in_channels]``.
        bias (Parameter): ``[out_channels]``, or None.
        multiplier (Parameter): float32 ``[1]``, m.

    Raises:
        ValueError: if ``multiplier`` is not a finite number above 0.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.less_batch_normalization import CommonHeadLastFN
        >>> head = CommonHeadLastFN(2, 2, Tensor([[0.0, 2.0], [3.0, 0.0]]))
        >>> head(Tensor([[5.0, 0.0]])).asnumpy().tolist()
        [[0.0, 1.0]]
    """

    one_step = True  # for tracing.py: a layer, not a Cell to look into

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = "normal",
        bias_init: Any = "zeros",
        has_bias: bool = True,
        activation: Any = None,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        check("multiplier", multiplier, real("(0, inf)"))
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.has_bias = bool(has_bias)
        self.weight = _parameter(weight_init, (out_channels, in_channels), "weight")
        self.bias = _parameter(bias_init, (out_channels,), "bias") if has_bias else None
        start = Tensor([float(multiplier)], ms.float32)
        self.multiplier = Parameter(start, name="multiplier")
        self.activation = activation

    def construct(self, x: Tensor) -> Tensor:
        """Return the scaled cosines between features and weights, activated."""
        return self.outputs(x)

    def extend_repr(self) -> str:
        """Return the settings, for ``print(network)``."""
        return f"{self.in_channels}, {self.out_channels}, has_bias={self.has_bias}"


def in_place_of(dense: nn.Dense, multiplier: float = 1.0) -> CommonHeadLastFN:
    """Return the head that takes the place of a Dense: its Parameters, settings and activation.

    Args:
        dense (nn.Dense): the layer. It is left as it is.
        multiplier (float): where m starts, > 0. Default: ``1.0``.

    Returns:
        CommonHeadLastFN; its multiplier is named as the weight is, ``<layer>.multiplier``.
    """
    head = CommonHeadLastFN(
        *(dense.in_channels, dense.out_channels, dense.weight, dense.bias),
        has_bias=dense.has_bias,
        activation=dense.activation,
        multiplier=multiplier,
    )
    prefix, dot, _ = dense.weight.name.rpartition(".")
    head.multiplier.name = f"{prefix}{dot}multiplier"
    precision = {name: on for name, on in dense.get_flags().items() if name in _PRECISIONS}
    head.add_flags(**precision)
    head.set_train(dense.training)
    return head


_PRECISIONS = ("fp16", "fp32", "bf16")


def _parameter(given: Any, shape: tuple[int, ...], name: str) -> Parameter:
    if isinstance(given, Tensor) and given.shape != shape:
        raise ValueError(f"{name}_init must have the shape {shape}, got {given.shape}")
    if isinstance(given, Parameter):
        return given
    if given is None or isinstance(given, bool):
        raise TypeError(f"{name}_init must be a Tensor, str or number, got {shown(given)}")
    return Parameter(initializer(given, shape), name=name)


def lowest_cross_entropy(multiplier: float, classes: int) -> float:
    """Return the cross-entropy that cosines times ``multiplier`` cannot go below.

    Args:
        multiplier: m.
        classes: number of classes, >= 2.

    Examples:
        >>> from mindspore_boost_ext.normalised_head import lowest_cross_entropy
        >>> round(lowest_cross_entropy(1.0, 10), 3)
        1.377
    """
    others = classes - 1
    return math.log1p(others * math.exp(-multiplier * classes / others))


__all__ = ["CommonHeadLastFN", "in_place_of", "lowest_cross_entropy"]
