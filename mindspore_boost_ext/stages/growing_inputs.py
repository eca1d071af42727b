"""The base of algorithms that begin with small inputs: a variant of the step for each size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, StepCell, fewest_updates, seen_in_first_batch
from mindspore_boost_ext.base.cells import (
    declared_shapes,
    is_open,
    layers_of,
    leaves,
    tensors_within,
)
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.config.rules import described
from mindspore_boost_ext.report import APPLIED, SKIPPED, HeldWarning
from mindspore_boost_ext.runtime.ranks import check_equal_on_ranks, differences_between_ranks
from mindspore_boost_ext.stages.choice import StepChoice
from mindspore_boost_ext.stages.phases import CountedUpdate, PhaseChooser, chooser_of, first_updates
from mindspore_boost_ext.stages.trial import Outcome, Run, batch_behind, on_trial

SKIP = "skip"


class GrowingInputs(Algorithm):
    """Makes inputs smaller in the first phases of a training, as its section says: `settings`."""

    settings: Any  # known from `join` on

    def __init__(self) -> None:
        self.too_short = HeldWarning()
        self._unseen = False  # whether the first batch has yet to show that the network fits

    def smaller(self, scale: float) -> nn.Cell:
        """Return the Cell that makes a batch smaller by a scale: all inputs -> all inputs."""
        raise NotImplementedError

    def check_inputs(self, *inputs: object) -> None:
        """Raise a ``ValueError`` if a batch holds nothing that could be made smaller."""

    def check_loss(self, run: Run, *inputs: object) -> None:
        """Raise a ``ValueError`` if training on smaller inputs would have another aim.

        It may call ``run``, which runs the network on a batch in evaluation mode.
        """

    def join(self, step: StepCell) -> None:
        """Make a step for each size; the count of updates chooses among them."""
        if not self.is_on(step):
            return
        if not step.runs_our_construct():
            raise ValueError(
                f"{type(step).__name__} overrides construct, so every step would train at full "
                f"size: leave {self.switch} out"
            )
        self.settings = getattr(step.auto_boost.config, self.switch)
        firsts = self._firsts(step)
        if self.settings.if_unfit != SKIP:
            self.too_short.release()
        else:  # in sink mode no batch shows whether the network fits: it stays at full size
            self._unseen = True
        self._show(step, firsts)
        step.update_part = CountedUpdate(step.update_part, PhaseChooser(self.switch, firsts))
        step.choose_last(self._choice)

    def _updates(self, step: StepCell) -> int:
        """Return the number of updates that phases are shares of: all that the training makes."""
        total, made = int(self.settings.total_steps), fewest_updates(step)
        return total if made is None else min(total * step.updates_per_batch, made)

    def _firsts(self, step: StepCell) -> tuple[int, ...]:
        return first_updates([share for share, _ in self.settings.phases], self._updates(step))

    def _show(self, step: StepCell, firsts: Sequence[int]) -> None:
        words = [
            f"scale {scale:g} until update {end}"
            for (_, scale), begin, end in zip(self.settings.phases, firsts, firsts[1:])
            if begin < end
        ]
        if not words:
            reason = "after rounding, no update has inputs smaller than full size"
            return step.report().update(self.switch, SKIPPED, reason)
        reason = f"{', '.join(words)} of {self._updates(step)}, then full size"
        if self._unseen:
            reason += "; in sink mode full size from the first update on"
        return step.report().update(self.switch, APPLIED, reason, {"sizes": len(words) + 1})

    def _begin_at(self, step: StepCell, firsts: Sequence[int]) -> None:
        """Change the updates at which phases begin, in every variant of the step."""
        chooser = chooser_of(step.update_part, self.switch)
        chooser.begin_at(firsts)
        for choice in layers_of(step, (StepChoice,)):
            if choice.chooser is chooser:
                choice.takes_last = False

    def _choice(self, step: StepCell) -> StepChoice:
        """Return a step for each size; the last one leaves the inputs as they are."""
        everything = tuple(range(len(step.weights)))
        scales = [scale for _, scale in self.settings.phases]
        steps = [step.restricted(step.optimizer, everything) for _ in (*scales, 1.0)]
        for variant, scale in zip(steps, scales):
            smaller, first = self.smaller(scale), step.batch_part
            variant.batch_part = smaller if first is None else _Behind(first, smaller)
        names = [*(f"scale {scale:g}" for scale in scales), "full size"]
        choice = StepChoice(steps, chooser_of(step.update_part, self.switch), names)
        choice.takes_last = self._unseen
        return choice

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Try every size on the first batch; refuse a failing network, or leave it at full size."""
        if not (self.is_on(step) and inputs):
            return
        self._unseen, seen = False, seen_in_first_batch(step)
        if self.switch not in seen:
            seen[self.switch] = self._seen_in(step, *inputs)
        reason, firsts = seen[self.switch]
        if step.reducer_flag:
            status = SKIPPED if reason else APPLIED
            remedy = f"Give every rank the same kind of batches, or leave {self.switch} out."
            check_equal_on_ranks({self.switch: status}, "the first batch", remedy)
            words = {"first updates of the sizes": str(firsts)}
            if differences_between_ranks(words, "the first batch"):
                firsts = list(self._firsts(step))  # some sizes are equal on one rank only
                seen[self.switch] = reason, firsts
        self._begin_at(step, firsts)
        if reason:
            step.report().update(self.switch, SKIPPED, reason)
            return
        self._show(step, firsts)
        self.too_short.release()

    def _seen_in(self, step: StepCell, *inputs: object) -> tuple[str, list[int]]:
        """Return why the network stays at full size, or an empty text; and where phases begin."""
        inputs = batch_behind(step.batch_part, *inputs)
        reason = self._unfit(step, *inputs)
        if reason:
            return reason, [0] * (len(self.settings.phases) + 1)  # full size from the start
        # Computed anew: the batch shows the sizes, and may have shown that no update is saved.
        return "", _merged(self._firsts(step), self._sizes(*inputs))

    def _unfit(self, step: StepCell, *inputs: object) -> str:
        """Return why a network stays at full size, or raise that if ``if_unfit`` is not "skip"."""
        try:
            self.check_inputs(*inputs)
            self._check_samples(*inputs)
            self._check_declared(step, *inputs)
            self._try_sizes(step.network, *inputs)
        except ValueError as error:
            if self.settings.if_unfit != SKIP:
                raise
            return str(error).partition(": leave ")[0]
        return ""

    def _check_samples(self, *inputs: object) -> None:
        """Raise a ``ValueError`` if smaller inputs and their labels would differ in samples.

        Some losses would broadcast them instead of failing. Tensors in tuples, lists and dicts stay
        as they are, so they must not be among those that are made smaller.
        """
        *small, full = self._sizes(*inputs, *tensors_within(inputs))
        together = [number for number, shape in enumerate(full) if shape and shape[0] == full[0][0]]
        for each in small:
            if each[len(inputs) :] != full[len(inputs) :]:
                raise ValueError(
                    f"{self.switch} makes Tensors smaller, but not those in a tuple, list or dict "
                    f"(of shapes {full[len(inputs) :]}): leave {self.switch} out, or give these "
                    "as inputs of their own"
                )
            counts = {each[number][0] for number in together}
            if len(counts) > 1:
                raise ValueError(
                    f"{self.switch} would make {each} of inputs of shapes {full}, so that samples "
                    "and labels no longer match, as with labels of whole sequences: leave "
                    f"{self.switch} out, or set its method to 'truncate'"
                )

    def _check_declared(self, step: StepCell, *inputs: object) -> None:
        """Raise a ``ValueError`` if a graph does not know the sizes that are made smaller."""
        if step.runs_eagerly() or not (shapes := declared_shapes(step)):
            return
        *small, full = self._sizes(*inputs)
        # A batch_part of the user's own may return fewer inputs than it takes.
        for number, shape in enumerate(shapes[: len(full)]):
            grows = any(each[number] != full[number] for each in small)
            if grows and is_open(shape, slice(1, None)):
                raise ValueError(
                    f"{self.switch} needs the shapes of the inputs, but set_inputs leaves them "
                    f"open ({shape}): leave {self.switch} out"
                )

    def _try_sizes(self, network: nn.Cell, *inputs: object) -> None:
        """Raise a ``ValueError`` unless losses are finite and of one shape at every size."""
        with on_trial(network) as run:
            try:
                expected = run(*inputs)
            except Exception as error:
                if self.settings.if_unfit != SKIP:
                    return  # it may run in a graph only: then compiling tries it
                reason = f"cannot be tried on the first batch: {described(error)}"
                raise ValueError(reason) from error
            for _, scale in self.settings.phases:
                self._try(run, scale, expected, *inputs)
            self.check_loss(run, *inputs)

    def _sizes(self, *inputs: Any) -> list[list[Any]]:
        """Return the shapes of a batch in each phase; the last is that of full size."""
        with _compat.running_eagerly():
            small = [self.smaller(scale)(*inputs) for _, scale in self.settings.phases]
        return [[getattr(one, "shape", None) for one in each] for each in (*small, inputs)]

    def _try(self, run: Run, scale: float, expected: Outcome, *inputs: object) -> None:
        cause, reason = None, ""
        try:
            found = run(*self.smaller(scale)(*inputs))
            if found.shapes != expected.shapes:
                reason = f"the loss has shapes {found.shapes}, not {expected.shapes}"
            elif expected.is_finite and not found.is_finite:
                reason = "the loss is not finite"
        except Exception as error:  # the user's network
            cause, reason = error, described(error)
        if reason:
            shapes = [getattr(one, "shape", one) for one in leaves(inputs)]
            raise ValueError(
                f"{self.switch} cannot train this network, which may need inputs of a fixed size: "
                f"at scale {scale:g} of {shapes}, {reason}: leave {self.switch} out, or choose "
                f"{self.switch}.phases or {self.switch}.multiple that fit it"
            ) from cause

    def observations(self, step: StepCell) -> dict[str, Any]:
        """Return the scale of the next step."""
        if not self.is_on(step):
            return {}
        scales = [scale for _, scale in self.settings.phases]
        phase = chooser_of(step.update_part, self.switch).now()
        return {f"{self.switch}_scale": (*scales, 1.0)[phase]}

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn when the training ends before inputs have their full size."""
        if self.is_on(step) and epochs > 0:
            self.too_short.give(functools.partial(self._too_short, step, epochs * steps))

    def _too_short(self, step: StepCell, batches: int) -> str:
        """Return what to warn of, by the phases as they are now; or an empty text."""
        phases = chooser_of(step.update_part, self.switch)
        updates, first = phases.updates() + step.updates_in(batches), phases.firsts[-1] + 1
        if updates >= first:
            return ""
        return (
            f"the training ends at update {updates}, before its inputs have their full size (from "
            f"update {first} on): unless you continue it, accuracy at full size will be poor; set "
            f"{self.switch}.total_steps to the updates of the whole training"
        )


class _Behind(nn.Cell):
    """Changes a batch twice."""

    def __init__(self, first: nn.Cell, second: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.first, self.second = first, second

    def construct(self, *inputs: Tensor) -> Any:
        return call(self.second, call(self.first, inputs))


def _merged(firsts: Sequence[int], sizes: Sequence[object]) -> list[int]:
    """Let phases of equal sizes begin together: only the last of them is on, and compiles."""
    found = list(firsts)
    for number in range(1, len(found)):
        if sizes[number] == sizes[number - 1]:
            found[number] = found[number - 1]
    return found


def scaled(size: int, scale: float, multiple: int) -> int:
    """Return the multiple of ``multiple`` nearest to a size times its scale, but not 0.

    If that is larger than the size, return the size. It works in graphs, too.
    """
    return min(max(int(size * scale / multiple + 0.5), 1) * multiple, size)
