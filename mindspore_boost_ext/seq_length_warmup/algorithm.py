"""The switch ``seq_length_warmup``: sequences start short and grow with the training."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.stages.growing_inputs import SKIP, GrowingInputs, scaled

_MOSTLY = 0.9  # of the places of a batch: padding may differ
TRUNCATE, RESHAPE = "truncate", "reshape"


class ShortSequences(nn.Cell):
    r"""Makes the sequences of a batch shorter.

    Shortened are all inputs whose second axis is as long as that of the first input. To reshape, a
    length :math:`l` that does not divide :math:`L` leaves the last :math:`L \bmod l` places out.

    Args:
        scale (float): of the length, in (0, 1).
        multiple (int): what the length is rounded to a multiple of, at least 1. Default: 1.
        method (str): ``"truncate"`` keeps the first :math:`l` places; ``"reshape"`` makes
            :math:`\lfloor L / l \rfloor` sequences of each, so that nearly all is trained on.
            Default: ``"truncate"``.

    Inputs:
        - **sequences** (Tensor) - any dtype, shape :math:`(N, L, ...)`.
        - **\*rest** (tuple(Tensor)) - the other inputs, such as labels :math:`(N, L)`.

    Outputs:
        tuple of all inputs, those of length :math:`L` in shape :math:`(N, l, ...)`, or
        :math:`(N \lfloor L / l \rfloor, l, ...)`.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.seq_length_warmup import ShortSequences
        >>> tokens = Tensor([[1, 2, 3, 4]])
        >>> ShortSequences(0.5)(tokens)[0].asnumpy().tolist()
        [[1, 2]]
        >>> ShortSequences(0.5, method="reshape")(tokens)[0].asnumpy().tolist()
        [[1, 2], [3, 4]]
    """

    def __init__(self, scale: float, multiple: int = 1, method: str = TRUNCATE) -> None:
        super().__init__(auto_prefix=False)
        self.scale, self.multiple = scale, multiple
        self.reshapes = method == RESHAPE

    def construct(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Shorten every input that is as long as the first."""
        length = inputs[0].shape[1]
        short = scaled(length, self.scale, self.multiple)
        result = ()
        for one in inputs:
            if isinstance(one, Tensor) and one.ndim > 1 and one.shape[1] == length:
                if self.reshapes:
                    whole = one[:, : length // short * short]
                    one = whole.reshape((-1, short, *one.shape[2:]))
                else:
                    one = one[:, :short]
            result += (one,)  # type: ignore[assignment]
        return result


class SeqLengthAlgorithm(GrowingInputs):
    """Sequence-length warm-up."""

    switch = "seq_length_warmup"

    def smaller(self, settings: Any, scale: float) -> nn.Cell:
        """Return what shortens sequences."""
        return ShortSequences(scale, settings.multiple, settings.method)

    def check_inputs(self, settings: Any, *inputs: object) -> None:
        """Refuse a first input that is no batch of sequences; to skip, pieces that do not match."""
        first = inputs[0] if inputs else None
        if isinstance(first, Tensor) and first.ndim in (2, 3):
            pieces = settings.if_unfit == SKIP and settings.method == RESHAPE
            if pieces and any(_is_taught(*two, first) for two in combinations(inputs[1:], 2)):
                raise ValueError(
                    "it takes a source and a target, as for a translation, whose pieces do not "
                    "belong together"
                )
            return
        found = f"shape {first.shape}" if isinstance(first, Tensor) else shown(first)
        raise ValueError(
            "seq_length_warmup shortens the second axis of the first input, which must be a Tensor "
            f"of shape (N, L) or (N, L, features), got {found}: leave seq_length_warmup away"
        )


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
