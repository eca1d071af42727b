"""Trains on a batch in parts, one after the other, with an update for each."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.stages.choice import Chooser, StepChoice


class PartByPart(StepChoice):
    r"""Runs a step on each part of a batch, as if the data came in batches of that size.

    If there are :math:`N` samples, part :math:`i` of :math:`P` has those from
    :math:`\lfloor i N / P \rfloor` on. A batch of fewer than :math:`2 P` samples is cut into fewer
    parts, so that no part has only one: its variance would be NaN in BatchNorm.
    An input whose first axis is not that of the first input goes into every part unchanged.
    """

    def __init__(self, step: nn.Cell, parts: int) -> None:
        super().__init__([step], Chooser(), ["the step"])
        self.parts = parts

    def construct(self, *inputs: Tensor) -> Any:
        """Run the step on one part after the other, in one graph."""
        outputs: tuple[Any, ...] = ()
        parts = parts_of(inputs, self.parts)
        for number in range(parts):
            part = part_of(inputs, number, parts)
            if number > 0:
                part = (ops.depend(part[0], outputs[-1]), *part[1:])
            outputs += (call(self.only, part),)
        return outputs[0] if parts == 1 else self.only.joined(outputs, inputs[0].shape[0])

    def run(self, variant: nn.Cell, *inputs: Tensor, **kwargs: object) -> Any:
        """Run the step, which is compiled for one part, on one part after the other."""
        parts = parts_of(inputs, self.parts)
        outputs = [variant(*part_of(inputs, one, parts), **kwargs) for one in range(parts)]
        return outputs[0] if parts == 1 else variant.joined(tuple(outputs), inputs[0].shape[0])


def parts_of(inputs: tuple[Any, ...], parts: int) -> int:
    """Return into how many parts a batch is cut."""
    return 1 if parts == 1 else max(min(parts, inputs[0].shape[0] // 2), 1)


def part_of(inputs: tuple[Any, ...], number: int, parts: int) -> tuple[Any, ...]:
    """Return one of the parts of a batch."""
    if parts == 1:
        return inputs
    samples = inputs[0].shape[0]
    begin, end = number * samples // parts, (number + 1) * samples // parts
    part: tuple[Any, ...] = ()
    for one in inputs:
        cut = isinstance(one, Tensor) and one.ndim > 0 and one.shape[0] == samples
        part += (one[begin:end] if cut else one,)
    return part


def joined_losses(losses: tuple[Any, ...], samples: int) -> Any:
    """Return the loss of a batch of ``samples`` from the losses of its parts, which may be tuples.

    It is their mean; if there is a loss for each sample, it is all of them.
    """
    if isinstance(losses[0], tuple):
        places = range(len(losses[0]))
        of_places = [tuple([loss[place] for loss in losses]) for place in places]
        return tuple([joined_losses(one, samples) for one in of_places])
    if losses[0].ndim > 0:
        # There is a loss for each sample, or each place in it; else one for each of several tasks.
        are_of_samples = sum([loss.shape[0] for loss in losses]) % samples == 0
        if are_of_samples or losses[0].shape != losses[-1].shape:
            return ops.cat(losses)
    return sum(losses[1:], losses[0]) / len(losses)
