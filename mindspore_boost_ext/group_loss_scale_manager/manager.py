"""GroupLossScaleManager: one dynamic loss scale for each group of layers."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.group_loss_scale_manager.marker import Marker, marker_constants
from mindspore_boost_ext.group_loss_scale_manager.scale import GroupedScale
from mindspore_boost_ext.report import NoEffectWarning, warn
from mindspore_boost_ext.stages.overflow import OverflowDetector

GROWTH_FACTOR = 2 ** (1 / 1000)
SHRINK_FACTOR = 2 ** (-1 / 2)
MAXIMUM = 2.0**100


@_compat.not_rewritten
class GroupLossScaleManager(nn.Cell):
    r"""A loss-scale manager with one scale for each group, and the marker between groups.

    Source: the class of this name in ``mindspore.boost``; here, scales also shrink.

    Args:
        init_loss_scale (Union[Number, list[Number]]): first scale of all groups, or one for each.
        loss_scale_groups (list[list[Parameter]]): the groups, from the input of the network to its
            output, in any order within a group. May be empty and set later through the attribute of
            that name, before the training step is built.
        growth_factor (float): factor on the scale of a group without overflow, at least 1.
            Default: 2 ** (1 / 1000).
        shrink_factor (float): factor on the scale of a group with overflow, in (0, 1).
            Default: 2 ** (-1 / 2).
        minimum (float): lower bound of every scale, above 0. Default: 1.0.
        maximum (float): upper bound of every scale. Default: 2 ** 100.

    Inputs:
        - **x** (Tensor) - what passes from one group to the next, any shape and float dtype.
        - **layer1** (int) - number of the group before the marker; 0 is the network's input.
        - **layer2** (int) - number of the group behind it; n + 1 is the network's output.

    Outputs:
        Tensor, ``x`` unchanged.

    Raises:
        TypeError: if a scale or a factor is not a number, or NaN, or a group holds something else
            than Parameters.
        ValueError: if a number is out of range, a group is empty, or a parameter is in two groups.

    Examples:
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import GroupLossScaleManager
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 2))
        >>> groups = [net[0].trainable_params(), net[1].trainable_params()]
        >>> manager = GroupLossScaleManager(4096, groups)
        >>> manager.group_scales()
        [4096.0, 4096.0]
    """

    def __init__(
        self,
        init_loss_scale: float | Sequence[float],
        loss_scale_groups: Sequence[Sequence[Parameter]],
        *,
        growth_factor: float = GROWTH_FACTOR,
        shrink_factor: float = SHRINK_FACTOR,
        minimum: float = 1.0,
        maximum: float = MAXIMUM,
    ) -> None:
        super().__init__(auto_prefix=False)
        self._init_loss_scale = init_loss_scale
        self.growth_factor = _number("growth_factor", growth_factor)
        _check("growth_factor", growth_factor, self.growth_factor >= 1, ">= 1")
        self.shrink_factor = _number("shrink_factor", shrink_factor)
        _check("shrink_factor", shrink_factor, 0 < self.shrink_factor < 1, "in (0, 1)")
        self.minimum = _number("minimum", minimum)
        _check("minimum", minimum, self.minimum > 0, "> 0")
        self.maximum = _number("maximum", maximum)
        within = self.minimum <= self.maximum <= MAXIMUM
        _check("maximum", maximum, within, f"in [minimum, {MAXIMUM:g}]")
        self.marker = Marker()
        self.in_use = False
        self._groups: list[list[Parameter]] = []
        self.loss_scale_groups = loss_scale_groups

    @property
    def loss_scale_groups(self) -> list[list[Parameter]]:
        """The groups of parameters, from the network's input to its output."""
        return self._groups

    @loss_scale_groups.setter
    def loss_scale_groups(self, groups: Sequence[Sequence[Parameter]]) -> None:
        if self.in_use:
            raise ValueError(
                "loss_scale_groups cannot change: a training step uses them already. Make a new "
                "GroupLossScaleManager for a new Model"
            )
        checked = _checked_groups(groups)
        values = self._row("init_loss_scale", _first_scales(self._init_loss_scale, len(checked)))
        self._groups = checked
        # Plain attributes, not Parameters of the Cell. Else the network that holds the markers
        # would count the scales among its parameters, and the probe among those to train. The
        # training step owns both.
        own = self.__dict__
        own["scales"] = state("loss_scale_group.scales", values)
        # Its "gradient" carries the markers' records of overflow out of the backward pass.
        probe = np.zeros((len(values), 4))
        own["probe"] = state("loss_scale_group.probe", probe, requires_grad=True)
        own["picks"], own["rows"] = marker_constants(len(values))

    def _row(self, name: str, scales: Sequence[float]) -> np.ndarray:
        """Check the scales; return them between 1 for the input and 1 for the output: [n + 2]."""
        for scale in scales:
            within = self.minimum <= scale <= self.maximum
            _check(name, scale, within, f"in [{self.minimum:g}, {self.maximum:g}]")
        return np.array([1.0, *scales, 1.0], np.float32)

    def add_flags_recursive(self, **flags: object) -> GroupLossScaleManager:
        """Stay in float32 inside a network of lower precision, but return ``x`` in that precision.

        A manager cast with its network would have scales in float16, whose largest number is 65504.
        Without a precision of its own, it would take its caller's.
        """
        if "fp16" in flags:
            low = ms.float16 if flags["fp16"] else ms.bfloat16 if flags.get("bf16") else None
            self.marker.dtype = low
            flags.update(fp16=False, bf16=False, fp32=True)
        super().add_flags_recursive(**flags)
        return self

    def construct(self, x: Tensor, layer1: int, layer2: int) -> Tensor:
        """Mark the passage from group ``layer1`` to ``layer2``; nothing before :meth:`use`."""
        if self.in_use:
            _check_layers(layer1, layer2, len(self.picks))
            pick, rows = self.picks[layer1][layer2], self.rows[layer1][layer2]
            x = self.marker(x, self.scales, self.probe, pick, rows)
        return x if self.marker.dtype is None else ops.cast(x, self.marker.dtype)

    def group_scales(self) -> list[float]:
        """Return the present scale of each group."""
        return [float(scale) for scale in self.scales.asnumpy()[1:-1]]

    @property
    def loss_scale_number(self) -> int:
        """The number of groups."""
        return len(self._groups)

    @property
    def dynamic_loss_scale(self) -> tuple[Tensor, ...]:
        """The present scales, each of shape (): 1, those of the groups, 1."""
        return tuple(Tensor(scale) for scale in self.scales.asnumpy())

    def set_loss_scale_status(
        self, loss_scale_number: int, init_loss_scale: float | Sequence[float]
    ) -> None:
        """Set the scale of every group.

        Args:
            loss_scale_number (int): the number of groups.
            init_loss_scale (Union[Number, list[Number]]): one scale for all, or one for each.

        Raises:
            ValueError: if there is another number of groups, or a scale leaves its range.
        """
        count = self.loss_scale_number
        if loss_scale_number != count:
            raise ValueError(
                f"loss_scale_number must be {count}, the number of groups, got "
                f"{shown(loss_scale_number)}: to have others, set loss_scale_groups"
            )
        self._set(_first_scales(init_loss_scale, count))

    def update_loss_scale_status(self, layer: int, update_ratio: float | Tensor) -> Tensor:
        """Multiply the scale of one group by a number; return the new one, shape ().

        Args:
            layer (int): the group, from 0.
            update_ratio (Union[float, Tensor]): the number.

        Raises:
            ValueError: if there is no such group, or the new scale leaves its range.
        """
        scales = self.group_scales()
        _check("layer", layer, layer in range(len(scales)), f"in [0, {len(scales)})")
        scales[layer] *= _number("update_ratio", update_ratio)
        self._set(scales)
        return self.dynamic_loss_scale[layer + 1]

    def _set(self, scales: Sequence[float]) -> None:
        ops.assign(self.scales, Tensor(self._row("loss_scale", scales)))

    def get_loss_scale(self) -> float | Sequence[float]:
        """Return the first scale, as given."""
        return self._init_loss_scale

    def get_update_cell(self) -> GroupLossScaleManager:
        """Return the manager itself: it updates its scales inside the training step."""
        return self

    def get_drop_overflow_update(self) -> bool:
        """Return False: ms.Model need not update anything on the host after a step."""
        return False

    def lock_groups(self, parameters: Sequence[Parameter]) -> list[int]:
        """Lock the groups, and return the group of each parameter, from 0 on.

        Raises:
            ValueError: if a parameter to train is in no group, or a group's parameter is not
                trained.
        """
        group_of = {id(one): index for index, group in enumerate(self._groups) for one in group}
        for parameter in parameters:
            if id(parameter) not in group_of:
                raise ValueError(
                    f"loss_scale_groups: the parameter {parameter.name!r} is trained but in no "
                    "group: every trained parameter must be in exactly one"
                )
        trained = {id(parameter) for parameter in parameters}
        for parameter in itertools.chain(*self._groups):
            if id(parameter) not in trained:
                raise ValueError(
                    f"loss_scale_groups: the parameter {parameter.name!r} is in a group but "
                    "not among the optimizer's parameters: take it out of the group"
                )
        self.in_use = True
        return [group_of[id(parameter)] for parameter in parameters]

    def limit_scales(self, maximum: float) -> None:
        """Let no scale be larger, from now on."""
        self.maximum = min(self.maximum, maximum)
        self.scales.set_data(Tensor(np.minimum(self.scales.asnumpy(), np.float32(maximum))))

    def scale_of_step(
        self,
        detector: OverflowDetector,
        weights: Sequence[Parameter],
        layers: Sequence[Parameter] = (),
    ) -> GroupedScale:
        """Return the part of a step that works with these scales."""
        ours = GroupLossScaleManager.update_loss_scale_status
        if type(self).update_loss_scale_status is not ours:
            warn(
                f"update_loss_scale_status of {type(self).__name__} is not called: the step "
                "updates all scales together; limit them by minimum and maximum",
                NoEffectWarning,
            )
        return GroupedScale(self, detector, weights, layers)

    def blamed_groups(self, marked: Tensor, own: Tensor) -> Tensor:
        """Return which groups have overflowed by themselves.

        An overflow of the loss itself is blamed on the group that it enters.

        Args:
            marked: bool [n, 3], for each group whether it passed on a gradient that is not finite,
                whether one entered it, and whether that one was so before the ratio was applied.
            own: bool [n], whether a gradient of the group's own parameters is not finite.

        Returns:
            Tensor of bool [n].
        """
        handed_on, entered, before = ops.unstack(marked, 1)
        bad = ops.logical_or(ops.logical_or(handed_on, entered), own)
        return ops.logical_and(bad, ops.logical_not(before))

    def update_scales(self, blamed: Tensor, moving: Tensor) -> Tensor:
        """Shrink the scale of some groups, grow that of others; return all: float32 [n + 2].

        Args:
            blamed: bool [n], the groups that overflowed.
            moving: bool [n], the groups whose scale changes; it grows if they are not blamed.
        """
        factors = ops.where(blamed, Tensor(self.shrink_factor), Tensor(self.growth_factor))
        factors = ops.where(moving, factors, ops.ones_like(factors))
        scales = ops.clamp(self.scales[1:-1] * factors, self.minimum, self.maximum)
        ends = ops.ones((1,), ms.float32)
        return ops.assign(self.scales, ops.concat((ends, scales, ends)))


