"""The switch ``seq_length_warmup``: sequences start short and grow with the training."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.config.rules import described, shown
from mindspore_boost_ext.stages.growing_inputs import SKIP, GrowingInputs, scaled
from mindspore_boost_ext.stages.trial import Run, depends_on_order, mixes_samples

TRUNCATE, RESHAPE = "truncate", "reshape"
_SHORTEST_PIECE = 2
_PRODUCT, _FIRST_LARGEST = ops.MatMul(), ops.Argmax(1, ms.int32)
# What is said of the loss of the first batch.
_COMPARES = (
    "the loss of the first batch is neither the mean nor the sum of those of its halves, as where "
    "it compares samples: it would compare pieces of them"
)
_TIME_FIRST = (
    "the loss of the first batch changes with the order of its rows, as where the first axis is "
    "time: sequences must have the shape (N, L)"
)
_MOSTLY = 0.9  # share of the places of a batch: padding may differ


class ShortSequences(nn.Cell):
    r"""Makes the sequences of a batch shorter.

    It shortens all inputs whose second axis is as long as that of the first input, and integer
    labels of shape :math:`(N L)`. If it reshapes, and :math:`l` does not divide :math:`L`, it
    leaves out the last :math:`L \bmod l` places. A piece of padding alone gives way, in all inputs,
    to the first other piece of its sequence: attention that masks padding with -inf has no result
    for it. Padding is what repeats the last value of a sequence of the first input up to its end,
    or the first value from its start.

    Args:
        scale (float): factor on the length, in (0, 1).
        multiple (int): the length is rounded to a multiple of this, at least 1. Default: 1.
        method (str): ``"truncate"`` keeps the first :math:`l` places; ``"reshape"`` makes
            :math:`\lfloor L / l \rfloor` sequences of each, so that nearly all is trained on; they
            have at least 2 places. Default: ``"truncate"``.

    Inputs:
        - **sequences** (Tensor) - any dtype, shape :math:`(N, L, ...)`.
        - **\*rest** (tuple(Tensor)) - the other inputs, such as labels :math:`(N, L)`.

    Outputs:
        tuple of all inputs, those of length :math:`L` in shape :math:`(N, l, ...)`, or
        :math:`(N \lfloor L / l \rfloor, l, ...)`; labels of one axis keep it.

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
        if self.reshapes:  # a piece of one place would always be the end of something
            short = min(max(short, _SHORTEST_PIECE), length)
        result = ()
        for one in inputs:
            if isinstance(one, Tensor) and _are_flat_labels(one, inputs[0]):
                one = self._cut(one.reshape((-1, length)), short, inputs[0]).reshape((-1,))
            elif isinstance(one, Tensor) and one.ndim > 1 and one.shape[1] == length:
                one = self._cut(one, short, inputs[0])
            result += (one,)  # type: ignore[assignment]
        return result

    def _cut(self, one: Tensor, short: int, first: Tensor) -> Tensor:
        """Return the pieces of an input, without those that hold only padding in the first one."""
        if not self.reshapes:
            return one[:, :short]
        count = one.shape[1] // short
        whole = one[:, : count * short].reshape((-1, count, short, *one.shape[2:]))
        if _has_same_samples(one.shape, first.shape):
            whole = ops.gather(whole, _pieces(first, short), 1, 1)
        return whole.reshape((-1, short, *one.shape[2:]))


def _pieces(first: Tensor, short: int) -> Tensor:
    """Return which piece of each sequence to take, int32 of shape (N, pieces): itself, or another.

    ``first`` is the first input, of shape (N, L, ...).
    """
    numbers, behind, before = _sums(first.shape[1], short)
    at_end = _PRODUCT(_differ(first, first[:, -1:]), behind)
    at_start = _PRODUCT(_differ(first, first[:, :1]), before)
    has_content = ops.Sign()(at_end * at_start)
    other = ops.Cast()(_FIRST_LARGEST(has_content), ms.float32).reshape((-1, 1))
    return ops.Cast()(other + has_content * (numbers - other), ms.int32)


