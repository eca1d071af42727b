"""The switch ``short_schedule``: compresses the learning-rate schedule into fewer updates."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, StepCell, seen_in_first_batch
from mindspore_boost_ext.base.arguments import class_name, innermost
from mindspore_boost_ext.base.cells import layers_of, leaves, tensors_within
from mindspore_boost_ext.base.learning_rate import read_learning_rate
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.config.rules import described, shown
from mindspore_boost_ext.report import APPLIED, SKIPPED, HeldWarning, NoEffectWarning, warn
from mindspore_boost_ext.runtime.ranks import check_equal_on_ranks
from mindspore_boost_ext.stages.labels import next_tokens, no_class_a_sample, rows_of_places
from mindspore_boost_ext.stages.parts import PartByPart, part_of, parts_of
from mindspore_boost_ext.stages.trial import batch_behind, mixes_samples, on_trial
from mindspore_boost_ext.stages.update import Update, UpdateAround

REFUSE, SKIP = "refuse", "skip"
# Their updates use the optimizer's step count for more than learning rates.
_COUNTING = (nn.Lamb, nn.ASGD, nn.Rprop)
_MOST_UPDATES = 2**30  # counted as int32
_FEWEST = 32  # least samples in a part of a recipe: with fewer, each takes longer


class ShortScheduleAlgorithm(Algorithm):
    """A shorter training."""

    switch = "short_schedule"
    settings: Any  # its section, known from `join` on

    def __init__(self) -> None:
        self.other_length = HeldWarning()

    def join(self, step: StepCell) -> None:
        """Let each update advance the optimizer's schedule by more than one step."""
        if not self.is_on(step):
            return
        self.settings, optimizer = step.auto_boost.config.short_schedule, innermost(step.optimizer)
        reason = _unfit(optimizer)
        if reason:
            if self.settings.if_unfit == REFUSE:
                raise ValueError(f"short_schedule {reason}: leave short_schedule out")
            step.report().update(self.switch, SKIPPED, reason)
            return
        step.updates_per_batch = self._parts(step)
        _check_rates(optimizer, self.settings.total_steps)
        step.update_part = FasterSchedule(
            step.update_part,
            optimizer.global_step,
            self._updates(step),
            self.settings.total_steps,
            step.updates_per_batch,
        )
        if self.settings.if_unfit != SKIP:
            self.other_length.release()
        if step.updates_per_batch > 1:
            step.choose_first(self._choice)
        self._show(step)

    def _parts(self, step: StepCell) -> int:
        """Return into how many parts batches can be cut."""
        reason, parts = "", int(self.settings.parts)
        if step.window_part is not None:
            reason = "makes several updates per batch, but a window makes one per several batches"
        elif not step.runs_our_construct():
            reason = f"cannot cut batches for {type(step).__name__}, which overrides construct"
        elif parts * self.settings.total_steps > _MOST_UPDATES:
            reason = "makes more updates than int32 can count"
        if reason and parts > 1 and self.settings.if_unfit == REFUSE:
            raise ValueError(f"short_schedule.parts={parts} {reason}: leave it out")
        return 1 if reason else parts

    @staticmethod
    def _choice(step: StepCell) -> PartByPart:
        """Return the step that runs on the parts of a batch one after the other."""
        everything = tuple(range(len(step.weights)))
        return PartByPart(step.restricted(step.optimizer, everything), step.updates_per_batch)

    def _updates(self, step: StepCell) -> int:
        return int(self.settings.batches(step.updates_per_batch)) * step.updates_per_batch

    def _show(self, step: StepCell, why_whole: str = "") -> None:
        total, parts, counts = self.settings.total_steps, step.updates_per_batch, {}
        length, updates = self.settings.batches(parts), self._updates(step)
        reason = f"the training ends after {length} of {total} updates"
        if parts < self.settings.parts and self.settings.whole_share is not None:
            reason += " (whole_share)"
        if parts > 1:
            reason = f"the training ends after {length} of {total} batches, {parts} updates each"
            counts = {"parts": parts}
        reason += why_whole
        step.report().update(self.switch, APPLIED, reason, {"updates": updates, **counts})

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Check the first axis; in a recipe, skip language models, leave small batches whole."""
        if not self._is_applied(step) or not inputs:
            return
        if not step.calls_update():
            step.leave_out(self.switch, self.switch)
        if self.settings.if_unfit == REFUSE:
            self._check_first_axis(step, *inputs)
            return
        reason, why_whole = self._seen(step, *inputs)
        if step.updates_per_batch > 1 and why_whole != "":
            self._leave_whole(step, why_whole or "")
        if step.reducer_flag and (self.settings.parts > 1 or self.settings.if_unfit == SKIP):
            found = {"updates per batch": str(step.updates_per_batch)}
            found["one class per sample"] = str(not reason)
            remedy = f"Give ranks the same size and kind of batches, or leave {self.switch} out."
            check_equal_on_ranks(found, "the first batch", remedy)
        if reason:
            for each in layers_of(step, (FasterSchedule,)):  # every variant of the step has one
                each.leave_alone()
            step.report().update(self.switch, SKIPPED, reason)
        else:
            self.other_length.release()

    def _seen(self, step: StepCell, *inputs: object) -> tuple[str, str | None]:
        """Return why the schedule stays, and why batches stay whole; a restored file decides first.

        The first is empty if the schedule gets shorter; the second is as from :func:`_why_whole`.
        """
        seen = seen_in_first_batch(step)
        known = seen.get(self.switch)
        if isinstance(known, list):
            return known[0], known[1]
        reason, why_whole = self._why_left_alone(step, *inputs), known
        if step.updates_per_batch > 1 and not reason and self.switch not in seen:
            why_whole = _why_whole(step.network, step.updates_per_batch, *inputs)
        seen[self.switch] = [reason, why_whole]
        return reason, why_whole

    def _why_left_alone(self, step: StepCell, *inputs: object) -> str:
        if layers_of(step, (FasterSchedule,))[0].is_left_alone():
            return "keeps its whole length, as in the run that this one continues"
        if self.settings.if_unfit != SKIP:
            return ""
        inputs = batch_behind(step.batch_part, *inputs)
        return no_class_a_sample(*inputs) or rows_of_places(*inputs) or next_tokens(*inputs)

    def _check_first_axis(self, step: StepCell, first: object, *others: object) -> None:
        parts, samples = step.updates_per_batch, _samples(first)
        if parts > 1 and not samples:
            raise ValueError(
                f"short_schedule.parts={parts} cuts batches along the first axis of the first "
                f"input, got {shown(first)}: leave it out"
            )
        if parts > 1 and samples in [_samples(one) for one in tensors_within(others)]:
            raise ValueError(
                f"short_schedule.parts={parts} cuts Tensors, but not those in a tuple, list or "
                f"dict, of which one has the {samples} samples of the first input: give it as an "
                "input of its own, or leave parts out"
            )
        # A resumed run may begin with the last, smaller batch of an epoch.
        if parts > 1 and samples < 2 * parts and not step.was_restored:
            raise ValueError(
                f"short_schedule.parts={parts} needs batches of at least {2 * parts} samples, two "
                f"for each part, got {samples}: give fewer parts, or larger batches"
            )

    def _leave_whole(self, step: StepCell, why: str) -> None:
        step.updates_per_batch = 1
        for part in layers_of(step, (PartByPart,)):
            part.parts = 1
        for each in layers_of(step, (FasterSchedule,)):
            each.parts = 1
            each.go_through_in(self._updates(step))
        self._show(step, why)

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn when the training is longer or shorter than ``total_steps`` says."""
        if self._is_applied(step) and epochs > 0:
            self.other_length.give(functools.partial(self._other_length, step, epochs, steps))

    def _other_length(self, step: StepCell, epochs: int, steps: int) -> str:
        """Return what to warn of, by the parts into which batches are cut now; or an empty text."""
        total, batches = self.settings.total_steps, self.settings.batches(step.updates_per_batch)
        position = int(innermost(step.optimizer).global_step.asnumpy()[0])
        waiting = 0 if step.window_part is None else step.window_part.micro_steps()
        made = round(position * batches / total)
        planned = made + (epochs * steps + waiting) // step.window()
        remedy = f"set {self.switch}.total_steps to the updates of the whole training"
        # A run that is resumed within an epoch skips the batches that it has seen.
        skipped = made % max(steps // step.window(), 1) if step.was_restored else 0
        if planned - skipped > total > position + 1:  # else it is over: reported elsewhere
            return (
                f"{self.switch}.total_steps={total} ends this training after {batches} of its "
                f"{planned} updates: {remedy}"
            )
        if planned < batches and epochs > 1:  # calls of one epoch each are parts of a training
            return (
                f"the training has {planned} updates, but its shorter schedule has {batches} "
                f"({self.switch}.total_steps={total}), so the learning rate does not reach its "
                f"end: {remedy}, unless further calls continue it"
            )
        # A training of whole epochs needs a part of the last; flushes add one an epoch at most.
        if batches + steps // step.window() <= planned < total - epochs and epochs > 1:
            return (
                f"the training has {planned} updates, but {self.switch}.total_steps={total}: "
                f"learning rates that are made for {planned} updates reach their end after "
                f"{round(planned * batches / total)} of the {batches} that are made: {remedy}, "
                "unless further calls continue it"
            )
        if batches <= planned < total - epochs and epochs > 1 and self._is_flat(step, planned):
            return (
                f"{self.switch}.total_steps={total}, but the learning rates no longer change from "
                f"step {planned} on: if they are made for the {planned} updates of this training, "
                f"set {self.switch}.total_steps to {planned}"
            )
        return ""

    def _is_flat(self, step: StepCell, begin: int) -> bool:
        """Return whether the learning rates change before a step, and not from it on."""
        if _compat.lists_of_rates(innermost(step.optimizer)):  # made for so many updates
            return False
        end = self.settings.total_steps - 1
        places = (begin // 2, begin, (begin + end) // 2, end)
        try:
            before, *later = (read_learning_rate(innermost(step.optimizer), one) for one in places)
        except Exception:  # a schedule of the script's own may run in a graph only
            return False
        return before != later[0] == later[1] == later[2]

    def _is_applied(self, step: StepCell) -> bool:
        return self.is_on(step) and step.report()[self.switch].status == APPLIED

    def updates_made(self, step: StepCell) -> int | None:
        """Return how many updates the shorter training makes."""
        return self._updates(step) if self._is_applied(step) else None

    def end_of_training(self, step: StepCell) -> Callable[[], bool] | None:
        """Return a function that returns whether the schedule has ended."""
        if not self._is_applied(step):
            return None
        position, last = innermost(step.optimizer).global_step, self.settings.total_steps - 1
        schedule = layers_of(step, (FasterSchedule,))[0]

        def is_over() -> bool:
            ends = self._is_applied(step) and bool(position.asnumpy()[0] >= last)
            return ends and not schedule.is_left_alone() and schedule.has_made_all()

        return is_over


def _why_whole(network: nn.Cell, parts: int, *inputs: Any) -> str | None:
    """Return why batches stay whole: empty if they do not, None if too small or not of samples."""
    if _samples(inputs[0]) < _FEWEST * parts or not _are_of_samples(inputs):
        return None
    with on_trial(network) as run:
        try:
            run(*inputs)
        except Exception:  # if it runs in a graph only, it is not tried
            return ""
        try:
            run(*part_of(inputs, 0, parts))
            has_number = any(map(_is_number, leaves(inputs)))
            mixes = mixes_samples(run, *inputs, may_add_up=not has_number)
        except Exception as error:  # states of one size, or a graph of the samples
            return f"; batches stay whole, as a part fails: {described(error)}"
    why = "the loss of a batch is neither the mean nor the sum of those of its halves"
    if has_number:  # such as that of the labels in a batch, by which the loss divides
        why = (
            "the loss of a batch is not the mean of those of its halves, and an input that is a "
            "number cannot be cut"
        )
    return f"; batches stay whole, as {why}" if mixes else ""


def _samples(first: object) -> int:
    shape = getattr(first, "shape", ())
    return int(shape[0]) if shape else 0


def _is_number(one: object) -> bool:
    is_scalar = isinstance(one, Tensor) and one.ndim == 0
    return is_scalar or (isinstance(one, numbers.Real) and not isinstance(one, bool))


def _are_of_samples(inputs: tuple[Any, ...]) -> bool:
    """Return whether every input can be cut: none is a graph's edges, or its matrix of nodes.

    Nothing is cut within a tuple, list or dict.
    """
    samples = _samples(inputs[0])
    if samples in [_samples(one) for one in tensors_within(inputs)]:
        return False
    shapes = [getattr(one, "shape", ()) for one in inputs]
    of_samples = all(not shape or shape[0] == samples for shape in shapes)
    return of_samples and (samples, samples) not in [tuple(one) for one in shapes[1:]]


def _unfit(optimizer: nn.Cell) -> str:
    """Return why the schedule of an optimizer cannot be compressed; empty if it can."""
    if isinstance(optimizer, _COUNTING):
        return f"advances the step count, which {type(optimizer).__name__} uses in its updates"
    if not isinstance(optimizer, nn.Optimizer):
        return f"needs an optimizer of mindspore.nn, got {class_name(optimizer)}"
    if not getattr(optimizer, "dynamic_lr", False):
        return (
            "needs a schedule of learning rates, but the rate is a number: give the optimizer a "
            "list or a LearningRateSchedule, or train for fewer epochs"
        )
    return ""


def _check_rates(optimizer: nn.Cell, total: int) -> None:
    """Refuse lists of learning rates that end before the schedule does."""
    lengths = [len(rate) for rate in _compat.lists_of_rates(optimizer)]
    if min(lengths, default=total) < total:
        raise ValueError(
            f"short_schedule.total_steps={total} needs a rate for each of these updates, but the "
            f"optimizer has a list of {min(lengths)}: set it to the updates of the training of "
            "this Model (others count their own), for which the list was made"
        )


class FasterSchedule(UpdateAround):
    r"""Advances the step count by which an optimizer looks up its learning rates.

    After update :math:`c` of :math:`E` it is :math:`\min(\lfloor c T / E \rfloor, T - 1)`. A step
    does not divide: devices divide 64-bit integers in floating point. If :math:`E \ge T`, several
    updates come at :math:`T - 1`; after the last one the remainder is :math:`E`.

    Args:
        inner (Update): the update that this one wraps.
        position (Parameter): the count, int32, shape (1,); ``inner`` adds 1 to it.
        updates (int): :math:`E`, of the shorter training.
        total (int): :math:`T`, those that the schedule was made for, at most 2**30.
        parts (int): updates of a batch. Default: 1.
    """

    def __init__(
        self, inner: Update, position: Parameter, updates: int, total: int, parts: int = 1
    ) -> None:
        super().__init__(inner)
        name = "boost.short_schedule.remainder"  # of c T / E; -1 if left alone
        self.remainder = Parameter(Tensor([0], ms.int32), name=name, requires_grad=False)
        self.position, self.total, self.parts = position, total, parts
        self.last = Tensor([total - 1], ms.int32)
        self.runs, self.__dict__["said"] = 0, {"over": False}  # all variants share the second
        self.go_through_in(updates)

    def go_through_in(self, updates: int) -> None:
        """Go through the schedule in ``updates`` updates, from the first step on."""
        self.updates = updates
        self.whole, self.rest = divmod(self.total, updates)

    def leave_alone(self) -> None:
        """Go through the schedule at its usual pace, from the first step on."""
        self.whole, self.rest, self.last = 1, 0, Tensor([2**31 - 1], ms.int32)
        self.remainder.set_data(Tensor([-1], ms.int32))  # stays so, also in a file
        self.said["over"] = True  # so that no warning comes

    def is_left_alone(self) -> bool:
        """Return whether the schedule keeps its usual pace, perhaps since a restored run."""
        return bool(self.remainder.asnumpy()[0] < 0)

    def has_made_all(self) -> bool:
        """Return whether no update is left, if the count has come to its end."""
        return self.updates < self.total or bool(self.remainder.asnumpy()[0] >= self.updates)

    def before_step(self, *inputs: Tensor) -> None:
        """Warn, once, if a loop of the script's own goes on after the end of the schedule."""
        super().before_step(*inputs)
        if self.runs == 0:  # perhaps restored
            self.runs = int(self.position.asnumpy()[0]) * self.updates // self.total
        self.runs += parts_of(inputs, self.parts)
        # The host reads as little as it can. The last batch may begin within the schedule.
        if self.said["over"] or self.runs < self.updates + self.parts:
            return
        if self.position.asnumpy()[0] >= self.total - 1:
            self.said["over"] = True
            warn(
                "short_schedule: the schedule is over, and your loop trains on at the last rate, "
                "as nothing stops it. Loop over step.over(dataset, epochs) of make_train_step, "
                f"or stop when optimizer.global_step is {self.total - 1}",
                NoEffectWarning,
            )

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Update, then advance in the schedule."""
        loss = call(self.inner, (loss, gradients, *inputs))
        remainder = self.remainder + self.rest
        carry = ops.cast(remainder >= self.updates, ms.int32)
        further = ops.depend(self.position, loss) + (self.whole - 1) + carry
        loss = ops.depend(loss, ops.assign(self.position, ops.minimum(further, self.last)))
        remainder -= carry * self.updates
        if self.updates >= self.total:
            has_ended = ops.cast(further > self.last, ms.int32)
            remainder += has_ended * (self.updates - remainder)
        return ops.depend(loss, ops.assign(self.remainder, remainder))
