"""Which layers THOR preconditions, and how it sees their activations and output gradients."""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import has_replaced_construct, is_a, is_rewritten
from mindspore_boost_ext.base.order import in_order_of_construct

DENSE, CONV, EMBEDDING = "Dense", "Conv2d", "Embedding"
PLAIN, LAYER_NORM = "plain", "LayerNorm"


@dataclass(frozen=True)
class LayerPlan:
    """A layer whose gradient is preconditioned."""

    kind: str  # "Dense", "Conv2d" or "Embedding"
    layer: nn.Cell
    weight: Parameter  # that the factors belong to
    a_size: int  # length of a row of activations; for an embedding the vocabulary: A is a vector
    g_size: int  # length of a row of output gradients
    block: int  # rows and columns of a diagonal block; factors up to that size are one block

    @property
    def a_shape(self) -> tuple[int, ...]:
        """Shape of factor A."""
        return (self.a_size,) if self.kind == EMBEDDING else factor_shape(self.a_size, self.block)

    @property
    def g_shape(self) -> tuple[int, ...]:
        """Shape of factor G."""
        return factor_shape(self.g_size, self.block)


def factor_shape(size: int, block: int) -> tuple[int, ...]:
    """Return [size, size], or [blocks, block, block] where the size exceeds the block."""
    if size <= block:
        return (size, size)
    return (-(-size // block), block, block)


def layer_plans(
    network: nn.Cell, trained: Iterable[Parameter], block: int
) -> tuple[list[LayerPlan], dict[int, str]]:
    """Return the plans for a network's layers, in its order, with blocks of at most ``block``.

    Also return for the other ``trained`` Parameters, by id, why each keeps its plain gradient
    (``"LayerNorm"`` for those with the rule of LayerNorm).
    """
    wanted = {id(parameter): parameter for parameter in trained}
    cells = [cell for _, cell in network.cells_and_names()]
    # A dot in the name shows a ParameterTuple. It owns nothing: it may only count or log.
    owned = [
        {id(one) for name, one in _compat.own_parameters(cell).items() if "." not in name}
        for cell in cells
    ]
    owners = Counter(key for keys in owned for key in keys)
    plans: dict[int, LayerPlan] = {}
    reasons = dict.fromkeys(wanted, "no layer that THOR preconditions")
    for cell in cells:
        for parameter in _compat.own_parameters(cell).values():
            key = id(parameter)
            if key not in wanted:
                continue
            plan, reason = _plan(cell, parameter, block)
            if plan is None:
                reasons[key] = reason
            elif owners[key] == 1:
                plans[key] = plan
    for key in wanted:
        if owners[key] > 1 and reasons[key] != LAYER_NORM:
            reasons[key] = "shared"  # the sum of two layers has no Kronecker factors
    for parameter, name in _tables_read(network, plans.values()):
        plans.pop(id(parameter), None)  # nor has the sum of these uses
        reasons[id(parameter)] = f"read by the code of {name}, too"
    reasons = {key: reason for key, reason in reasons.items() if key not in plans}
    return list(plans.values()), reasons


def _tables_read(network: nn.Cell, plans: Iterable[LayerPlan]) -> list[tuple[Parameter, str]]:
    """Return tables of embeddings that another Cell reads, as a tied output does, and its class."""
    owners = {id(plan.weight): plan.layer for plan in plans if plan.kind == EMBEDDING}
    return [
        (parameter, type(cell).__name__)
        for _, cell in (network.cells_and_names() if owners else ())
        for parameter in in_order_of_construct(cell)
        if isinstance(parameter, Parameter) and owners.get(id(parameter), cell) is not cell
    ]


def _plan(cell: nn.Cell, parameter: Parameter, block: int) -> tuple[LayerPlan | None, str]:
    """Return the plan for one parameter of a Cell, or the reason why there is none."""
    if is_a(cell, (nn.LayerNorm,)):
        return None, LAYER_NORM
    kind = _kind(cell)
    if kind is None:
        known = _OF_MINT.get(type(cell))
        remedy = f" of mindspore.mint: use nn.{known}" if known else ""
        return None, f"parameter of {type(cell).__name__}{remedy}"
    if parameter is not _main(cell):
        return None, f"bias of {kind}"
    if is_rewritten(cell):
        own = type(cell).__mro__[1].__name__ != kind
    else:
        own = type(cell).construct is not _CLASSES[kind].construct or has_replaced_construct(cell)
    if own:
        return None, f"{type(cell).__name__} has its own construct"
    if kind == CONV and (cell.group != 1 or cell.data_format != "NCHW"):
        return None, f"Conv2d with group={cell.group}, {cell.data_format}"
    rows, columns = parameter.shape[0], math.prod(parameter.shape[1:])
    a_size, g_size = (rows, columns) if kind == EMBEDDING else (columns, rows)
    return LayerPlan(kind, cell, parameter, a_size, g_size, block), ""


_CLASSES = {DENSE: nn.Dense, CONV: nn.Conv2d, EMBEDDING: nn.Embedding}
_OF_MINT = {mint.nn.Linear: DENSE, mint.nn.Conv2d: CONV, mint.nn.Embedding: EMBEDDING}


def _main(layer: nn.Cell) -> Parameter:
    """Return the weight of a layer of a known kind."""
    return layer.embedding_table if _kind(layer) == EMBEDDING else layer.weight


def _kind(cell: nn.Cell) -> str | None:
    kind = next((kind for kind, one in _CLASSES.items() if is_a(cell, (one,))), None)
    # MindNLP puts a class of its own, with a "weight", in the place of nn.Embedding.
    return None if kind == EMBEDDING and not hasattr(cell, "embedding_table") else kind


# ---- from activations and gradients to factors ----


def gram(columns: Tensor, block: int) -> Tensor:
    """Return columns · columnsᵀ, or its diagonal blocks: [n, M] -> [n, n] or [blocks, b, b].

    The last block is filled up with rows of zeros.
    """
    size = columns.shape[0]
    if size <= block:
        return ops.MatMul(transpose_b=True)(columns, columns)
    columns = ops.reshape(padded_rows(columns, block), (-1, block, columns.shape[1]))
    return ops.BatchMatMul(transpose_b=True)(columns, columns)


def padded_rows(matrix: Tensor, block: int) -> Tensor:
    """Return the matrix with rows of zeros added, up to a multiple of ``block``."""
    missing = -matrix.shape[0] % block
    if missing == 0:
        return matrix
    return ops.concat((matrix, ops.zeros((missing, matrix.shape[1]), matrix.dtype)), 0)


@ops.constexpr
def same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return what pad mode ``"same"`` adds before and after an axis."""
    output = -(-size // stride)
    total = max((output - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return total // 2, total - total // 2


# Each layer compiles its own tap. Operators, and one function for all numbers, compile fast: with
# functions of ``ops`` and arithmetic on shapes, a small ResNet takes 2 seconds longer.
_RESHAPE, _TRANSPOSE, _CAST = ops.Reshape(), ops.Transpose(), ops.Cast()
_MUL, _ZEROS_LIKE = ops.Mul(), ops.ZerosLike()


@ops.constexpr
def _factors_scales(samples: int, rows: int, positions: int) -> tuple[float, float]:
    """Return the factors on the column products for A and for G.

    The products are sums over ``rows`` columns. In a sample, ``positions`` of the output share the
    weight.
    """
    scale = positions**0.5 / rows
    return scale, scale * samples * samples


class _Tap(nn.Cell):
    """Identity in the forward pass; backwards, the factors as gradients of ``a`` and ``g``."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(auto_prefix=False)
        self.a_size, self.g_size, self.block = plan.a_size, plan.g_size, plan.block
        # float32 inside networks of lower precision: squares of small gradients are 0 in float16.
        self.to_float(ms.float32)

    def construct(self, out: Tensor, x: Tensor, a: Parameter, g: Parameter) -> Tensor:
        return out

    def bprop(
        self, out: Tensor, x: Tensor, a: Parameter, g: Parameter, result: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        activations, gradients = self.columns(x, _CAST(dout, ms.float32))
        samples, positions = self.samples(x), self.positions(dout)
        for_a, for_g = _factors_scales(samples, gradients.shape[1], positions)
        gradient_by_a = _MUL(self.a_product(activations), for_a)
        return dout, _ZEROS_LIKE(x), gradient_by_a, _MUL(gram(gradients, self.block), for_g)

    def positions(self, dout: Tensor) -> int:
        """Return at how many positions of a sample's output the weight is used."""
        return 1

    def samples(self, x: Tensor) -> int:
        """Return the size of the first axis; 1 if ``x`` is the features of a single sample."""
        return x.shape[0] if x.ndim > 1 else 1

    def a_product(self, activations: Tensor) -> Tensor:
        """Return the sum for factor A over the columns of activations."""
        return gram(activations, self.block)

    def columns(self, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations [a_size, M] and output gradients [g_size, M]."""
        x = _RESHAPE(_CAST(x, ms.float32), (-1, self.a_size))
        return _TRANSPOSE(x, (1, 0)), self.columns_of_rows(dout)

    def columns_of_rows(self, dout: Tensor) -> Tensor:
        """Return gradients, whose last axis is a row, as columns."""
        return _TRANSPOSE(_RESHAPE(dout, (-1, self.g_size)), (1, 0))


class _EmbeddingTap(_Tap):
    """For an embedding A is diagonal: the share of each word among the rows."""

    def samples(self, x: Tensor) -> int:
        return x.shape[0] if x.ndim > 0 else 1

    def columns(self, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        return _RESHAPE(_CAST(x, ms.int32), (-1,)), self.columns_of_rows(dout)

    def a_product(self, activations: Tensor) -> Tensor:
        ones = ops.ones(activations.shape, ms.float32)
        return ops.unsorted_segment_sum(ones, activations, self.a_size)


class _ConvTap(_Tap):
    """For a convolution a row is a patch of the input, as im2col cuts it."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(plan)
        layer = plan.layer
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.same = layer.pad_mode == "same"
        pads = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,) * 4
        self.pads = pads if layer.pad_mode == "pad" else (0, 0, 0, 0)  # top, bottom, left, right
        self.im2col = _compat.im2col(self.kernel, self.stride, self.dilation)

    def positions(self, dout: Tensor) -> int:
        return dout.shape[2] * dout.shape[3]

    def columns(self, x: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        x = _CAST(x, ms.float32)
        top, bottom, left, right = self.pads
        if self.same:
            top, bottom = same_padding(x.shape[2], self.kernel[0], self.stride[0], self.dilation[0])
            left, right = same_padding(x.shape[3], self.kernel[1], self.stride[1], self.dilation[1])
        if top + bottom + left + right > 0:
            x = ops.Pad(((0, 0), (0, 0), (top, bottom), (left, right)))(x)
        patches = self.im2col(x)  # [N, channels, positions in the kernel, H * W]
        patches = _RESHAPE(_TRANSPOSE(patches, (1, 2, 0, 3)), (self.a_size, -1))
        return patches, _RESHAPE(_TRANSPOSE(dout, (1, 0, 2, 3)), (self.g_size, -1))


_TAPS = {DENSE: _Tap, CONV: _ConvTap, EMBEDDING: _EmbeddingTap}


# ---- layers with a tap; these functions replace the layer's own construct ----


def _through_tap(layer: nn.Cell, out: Tensor, x: Tensor) -> Tensor:
    """Return ``out`` through the tap, with casts, so that its gradient has the dtype of ``out``."""
    wide = layer.thor_tap(_CAST(out, ms.float32), ops.stop_gradient(x), layer.thor_a, layer.thor_g)
    return _CAST(wide, out.dtype)


def _tapped(self: nn.Cell, x: Tensor) -> Tensor:
    return _through_tap(self, self.thor_plain(x), x)


def _tapped_embedding(self: nn.Cell, ids: Tensor) -> Tensor:
    return _through_tap(self, self.thor_plain(ids), ids)


def _tapped_dense_with_activation(self: nn.Cell, x: Tensor) -> Tensor:
    """The operators of ``nn.Dense``, with the tap in front of the activation."""
    shape = x.shape
    rows = self.reshape(x, (-1, shape[-1])) if len(shape) != 2 else x
    out = self.matmul(rows, self.weight)
    if self.has_bias:
        out = self.bias_add(out, self.bias)
    out = self.activation(_through_tap(self, out, x))
    return self.reshape(out, (*shape[:-1], out.shape[-1])) if len(shape) != 2 else out


_OWN = ("construct", "thor_plain", "thor_tap", "thor_a", "thor_g")


class Taps:
    """Attaches taps, each with its Parameters A and G, to layers, and detaches them."""

    def __init__(
        self, plans: Iterable[LayerPlan], factors: Iterable[tuple[Parameter, Parameter]]
    ) -> None:
        self._plans = tuple(plans)
        self.layers = [plan.layer for plan in self._plans]
        self._parts = [(_TAPS[plan.kind](plan), *pair) for plan, pair in zip(self._plans, factors)]
        self.used = False  # whether they have ever been attached

    def follow(self, network: nn.Cell) -> None:
        """Use the layers that have the weights now: mixed precision O1 makes new ones."""
        self.detach()
        cells = [cell for _, cell in network.cells_and_names()]
        left = {id(cell) for cell in cells}
        # Only layers of these kinds: a loss with a penalty may hold a weight, too.
        anew = {id(_main(cell)): cell for cell in cells if _kind(cell)}
        self.layers = [
            plan.layer if id(plan.layer) in left else anew.get(id(plan.weight), plan.layer)
            for plan in self._plans
        ]

    def attach(self) -> None:
        """Attach these taps to the layers, in place of any others."""
        self.used = True
        for plan, layer, part in zip(self._plans, self.layers, self._parts):
            _remove(layer)
            function = _tapped_embedding if plan.kind == EMBEDDING else _tapped
            if plan.kind == DENSE and layer.activation_flag:
                function = _tapped_dense_with_activation
            # Not by Cell.__setattr__: the layer must not list them as its Cells and Parameters.
            values = (types.MethodType(function, layer), layer.construct, *part)
            layer.__dict__.update(zip(_OWN, values))

    def detach(self) -> None:
        """Give the layers back their own ``construct``."""
        for layer in self.layers:
            _remove(layer)


def _remove(layer: nn.Cell) -> None:
    if "thor_tap" in vars(layer):  # else its construct may be the script's
        for name in _OWN:
            layer.__dict__.pop(name, None)
