"""Chooses the group whose step runs now: the host asks the optimizer, a graph has a table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindspore_boost_ext.grad_freeze.adaptive import AdaptiveFreezeOpt
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt
from mindspore_boost_ext.grad_freeze.schedule import HOLD
from mindspore_boost_ext.grad_freeze.sequences import AT_ONCE, FunctionGroups, PrefixGroups
from mindspore_boost_ext.stages.choice import Chooser

_LONGEST_TABLE = 2**24  # steps; 64 MiB of a graph
_TOO_LONG = (
    "if the graph chooses the group, as in sink mode, a schedule of grad_freeze must have at most "
    f"{_LONGEST_TABLE} entries ({AT_ONCE} of a function), got {{}}: lower "
    "grad_freeze.total_steps, after which it starts again, or use grad_freeze.schedule 'linear', "
    "'cubic' or 'step', or train without sink mode"
)
_NO_LOOK = (
    "if the graph chooses the group, as in sink mode, grad_freeze.schedule 'adaptive' cannot "
    "compare the weights: train without sink mode, or use 'linear', 'cubic' or 'step'"
)


def group_chooser(optimizer: FreezeOpt, variant_of_group: Sequence[int]) -> GroupChooser:
    """Return the chooser for the schedule of a ``FreezeOpt``; the steps advance its position.

    ``variant_of_group`` has the number of the variant that trains each group.
    """
    has_first_steps = isinstance(optimizer.schedule.groups, PrefixGroups)
    kind = FirstStepsChooser if has_first_steps else GroupChooser
    return kind(optimizer, variant_of_group)


def _refusal(optimizer: FreezeOpt, length: int) -> str:
    """Return why no graph can look up a schedule that repeats itself after ``length`` steps."""
    if isinstance(optimizer, AdaptiveFreezeOpt):
        return _NO_LOOK
    # A graph cannot call a function that is called block by block.
    is_function = isinstance(optimizer.schedule.groups, FunctionGroups)
    longest = AT_ONCE if is_function else _LONGEST_TABLE
    return _TOO_LONG.format(length) if length > longest else ""


class GroupChooser(Chooser):
    """Chooses by the schedule of a ``FreezeOpt``: the host asks it, the graph has a table."""

    def __init__(self, optimizer: FreezeOpt, variant_of_group: Sequence[int]) -> None:
        super().__init__()
        self.variant_of_group = tuple(variant_of_group)
        self.position = optimizer.position
        self.__dict__.update(next_group=optimizer.next_group, groups=optimizer.schedule.groups)
        self.steps, self.holds = len(self.groups), optimizer.schedule.at_end == HOLD
        self.length = getattr(self.groups, "period", self.steps)
        self.refusal = _refusal(optimizer, self.length)

    def now(self) -> int:
        """Ask the optimizer."""
        group: int = self.next_group()
        return self.variant_of_group[group]

    @functools.cached_property  # read when a graph is compiled: the host needs no table
    def table(self) -> Tensor:
        """The variant of each step: int32 [length]."""
        entries = itertools.islice(self.groups, self.length)
        groups = np.fromiter(entries, np.int32, self.length)
        return Tensor(np.array(self.variant_of_group, np.int32)[groups])

    def place(self) -> Tensor:
        """Return, in the graph, the index of the position in the sequence."""
        if self.holds:
            return ops.minimum(self.position, self.steps - 1)
        return self.position % self.steps

    def index(self) -> Tensor:
        """Look the position up in the table; raise a ``ValueError`` if there can be no table."""
        if self.refusal != "":
            raise ValueError(self.refusal)
        return self.table[self.place() % self.length]


class FirstStepsChooser(GroupChooser):
    """Puts the first step of each group into the graph; the number of steps does not matter."""

    def __init__(self, optimizer: FreezeOpt, variant_of_group: Sequence[int]) -> None:
        super().__init__(optimizer, variant_of_group)
        self.refusal = ""  # the graph holds one number for each group
        self.first_steps = Tensor(self.groups.first_steps.astype(np.int32))
        self.variants = Tensor(self.variant_of_group, ms.int32)

    def index(self) -> Tensor:
        """Count the groups that have begun."""
        begun = ops.cast(self.place() >= self.first_steps, ms.int32)
        return self.variants[ops.cast(ops.sum(begun), ms.int32) - 1]
