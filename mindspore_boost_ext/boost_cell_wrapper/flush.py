"""Closes the window of a step before it is full."""

from __future__ import annotations

from typing import Any, cast

from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.algorithm import StepCell
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.stages.state import connected
from mindspore_boost_ext.stages.update import Update


def keep_batch(step: StepCell, batch: tuple[Any, ...], outputs: object) -> None:
    """Let a step keep the last batch that was not skipped, if a flush runs the network on it."""
    if not step._is_whole or step.window_part is None or not step.update_part.takes_inputs:
        return
    says = isinstance(outputs, tuple) and step.scales_loss and len(outputs) == 3
    if not (says and bool(cast(Any, outputs)[1].asnumpy().any())):
        step.__dict__["_last_batch"] = batch  # not by setattr: a Cell looks at each Tensor


def batch_for(part: Update, last: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the batch on which an update runs the network again; None, with a warning, without.

    It is empty for an update that does not; ``last`` is the last one that counted.
    """
    if not part.takes_inputs:
        return ()
    if last is None:
        warn(
            "the accumulated gradients were not applied: flushing runs the network on the last "
            "batch, but the host has seen none, as in sink mode. Flush after a step outside of "
            "sink mode, or choose a window that divides the number of batches"
        )
    return last


class Flush(nn.Cell):
    """Updates with the gradients in the window of a step without variants, and empties it.

    If the update runs the network again, the inputs are the last batch, and the output is its loss,
    shape (). Otherwise there are no inputs, and the output is 0.
    """

    def __init__(self, step: StepCell) -> None:
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
