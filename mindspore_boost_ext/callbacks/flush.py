"""A callback that closes the last accumulation window of each epoch."""

from __future__ import annotations

from typing import Any

from mindspore.train import Callback, ModelCheckpoint, RunContext

from mindspore_boost_ext.callbacks.epoch import is_last_of_epoch
from mindspore_boost_ext.report import NoEffectWarning, warn


class FlushAccumulation(Callback):
    """Closes the last, partly filled accumulation window of each epoch, with correct weights.

    Without it, a window carries over into the next epoch, and after the last epoch it is lost. In
    the list of callbacks, put it before :class:`BoostMonitor` and before those that save
    checkpoints. It closes the window right after the last step of an epoch, before validation; in
    sink mode, or if the training stops within an epoch, at the end of the epoch.

    Examples:
        >>> from mindspore_boost_ext import FlushAccumulation
        >>> callback = FlushAccumulation()
    """

    def __init__(self) -> None:
        super().__init__()
        self._cell: Any = None
        self._steps_before = 0  # this epoch; epochs may differ in length

    def on_train_begin(self, run_context: RunContext) -> None:
        """Find the step cell; warn if nothing is accumulated, or ModelCheckpoint comes first."""
        self._cell = run_context.original_args().train_network
        if not getattr(self._cell, "use_grad_accumulation", False):
            self._cell = None
            warn("FlushAccumulation has no effect: gradients are not accumulated", NoEffectWarning)
            return
        behind = [*run_context.original_args().get("list_callback", ())]
        before = behind[: behind.index(self)] if self in behind else []
        if any(isinstance(one, ModelCheckpoint) for one in before):
            warn(
                "FlushAccumulation comes after ModelCheckpoint, whose checkpoints then lack the "
                "last update of an epoch: put it first"
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Note where the epoch begins."""
        self._steps_before = run_context.original_args().get("cur_step_num", 0)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Close the window after the last step of an epoch."""
        params = run_context.original_args()
        sinks = params.get("dataset_sink_mode")
        if not sinks and is_last_of_epoch(params, self._steps_before):
            self.on_train_epoch_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Close the window."""
        if self._cell is not None:
            self._cell.flush_accumulation()
