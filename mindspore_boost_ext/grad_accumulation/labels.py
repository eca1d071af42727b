"""What a loss divides by, where that is not the number of samples."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.base.cells import has_replaced_construct
from mindspore_boost_ext.base.order import is_own

_KINDS = (nn.CrossEntropyLoss, nn.NLLLoss)
_INDICES = (ms.int8, ms.int16, ms.int32, ms.int64, ms.uint8)


class LabelCount(nn.Cell):
    """Counts the labels, or the weights of their classes, by which a mean loss divides.

    Args:
        loss (Cell): the loss, for which :func:`divides_by_labels`.

    Inputs:
        - **labels** (Tensor) - classes, or shares of classes, as the loss takes them.

    Outputs:
        Tensor, the divisor: float32, shape ().
    """

    def __init__(self, loss: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.__dict__["loss"] = loss  # not as a child: the step holds it already

    def construct(self, labels: Tensor) -> Tensor:
        """Return the divisor for the labels of a batch."""
        if labels.dtype not in _INDICES:  # shares: the loss ignores none, and divides by samples
            samples = labels.size / labels.shape[min(1, labels.ndim - 1)]
            return ops.scalar_to_tensor(samples, ms.float32)
        counts, weights = labels != self.loss.ignore_index, self.loss.weight
        if weights is None:
            return ops.cast(counts, ms.float32).sum()
        of_labels = ops.gather(weights, labels * ops.cast(counts, labels.dtype), 0)
        return (ops.cast(of_labels, ms.float32) * ops.cast(counts, ms.float32)).sum()


def divides_by_labels(loss: nn.Cell) -> bool:
    """Return whether a loss, with MindSpore's own computation, divides by what counts."""
    own = [kind for kind in _KINDS if isinstance(loss, kind)]
    if not own or type(loss).construct is not own[0].construct or has_replaced_construct(loss):
        return False
    return bool(loss.reduction == "mean")


def other_divisor(loss: Any, micro_batches: int) -> str:
    """Return why equal weights, or samples, do not give a big batch's gradient; empty if they may.

    What counts shows in a batch only: see :func:`counts_by_labels`. A loss of the script's own may
    take the mean by itself, whatever it says.
    """
    if isinstance(loss, nn.LossBase) and is_own(type(loss).__module__) and not _divides(loss):
        return (
            "the loss does not divide by the samples, while the window takes the mean over its "
            f"micro-batches, 1/{micro_batches} of the big batch's gradient: give the loss "
            "reduction 'mean', or choose the learning rate for that"
        )
    return ""


def _divides(loss: nn.Cell) -> bool:
    """Return whether a loss of MindSpore divides; some say it by a word, some by two flags."""
    by_flags = "sum" if loss.reduce and not loss.average else "mean"
    # A loss for each sample may be reduced elsewhere: the window looks at the network's output.
    return getattr(loss, "reduction", by_flags) != "sum"


def counts_by_labels(loss: Any, labels: object) -> str:
    """Return why weights must follow the labels of a batch; empty if all of them count alike."""
    if not (divides_by_labels(loss) and isinstance(labels, Tensor) and labels.dtype in _INDICES):
        return ""
    if loss.weight is not None:
        return "the loss divides by the weights of the classes in a batch: set weighting 'labels'"
    if not bool((labels.asnumpy() == loss.ignore_index).any()):
        return ""
    return (
        f"the first batch has labels to ignore ({loss.ignore_index}), and the loss divides by the "
        "others: set weighting 'labels'"
    )
