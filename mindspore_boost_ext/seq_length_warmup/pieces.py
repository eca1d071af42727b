"""Asks a network whether pieces of its sequences may be trained on as samples of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from mindspore_boost_ext.config.rules import described
from mindspore_boost_ext.stages.trial import Outcome, compares_samples

_MOSTLY = 0.9  # of the places of a batch: padding may differ
_ROUNDING = 0.02  # of the change of a loss, beside which the loss itself is large


def why_not_by_inputs(first: Tensor, *others: object) -> str:
    """Return why pieces would not go together; empty if nothing in the inputs speaks against it."""
    if any(_is_taught(*two, first) for two in combinations(others, 2)):
        return (
            "it takes a source and a target, as for a translation, whose pieces do not belong "
            "together"
        )
    return ""


def why_not_by_loss(run: Callable[..., Outcome], first: Tensor, *others: object) -> str:
    """Return why pieces would be trained on for another aim; empty if nothing shows that.

    Args:
        run (Callable): runs the network in evaluation mode.
        first (Tensor): sequences, shape (N, L) or (N, L, features).
        others (object): the other inputs.
    """
    inputs = (first, *others)
    try:
        if compares_samples(run, *inputs):
            return "its loss compares the samples of a batch, and would compare pieces of them"
    except Exception as error:  # the user's network
        return f"half of the first batch cannot be tried: {described(error)}"
    like = [
        n for n, one in enumerate(others, 1) if getattr(one, "shape", ())[:2] == first.shape[:2]
    ]
    if like and not any(_has_labels_of_places(run, inputs, number) for number in like):
        return "no input behind the first has labels of its places, and pieces have no others"
    return ""


def _has_labels_of_places(run: Callable[..., Outcome], inputs: Sequence[Any], number: int) -> bool:
    """Return whether an input moves the loss place by place, as labels do and sequences do not.

    Then what turning round its first half changes is the same whether the second half is as it was
    or turned round, too.
    """

    def loss(*turned: bool) -> float:
        changed = _turned(inputs[number], *turned)
        found = run(*inputs[:number], changed, *inputs[number + 1 :]).loss
        return np.nan if found is None else found

    alone, beside = loss(True, False) - loss(False, False), loss(True, True) - loss(False, True)
    return bool(alone != 0 and not abs(alone - beside) > _ROUNDING * abs(alone))


def _turned(one: Tensor, *turned: bool) -> Tensor:
    """Return an input in which the first half of the places, or the second, is turned round."""
    middle = one.shape[1] // 2
    halves = zip((one[:, :middle], one[:, middle:]), turned)
    return ops.concat([ops.flip(half, (1,)) if turn else half for half, turn in halves], 1)


def _is_taught(one: object, other: object, first: Tensor) -> bool:
    """Return whether two inputs are what a decoder is given and what it is to say, one further.

    Args:
        one: an input behind the first.
        other: one behind that; what is below 0 counts as left out of the loss.
        first (Tensor): the first input.
    """
    for each in (one, other):
        if not isinstance(each, Tensor) or each.shape != first.shape or each.is_floating_point():
            return False
    given, said = one.asnumpy()[:, 1:], other.asnumpy()[:, :-1]  # type: ignore[attr-defined]
    symbols, counts = np.unique(said[said >= 0], return_counts=True)
    if given.max(initial=0) <= 1 or symbols.size == 0:  # a mask; no labels
        return False
    filler = symbols[counts.argmax()]
    compared = (said >= 0) & ~((given == filler) & (said == filler))
    right, rows = int((compared & (given == said)).sum()), len(said)
    wrong = int(compared.sum()) - right
    # An end of each sentence is said and never given, and padding may differ.
    return right >= 2 * rows and wrong <= rows + (1 - _MOSTLY) * (right + wrong)
