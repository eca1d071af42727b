"""How many epochs are done, and where one ends, for callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from mindspore import nn

# Step cell -> number of epochs done, in earlier calls and in the restored run.
DONE: WeakKeyDictionary[nn.Cell, int] = WeakKeyDictionary()
# Step cell -> how often a file was restored into it.
RESTORES: WeakKeyDictionary[nn.Cell, int] = WeakKeyDictionary()


def restored_epochs(step: nn.Cell) -> tuple[int, int]:
    """Return how many epochs of a step are done, and how often a file was restored into it."""
    return DONE.get(step, 0), RESTORES.get(step, 0)


def batches_of_epoch(params: Mapping[str, Any]) -> int:
    """Return how many batches an epoch has.

    If ``sink_size`` is given, MindSpore's ``batch_num`` is that, even on CPU, which sinks nothing
    and reads the whole dataset. ``params`` are those of a training that has begun.
    """
    size = getattr(params.get("train_dataset"), "get_dataset_size", None)
    if size is None or params.get("dataset_sink_mode"):
        return int(params.get("batch_num", 1))
    return int(size())


def is_last_of_epoch(params: Mapping[str, Any], steps_before: int) -> bool:
    """Return whether the step that has ended is the last of an epoch of full length."""
    return params.get("cur_step_num", 0) - steps_before == batches_of_epoch(params)
