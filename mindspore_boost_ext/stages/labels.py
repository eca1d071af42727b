"""What labels are of: each sample one class, or something else."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor

_SHARES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)  # dtypes of a row for each sample
_SLACK = 0.01  # of shares in float16 or bfloat16, added up


def no_class_a_sample(*inputs: object) -> str:
    """Return why the labels of a batch are not one class of each sample; empty if they are.

    Those of a language model belong to each place of a sequence, those of a segmentation to each
    pixel.

    Args:
        inputs: the batch, labels last: ``[N]`` of classes or ``[N, K]`` of their shares.
    """
    first, labels = (getattr(one, "shape", ()) for one in (inputs[0], inputs[-1]))
    rows = len(labels) == 2 and getattr(inputs[-1], "dtype", None) in _SHARES
    if first[:1] != labels[:1] or not (len(labels) == 1 or rows):
        return f"takes one class a sample, but the labels have the shape {tuple(labels)}"
    if rows and _are_of_places(inputs[0], inputs[-1]):
        return f"takes shares of classes, but the rows of labels {tuple(labels)} do not add up to 1"
    return ""


def _are_of_places(first: Any, labels: Tensor) -> bool:
    """Return whether rows belong to a sequence, such as a mask of tokens or a series.

    Shares of classes are told from them by their sum, 1.
    """
    sequence = first.dtype not in _SHARES or first.shape == labels.shape
    if not sequence or labels.shape[1] == 1:
        return False
    sums = labels.float().asnumpy().sum(1)
    return bool(abs(sums - 1).max() > _SLACK)


__all__ = ["no_class_a_sample"]
