"""What labels are of: each sample one class, or something else."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor

_SHARES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)  # dtypes of a row for each sample
_MOST = 0.5  # of a share: what is left out of a loss, such as a prompt, may have another target
# Of a stream without an axis of samples: fewer may be a feature, and its classes, by chance.
_PLACES, _KINDS = 16, 8
_SLACK = 0.01  # of shares in float16 or bfloat16, added up


def no_class_a_sample(*inputs: object) -> str:
    """Return why the labels of a batch are not one class of each sample; empty if they are.

    They are last, ``[N]`` of classes or ``[N, K]`` of their shares. Those of a language model
    belong to each place of a sequence, those of a segmentation to each pixel.
    """
    if len(inputs) == 1:
        return "needs one class per sample, but the batch has one input and no labels"
    shapes: list[tuple[int, ...]] = [getattr(one, "shape", ()) for one in inputs]
    first, labels = shapes[0], shapes[-1]
    rows = len(labels) == 2 and getattr(inputs[-1], "dtype", None) in _SHARES
    if first[:1] == labels[:1] and (len(labels) == 1 or rows):
        return ""
    found = f"the last input, used as the labels, has the shape {tuple(labels)}"
    return f"needs one class per sample, but {found}, and the first input has {tuple(first)}"


def next_tokens(*inputs: Any) -> str:
    """Return why a batch is a language model's, whatever input stands last; empty if it is not.

    Another input has the tokens of the first one, one place on. Places whose token comes twice do
    not count: padding, which masks and segments have there, too.
    """
    # Without an axis of samples a stream and its targets alone: more may be numbers of users.
    axes = 1 if len(inputs) == 2 and getattr(inputs[0], "ndim", 2) == 1 else 2
    if not _are_tokens(inputs[0], axes):
        return ""
    tokens = inputs[0].asnumpy()
    moved = tokens[..., 1:] != tokens[..., :-1]
    for place, one in enumerate(inputs[1:], 2):
        if moved.any() and _are_tokens(one, axes) and one.shape == tokens.shape:
            same = one.asnumpy()[..., :-1] == tokens[..., 1:]
            few = axes == 1 and (moved.sum() < _PLACES or len(set(tokens.tolist())) < _KINDS)
            if same[moved].mean() > _MOST and not few:
                return f"needs one class per sample, but input {place} has tokens shifted by one"
    return ""


def _are_tokens(thing: Any, axes: int) -> bool:
    return isinstance(thing, Tensor) and thing.ndim == axes and thing.dtype in (ms.int32, ms.int64)


def rows_of_places(*inputs: Any) -> str:
    """Return why the last input, rows of numbers, is of the places of sequences; empty if not.

    A mask of tokens, or a series. Shares of classes are told from them by their sum, 1.
    """
    first, labels = inputs[0], inputs[-1]
    shape: tuple[int, ...] = getattr(labels, "shape", ())
    if len(shape) != 2 or shape[1] == 1 or labels.dtype not in _SHARES or labels.size == 0:
        return ""
    if first.dtype in _SHARES and first.shape != shape:  # numbers, and no series
        return ""
    sums = labels.float().asnumpy().sum(1)
    if abs(sums - 1).max() <= _SLACK:
        return ""
    return f"needs shares of classes, but the rows of labels {tuple(shape)} do not add up to 1"
