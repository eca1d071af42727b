"""Closes the window of a step before it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.stages.state import connected
from mindspore_boost_ext.stages.update import Update

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


class LastBatch:
    """The last batch that counted, on which a window closed early can run the network again."""

    def __init__(self) -> None:
        self._batches: tuple[tuple[Any, ...], ...] = ()

    @staticmethod
    def is_kept(step: BoostTrainOneStepCell) -> bool:
        """Return whether a step has a window, and an update that asks for a batch."""
        is_whole = len(step._host_writes.state) > 0  # a variant of a step keeps none
        return is_whole and step.window_part is not None and step.update_part.takes_inputs

    def keep(self, step: BoostTrainOneStepCell, batch: tuple[Any, ...]) -> None:
        """Keep a batch, and the one before, should this one be skipped."""
        if self.is_kept(step):
            self._batches = (batch, *self._batches[:1])

    def forget(self) -> None:
        """Forget a batch that was skipped: no window holds it."""
        self._batches = self._batches[1:]

    def of(self, part: Update) -> tuple[Any, ...] | None:
        """Return the batch for an update, empty if it needs none; else None, with a warning."""
        given = part.last_inputs()
        if given is None and not self._batches:
            warn(
                "the accumulated gradients were not applied: flushing runs the network on the last "
                "batch, but the host has seen none, as in sink mode. Flush after a step outside of "
                "sink mode, or choose a window that divides the number of batches"
            )
        return given if given is not None or not self._batches else self._batches[0]


class Flush(nn.Cell):
    """Updates with the gradients in the window of a step without variants, and empties it.

    If the update runs the network again, the inputs are the last batch, and the output is its loss,
    shape (). Otherwise there are no inputs, and the output is 0.
    """

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return what rank 0 sends to all when this compiles: the same as for the step."""
        return self.step.parameters_broadcast_dict(recurse)

    def construct(self, *inputs: Tensor) -> Tensor:
        """Close the window."""
        if len(inputs) > 0 and self.step.batch_part is not None:
            inputs = call(self.step.batch_part, inputs)
        loss = connected(call(self.step.update_part.loss_of, inputs), self.step._state)
        return call(self.step.close_window, (loss, *inputs))
