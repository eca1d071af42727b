"""Schedules of gradient freezing: which group of parameters trains at which step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
from mindspore import Tensor

from mindspore_boost_ext.config.rules import integer, one_of, real, shown
from mindspore_boost_ext.grad_freeze.sequences import (
    AT_ONCE,
    FunctionGroups,
    GroupSequence,
    PrefixGroups,
    checked_group,
)

CONTINUOUS, INTERVAL, ADAPTIVE = 0, 1, "adaptive"
WRAP, HOLD = "wrap", "hold"


@dataclass(frozen=True)
class FreezeSchedule:
    """Which group trains at which step.

    Attributes:
        groups: the group of each step, ints >= 0: a tuple, or a ``GroupSequence`` of more than
            ``AT_ONCE`` entries, which computes a block at a time.
        at_end: what follows the last entry: ``"wrap"`` starts again, ``"hold"`` keeps the last one.
    """

    groups: Sequence[int]
    at_end: str = WRAP

    def __post_init__(self) -> None:
        """Check the entries; NumPy integers become ints."""
        one_of((WRAP, HOLD)).read("at_end", self.at_end)
        if not self.groups:
            raise ValueError("train_strategy must not be empty: give None for the groups in turn")
        if not isinstance(self.groups, GroupSequence) or len(self.groups) <= AT_ONCE:
            groups = tuple(checked_group("train_strategy", group) for group in self.groups)
            object.__setattr__(self, "groups", groups)

    def __hash__(self) -> int:
        """Hash the end, the length and the first groups, not every step."""
        return hash((self.at_end, len(self.groups), self.groups[:64]))

    def at(self, position: int) -> int:
        """Return the group of the step that comes after ``position`` steps."""
        last = len(self.groups) - 1
        return self.groups[min(position, last) if self.at_end == HOLD else position % (last + 1)]

    def tally(self, position: int = 0, steps: int | None = None) -> dict[int, int]:
        """Return how often each group comes in a number of steps; see ``GroupSequence``.

        Args:
            position: number of steps before the first one that counts.
            steps: number of steps that count; None, or too many, means the whole schedule.
        """
        length = len(self.groups)
        steps = length if steps is None else min(steps, length)
        begin = min(position, length - 1) if self.at_end == HOLD else position % length
        found = Counter(self._count(begin, min(begin + steps, length)))
        if self.at_end == WRAP:
            found += Counter(self._count(0, max(begin + steps - length, 0)))
        return dict(found)

    def _count(self, begin: int, end: int) -> dict[int, int]:
        if isinstance(self.groups, GroupSequence):
            return self.groups.tally(begin, end)
        return dict(Counter(self.groups[begin:end]))


Strategy = Union[FreezeSchedule, Sequence[int], Tensor, None]
OwnSchedule = Union[FreezeSchedule, Sequence[int], Callable[[int], int], str, None]


def prefix_schedule(
    groups: int,
    total_steps: int,
    kind: str = "linear",
    *,
    fraction: float = 1.0,
    start: float = 0.5,
) -> FreezeSchedule:
    r"""Return a schedule that freezes a growing prefix of the network, which stays frozen.

    With :math:`K = \lfloor fraction\cdot(G-1)\rfloor`, prefix k of 1 … K is frozen from the share
    :math:`t_k` of the steps on: linear :math:`t_k = s + (1-s)(k-1)/K`; cubic
    :math:`t_k = (\sqrt[3]s + (1-\sqrt[3]s)(k-1)/K)^3`, which freezes the first prefixes at shorter
    intervals; step :math:`t_k = s`, all at once.

    Args:
        groups: number of groups G, an int from 1 on. Group 0 trains everything.
        total_steps: steps of the training, an int from 1 on. After them the last group stays.
        kind: ``"linear"``, ``"cubic"`` or ``"step"``.
        fraction: how much of the network is frozen in the end, in [0, 1]. The last part never is.
        start: the share s of the steps before the first freezing, in [0, 1].

    Raises:
        ValueError: if an argument is out of its range.

    Examples:
        >>> from mindspore_boost_ext.grad_freeze.freezing import prefix_schedule
        >>> prefix_schedule(3, 8, start=0.5).groups
        (0, 0, 0, 0, 1, 1, 2, 2)
    """
    integer(1).read("groups", groups)
    integer(1).read("total_steps", total_steps)
    kind = str(one_of(("linear", "cubic", "step")).read("kind", kind))
    real("[0, 1]").read("fraction", fraction)
    real("[0, 1]").read("start", start)
    frozen = prefix_length(groups, fraction)
    ramp = np.arange(frozen) / max(frozen, 1)
    power = {"linear": 1, "cubic": 3, "step": 1}[kind]
    root = start ** (1 / power)
    shares = np.full(frozen, start) if kind == "step" else (root + (1 - root) * ramp) ** power
    # Rounded, so that an error in the sixteenth digit does not turn 0.5 of 8 steps into 5.
    first_steps = np.ceil(np.round(shares * total_steps, 6))
    return FreezeSchedule(PrefixGroups(first_steps, int(total_steps)), HOLD)


def prefix_length(groups: int, fraction: float) -> int:
    """Return the number of groups in a share of all but group 0, rounded down."""
    return math.floor(fraction * (groups - 1) + 1e-9)


def tabulate(schedule: Callable[[int], int], total_steps: int) -> FreezeSchedule:
    """Return the schedule of a function of the step: step 0, 1, … -> group.

    Args:
        schedule: it must return ints >= 0, and the same for the same step. Up to ``AT_ONCE`` steps,
            it is called now, once for each. For a longer schedule, it is called block by block when
            steps come near, perhaps more than once for a step.
        total_steps: number of steps, an int from 1 on. After them the schedule starts again.
    """
    integer(1).read("total_steps", total_steps)
    return FreezeSchedule(FunctionGroups(schedule, int(total_steps)))


def as_schedule(strategy: Strategy, groups: int) -> FreezeSchedule:
    """Return any form of strategy as a schedule; refuse groups that do not exist."""
    if strategy is None:
        return FreezeSchedule(tuple(range(groups)))
    if isinstance(strategy, (Tensor, np.ndarray)):
        if strategy.ndim != 1:
            raise ValueError(f"train_strategy must have one axis, got shape {strategy.shape}")
        strategy = (strategy.asnumpy() if isinstance(strategy, Tensor) else strategy).tolist()
    if isinstance(strategy, (list, tuple, GroupSequence)):
        strategy = FreezeSchedule(strategy)
    if not isinstance(strategy, FreezeSchedule):
        raise TypeError(
            "train_strategy must be a list, tuple, int32 Tensor, FreezeSchedule or None, got "
            f"{shown(strategy)}: tabulate(function, total_steps) makes one of a function"
        )
    check_highest(max(strategy.tally()), groups)
    return strategy


def check_highest(group: int, groups: int) -> None:
    """Raise ``ValueError`` unless a schedule's group is one of ``groups`` groups."""
    if group >= groups:
        raise ValueError(
            "a schedule (train_strategy, grad_freeze.schedule) must name groups "
            f"0 to {groups - 1}, got {group}: the network has "
            f"{groups} groups"
        )
