"""What labels are of: each sample one class, or something else."""

from __future__ import annotations

import mindspore as ms

_SHARES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)  # dtypes of a row for each sample


def no_class_a_sample(*inputs: object) -> str:
    """Return why the labels of a batch are not one class of each sample; empty if they are.

    Those of a language model belong to each place of a sequence, those of a segmentation to each
    pixel.

    Args:
        inputs: the batch, labels last: ``[N]`` of classes or ``[N, K]`` of their shares.
    """
    samples, labels = getattr(inputs[0], "shape", ()), inputs[-1]
    shape = getattr(labels, "shape", ())
    rows = len(shape) == 2 and getattr(labels, "dtype", None) in _SHARES
    if shape[:1] == samples[:1] and (len(shape) == 1 or rows):
        return ""
    return f"takes one class a sample, but the labels have the shape {tuple(shape)}"


__all__ = ["no_class_a_sample"]
