"""Tells whether labels give one class for each sample, or something else."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

_SHARES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)  # dtypes of shares of classes
_MOST = 0.5  # more must be equal, not all: a prompt, left out of a loss, may have other targets
# The least for inputs of one axis: with fewer, a feature and its classes may match by chance.
_PLACES, _KINDS = 16, 8
_SLACK = 0.01  # tolerance for the sum of shares in float16 or bfloat16


def no_class_a_sample(*inputs: object) -> str:
    """Return why the labels of a batch are not one class for each sample; empty if they are.

    Labels are the last input: classes ``[N]``, or shares of classes ``[N, K]``. A language model
    has a label for each place of a sequence, a segmentation for each pixel.
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
    """Return why a batch is a language model's, whatever its last input is; empty if it is not.

    It is one if another input has the tokens of the first one, one place on. Places followed by the
    same token do not count: they may be padding, on which masks and segments agree, too. It is also
    one if another input has one number below 0 among those for the places, as labels to ignore.
    """
    # One axis counts only for a stream and its targets: with more inputs it may be ids of users.
    axes = 1 if len(inputs) == 2 and getattr(inputs[0], "ndim", 2) == 1 else 2
    if not _are_tokens(inputs[0], axes):
        return ""
    tokens = inputs[0].asnumpy()
    moved = tokens[..., 1:] != tokens[..., :-1]
    for place, one in enumerate(inputs[1:], 2):
        if moved.any() and _are_tokens(one, axes) and one.shape == tokens.shape:
            others = one.asnumpy()
            same = others[..., :-1] == tokens[..., 1:]
            few = axes == 1 and (moved.sum() < _PLACES or len(set(tokens.tolist())) < _KINDS)
            if same[moved].mean() > _MOST and not few:
                return f"needs one class per sample, but input {place} has tokens shifted by one"
            ignored = np.unique(others[others < 0])
            if axes > 1 and len(ignored) == 1 and tokens.min() >= 0:
                words = f"the number {ignored[0]} among others, as labels of masked words have"
                return f"needs one class per sample, but input {place} has {words}"
    return ""


def _are_tokens(thing: Any, axes: int) -> bool:
    return isinstance(thing, Tensor) and thing.ndim == axes and thing.dtype in (ms.int32, ms.int64)


def rows_of_places(*inputs: Any) -> str:
    """Return why the rows of the last input are for places of sequences; empty if they are not.

    They may be a mask of tokens, or a series. Shares of classes are recognised by their sum, 1.
    """
    first, labels = inputs[0], inputs[-1]
    shape: tuple[int, ...] = getattr(labels, "shape", ())
    if len(shape) != 2 or shape[1] == 1 or labels.dtype not in _SHARES or labels.size == 0:
        return ""
    if first.dtype in _SHARES and first.shape != shape:  # the first input is not a series
        return ""
    sums = labels.float().asnumpy().sum(1)
    if abs(sums - 1).max() <= _SLACK:
        return ""
    return f"needs shares of classes, but the rows of labels {tuple(shape)} do not add up to 1"
