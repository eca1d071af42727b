"""Several processes: what each works on, and the accuracy of all together."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Metric

from mindspore_boost_ext.adasum.collectives import RowsOfRanks
from mindspore_boost_ext.bundled import WHOLE, Shard


def join_processes() -> Shard:
    """Joins the processes that msrun started; gradients are averaged over them from now on."""
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return Shard(get_rank(), get_group_size())


class Accuracy(Metric):
    """Share of images in the right class, over the images of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RowsOfRanks()
        self.clear()

    def clear(self) -> None:
        """Forgets all images."""
        self.right, self.seen = 0, 0

    def update(self, *inputs: Any) -> None:
        """Counts a batch: logits ``[batch, classes]`` and labels ``[batch]``."""
        logits, labels = (self._convert_data(one) for one in inputs)
        self.right += int((logits.argmax(axis=1) == labels).sum())
        self.seen += len(labels)

    def eval(self) -> float:
        """Returns the accuracy; a call for all processes at once."""
        counts = ms.Tensor(np.array([self.right, self.seen], np.float32))
        right, seen = self.rows(counts).asnumpy().sum(axis=0)
        return float(right / seen)


__all__ = ["WHOLE", "Accuracy", "Shard", "join_processes"]
