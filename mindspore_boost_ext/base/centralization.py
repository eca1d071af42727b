"""Gradient centralization: subtract from a weight's gradient the mean over an output's inputs."""

from __future__ import annotations

import dis
import fnmatch
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext._compat import RowTensor
from mindspore_boost_ext.base.cells import is_a
from mindspore_boost_ext.base.mapping import each
from mindspore_boost_ext.base.sums import over_columns
from mindspore_boost_ext.config.rules import shown

# Stands for the output axis if a gradient stays as it is.
UNTOUCHED = -1
# Last parts of the names of parameters that are no weights.
_NO_WEIGHTS = ("gamma", "beta", "bias")

_TRANSPOSED = (nn.Conv1dTranspose, nn.Conv2dTranspose, nn.Conv3dTranspose, mint.nn.ConvTranspose2d)


# ---- The rule ----


def centralize(gradient: Tensor, output_axis: int = 0) -> Tensor:
    """Return a gradient minus its mean over all axes but one.

    Args:
        gradient (Tensor): of any shape and floating dtype; 16-bit ones are computed in float32.
        output_axis (int): the axis that is kept. Default: ``0``.

    Returns:
        Tensor, of the shape and dtype of ``gradient``; ``gradient`` itself if it has no other axis.

    Examples:
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.base.centralization import centralize
        >>> centralize(Tensor([[1.0, 3.0], [5.0, 5.0]])).asnumpy().tolist()
        [[-1.0, 1.0], [0.0, 0.0]]
    """
    axes = _other_axes(gradient.ndim, output_axis)
    if len(axes) == 0:
        return gradient
    if gradient.dtype == ms.float16 or gradient.dtype == ms.bfloat16:
        return ops.cast(_less_mean(ops.cast(gradient, ms.float32), axes), gradient.dtype)
    return _less_mean(gradient, axes)


@ops.constexpr
def _other_axes(count: int, axis: int) -> tuple[int, ...]:
    return tuple(one for one in range(count) if one != axis)


