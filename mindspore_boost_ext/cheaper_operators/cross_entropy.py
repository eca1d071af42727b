"""The cross-entropy of labels that are indices of classes, in graphs."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell, is_ranked
from mindspore_boost_ext.runtime.cross_entropy import Slope, fits, in_rows, nan_if_nan, picked

_CERTAIN = 3.4e38  # a logit so large that all others have no weight: nearly the largest float32


class _Total(nn.Cell):
    """The sum over rows. The operator's own mean loses digits: it adds up row after row."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.logarithms, self.slope = ops.LogSoftmax(-1), Slope()

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return -ops.ReduceSum()(picked(self.logarithms(rows), classes))

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        # ``depend`` runs the loss first, even if a graph is asked only for the gradient: the loss
        # raises for labels out of range, except -1, which MindSpore takes for the last class.
        classes = ops.depend(classes, out) % rows.shape[1]
        dout = nan_if_nan(out, dout)
        return self.slope(rows, classes) * (dout * rows.shape[0]), ops.zeros_like(classes)


class _Certain(nn.Cell):
    """Makes rows that are not kept certain of class 0: their loss and its gradient are 0."""

    def construct(self, rows: Tensor, keep: Tensor) -> Tensor:
        first = rows[:, 0]
        first = ops.Select()(keep, first, ops.full_like(first, _CERTAIN))
        return ops.Concat(1)((first.reshape((-1, 1)), rows[:, 1:]))

    def bprop(self, rows: Tensor, keep: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return dout, ops.zeros_like(keep)


_TOTAL, _CERTAIN_OF = _Total(), _Certain()


def loss_of(
    rows: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    """Return the loss of the rows whose label is not ``ignore_index``, shape ().

    Its gradient is one operator, which accepts no labels that are to be ignored.
    """
    keep = labels != ignore_index
    classes = labels * ops.cast(keep, mstype.int32)
    total = _TOTAL(_CERTAIN_OF(rows, keep), classes)
    if label_smoothing:
        smoothed = picked(rows, classes) - rows.mean(1)
        smoothed = ops.Select()(keep, smoothed, ops.zeros_like(smoothed))
        total = total + label_smoothing * smoothed.sum()
    kept = ops.cast(keep, mstype.float32).sum()
    total = ops.Select()(kept > 0, total, ops.zeros_like(total))  # without rows no gradient
    return total if reduction == "sum" else total / kept


class CheaperCrossEntropy(CheaperCell, nn.CrossEntropyLoss):
    """An ``nn.CrossEntropyLoss`` without class weights, for labels that are class indices."""

    counted_as = "cross_entropy"

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, shape ()."""
        if self.is_plain(logits) or not is_ranked(logits.shape) or not fits(logits, labels):
            return self.plain(logits, labels)
        rows, classes = in_rows(logits, labels)
        return loss_of(rows, classes, self.ignore_index, self.reduction, self.label_smoothing)
