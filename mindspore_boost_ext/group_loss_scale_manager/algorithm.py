"""The switch ``loss_scale_group``: it needs a ``GroupLossScaleManager``, and vice versa."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, StepCell
from mindspore_boost_ext.base.cells import layers_of
from mindspore_boost_ext.base.order import in_order_of_construct, is_own
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.report import NoEffectWarning, warn
from mindspore_boost_ext.stages.gradients import check_dense

if TYPE_CHECKING:
    from mindspore_boost_ext.boost import AutoBoost

_NAMED = 3  # weights in a warning


class GroupedScaleAlgorithm(Algorithm):
    """Loss scales of groups; the manager itself makes the part of the step."""

    switch = "loss_scale_group"

    def check_loss_scale(self, manager: object, boost: AutoBoost) -> None:
        """Refuse the switch without a manager of groups, and the other way round."""
        grouped = isinstance(manager, GroupLossScaleManager)
        if not grouped:
            boost.leave_out(self.switch, "the loss_scale_manager is not a GroupLossScaleManager")
        wanted = boost.boost_config[self.switch]
        if wanted and not grouped:
            raise ValueError(
                "boost.loss_scale_group is on, so loss_scale_manager must be a "
                f"GroupLossScaleManager, got {shown(manager)}"
            )
        if grouped and not wanted:
            remedy = "set it to True, in mode 'manual'"
            for decision in boost.plan():
                allowed = boost.config.section(decision.algorithm).goes_with
                if decision.wanted and allowed is not None and self.switch not in allowed:
                    remedy = f"{decision.algorithm} excludes it, so give another manager"
            raise ValueError(
                "loss_scale_manager is a GroupLossScaleManager, but boost.loss_scale_group is off: "
                f"{remedy}"
            )

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse a network whose gradients would carry wrong scales; warn where they may."""
        own = getattr(step, "loss_scaling_manager", None)
        for other in layers_of(step.network, (GroupLossScaleManager,)):
            if other is not own:
                _check_other(other, step.weights, isinstance(own, GroupLossScaleManager))
        if isinstance(own, GroupLossScaleManager):
            if ms.get_context("mode") == ms.GRAPH_MODE:
                check_dense(step.network, f"{self.switch} in GRAPH_MODE")
            if len(own.loss_scale_groups) > 1:
                _warn_of_shared_weights(step)


def _check_other(
    manager: GroupLossScaleManager, weights: Iterable[Parameter], has_own: bool
) -> None:
    """Refuse, or warn of, markers of a manager that the step does not use."""
    held = {id(one) for group in manager.loss_scale_groups for one in group}
    marks = [weight.name for weight in weights if id(weight) in held]
    words = "the network has markers of a GroupLossScaleManager that is not its loss_scale_manager"
    if not manager.in_use:
        warn(f"{words}: they have no effect", NoEffectWarning)
    elif marks:
        raise ValueError(
            f"{words}, but was given to another step: the gradient of {marks[0]} would carry a "
            "scale that nothing divides out. Give that manager, or make the network anew"
        )
    elif has_own and ms.get_context("mode") == ms.GRAPH_MODE:
        raise ValueError(
            f"{words}, but was given to another step, and a graph holds one manager: use "
            "PYNATIVE_MODE, or one manager for all networks"
        )


def _warn_of_shared_weights(step: StepCell) -> None:
    """Warn of weights whose uses may stand in different groups, of which each has one."""
    if found := _in_several_cells(step.network, step.weights):
        named = [f"{weight!r} ({', '.join(users)})" for weight, users in found.items()]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        listed = ", ".join(named[:_NAMED])
        warn(
            f"loss_scale_group: several Cells use the weight {listed}{more}. If these "
            "stand in different groups, its gradient is wrong, as it is divided by one scale: "
            "let one group hold all of them, or use one dynamic loss scale"
        )


def _in_several_cells(network: nn.Cell, weights: Iterable[Parameter]) -> dict[str, list[str]]:
    """Return weights that several Cells hold or read in construct, and the names of these Cells."""
    users: dict[int, list[str]] = {id(weight): [] for weight in weights}
    for name, cell in network.cells_and_names():
        held = [one for key, one in _compat.own_parameters(cell).items() if "." not in key]
        # MindSpore's own code reads weights in the place of a call, as of a projection.
        uses = () if is_own(type(cell).__module__) else in_order_of_construct(cell)
        read = [use for use in uses if isinstance(use, Parameter)]
        for key in {id(one) for one in (*held, *read)} & set(users):
            users[key].append(name or type(cell).__name__)
    found = {weight.name: users[id(weight)] for weight in weights}
    return {name: several for name, several in found.items() if len(several) > 1}
