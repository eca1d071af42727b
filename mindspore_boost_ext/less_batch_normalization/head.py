"""CommonHeadLastFN: a classifier by cosines; lengths of features and weights do not matter.

Divides every row of features and of weights by its length before they are multiplied,
and scales the cosines by one learned number m.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import Tensors
from mindspore_boost_ext.base.order import is_own, names_in_code, names_of
from mindspore_boost_ext.config.rules import real, shown

EPSILON = 1e-4


class _Head(nn.Cell):
    """(Cosines + bias) · m, and the cosines. Its gradients pass over the rows only once.

    The gradient of a row has no part along the row. The part to subtract is one number for each
    row, a sum of gradients times cosines. Automatic differentiation goes back through all squares.
    """

    def construct(self, rows: Tensor, weight: Tensor, multiplier: Tensor, bias: Tensor) -> Tensors:
        return _outputs(rows, weight, multiplier, bias)

    def bprop(
        self,
        rows: Tensor,
        weight: Tensor,
        multiplier: Tensor,
        bias: Tensor,
        out: Tensor,
        dout: Tensor,
    ) -> Tensors:
        return _gradients(rows, weight, multiplier, bias, out[1], dout[0])


_HEAD = _Head(auto_prefix=False)


# Each is one call in PYNATIVE_MODE instead of a dozen. They are not one function that MindSpore
# differentiates: if its first call needs the weight's gradient alone, as with frozen layers below,
# it never returns the rows' gradient afterwards.
@ms.jit
def _outputs(rows: Tensor, weight: Tensor, multiplier: Tensor, bias: Tensor) -> Tensors:
    """Return (cosines + bias) · m, and the cosines.

    Only the features are divided before the product. To divide the product's columns is cheaper
    than to divide the weight, and the product is at most the length of a weight row.
    """
    product = ops.MatMul(transpose_b=True)(_unit(rows), ops.cast(weight, rows.dtype))
    cosines = product * ops.cast(ops.transpose(_lengths(weight)[0], (1, 0)), rows.dtype)
    result = cosines + ops.cast(bias, rows.dtype)
    return result * ops.cast(multiplier, rows.dtype), cosines


@ms.jit
def _gradients(
    rows: Tensor, weight: Tensor, multiplier: Tensor, bias: Tensor, cosines: Tensor, dout: Tensor
) -> Tensors:
    """Return the gradients of rows, weight, m and bias."""
    total, kind = ops.ReduceSum(keep_dims=True), rows.dtype
    row_scale, row_away = _lengths(rows)  # [batch, 1]
    scale, away = _lengths(weight)  # [outputs, 1]
    unit = _unit(rows)
    wide = ops.cast(cosines, ms.float32)
    by_result = ops.cast(dout, ms.float32)
    gradient = by_result * ops.cast(multiplier, ms.float32)
    along = gradient * wide
    to_product = gradient * ops.transpose(scale, (1, 0))
    to_rows = ops.MatMul()(ops.cast(to_product * row_scale, kind), ops.cast(weight, kind))
    to_rows = to_rows - unit * ops.cast(total(along, 1) * row_away, kind)
    to_weight = ops.MatMul(transpose_a=True)(ops.cast(to_product, kind), unit)
    by_output = ops.transpose(total(along, 0), (1, 0)) * (away * scale)
    to_weight = ops.cast(to_weight, weight.dtype) - weight * ops.cast(by_output, weight.dtype)
    inner = wide + ops.cast(bias, ms.float32)
    to_multiplier = ops.reshape((by_result * inner).sum(), (1,))
    to_multiplier = ops.cast(to_multiplier, multiplier.dtype)
    return to_rows, to_weight, to_multiplier, ops.cast(gradient.sum(0), bias.dtype)


def _lengths(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / length of each row, but 100 below length 0.01; and the same, but 0 there."""
    wide = ops.cast(rows, ms.float32)
    square = ops.ReduceSum(keep_dims=True)(wide * wide, 1)
    scale = ops.rsqrt(ops.maximum(square, EPSILON))
    return scale, scale * ops.cast(square > EPSILON, ms.float32)


def _unit(rows: Tensor) -> Tensor:
    """Return rows divided by their lengths, in the dtype of ``rows``."""
    return ops.cast(ops.cast(rows, ms.float32) * _lengths(rows)[0], rows.dtype)


