"""``ops.cross_entropy`` of labels that are indices of classes, with a gradient of one operator."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.function.nn_func import cross_entropy as ORIGINAL

from mindspore_boost_ext.runtime.functions import is_compiling

_CERTAIN = 1e30  # a logit beside which all others count for nothing


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return what ``ops.cross_entropy`` does; in less time where Python runs it.

    MindSpore always computes what label smoothing asks for, and differentiates that, too.
    """
    ours = weight is None and reduction in ("mean", "sum") and fits(input, target)
    if is_compiling() or not ours or not _are_legal(ignore_index, label_smoothing, input.ndim):
        return ORIGINAL(input, target, weight, ignore_index, reduction, label_smoothing)
    rows, labels = in_rows(input, target)
    classes = _classes(labels, rows.shape[1], ignore_index)
    if classes is None:
        return ORIGINAL(input, target, weight, ignore_index, reduction, label_smoothing)
    mean = _MEAN(rows, classes)
    if label_smoothing:
        mean = mean + label_smoothing * (_picked(rows, classes).mean() - rows.mean())
    return mean if reduction == "mean" else mean * len(rows)


def _are_legal(ignored: object, smoothing: object, axes: int) -> bool:
    """Return whether MindSpore takes two settings, and has no second gradient that this has not."""
    if type(ignored) is not int or type(smoothing) is not float:
        return False
    return smoothing == 0 or (0 < smoothing <= 1 and axes == 2)


def _classes(labels: Tensor, classes: int, ignored: int) -> Tensor | None:
    """Return a copy of the labels, which may change before the gradient is taken.

    None if one is to be ignored, or is no class: MindSpore does not take long for the rest then, or
    says what is wrong.
    """
    values = labels.asnumpy()
    if ((values < 0) | (values >= classes) | (values == ignored)).any():
        return None
    return Tensor(values.copy())


def fits(logits: Tensor, labels: Tensor) -> bool:
    """Return whether these are logits and indices of classes, else MindSpore says what."""
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


def of_kept(rows: Tensor, labels: Tensor, ignored: int, reduction: str, smoothing: float) -> Tensor:
    """Return the loss of the rows whose label is not the ignored one."""
    keep = labels != ignored
    classes = labels * ops.cast(keep, mstype.int32)
    total = _TOTAL(_CERTAIN_ROWS(rows, keep), classes)
    if smoothing:
        smoothed = _picked(rows, classes) - rows.mean(1)
        smoothed = ops.Select()(keep, smoothed, ops.zeros_like(smoothed))
        total = total + smoothing * smoothed.sum()
    kept = ops.cast(keep, mstype.float32).sum()
    total = ops.Select()(kept > 0, total, ops.zeros_like(total))  # no gradient of no row
    return total if reduction == "sum" else total / kept


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


class _Total(nn.Cell):
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


class _Mean(nn.Cell):
    """The mean over rows all of which count, of labels that are classes."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.logarithms, self.slope = ops.LogSoftmax(-1), _Slope()
        self.to_float(mstype.float32)  # also in a Cell of 16 bits

    def construct(self, rows: Tensor, classes: Tensor) -> Tensor:
        return -ops.ReduceMean()(_picked(self.logarithms(rows), classes))

    def bprop(self, rows: Tensor, classes: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return self.slope(rows, classes) * dout, ops.zeros_like(classes)


_MEAN, _TOTAL, _CERTAIN_ROWS = _Mean(), _Total(), _Certain(auto_prefix=False)
