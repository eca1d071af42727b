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

_OWN_CHOICE = (
    "if the graph chooses the group, as in sink mode, it looks it up in the schedule, and cannot "
    "ask next_group of {}: train without sink mode, or leave next_group out and give the groups as "
    "train_strategy"
)


def _refusal(optimizer: FreezeOpt, length: int) -> str:
    """Return why no graph can look up a schedule that repeats itself after ``length`` steps."""
    if isinstance(optimizer, AdaptiveFreezeOpt):
        return _NO_LOOK
    if not optimizer.chooses_by_schedule():
        return _OWN_CHOICE.format(type(optimizer).__name__)
    groups = optimizer.schedule.groups
    if isinstance(groups, PrefixGroups):
        return ""  # the graph holds one number for each group
    # A graph cannot call a function that is called block by block.
    longest = AT_ONCE if isinstance(groups, FunctionGroups) else _LONGEST_TABLE
    return _TOO_LONG.format(length) if length > longest else ""


class GroupChooser(Chooser):
    """Chooses by the schedule of a ``FreezeOpt``, whose position the steps advance.

    The host asks the schedule. A graph has a table; for a growing prefix it has the first step of
    each group. ``variant_of_group`` has the number of the variant that trains each group.
    """

    def __init__(self, optimizer: FreezeOpt, variant_of_group: Sequence[int]) -> None:
        super().__init__()
        self.variant_of_group = tuple(variant_of_group)
        self.position = optimizer.position
        self.__dict__.update(next_group=optimizer.next_group, groups=optimizer.schedule.groups)
        self.steps, self.holds = len(self.groups), optimizer.schedule.at_end == HOLD
        self.length = getattr(self.groups, "period", self.steps)
        self.has_first_steps = isinstance(self.groups, PrefixGroups)
        self.refusal = _refusal(optimizer, self.length)

    def now(self) -> int:
        """Ask the optimizer."""
        group: int = self.next_group()
        return self.variant_of_group[group]

    @functools.cached_property  # read when a graph is compiled: the host needs no table
    def table(self) -> Tensor:
        """The variant of each step, int32 [length]; or the first step of each group."""
        if self.has_first_steps:
            return Tensor(self.groups.first_steps.astype(np.int32))
        entries = itertools.islice(self.groups, self.length)
        groups = np.fromiter(entries, np.int32, self.length)
        return Tensor(np.array(self.variant_of_group, np.int32)[groups])

    def index(self) -> Tensor:
        """Look the position up in the table; raise a ``ValueError`` if there can be no table."""
        if self.refusal != "":
            raise ValueError(self.refusal)
        last = self.steps - 1
        place = ops.minimum(self.position, last) if self.holds else self.position % self.steps
        if self.has_first_steps:
            begun = ops.cast(place >= self.table, ms.int32)
            variants = Tensor(self.variant_of_group, ms.int32)
            return variants[ops.cast(ops.sum(begun), ms.int32) - 1]
        return self.table[place % self.length]
