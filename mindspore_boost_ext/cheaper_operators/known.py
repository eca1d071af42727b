"""Which operators and layers are replaced, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mindspore import dtype as mstype
from mindspore import nn, ops

from mindspore_boost_ext.cheaper_operators import activations, rows
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.cheaper_operators.cross_entropy import CheaperCrossEntropy
from mindspore_boost_ext.cheaper_operators.normalisation import CheaperBatchNorm, CheaperGroupNorm
from mindspore_boost_ext.cheaper_operators.pooling import CheaperMaxPool, CheaperPad, may_fit
from mindspore_boost_ext.cheaper_operators.recurrent import STEPS, CheaperRecurrence


def _has_one_axis(plain: ops.Primitive) -> bool:
    return isinstance(plain.axis, int) or len(plain.axis) == 1


def _is_of_floats(plain: nn.GroupNorm) -> bool:
    # BatchNorm takes no other epsilon.
    return bool(plain.gamma.dtype == mstype.float32 and 0 < plain.eps <= 1)


def _is_one_number(plain: nn.CrossEntropyLoss) -> bool:
    return plain.weight is None and plain.reduction != "none"


class Known(NamedTuple):
    """An operator or layer that is replaced."""

    replacement: type[CheaperCell]
    fits: Callable[[Any], bool] = lambda plain: True  # whether the replacement gives its values
    eagerly: bool = True  # whether it is replaced in PYNATIVE_MODE, too
    holder: type[nn.Cell] | None = None  # the class of the layer that must hold it; None: any


# By exact type: a subclass of the user's may compute something else.
KNOWN: Mapping[type, Known] = {
    nn.GELU: Known(activations.CheaperGeluLayer, lambda plain: plain.approximate == "tanh"),
    ops.GeLU: Known(activations.CheaperGelu),
    nn.LeakyReLU: Known(
        activations.CheaperLeakyRelu, lambda plain: activations.is_gentle(plain.alpha)
    ),
    # If x is small beside a large height, exp(x / height) - 1 loses its digits in float32.
    ops.CeLU: Known(activations.CheaperCelu, lambda plain: 0 < plain.alpha <= 2),
    ops.SeLU: Known(activations.CheaperSelu),
    ops.Softmax: Known(rows.CheaperSoftmax, _has_one_axis),
    ops.LogSoftmax: Known(rows.CheaperLogSoftmax, _has_one_axis),
    ops.L2Normalize: Known(rows.CheaperL2Normalize, _has_one_axis),
    # Eagerly these are slower.
    ops.Elu: Known(activations.CheaperElu, eagerly=False),
    ops.LayerNorm: Known(
        rows.CheaperLayerNorm,
        lambda plain: plain.begin_norm_axis == plain.begin_params_axis == -1,
        eagerly=False,
    ),
    ops.BatchNorm: Known(
        CheaperBatchNorm, lambda plain: plain.is_training, eagerly=False, holder=nn.BatchNorm1d
    ),
    nn.GroupNorm: Known(CheaperGroupNorm, _is_of_floats, eagerly=False),
    # Eagerly the import speeds up the loss; MindSpore's gradient of Pad is right and fast.
    nn.CrossEntropyLoss: Known(CheaperCrossEntropy, _is_one_number, eagerly=False),
    ops.Pad: Known(CheaperPad, eagerly=False),
    ops.MaxPool: Known(CheaperMaxPool, may_fit),
    **dict.fromkeys(STEPS, Known(CheaperRecurrence)),
}