def _less_mean(gradient: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a gradient of two axes or more minus its mean over ``axes``."""
    if axes[0] == 1:
        # The CPU kernel takes the mean over one last axis three times faster than over several.
        rows = ops.reshape(gradient, (gradient.shape[0], -1))
        means = ops.mean(rows, 1, True)
        return ops.reshape(rows - over_columns(means, rows.shape[1]), gradient.shape)
    return gradient - ops.mean(gradient, axes, True)


# With a sparse lookup in GRAPH_MODE the compiler learns late which gradients are row-sparse; a
# MultitypeFuncGraph waits for it.
_centralize_one = ops.MultitypeFuncGraph("boost_centralize")


@_centralize_one.register("Number", "Tensor")
def _centralize_dense(output_axis: int, gradient: Tensor) -> Tensor:
    if output_axis < 0:
        return gradient
    return centralize(gradient, output_axis)


@_centralize_one.register("Number", "RowTensor")
def _centralize_rows(output_axis: int, gradient: Tensor) -> Tensor:
    # A row that is not stored is zero, and its mean is zero.
    if output_axis != 0:
        return gradient
    return RowTensor(gradient.indices, centralize(gradient.values), gradient.dense_shape)


class Centralization(nn.Cell):
    """Centralizes the gradients of an optimizer, Tensors or RowTensors, one for each parameter.

    It has no parameters. ``output_axes`` has each parameter's output axis, or ``UNTOUCHED``.
    """

    def __init__(self, output_axes: Sequence[int]) -> None:
        super().__init__(auto_prefix=False)
        self.output_axes = tuple(output_axes)

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        """Return the gradients centralized."""
        return each(_centralize_one, self.output_axes, gradients)

    def restricted(self, positions: Iterable[int]) -> Centralization:
        """Return the same for the parameters at some positions."""
        part: Centralization = _compat.shallow_copy(self)
        part.output_axes = tuple(self.output_axes[position] for position in positions)
        return part


# ---- Which parameters ----


def output_axes(network: nn.Cell, exclude: Iterable[str] = ()) -> dict[str, int]:
    """Return the parameters of a network whose gradients are to be centralized.

    Args:
        network (Cell): the network, without or with its loss.
        exclude (Iterable[str]): patterns of names to leave out as well, as for ``fnmatch``
            (``"*.embedding_table"``). Default: none.

    Returns:
        dict, name of the parameter -> its output axis.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.base.centralization import output_axes
        >>> net = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, group=8), nn.Dense(8, 2))
        >>> output_axes(net)
        {'0.weight': 0, '2.weight': 0}
    """
    patterns = _checked_patterns(exclude)
    found: dict[str, int] = {}
    refused: set[str] = set()
    for parameter, owner in owned_parameters(network):
        axis = output_axis_of(parameter, owner)
        left_out = any(fnmatch.fnmatchcase(parameter.name, pattern) for pattern in patterns)
        if axis == UNTOUCHED or left_out:
            refused.add(parameter.name)
        else:
            found[parameter.name] = axis
    # A parameter that several Cells share is left alone if one of them asks for it.
    return {name: axis for name, axis in found.items() if name not in refused}


def owned_parameters(network: nn.Cell) -> Iterator[tuple[Parameter, nn.Cell]]:
    """Yield every parameter of a network with its Cell; a shared one with each of its Cells."""
    for _, cell in network.cells_and_names():
        for parameter in cell.get_parameters(expand=False):
            yield parameter, cell


def output_axis_of(parameter: Parameter, owner: nn.Cell | None = None) -> int:
    """Return the output axis of a parameter, or ``UNTOUCHED`` if it is not to be centralized.

    Without the Cell it belongs to, groups of a convolution and other exceptions are not known.
    """
    own_name = parameter.name.rpartition(".")[2]
    axis = 1 if owner is not None and is_a(owner, _TRANSPOSED) else 0
    if parameter.ndim < 2 or any(word in own_name for word in _NO_WEIGHTS):
        return UNTOUCHED
    if parameter.size == parameter.shape[axis]:  # a single input
        return UNTOUCHED
    if owner is not None and (_in_groups(parameter, owner) or _is_normalised_head(owner)):
        return UNTOUCHED
    return axis


def _in_groups(weight: Parameter, owner: nn.Cell) -> bool:
    """Return whether a weight is of a grouped convolution, by an attribute of its Cell.

    The Cell may be the user's own convolution. A matrix is never a convolution's weight.
    """
    groups = getattr(owner, "group", None) or getattr(owner, "groups", None)  # mint has the latter
    return weight.ndim > 2 and isinstance(groups, int) and groups > 1


def _is_normalised_head(cell: nn.Cell) -> bool:
    # By name: the head of mindspore.boost is another class of the same name.
    return any(kind.__name__ == "CommonHeadLastFN" for kind in type(cell).__mro__)


def _checked_patterns(exclude: Iterable[str]) -> tuple[str, ...]:
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"exclude must be patterns of parameter names, as strings, got {shown(pattern)}"
            )
    return patterns


# ---- Into an optimizer ----


class _ThenScale(Centralization):
    """Replaces ``scale_grad`` in an optimizer that never calls a centralization."""

    def __init__(self, output_axes: Sequence[int], factor: float) -> None:
        super().__init__(output_axes)
        self.is_one = factor == 1.0
        self.factor = Tensor(factor, ms.float32)

    def construct(self, gradients: tuple[Any, ...]) -> Any:
        gradients = each(_centralize_one, self.output_axes, gradients)
        if self.is_one:
            return gradients
        return each(self._scaled, gradients)

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient * ops.cast(self.factor, gradient.dtype)


class _InUpdate(Centralization):
    """Replaces ``hyper_map`` in an optimizer whose whole update is one map over columns.

    ``place`` is the column of the gradients, counted from the end.
    """

    def __init__(self, output_axes: Sequence[int], place: int) -> None:
        super().__init__(output_axes)
        self.place = place

    def construct(self, function: Any, *columns: Any) -> Any:
        place = len(columns) + self.place
        centralized = each(_centralize_one, self.output_axes, columns[place])
        return each(function, *columns[:place], centralized, *columns[place + 1 :])


# Which column of an optimizer's update has the gradients, counted from the end.
_GRADIENT_COLUMN: Mapping[Any, int] = {nn.AdamWeightDecay: -3, nn.AdaFactor: -6}
_HOOK, _SCALING, _MAP = "gradients_centralization", "scale_grad", "hyper_map"
_NOTE = "boost_centralized"


def install_centralization(optimizer: nn.Optimizer, axes: Sequence[int]) -> None:
    """Make an optimizer that has not been used yet centralize gradients.

    Its class does not change. In this one object, the rule replaces a method that the update calls
    at the right moment. Under LARS, give the optimizer that LARS wraps. ``axes`` are as for
    :class:`Centralization`.

    Raises:
        ValueError: if the update of this class calls no such method.
    """
    place = place_of_rule(optimizer)
    # An attribute, not a child: it has no parameters, and the class has a method of that name.
    if place == _HOOK:
        vars(optimizer)[place] = Centralization(axes)
    elif place == _SCALING:
        vars(optimizer)[place] = _ThenScale(axes, float(optimizer.reciprocal_scale))
    elif place == _MAP:
        vars(optimizer)[place] = _InUpdate(axes, _column(optimizer))
    else:
        raise ValueError(
            f"{type(optimizer).__name__} has no place for gradient centralization: call "
            "self.gradients_centralization(gradients) in its construct, after decay_weight and "
            "before scale_grad"
        )
    optimizer.grad_centralization_flags = tuple(axis != UNTOUCHED for axis in axes)
    chosen = zip(optimizer.parameters, axes)
    vars(optimizer)[_NOTE] = {id(one): axis for one, axis in chosen if axis != UNTOUCHED}


def place_of_rule(optimizer: nn.Optimizer) -> str:
    """Return the name of the method that the rule can replace; empty if there is none.

    Under LARS or FreezeOpt, give the optimizer inside.
    """
    construct = inspect.unwrap(type(optimizer).construct)
    # Only attributes: MindCV's AdamW and Lion call a function of the name ``scale_grad``.
    loads = ("LOAD_ATTR", "LOAD_METHOD")
    names = {step.argval for step in dis.get_instructions(construct) if step.opname in loads}
    if _HOOK in names and not getattr(optimizer, "use_offload", False):
        return _HOOK
    if _SCALING in names:
        return _SCALING
    return _MAP if _MAP in names and _column(optimizer) else ""


def _column(optimizer: nn.Optimizer) -> int:
    """Return the gradients' column in the update, counted from the end; 0 if it is unknown."""
    update = inspect.unwrap(type(optimizer).construct)
    places = _GRADIENT_COLUMN.items()
    return next((one for kind, one in places if update is inspect.unwrap(kind.construct)), 0)


def installed_axes(optimizer: nn.Optimizer) -> dict[int, int]:
    """Return the parameters that an optimizer centralizes by this rule: ``id`` -> output axis."""
    return dict(vars(optimizer).get(_NOTE, {}))
