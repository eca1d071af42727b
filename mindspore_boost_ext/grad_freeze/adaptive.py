"""Adaptive freezing: the next part of the prefix is frozen when its weights have stopped moving."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt

_NEVER = 2**31 - 1
_RANDOM_WALK = 2**-0.5  # random walk: way over two windows / sum of the ways over each


class AdaptiveFreezeOpt(FreezeOpt):
    r"""A :class:`FreezeOpt` that decides from the weights when its next group begins.

    Every ``window`` updates, the weights :math:`w` of each part are compared with those of one and
    two windows ago, :math:`w'` and :math:`w''`. The next part to freeze has stopped if its relative
    change is small compared with its largest so far, and is noise, not a move in one direction:

    .. math::
        \frac{|w - w'|}{|w|} \le tolerance \cdot \max \frac{|w - w'|}{|w|}, \qquad
        |w - w''| \le \sqrt{\tfrac12}\,(|w - w'| + |w' - w''|)

    The host decides between two steps, from weights that are equal on all ranks. In sink mode this
    is not possible. State: the first update of each group, and two copies of the weights that may
    be frozen.

    Args:
        opt (nn.Optimizer): the plain optimizer.
        train_parameter_groups (Union[tuple, list]): group 0 is all; each further one leaves out a
            longer prefix.
        most (int): the last group that may begin.
        window (int): updates between two comparisons, at least 1.
        tolerance (float): share of a part's largest change at which it has stopped, in (0, 1).

    Inputs and outputs are those of :class:`FreezeOpt`.

    Source: the relative change and its order along the network are from Liu et al., AutoFreeze,
    2021; to decide on a part by its own plasticity is from Wang et al., Egeria, 2023.
    """

    def __init__(
        self,
        opt: nn.Optimizer,
        train_parameter_groups: Sequence[Iterable[Any]],
        most: int,
        window: int,
        tolerance: float,
    ) -> None:
        super().__init__(opt, train_parameter_groups, (0,))
        self.most, self.window, self.tolerance = most, window, tolerance
        groups = self.group_positions
        self.parts = [
            tuple(sorted({*groups[one]} - {*groups[one + 1]})) for one in range(self.most)
        ]
        self.first_steps = state("grad_freeze.first_steps", [0, *[_NEVER] * most], np.int32)
        # Number of looks, update of the last.
        self.looked = state("grad_freeze.looked", [0, 0], np.int32)
        # At least one entry: a checkpoint file of MindSpore leaves out empty Parameters.
        self.fastest = state("grad_freeze.fastest", np.zeros(max(most, 1)))
        frozen = [self.parameters[place] for part in self.parts for place in part]
        self.last = _copies("last", frozen)
        self.before_last = _copies("before_last", frozen)

    def next_group(self) -> int:
        """Return the group to train now; first look at the weights if a window is over."""
        position = int(self.position.asnumpy())
        looks, last = self.looked.asnumpy().tolist()
        if looks == 0 or position - last >= self.window:
            self._look(position, looks)
        return self.present_group(position)

    def present_group(self, position: int) -> int:
        """Return the last group that has begun."""
        return int(np.searchsorted(self.first_steps.asnumpy(), position, side="right")) - 1

    def _look(self, position: int, looks: int) -> None:
        """Record the change of each part; begin the next group if its part has stopped."""
        now = [self.parameters[place].asnumpy() for part in self.parts for place in part]
        last, before = ([one.asnumpy() for one in kept] for kept in (self.last, self.before_last))
        fastest, group, begin = self.fastest.asnumpy().copy(), self.present_group(position), 0
        for number, part in enumerate(self.parts):
            end = begin + len(part)
            w, one, two = (_joined(values[begin:end]) for values in (now, last, before))
            begin = end
            if looks == 0:
                continue
            change = _norm(w - one) / (_norm(w) or 1.0)
            slow = change <= self.tolerance * fastest[number]
            fastest[number] = max(fastest[number], change)
            way = _norm(w - one) + _norm(one - two)
            if looks > 1 and number == group and slow and _norm(w - two) <= _RANDOM_WALK * way:
                first_steps = self.first_steps.asnumpy().copy()
                first_steps[number + 1] = position
                self.first_steps.set_data(Tensor(first_steps))
        for kept, values in ((self.before_last, last), (self.last, now)):
            for parameter, value in zip(kept, values):
                parameter.set_data(Tensor(value))
        self.fastest.set_data(Tensor(fastest))
        self.looked.set_data(Tensor(np.array([looks + 1, position], np.int32)))

    def expect_updates(self, updates: int) -> None:
        """Do nothing: what will freeze is not known beforehand."""

    def ever_freezes(self) -> bool:
        """Return whether there is a group that may begin."""
        return self.most > 0

    def counts(self) -> dict[str, int]:
        """Return figures for a report: groups, and the last one that may begin."""
        return {"groups": len(self.group_positions), "last_group": self.most}

    def most_frozen(self) -> str:
        """Return, for a report, which parameters may be frozen."""
        if not self.parts:
            return "nothing"
        names = [self.parameters[place].name for part in self.parts for place in part]
        return f"at most {names[0]} ... {names[-1]}, each part when its weights have stopped moving"

    def over_other_parameters(self, opt: nn.Optimizer) -> FreezeOpt:
        """Return the same over another optimizer, which compares its weights anew."""
        groups = super().over_other_parameters(opt).train_parameter_groups
        other = AdaptiveFreezeOpt(opt, groups, self.most, self.window, self.tolerance)
        other.position = self.position
        return other


def _copies(name: str, parameters: Sequence[Parameter]) -> ParameterTuple:
    """Return zeros of the shapes of parameters, as state."""
    zeros = ((parameter.name, np.zeros_like(parameter.asnumpy())) for parameter in parameters)
    return ParameterTuple([state(f"grad_freeze.{name}.{of}", one, one.dtype) for of, one in zeros])


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.float64(value).reshape(-1) for value in values)])


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))