def _differ(values: Tensor, others: Tensor) -> Tensor:
    """Return 1 for each place of sequences that is not as another place, else 0; float32 (N, L)."""
    found = ops.Cast()(ops.NotEqual()(values, others), ms.float32)
    return found if found.ndim == 2 else found.reshape((*found.shape[:2], -1)).amax(-1)


@ops.constexpr
def _sums(length: int, short: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of pieces, and matrices that sum over places for each piece, float32.

    The first sums from the start of the piece to the end of the sequence, the second from the start
    of the sequence to the end of the piece.
    """
    pieces, places = np.arange(length // short), np.arange(length)[:, None]
    found = (pieces, places >= pieces * short, places < (pieces + 1) * short)
    numbers, behind, before = (Tensor(one.astype(np.float32)) for one in found)
    return numbers, behind, before


@ops.constexpr(check=False)  # what a graph does not know is None or -1 here
def _has_same_samples(shape: tuple[int, ...], first: tuple[int, ...]) -> bool:
    """Return whether an input has the samples of the first one, and there are any."""
    return first[0] != 0 and (shape[0] == first[0] or {shape[0], first[0]} & {None, -1} != set())


def _are_flat_labels(one: Tensor, first: Tensor) -> bool:
    """Return whether an input is integers, one for each place of the sequences of the first one.

    Floats may be weights of as many classes, and with one sequence integers may be its positions.
    """
    is_integer = one.dtype in (ms.int32, ms.int64)
    return is_integer and one.ndim == 1 and _has_each_place(one.shape, first.shape)


@ops.constexpr(check=False)
def _has_each_place(shape: tuple[int, ...], first: tuple[int, ...]) -> bool:
    known = not {shape[0], *first[:2]} & {None, -1}
    return known and first[0] > 1 and first[1] > 1 and shape[0] == first[0] * first[1]


class SeqLengthAlgorithm(GrowingInputs):
    """Sequence-length warm-up."""

    switch = "seq_length_warmup"

    def smaller(self, scale: float) -> nn.Cell:
        """Return the Cell that shortens sequences."""
        return ShortSequences(scale, self.settings.multiple, self.settings.method)

    def check_inputs(self, *inputs: object) -> None:
        """Refuse inputs that are not sequences or, with ``"skip"``, whose pieces do not match."""
        first = inputs[0] if inputs else None
        if isinstance(first, Tensor) and first.ndim in (2, 3):
            if self._asks() and are_source_and_target(*inputs):
                raise ValueError(
                    "its inputs are a source and a target, as for a translation, whose pieces do "
                    "not belong together"
                )
            return
        found = f"shape {first.shape}" if isinstance(first, Tensor) else shown(first)
        raise ValueError(
            "the first input must be a batch of sequences, of shape (N, L) or (N, L, features), "
            f"got {found}: leave seq_length_warmup out"
        )

    def check_loss(self, run: Run, *inputs: Any) -> None:
        """With ``"skip"``, refuse a loss that compares samples: it would compare their pieces."""
        if not self._asks():
            return
        try:
            mixes, ordered = mixes_samples(run, *inputs), depends_on_order(run, *inputs)
        except Exception as error:  # the user's network
            reason = f"the loss cannot be tried on half of the first batch: {described(error)}"
            raise ValueError(reason) from error
        if mixes:
            raise ValueError(_COMPARES)
        if ordered:
            raise ValueError(_TIME_FIRST)

    def _asks(self) -> bool:
        """Return whether it depends on the network if sequences are trained on in pieces."""
        return bool(self.settings.if_unfit == SKIP and self.settings.method == RESHAPE)


def are_source_and_target(first: Tensor, *others: object) -> bool:
    """Return whether two other inputs are a decoder's: pieces of ``first`` are not theirs."""
    return any(_is_taught(*two, first) for two in combinations(others, 2))


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
