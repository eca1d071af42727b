"""The switch ``loss_scale_group``: it needs a ``GroupLossScaleManager``, and vice versa."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager

if TYPE_CHECKING:
    from mindspore_boost_ext.boost import AutoBoost


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
            for one in boost.plan():
                allowed = boost.config.section(one.algorithm).goes_with
                if one.wanted and allowed is not None and self.switch not in allowed:
                    remedy = f"{one.algorithm} excludes it, so give another manager"
            raise ValueError(
                "loss_scale_manager is a GroupLossScaleManager, but boost.loss_scale_group is off: "
                f"{remedy}"
            )