@_compat.not_rewritten
class CommonHeadLastFN(nn.Cell):
    r"""Dense layer over features and weights of length one.

    Args:
        in_channels (int): length of the features, >= 1.
        out_channels (int): number of outputs, >= 1.
        weight_init: the weight as a Tensor, or a name, Initializer or number for ``initializer``; a
            ``Parameter`` is used itself. Default: ``'normal'``.
        bias_init: the bias, likewise. Default: ``'zeros'``.
        has_bias (bool): whether there is a bias, added to the cosines before they are multiplied.
            Default: ``True``.
        activation (Union[Cell, Primitive, None]): applied to the result. Default: None.
        multiplier (float): initial m, > 0. Default: ``1.0``.

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

    Examples:
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.less_batch_normalization.rewrite import CommonHeadLastFN
        >>> head = CommonHeadLastFN(2, 2, Tensor([[0.0, 2.0], [3.0, 0.0]]))
        >>> head(Tensor([[5.0, 0.0]])).asnumpy().tolist()
        [[0.0, 1.0]]
    """

    one_step = True  # for proxies.py: a layer, not a Cell to look into

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
        real("(0, inf)").read("multiplier", multiplier)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.has_bias = bool(has_bias)
        self.weight = _parameter(weight_init, (out_channels, in_channels), "weight")
        self.bias = _parameter(bias_init, (out_channels,), "bias") if has_bias else None
        start = Tensor([float(multiplier)], ms.float32)
        self.multiplier = Parameter(start, name="multiplier")
        self.activation = activation
        self.fp16 = self.bf16 = self.fp32 = False  # to_float sets them, now or later

    def construct(self, x: Tensor) -> Tensor:
        """Return the scaled cosines between features and weights, activated."""
        # PYNATIVE_MODE casts no inputs of functions of ms.jit.
        if self.fp16:
            x = ops.cast(x, ms.float16)
        elif self.bf16:
            x = ops.cast(x, ms.bfloat16)
        elif self.fp32:
            x = ops.cast(x, ms.float32)
        rows = x if x.ndim == 2 else x.reshape((-1, self.in_channels))
        # As plain Tensors: for each Parameter, ms.jit compiles anew and keeps the result.
        weight = ops.reshape(self.weight, (self.out_channels, self.in_channels))
        multiplier = ops.reshape(self.multiplier, (1,))
        bias = ops.zeros((self.out_channels,), ms.float32) if self.bias is None else self.bias
        result, _ = _HEAD(rows, weight, multiplier, ops.reshape(bias, (self.out_channels,)))
        if x.ndim != 2:
            result = result.reshape((*x.shape[:-1], self.out_channels))
        return result if self.activation is None else self.activation(result)

    def extend_repr(self) -> str:
        """Return the settings, for ``print(network)``."""
        return f"{self.in_channels}, {self.out_channels}, has_bias={self.has_bias}"


def in_place_of(dense: nn.Dense, multiplier: float) -> CommonHeadLastFN:
    """Return the head that takes the place of a Dense: its Parameters, settings and activation.

    Its multiplier is named like the weight, ``<layer>.multiplier``; the Dense does not change.
    """
    head = CommonHeadLastFN(
        *(dense.in_channels, dense.out_channels, dense.weight, dense.bias),
        has_bias=dense.has_bias,
        activation=dense.activation,
        multiplier=multiplier,
    )
    prefix, dot, _ = dense.weight.name.rpartition(".")
    head.multiplier.name = f"{prefix}{dot}multiplier"
    precisions = ("fp16", "fp32", "bf16")
    head.add_flags(**{name: on for name, on in dense.get_flags().items() if name in precisions})
    head.set_train(dense.training)
    return head


def _parameter(given: Any, shape: tuple[int, ...], name: str) -> Parameter:
    if isinstance(given, Tensor) and given.shape != shape:
        raise ValueError(f"{name}_init must have the shape {shape}, got {given.shape}")
    if isinstance(given, Parameter):
        return given
    if given is None or isinstance(given, bool):
        raise TypeError(f"{name}_init must be a Tensor, str or number, got {shown(given)}")
    return Parameter(initializer(given, shape), name=name)


# Kinds of losses over classes, and names of functions and operators that others call.
_CLASS_LOSSES = (
    *(nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, nn.CTCLoss, nn.FocalLoss),
    *(mint.nn.CrossEntropyLoss, mint.nn.NLLLoss),
)
_OVER_CLASSES = frozenset(
    (
        *("cross_entropy", "nll_loss", "multi_margin_loss", "NLLLoss", "MultiMarginLoss"),
        *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
    )
)
# These are words of classes in a loss alone: attention has them, too.
_SHARES = frozenset(("softmax", "log_softmax", "Softmax", "LogSoftmax", "logsumexp"))
_REMEDY = "if it is one, name the Dense in less_bn.heads"


def no_classes(network: nn.Cell, loss_fn: nn.Cell | None) -> str:
    """Return why no Dense is normalised unasked: no loss is known to be over classes; else empty.

    Cosines are bounded, so their head cannot reach targets of any size. If outputs do not compete
    as the classes of a softmax do, their lengths carry what is learned.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    if not any(isinstance(cell, (nn.Dense, CommonHeadLastFN)) for cell in cells):
        return ""  # reported elsewhere
    if loss_fn is not None:  # else the network computes it
        cells = [cell for cell in cells if isinstance(cell, nn.LossBase)]
    held = [loss_fn, *(getattr(cell, "_loss_fn", None) for cell in cells)]
    losses = [cell for one in held if one is not None for _, cell in one.cells_and_names()]
    losses += [cell for cell in cells if isinstance(cell, nn.LossBase)]
    if any(_calls(cell, _OVER_CLASSES) for cell in (*cells, *losses)):
        return ""
    if any(_calls(cell, _SHARES) for cell in losses or [network]):
        return ""
    if not losses:
        return f"no loss over classes is known: {_REMEDY}"
    return f"{type(losses[-1]).__name__} is not known to be a loss over classes: {_REMEDY}"


def _calls(cell: nn.Cell, names: frozenset[str]) -> bool:
    """Return whether a Cell is a loss over classes, or calls something of some names."""
    called = names_in_code(cell).union(one.name for one in _compat.primitives(cell).values())
    kinds = [kind for kind in type(cell).__mro__ if not is_own(kind.__module__)]
    written = [vars(kind).get("construct") for kind in kinds]
    spaces = [one.__globals__ for one in written if isinstance(one, FunctionType)]
    found = [*vars(cell).values(), *(space.get(name) for space in spaces for name in called)]
    for one in found:
        if isinstance(one, FunctionType):  # of the script's own, or one of MindSpore's
            called |= {one.__name__.removesuffix("_ext")}  # as mint's are called inside
            called |= set() if is_own(one.__module__ or "") else names_of(one.__code__)
    return isinstance(cell, _CLASS_LOSSES) or bool(called & names)
