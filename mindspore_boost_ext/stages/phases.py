"""Training in phases: the number of updates made decides which phase is on."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.stages.choice import Chooser
from mindspore_boost_ext.stages.update import Update, UpdateAround


def first_updates(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Return how many updates come before each phase (0 for the first), and before what follows.

    ``shares`` are the phases' shares of ``total``, the number of all updates of the training.
    """
    return tuple(round(math.fsum(shares[:number]) * total) for number in range(len(shares) + 1))


class PhaseChooser(Chooser):
    """Runs the variant of the phase that is on; if phases begin together, it is the last of them.

    It has the count of updates of the algorithm ``switch``. ``firsts`` is what
    :func:`first_updates` returns.
    """

    def __init__(self, switch: str, firsts: Sequence[int]) -> None:
        super().__init__()
        self.switch, self.count = switch, state(f"{switch}.updates", 0, np.int32)
        self.begin_at(firsts)

    def begin_at(self, firsts: Sequence[int]) -> None:
        """Set the updates at which phases begin; call this before the first step."""
        self.firsts = tuple(firsts)
        self.table = Tensor(self.firsts, ms.int32)

    def updates(self) -> int:
        """Return how many updates have been made."""
        return int(self.count.asnumpy())

    def now(self) -> int:
        """Return the number of the phase of the next update."""
        return bisect.bisect_right(self.firsts, self.updates()) - 1

    def index(self) -> Tensor:
        """Count the phases that have begun."""
        begun = ops.cast(self.count >= self.table, ms.int32)
        return ops.cast(ops.sum(begun), ms.int32) - 1


class CountedUpdate(UpdateAround):
    """Counts updates for one algorithm, not micro-batches or steps that a loss scale skips."""

    def __init__(self, inner: Update, chooser: PhaseChooser) -> None:
        super().__init__(inner)
        self.count, self.__dict__["chooser"] = chooser.count, chooser  # used on the host only

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Update, and count it."""
        loss = call(self.inner, (loss, gradients, *inputs))
        return ops.depend(loss, ops.assign_add(self.count, 1))


def chooser_of(part: nn.Cell, switch: str) -> PhaseChooser:
    """Return the chooser of an algorithm, found in the update part of its step."""
    while not (isinstance(part, CountedUpdate) and part.chooser.switch == switch):
        part = part.inner
    return part.chooser
