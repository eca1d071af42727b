"""Sequences of groups of any length, computed when they are read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from mindspore_boost_ext.config.rules import integer

AT_ONCE = 2**20  # entries that may be computed and held together
_BLOCK = 4096
_ASKED = 2**16  # steps at which a function is asked for an estimate
_GROUP = integer(0)


def checked_group(name: str, group: object) -> int:
    """Return the number of a group as an int; ``name`` is its source, for the error."""
    if type(group) is not int or group < 0:
        _GROUP.read(name, group, "give ints, the group of each update")
    return int(group)  # type: ignore[call-overload]


class GroupSequence(Sequence[int]):
    """The group of each step; it takes the memory of one block, whatever the length.

    All entries take the same time to read, so a training resumes from a late step at once. It is
    equal to a list or tuple with the same entries.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._block: tuple[int, list[int]] = (0, [])

    @abstractmethod
    def between(self, begin: int, end: int) -> np.ndarray:
        """Return the groups of the steps from ``begin`` to ``end`` - 1, int64 [end - begin]."""

    @abstractmethod
    def _estimate(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Return the groups from ``begin`` to ``end`` - 1 with their counts, perhaps estimated."""

    @property
    def period(self) -> int:
        """The number of entries after which the sequence repeats itself."""
        return self._length

    def tally(self, begin: int, end: int) -> dict[int, int]:
        """Return how often each group comes from ``begin`` to ``end`` - 1, without counts of 0.

        Above ``AT_ONCE`` steps, counts of drawn groups are the expected ones. Those of a function
        are estimated from a part of the steps.
        """
        if end - begin <= AT_ONCE:
            found, counts = np.unique(self.between(begin, end), return_counts=True)
            return dict(zip(found.tolist(), counts.tolist()))
        return {group: int(count) for group, count in self._estimate(begin, end) if count > 0}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        place = range(self._length)[index]
        if isinstance(place, range):
            if place.step == 1:
                return tuple(self.between(place.start, max(place.start, place.stop)).tolist())
            return tuple(self[one] for one in place)
        begin, block = self._block
        if not begin <= place < begin + len(block):
            begin = place - place % _BLOCK
            block = self.between(begin, min(begin + _BLOCK, self._length)).tolist()
            self._block = (begin, block)
        return block[place - begin]

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, self._length, _BLOCK):
            yield from self.between(begin, min(begin + _BLOCK, self._length)).tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, GroupSequence)):
            return NotImplemented
        return self is other or (
            len(self) == len(other) and all(one == two for one, two in zip(self, other))
        )

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        beginning = ", ".join(str(group) for group in self[:8])
        return f"{type(self).__name__}({beginning}{', ...' if self._length > 8 else ''})"


class RepeatedGroups(GroupSequence):
    """Freeze type 0: repeats a run of zeros, a share ``freeze_p``, and each other group once.

    It has at least ``length`` steps: the last repetition is complete.
    """

    def __init__(self, groups: int, freeze_p: float, length: int) -> None:
        self._zeros = int(freeze_p * (groups - 1) // (1 - freeze_p) + 0.5) if groups > 1 else 1
        self._groups = groups
        super().__init__(self.period * math.ceil(length / self.period))

    @property
    def period(self) -> int:
        """The length of one repetition: the zeros, and each other group once."""
        return self._zeros + self._groups - 1

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return zeros up to the place where the groups begin to count up."""
        return np.maximum(np.arange(begin, end) % self.period - self._zeros + 1, 0)

    def _estimate(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        return enumerate(self._before(end) - self._before(begin))

    def _before(self, step: int) -> np.ndarray:
        whole, rest = divmod(step, self.period)
        counts = whole + (rest >= self._zeros + np.arange(self._groups))
        counts[0] = whole * self._zeros + min(rest, self._zeros)
        return counts


class DrawnGroups(GroupSequence):
    """Freeze type 1: zeros and drawn groups take turns; needs two groups at least.

    The running share of zeros never differs from ``freeze_p`` by more than one step. Draws take k
    from 1 … groups−1 with probability ∝ groups−k. Draw i is the same in every block: each draw
    takes one number of the generator, which can skip numbers.
    """

    def __init__(self, groups: int, freeze_p: float, length: int, seed: int) -> None:
        super().__init__(length)
        self._share = 1 - freeze_p
        self._seed = seed
        weights = np.arange(groups - 1, 0, -1)
        self._groups, self._weights = np.arange(1, groups), weights / weights.sum()

    def between(self, begin: int, end: int) -> np.ndarray:
        """Return a drawn group where the number of frozen steps grows, else 0."""
        frozen = self._frozen_before(np.arange(begin, end + 1))
        generator = np.random.Generator(np.random.PCG64(self._seed).advance(int(frozen[0])))
        entries = np.zeros(end - begin, np.int64)
        draws = int(frozen[-1] - frozen[0])
        entries[np.diff(frozen) > 0] = generator.choice(self._groups, draws, p=self._weights)
        return entries

    def _frozen_before(self, steps: np.ndarray) -> np.ndarray:
        """Return how many of the first ``steps`` steps are frozen.

        The first is not. After n steps, the next one is frozen if fewer than their share of n are.
        So n + 1 steps have k frozen ones, the smallest k with k / n >= share, compared as floats.
        share * n gives k only up to a rounding error.
        """
        n = np.maximum(steps - 1, 0)
        least = np.floor(self._share * n).astype(np.int64) - 1
        too_few = sum((least + one) / np.maximum(n, 1) < self._share for one in range(3))
        return np.where(n > 0, least + too_few, 0)

    def _estimate(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        frozen = np.diff(self._frozen_before(np.array([begin, end])))[0]
        return enumerate([end - begin - frozen, *np.ceil(frozen * self._weights)])


class PrefixGroups(GroupSequence):
    """Group k trains from its first step until group k + 1 begins.

    Group 0 begins at step 0. ``first_steps`` are those of groups 1, 2, …, in order.
    """

    def __init__(self, first_steps: np.ndarray, length: int) -> None:
        super().__init__(length)
        self.first_steps = np.concatenate([[0], first_steps]).astype(np.int64)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Look each step up among the first steps of the groups."""
        steps = np.arange(begin, end)
        return np.searchsorted(self.first_steps, steps, side="right").astype(np.int64) - 1

    def _estimate(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        return enumerate(np.diff(np.clip([*self.first_steps, end], begin, end)))


class FunctionGroups(GroupSequence):
    """Groups from a function of the step, called block by block, again if a block is read again.

    It must return ints >= 0, and the same for the same step.
    """

    def __init__(self, function: Callable[[int], int], length: int) -> None:
        super().__init__(length)
        self._function = function

    def between(self, begin: int, end: int) -> np.ndarray:
        """Call the function for each step; raise ``ValueError`` if it returns no group."""
        return np.array([self._ask(step) for step in range(begin, end)], np.int64)

    def _estimate(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        # A random step in each of ``_ASKED`` equal parts: even spacing would miss a period.
        borders = np.linspace(begin, end, _ASKED + 1).astype(np.int64)
        steps = np.random.default_rng(0).integers(borders[:-1], borders[1:]).tolist()
        asked = Counter(self._ask(step) for step in (begin, *steps, end - 1))
        return ((group, count * (end - begin) // _ASKED) for group, count in asked.items())

    def _ask(self, step: int) -> int:
        return checked_group(f"grad_freeze.schedule({step})", self._function(step))
