"""Closes the window of a step before it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.stages.state import connected

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


class Flush(nn.Cell):
    r"""Updates with what the window of a step holds, and empties it.

    Args:
        step (BoostTrainOneStepCell): the step, without a choice of variants.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the last batch, if the update runs the network again.

    Outputs:
        Tensor, the loss of that batch, shape :math:`()`; 0 without one.
    """

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return what rank 0 hands to all when this compiles: as the step."""
        return self.step.parameters_broadcast_dict(recurse)

    def construct(self, *inputs: Tensor) -> Tensor:
        """Close the window."""
        if len(inputs) > 0 and self.step.batch_part is not None:
            inputs = call(self.step.batch_part, inputs)
        loss = connected(call(self.step.update_part.loss_of, inputs), self.step._state)
        return call(self.step.close_window, (loss, *inputs))
