"""Whether pieces of the sequences of a batch may be trained on as samples of their own."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from mindspore import Tensor

_MOSTLY = 0.9  # share of the places of a batch: padding may differ


def why_not(first: Tensor, *others: object) -> str:
    """Return why pieces would not belong together; empty if the inputs show no reason."""
    if any(_is_taught(*two, first) for two in combinations(others, 2)):
        return (
            "its inputs are a source and a target, as for a translation, whose pieces do not "
            "belong together"
        )
    return ""


def _is_taught(one: object, other: object, first: Tensor) -> bool:
    """Return whether two inputs are a decoder's input and its target, shifted by one place.

    Targets below 0 count as left out of the loss.
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
    # The end of a sentence is only in the target, and padding may differ.
    return right >= 2 * rows and wrong <= rows + (1 - _MOSTLY) * (right + wrong)
