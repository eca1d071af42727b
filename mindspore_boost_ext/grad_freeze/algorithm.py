"""The switch ``grad_freeze``: a variant of the step for each group of weights."""

from __future__ import annotations

import functools
from typing import Any

from mindspore import nn

from mindspore_boost_ext.algorithm import Algorithm, Build, StepCell
from mindspore_boost_ext.grad_freeze.adaptive import AdaptiveFreezeOpt
from mindspore_boost_ext.grad_freeze.freezing import GradientFreeze, ScheduledSteps, frozen_cells
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt
from mindspore_boost_ext.report import APPLIED, SKIPPED, NoEffectWarning, Row, warn
from mindspore_boost_ext.runtime.eval_copy import EvalCopy
from mindspore_boost_ext.stages.choice import StepChoice


class FreezeAlgorithm(Algorithm):
    """Freezing by a schedule of groups."""

    switch = "grad_freeze"
    needs_nn_optimizer = True

    def build(self, build: Build) -> None:
        """Wrap the optimizer in groups and a schedule, unless it is a ``FreezeOpt`` already."""
        if isinstance(build.optimizer, FreezeOpt):
            self.remember_built(build)
            return
        settings = dict(vars(build.config.grad_freeze))
        del settings["eval_frozen"]  # only the step uses it
        freezing = GradientFreeze(**settings)
        build.network, build.optimizer = freezing.freeze_generate(build.network, build.optimizer)
        self.remember_built(build)

    def join(self, step: StepCell) -> None:
        """Make a step for each group, among which the schedule chooses."""
        if not isinstance(step.optimizer, FreezeOpt):
            self.report_replaced(step)
            return
        if step.moves_schedule():
            raise ValueError(
                f"{type(step).__name__} sets step, but the optimizer of each group advances it: "
                "call super().gradient_freeze_process(*inputs)"
            )
        _warn_of_own_construct(step.optimizer)
        step.freeze = True
        step.choose_first(self._choice)
        status, reason = SKIPPED, "every update of the schedule trains everything"
        if step.optimizer.ever_freezes():
            status, reason = APPLIED, f"freezes {step.optimizer.most_frozen()}"
        report = step.report()
        asked_by = report[self.switch].asked_by
        asked_by = "FreezeOpt" if asked_by == "-" else asked_by
        report.put(Row(self.switch, asked_by, status, reason, step.optimizer.counts()))
        if not step.reaches("gradient_freeze_process", "choice_part", "freeze_nets"):
            step.leave_out(self.switch, self.switch, "gradient_freeze_process")

    def _choice(self, step: StepCell) -> StepChoice:
        """Return the steps of the groups; equal groups share one."""
        make = functools.partial(self._of_group, step)
        step.freeze_nets = step.optimizer.steps_of_groups(make)
        return ScheduledSteps(step.freeze_nets, step.optimizer)

    @staticmethod
    def _of_group(step: StepCell, optimizer: nn.Cell, positions: tuple[int, ...]) -> nn.Cell:
        variant = step.restricted(optimizer, positions)
        variant.freeze = False
        if step.auto_boost.config.grad_freeze.eval_frozen:
            trained = {id(parameter) for parameter in step.optimizer.parameters}
            others = [one for one in step.network.trainable_params() if id(one) not in trained]
            frozen = frozen_cells(step.network, [*variant.weights, *others])
            # No copies of layers that capture. They act alike in training and evaluation.
            kept = () if step.captures_part is None else step.captures_part.layers
            copy = EvalCopy(step.network, frozen, kept)
            copy.network.set_grad()
            variant.network = copy.network
            # Python calls the variant; of a step whose subclass chooses in its graph, the step.
            chooses_in_graph = step.overridden("construct", "gradient_freeze_process")
            for one in (variant, step) if chooses_in_graph else (variant,):
                one.surrounding_part = functools.partial(copy.followed, one.surrounding_part)
        return variant

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse parts that run the network again where some of it is in evaluation mode."""
        rests = step.freeze and step.auto_boost.config.grad_freeze.eval_frozen
        if rests and step.update_part.takes_inputs:
            raise ValueError(
                "grad_freeze.eval_frozen must be false where an algorithm runs the network again "
                "(takes_inputs): it would run the layers that are frozen in training mode"
            )

    def observations(self, step: StepCell) -> dict[str, Any]:
        """Return the present group if the schedule is adaptive."""
        optimizer = step.optimizer
        if not isinstance(optimizer, AdaptiveFreezeOpt):
            return {}
        return {"grad_freeze_group": optimizer.present_group(int(optimizer.position.asnumpy()))}

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn when the training ends before the schedule freezes anything."""
        if step.freeze and epochs > 0:
            step.optimizer.expect_updates(step.updates_in(epochs * steps))


def _warn_of_own_construct(optimizer: FreezeOpt) -> None:
    """Warn of an update that no variant runs: each runs the optimizer that is wrapped."""
    kind = type(optimizer)
    if kind.construct is not FreezeOpt.construct:
        warn(
            f"construct of {kind.__name__} has no effect: the step of each group calls the "
            "optimizer that it wraps, for the group's parameters: put this code into the construct "
            "of that optimizer",
            NoEffectWarning,
        )
