"""The cross-entropy of labels that are indices of classes, in graphs."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.runtime.cross_entropy import Slope, fits, in_rows, picked

_CERTAIN = 1e30  # a logit beside which all others count for nothing


class _Total(nn.Cell):
    """The sum over rows. The operator's own mean drifts, as it adds up one row after the other."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.logarithms, self.slope = ops.LogSoftmax(-1), Slope()

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return -ops.ReduceSum()(picked(self.logarithms(rows), classes))

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

    def __init__(self, plain: nn.CrossEntropyLoss) -> None:
        super().__init__(plain)
        self.total, self.certain = _Total(), _Certain()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, shape ()."""
        if self.is_plain(logits) or not fits(logits, labels):
            return self.plain(logits, labels)
        return self.of_kept(*in_rows(logits, labels))

    def of_kept(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the rows whose label is not ``ignore_index``."""
        keep = labels != self.ignore_index
        classes = labels * ops.cast(keep, mstype.int32)
        total = self.total(self.certain(rows, keep), classes)
        if self.label_smoothing:
            smoothed = picked(rows, classes) - rows.mean(1)
            smoothed = ops.Select()(keep, smoothed, ops.zeros_like(smoothed))
            total = total + self.label_smoothing * smoothed.sum()
        kept = ops.cast(keep, mstype.float32).sum()
        total = ops.Select()(kept > 0, total, ops.zeros_like(total))  # no gradient of no row
        return total if self.reduction == "sum" else total / kept
