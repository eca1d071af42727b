"""The cross-entropy of labels that are indices of classes, in graphs."""

from __future__ import annotations

from mindspore import Tensor

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.runtime.cross_entropy import fits, in_rows, of_kept


class CheaperCrossEntropy(CheaperCell):
    """An ``nn.CrossEntropyLoss`` without weights of classes, of labels that are indices.

    Its gradient is one operator, which takes no labels that are to be ignored.
    """

    counted_as = "cross_entropy"

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, shape ()."""
        if self.is_plain(logits) or not fits(logits, labels):
            return self.plain(logits, labels)
        rows, classes = in_rows(logits, labels)
        return of_kept(rows, classes, self.ignore_index, self.reduction, self.label_smoothing)
