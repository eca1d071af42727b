"""The loss scales of groups in the step: which group overflowed, and the scale of each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import each, entry
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.stages.gradients import filled_like, multiplied
from mindspore_boost_ext.stages.loss_scale import LARGEST_WITH_FACTORS, OneScale
from mindspore_boost_ext.stages.overflow import FiniteDetector, OverflowDetector


class GroupedScale(OneScale):
    """A loss scale for each group of layers, which a ``GroupLossScaleManager`` has and sets.

    ``weights`` are those of the step, ``layers`` the weight of each layer that captures.
    """

    can_be_set = False  # by one number

    def __init__(
        self,
        manager: nn.Cell,
        detector: OverflowDetector,
        weights: Sequence[Parameter],
        layers: Sequence[Parameter] = (),
    ) -> None:
        if not isinstance(detector, FiniteDetector):
            raise NotImplementedError(
                "loss scales by groups need a device that keeps inf and nan, but overflow is read "
                f"from a register here ({detector.why}): use one dynamic loss scale"
            )
        super().__init__(manager, detector)
        groups = manager.lock_groups(weights)
        self.extra = (manager.probe,)
        if layers:
            manager.limit_scales(LARGEST_WITH_FACTORS)
        self.markers_complete = state("loss_scale_group.markers_complete", True, np.bool_)
        group_of = {id(one): group for one, group in zip(weights, groups)}
        self.group_of_layer = tuple(group_of[id(layer)] for layer in layers)
        halves = any(weight.dtype in (ms.float16, ms.bfloat16) for weight in weights)
        self.may_grow = manager.minimum < 1 and halves  # gradients, when they are divided
        self._divide(groups)

    def _parameter(self, scale_sense: Any) -> Parameter:
        return scale_sense.scales

    def _divide(self, groups: Sequence[int]) -> None:
        """Keep the group of each weight, counted from 0."""
        self.group_of_weight = tuple(groups)
        self.places_of_group = tuple(
            tuple(place for place, group in enumerate(groups) if group == one)
            for one in range(self.manager.loss_scale_number)
        )
        self.has_weights = Tensor([len(places) > 0 for places in self.places_of_group])

    def restricted(self, positions: tuple[int, ...]) -> GroupedScale:
        """Return this part for the weights at some positions."""
        part: GroupedScale = _compat.shallow_copy(self)
        part._divide([self.group_of_weight[place] for place in positions])
        return part

    def start(self, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a status that is not used, the gradient of the loss, and the scales."""
        scales = self.scale_sense[1:-1] + 0.0  # a copy, as the Parameter changes later
        return loss, filled_like(loss, 1.0), scales

    def divided(self, gradients: tuple[Any, ...], scale: Tensor) -> tuple[Any, ...]:
        """Return gradients unchanged: overflow is looked for while they carry the scale."""
        return gradients

    def of_layers(self, scale: Tensor) -> Any:
        """Return, for each layer that captures, the scale that its output gradients carry."""
        return each(ops.partial(entry, ops.unstack(scale)), self.group_of_layer)

    def finish(
        self, status: Tensor, scale: Tensor, gradients: tuple[Any, ...], extra: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Tensor]:
        """Find the groups that overflowed, set the next scales, and divide the gradients.

        An overflow counts if it reaches the gradient of a weight that this step trains. If it
        trains no weight of a group, the group's scale does not grow.
        """
        marked = extra[0][1:-1] > 0
        own = ops.reshape(self._own_overflows(gradients), (-1, 1))
        missing = ops.reshape(ops.logical_not(marked[:, 3]), (-1, 1))
        # Reduced gradients bring the overflows of other ranks: with common flags all blame alike.
        flags = self.detector.agree(ops.concat((marked, own, missing), 1))
        own = flags[:, 4]
        # In GRAPH_MODE markers also see branches in which no weight is trained now.
        blamed = ops.logical_and(self.manager.blamed_groups(flags[:, :3], own), own.any())
        entered = ops.logical_and(flags[:, 3], self.has_weights)
        # Without a marker, a group's gradients do not carry its scale: the step must not update.
        complete = ops.logical_not(ops.logical_and(flags[:, 5], self.has_weights).any())
        inverses = each(ops.partial(entry, ops.unstack(1.0 / scale)), self.group_of_weight)
        result = each(multiplied, inverses, gradients)
        skip = ops.logical_or(blamed.any(), ops.logical_not(complete))
        if self.may_grow:
            skip = ops.logical_or(skip, ops.reshape(self.detector.any_non_finite(result), ()))
        # If no weight of a group is trained, its scale shrinks at an overflow, but does not grow.
        skip = ops.depend(skip, self.manager.update_scales(blamed, ops.logical_or(entered, blamed)))
        return result, ops.depend(skip, ops.assign(self.markers_complete, complete))

    def _own_overflows(self, gradients: tuple[Any, ...]) -> Tensor:
        """Return bool [n]: whether a gradient of the group's own weights is not finite."""
        found = ()
        for places in self.places_of_group:
            own = each(ops.partial(entry, gradients), places)
            found += (ops.reshape(self.detector.any_non_finite(own), ()),)  # type: ignore[assignment]
        return ops.stack(found)

    def after_first_step(self) -> None:
        """Refuse a network in which a marker is missing."""
        if not bool(self.markers_complete.asnumpy()):
            last = self.manager.loss_scale_number
            raise ValueError(
                "GroupLossScaleManager: no marker leads into some group, so the gradients do not "
                "carry its scale (no weight was changed): call manager(x, i, i + 1) wherever the "
                f"network passes from group i to i + 1, for i = 0 to {last}. In PYNATIVE_MODE, "
                "recompute() of a Cell hides the markers in it: keep them outside"
            )

    def observations(self) -> dict[str, float]:
        """Return the next scale of each group."""
        scales = self.manager.group_scales()
        return {f"loss_scale.{number}": scale for number, scale in enumerate(scales, 1)}
