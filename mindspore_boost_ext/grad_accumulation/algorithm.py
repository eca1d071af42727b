"""The switch ``grad_accumulation``: one update, and one reduction over ranks, for each window."""

from __future__ import annotations

from typing import Any

from mindspore_boost_ext.algorithm import Algorithm, StepCell
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.grad_accumulation.labels import (
    LabelCount,
    counts_by_labels,
    divides_by_labels,
    other_divisor,
)
from mindspore_boost_ext.grad_accumulation.window import LABELS, SAMPLES, GradientAccumulation
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.stages.gradients import check_dense
from mindspore_boost_ext.stages.trial import batch_behind

_WEIGHTING = "grad_accumulation.weighting"


class AccumulationAlgorithm(Algorithm):
    """Accumulation over micro-batches."""

    switch = "grad_accumulation"

    def join(self, step: StepCell) -> None:
        """Set up the window."""
        settings = step.auto_boost.config.grad_accumulation
        if not self.is_on(step) or settings.grad_accumulation_step == 1:
            return
        step.max_accumulation_step = settings.grad_accumulation_step
        if not step.reaches("gradient_accumulation_process", "close_window", "window_part"):
            step.leave_out(self.switch, self.switch, "gradient_accumulation_process")
        check_dense(step.network, self.switch)
        step.use_grad_accumulation = True
        step.window_part = GradientAccumulation(
            settings.grad_accumulation_step, step.optimizer, weighting=settings.weighting
        )
        step.window_part.drops_on_overflow = settings.on_overflow == "drop_window"
        loss: Any = step.auto_boost.loss_fn
        if settings.weighting != LABELS:
            _warn(other_divisor(loss, settings.grad_accumulation_step))
        elif divides_by_labels(loss):
            step.window_part.label_count = LabelCount(loss)
        else:
            kind = "None" if loss is None else f"{type(loss).__module__}.{type(loss).__name__}"
            raise ValueError(
                "grad_accumulation.weighting='labels' counts the labels by which the loss_fn "
                "divides, an nn.CrossEntropyLoss or nn.NLLLoss, no subclass, with reduction "
                f"'mean', got {kind}: give such a loss, or set another weighting"
            )

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse inputs without samples to count, and a window filled with another weighting."""
        if step.window_part is None or not step.use_grad_accumulation:
            return
        step.check_sums("gradient_accumulation_process")
        window = step.window_part
        if inputs:
            inputs = batch_behind(step.batch_part, *inputs)
            _check_inputs(step, inputs)
        saved = step.restored_settings.get(_WEIGHTING, "").strip("'")  # repr of the name
        # In sink mode the batch is not seen: it is taken to have several samples.
        if saved != window.weighting and (inputs or saved) and window.micro_steps() > 0:
            window.check_weighting(float(window.weight_of(*inputs)) if inputs else 2.0, saved)

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn when an epoch, or the whole training, ends before a window is full."""
        if epochs > 0 and step.window_part is not None and step.use_grad_accumulation:
            step.window_part.expect_training(epochs, steps)


def _check_inputs(step: StepCell, inputs: tuple[object, ...]) -> None:
    """Refuse inputs without samples to count; warn of a loss that does not add up."""
    weighting = step.window_part.weighting
    if weighting == SAMPLES and not getattr(inputs[0], "shape", ()):
        raise ValueError(
            "grad_accumulation.weighting='samples' counts samples along the first axis of "
            f"the first input, got {shown(inputs[0])}: make samples the first axis, or "
            "set weighting 'equal'"
        )
    if weighting != LABELS:
        _warn(counts_by_labels(step.auto_boost.loss_fn, inputs[-1]))


def _warn(reason: str) -> None:
    if reason:
        warn(f"gradients of micro-batches do not add up to those of the big batch: {reason}")
