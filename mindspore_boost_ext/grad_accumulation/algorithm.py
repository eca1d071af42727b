"""The switch ``grad_accumulation``: one update, and one reduction over ranks, for each window."""

from __future__ import annotations

from mindspore_boost_ext.algorithm import Algorithm, StepCell
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.grad_accumulation.window import GradientAccumulation
from mindspore_boost_ext.stages.gradients import check_dense

_WEIGHTING = "grad_accumulation.weighting"


class AccumulationAlgorithm(Algorithm):
    """Accumulation over micro-batches."""

    switch = "grad_accumulation"

    def join(self, step: StepCell) -> None:
        """Set up the window."""
        settings = step.auto_boost.config.grad_accumulation
        step.max_accumulation_step = settings.grad_accumulation_step
        if not self.is_on(step) or settings.grad_accumulation_step == 1:
            return
        if not step.reaches("gradient_accumulation_process", "close_window", "window_part"):
            step.leave_out(self.switch, self.switch, "gradient_accumulation_process")
        check_dense(step.network, self.switch)
        step.use_grad_accumulation = True
        step.window_part = GradientAccumulation(
            settings.grad_accumulation_step, step.optimizer, weighting=settings.weighting
        )
        step.window_part.drops_on_overflow = settings.on_overflow == "drop_window"

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse inputs without samples to count, and a window filled with the other weighting."""
        if step.window_part is None or not step.use_grad_accumulation:
            return
        step.check_sums("gradient_accumulation_process")
        if len(inputs) > 0:
            if step.window_part.by_samples and not getattr(inputs[0], "shape", ()):
                raise ValueError(
                    "grad_accumulation.weighting='samples' counts samples along the first axis of "
                    f"the first input, got {shown(inputs[0])}: make samples the first axis, or "
                    "set weighting 'equal'"
                )
            now = step.auto_boost.settings_in_force()
            if step.restored_settings.get(_WEIGHTING) != now.get(_WEIGHTING):
                step.window_part.check_weighting(step.window_part.weight_of(*inputs))

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn when an epoch, or the whole training, ends before a window is full."""
        if epochs > 0 and step.window_part is not None and step.use_grad_accumulation:
            step.window_part.expect_training(epochs, steps)
