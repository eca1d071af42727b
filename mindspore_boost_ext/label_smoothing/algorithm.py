"""The switch ``label_smoothing``: the gradient is that of the loss of smoothed labels."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import (
    Algorithm,
    Build,
    StepCell,
    fewest_updates,
    seen_in_first_batch,
)
from mindspore_boost_ext.base.cells import exchange, has_replaced_construct, layers_of
from mindspore_boost_ext.report import APPLIED, SKIPPED
from mindspore_boost_ext.runtime.ranks import check_equal_on_ranks
from mindspore_boost_ext.stages.labels import next_tokens, no_class_a_sample
from mindspore_boost_ext.stages.trial import batch_behind

SKIP, SHORTER = "skip", "shorter"


class LabelSmoothingAlgorithm(Algorithm):
    """Smoothed labels."""

    switch = "label_smoothing"
    network: nn.Cell | None = None  # the user's, perhaps with its loss

    def build(self, build: Build) -> None:
        """Keep the network: losses that it holds are not smoothed."""
        self.network = build.network

    def join(self, step: StepCell) -> None:
        """Put a smoothed loss between the user's network and the user's loss."""
        if not self.is_on(step):
            return
        reason = self._idle(step)
        if reason:
            self._unfit(step, reason)
            return
        # A loss that the network holds stays: the user may use it in other Models or without one.
        loss: Any = step.auto_boost.loss_fn
        share = step.auto_boost.config.label_smoothing.smoothing
        if _is_known(loss):
            cells = [] if self.network is None else self.network.cells_and_names()
            own = {id(cell) for _, cell in cells if not isinstance(cell, nn.WithLossCell)}
            exchange(step.network, {id(loss): SmoothedLoss(loss, share)}, spared=own)
        if layers_of(step.network, (SmoothedLoss,)):
            step.report().update(self.switch, APPLIED, f"{share:g} of each label")
        else:
            self._unfit(
                step,
                "needs an nn.SoftmaxCrossEntropyWithLogits, or an nn.CrossEntropyLoss without "
                "its own label_smoothing and without hooks, given as the loss_fn, and not held by "
                "the network",
            )

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse or skip labels that are not one class per sample, as those of a language model."""
        losses = layers_of(step.network, (SmoothedLoss,)) if self.is_on(step) else []
        if not (losses and inputs):
            return
        reason, seen = self._idle(step), seen_in_first_batch(step)
        if not reason:
            inputs = batch_behind(step.batch_part, *inputs)
            reason = seen.get(self.switch, no_class_a_sample(*inputs) or next_tokens(*inputs))
            seen[self.switch] = reason
        if step.reducer_flag:
            found = {"one class per sample": str(not reason)}
            remedy = f"Give every rank the same kind of batches, or leave {self.switch} out."
            check_equal_on_ranks(found, "the first batch", remedy)
        if reason:
            self._unfit(step, reason)
            losses[0].share = 0.0

    def _idle(self, step: StepCell) -> str:
        """Return why the training needs no smoothing; empty if it is wanted."""
        when = step.auto_boost.config.label_smoothing.when
        if when != SHORTER or fewest_updates(step) is not None:
            return ""
        return (
            "is for a shortened training (when: 'shorter'; 'always' is for any), but this training "
            "is not shortened"
        )

    def _unfit(self, step: StepCell, reason: str) -> None:
        if step.auto_boost.config.label_smoothing.if_unfit != SKIP:
            remedy = "leave label_smoothing out, or set if_unfit to 'skip'"
            raise ValueError(f"label_smoothing {reason}: {remedy}")
        step.report().update(self.switch, SKIPPED, reason)


def _is_known(loss: nn.Cell) -> bool:
    """Return whether a loss is one of MindSpore's and no more, and not smoothed already."""
    if type(loss) not in (nn.CrossEntropyLoss, nn.SoftmaxCrossEntropyWithLogits):
        return False
    smooths = getattr(loss, "label_smoothing", 0.0)
    return not (smooths or has_replaced_construct(loss) or _compat.has_hooks(loss))


class _WithGradientOf(nn.Cell):
    """Returns its first input, with the gradient of the second; also where both are infinite."""

    def construct(self, value: Tensor, other: Tensor) -> Tensor:
        return value

    def bprop(self, value: Tensor, other: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return ops.zeros_like(value), dout


class SmoothedLoss(nn.Cell):
    r"""A cross-entropy with the gradient of smoothed labels; its value stays that of the labels.

    Each of the :math:`K` classes gets :math:`\epsilon / K`, and the right one :math:`1 - \epsilon`
    more (Szegedy et al., Rethinking the Inception Architecture, 2016). In evaluation, it is the
    plain loss.

    Args:
        plain (Cell): an ``nn.SoftmaxCrossEntropyWithLogits`` or an ``nn.CrossEntropyLoss``.
        share (float): :math:`\epsilon`, in [0, 1); 0 for none. The first step fixes it.

    Inputs:
        - **logits** (Tensor) - as ``plain`` takes them.
        - **labels** (Tensor) - as ``plain`` takes them.

    Outputs:
        Tensor, the loss of ``plain``.
    """

    def __init__(self, plain: nn.LossBase, share: float) -> None:
        super().__init__(auto_prefix=False)
        self.plain, self.share = plain, share
        self.of_shares = None
        if isinstance(plain, nn.CrossEntropyLoss):  # may ignore labels, or weight classes
            self.of_shares = nn.CrossEntropyLoss(
                plain.weight, plain.ignore_index, plain.reduction, share
            )
        self.with_gradient_of = _WithGradientOf()
        self.in_float32 = bool(plain.get_flags().get("fp32"))

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the labels."""
        loss = self.plain(logits, labels)
        if not self.training or self.share == 0.0:
            return loss
        return self.with_gradient_of(loss, self.smoothed(loss, logits, labels))

    def smoothed(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of smoothed labels; in float32 if ``plain.to_float`` asks for it."""
        if self.in_float32:
            logits = ops.cast(logits, ms.float32)
        if self.of_shares is not None:
            return self.of_shares(logits, labels)
        shares = ops.log_softmax(logits, -1)
        shares = ops.masked_fill(shares, shares == -math.inf, 0.0)  # a class that is masked out
        of_all_classes = -shares.mean(-1)
        return (1 - self.share) * loss + self.share * self.plain.get_loss(of_all_classes)
