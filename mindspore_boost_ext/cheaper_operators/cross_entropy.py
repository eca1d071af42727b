"""The cross-entropy of labels that are indices of classes."""

from __future__ import annotations

from typing import ClassVar

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.runtime.functions import is_compiling

_CERTAIN = 1e30  # a logit beside which all others count for nothing


@ops.constexpr(check=False)
def _all_count(labels: Tensor, classes: int, ignored: int) -> bool:
    """Return whether all labels are classes, and none is ignored."""
    values = labels.asnumpy()
    return bool(((values >= 0) & (values < classes) & (values != ignored)).all())


def _picked(rows: Tensor, classes: Tensor) -> Tensor:
    return ops.GatherD()(rows, 1, classes.reshape((-1, 1))).reshape((-1,))


class _Slope(nn.Cell):
    """The gradient of a mean cross-entropy, with one of its own."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.slope = ops.SparseSoftmaxCrossEntropyWithLogits(is_grad=True)

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return self.slope(rows, classes)

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        shares = ops.Softmax(-1)(rows)
        product = shares * dout
        sums = ops.ReduceSum(keep_dims=True)(product, 1)
        return (product - shares * sums) / rows.shape[0], ops.zeros_like(classes)


class _CrossEntropy(nn.Cell):
    """The sum over rows. The operator's own mean drifts, as it adds up one row after the other."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.logarithms, self.slope = ops.LogSoftmax(-1), _Slope()

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return -ops.ReduceSum()(_picked(self.logarithms(rows), classes))

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        # Behind the loss, which raises for what is no class, also where a graph is asked for the
        # gradient alone. What is left out of range is -1, to MindSpore the last class.
        classes = ops.depend(classes, out) % rows.shape[1]
        return self.slope(rows, classes) * (dout * rows.shape[0]), ops.zeros_like(classes)


class _Certain(nn.Cell):
    """Makes rows that are not kept certain of class 0: their loss is 0, and its gradient, too."""

    def construct(self, rows: Tensor, keep: Tensor) -> Tensor:
        first = rows[:, 0]
        first = ops.Select()(keep, first, ops.full_like(first, _CERTAIN))
        return ops.Concat(1)((first.reshape((-1, 1)), rows[:, 1:]))

    def bprop(self, rows: Tensor, keep: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, ops.zeros_like(keep)


class CheaperCrossEntropy(CheaperCell):
    """An ``nn.CrossEntropyLoss`` without weights of classes, of labels that are indices.

    Its gradient is one operator, which takes no labels that are to be ignored.
    """

    counted_as = "cross_entropy"
    looks: ClassVar[bool] = False  # at the values of labels

    def __init__(self, plain: nn.CrossEntropyLoss) -> None:
        super().__init__(plain)
        self.loss, self.certain = _CrossEntropy(), _Certain()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, shape ()."""
        if not self.fits(logits, labels):
            return self.plain(logits, labels)
        rows, classes = logits, labels.reshape((-1,))
        if logits.ndim > 2:
            rows = logits.transpose((0, *range(2, logits.ndim), 1))
            rows = rows.reshape((-1, logits.shape[1]))
        if (
            self.looks
            and not is_compiling()
            and _all_count(classes, rows.shape[1], self.ignore_index)
        ):
            return self.of_all(rows, classes)
        return self.of_kept(rows, classes)

    def fits(self, logits: Tensor, labels: Tensor) -> bool:
        """Return whether these are logits and indices of classes; else MindSpore says what."""
        if self.is_plain(logits) or labels.dtype != mstype.int32:
            return False
        if logits.ndim < 2 or 0 in logits.shape:
            return False
        return labels.shape == (logits.shape[0], *logits.shape[2:])

    def of_all(self, rows: Tensor, classes: Tensor) -> Tensor:
        """Return the loss of rows none of which is ignored."""
        total = self.loss(rows, classes)
        if self.label_smoothing:
            smoothed = _picked(rows, classes).sum() - rows.sum() / rows.shape[1]
            total = total + self.label_smoothing * smoothed
        return total if self.reduction == "sum" else total / rows.shape[0]

    def of_kept(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the rows whose label is not ``ignore_index``."""
        keep = labels != self.ignore_index
        classes = labels * ops.cast(keep, mstype.int32)
        total = self.loss(self.certain(rows, keep), classes)
        if self.label_smoothing:
            smoothed = _picked(rows, classes) - rows.mean(1)
            smoothed = ops.Select()(keep, smoothed, ops.zeros_like(smoothed))
            total = total + self.label_smoothing * smoothed.sum()
        kept = ops.cast(keep, mstype.float32).sum()
        total = ops.Select()(kept > 0, total, ops.zeros_like(total))  # no gradient of no row
        return total if self.reduction == "sum" else total / kept


class LookingCrossEntropy(CheaperCrossEntropy):
    """The same where Python runs it, which sees whether labels are to be ignored: few are."""

    looks = True
