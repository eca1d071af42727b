"""Closes the window of a step before it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.stages.state import connected
from mindspore_boost_ext.stages.update import Update

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


def lacks_a_batch(part: Update) -> bool:
    """Return whether an update runs the network again but has no batch for it; if so, warn."""
    if part.last_inputs() is not None:
        return False
    warn(
        "the accumulated gradients were not applied: flushing runs the network on the last batch, "
        "but the host has seen none, as in sink mode. Flush after a step outside of sink mode, or "
        "choose a window that divides the number of batches"
    )
    return True


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
