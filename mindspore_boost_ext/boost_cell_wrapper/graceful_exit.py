"""Lets the ranks of a job end their training after the same step."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops

from mindspore_boost_ext.runtime.ranks import rank_count


class ReducesAndAsks(nn.Cell):
    """Reduces gradients over the ranks, and then asks all of them whether to end.

    With ``MS_ENABLE_GRACEFUL_EXIT=1`` in the environment, MindSpore's ``OnRequestExit`` sets
    ``asked`` (int32, shape (1,)) to 1 on a rank that is to end. It ends the training when
    ``agreed`` (bool, shape ()) is set. This happens when all ranks have been asked to end, so that
    no rank waits for one that has gone.
    """

    def __init__(self, reducer: nn.Cell, asked: Parameter, agreed: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.reducer = reducer
        self.asked, self.agreed = asked, agreed
        self.ranks = rank_count()
        self.sum_over_ranks = ops.AllReduce()

    def construct(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the reduced gradients after ``agreed`` has been written."""
        reduced = self.reducer(gradients)
        # After the reductions: ranks that sum in different orders wait for each other forever.
        asked = ops.depend(self.asked, reduced)
        # In float32, since CPU sums no integers over ranks.
        count = self.sum_over_ranks(asked.astype(ms.float32))
        all_asked = (count == self.ranks).all()
        return ops.depend(reduced, ops.assign(self.agreed, all_asked))


def asking(step: nn.TrainOneStepCell, reducer: nn.Cell) -> nn.Cell:
    """Return ``reducer``, or, for a graceful exit on several ranks, one that also asks them."""
    if not getattr(step, "use_graceful_exit", False) or rank_count() == 1:
        return reducer
    return ReducesAndAsks(reducer, step.init_param, step.exit_param)
