"""``ops.cross_entropy`` of labels that are indices of classes, with a gradient of one operator."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.function.nn_func import cross_entropy as ORIGINAL

from mindspore_boost_ext.runtime.compiling import is_eager


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return what ``ops.cross_entropy`` returns, in less time where Python runs it.

    MindSpore always computes and differentiates the terms of label smoothing, even if unused.
    """
    ours = weight is None and reduction in ("mean", "sum") and fits(input, target)
    if not is_eager() or not ours or not _fit(ignore_index, label_smoothing, input.ndim):
        return ORIGINAL(input, target, weight, ignore_index, reduction, label_smoothing)
    rows, labels = in_rows(input, target)
    classes = _classes(labels, rows.shape[1], ignore_index)
    if classes is None:
        return ORIGINAL(input, target, weight, ignore_index, reduction, label_smoothing)
    mean = _MEAN(rows, classes)
    if label_smoothing:
        mean = mean + label_smoothing * (picked(rows, classes).mean() - rows.mean())
    return mean if reduction == "mean" else mean * len(rows)


def _fit(ignored: object, smoothing: object, axes: int) -> bool:
    """Return whether the settings are legal, and the loss of logits of so many axes is made here.

    With smoothing, sequences and images are left to MindSpore, which has second gradients there.
    """
    if type(ignored) is not int or type(smoothing) is not float:
        return False
    return smoothing == 0 or (0 < smoothing <= 1 and axes == 2)


def _classes(labels: Tensor, classes: int, ignored: int) -> Tensor | None:
    """Return a copy of the labels: they may change before the gradient is computed.

    Return None if a label is to be ignored or is no class: then MindSpore's function is called.
    """
    values = labels.asnumpy()
    if ((values < 0) | (values >= classes) | (values == ignored)).any():
        return None
    return Tensor(values.copy())


def fits(logits: Tensor, labels: Tensor) -> bool:
    """Return whether these are logits and indices of classes; for others, MindSpore's is called."""
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return False
    if logits.dtype != mstype.float32 or labels.dtype != mstype.int32:
        return False
    if logits.ndim < 2 or 0 in logits.shape:
        return False
    return labels.shape == (logits.shape[0], *logits.shape[2:])


def in_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [N, C, ...] as rows of C, and their labels."""
    rows = logits
    if logits.ndim > 2:
        rows = logits.transpose((0, *range(2, logits.ndim), 1))
        rows = rows.reshape((-1, logits.shape[1]))
    return rows, labels.reshape((-1,))


def picked(rows: Tensor, classes: Tensor) -> Tensor:
    """Return for each row the value at its class."""
    return ops.GatherD()(rows, 1, classes.reshape((-1, 1))).reshape((-1,))


class Slope(nn.Cell):
    """The gradient of a mean cross-entropy; it can be differentiated itself."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.slope = ops.SparseSoftmaxCrossEntropyWithLogits(is_grad=True)

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        """Return the gradient, [N, C]."""
        return self.slope(rows, classes)

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient for the rows, given ``dout``, and zeros for their classes."""
        shares = ops.Softmax(-1)(rows)
        product = shares * dout
        sums = ops.ReduceSum(keep_dims=True)(product, 1)
        return (product - shares * sums) / rows.shape[0], ops.zeros_like(classes)


class _Mean(nn.Cell):
    """The mean loss over rows; every row counts, and every label is a class.

    MindSpore's operator for the mean takes the logarithm of a class's share. If the share is too
    small for float32, its result is infinite.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.logarithms, self.slope = ops.LogSoftmax(-1), Slope()
        self.to_float(mstype.float32)  # also in a Cell of 16 bits

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return -ops.ReduceMean()(picked(self.logarithms(rows), classes))

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return self.slope(rows, classes) * nan_if_nan(out, dout), ops.zeros_like(classes)


def nan_if_nan(loss: Tensor, dout: Tensor) -> Tensor:
    """Return ``dout``, or NaN where the loss is NaN.

    MindSpore's gradient stops at a row of logits that are all -inf: what stands in the rows behind
    it is whatever was in the memory.
    """
    return ops.Select()(loss != loss, loss, dout)


_MEAN = _Mean()