@ops.constexpr(check=False)
def _check_layers(layer1: int, layer2: int, count: int) -> None:
    for layer in (layer1, layer2):
        is_whole = isinstance(layer, numbers.Integral) and not isinstance(layer, bool)
        good = is_whole and 0 <= layer < count
        _check("layer1 and layer2", layer, good, f"ints in [0, {count})")


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.size == 1:
        value = value.asnumpy().item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise TypeError(
            f"GroupLossScaleManager: {name} must be a finite number, got {shown(value)}"
        )
    return float(value)


def _check(name: str, value: object, good: bool, rule: str) -> None:
    if not good:
        raise ValueError(f"GroupLossScaleManager: {name} must be {rule}, got {shown(value)}")


def _first_scales(init: Any, count: int) -> list[float]:
    if not isinstance(init, (list, tuple)):
        return [_number("init_loss_scale", init)] * count
    if count and len(init) != count:
        raise ValueError(
            f"GroupLossScaleManager: init_loss_scale must be one number, or one for each of the "
            f"{count} groups, got {len(init)} numbers"
        )
    return [_number("init_loss_scale", scale) for scale in init]


def _checked_groups(groups: Any) -> list[list[Parameter]]:
    try:
        listed = [list(group) for group in groups]
    except TypeError:
        raise TypeError(
            "loss_scale_groups must be a list of lists of Parameters, which may be empty at first, "
            f"got {shown(groups)}"
        ) from None
    seen: set[int] = set()
    for index, group in enumerate(listed, 1):
        if not group:
            raise ValueError(f"loss_scale_groups: group {index} is empty: leave it out")
        for parameter in group:
            if not isinstance(parameter, Parameter):
                raise TypeError(
                    f"loss_scale_groups: group {index} must hold Parameters, got {shown(parameter)}"
                )
            if id(parameter) in seen:
                raise ValueError(
                    f"loss_scale_groups: the parameter {parameter.name!r} is given twice: every "
                    "parameter must be in exactly one group"
                )
            seen.add(id(parameter))
    return listed
