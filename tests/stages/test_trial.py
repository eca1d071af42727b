"""A network on trial: what comes of it, and that it leaves no mark."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.stages.trial import compares_samples, on_trial


class Counting(nn.Cell):
    """Counts its runs; has frozen Parameters that CPU cannot assign, and outputs within outputs."""

    def __init__(self):
        super().__init__()
        self.frozen = Parameter(Tensor([1.0], ms.bfloat16), requires_grad=False)
        self.runs = Parameter(Tensor([0], ms.int32), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.runs, Tensor([1], ms.int32))
        return x.mean(), (x, [x.sum(), x.astype(ms.bfloat16)])


@pytest.mark.parametrize("value", [1.0, np.inf])
def test_all_outputs_are_looked_at_and_parameters_restored(mode, value):
    net = Counting()
    with on_trial(net) as run:
        found = [run(Tensor(np.full((2, 3), value, np.float32))) for _ in range(2)]
    assert found == [([(), (2, 3), (), (2, 3)], value == 1.0, value)] * 2
    assert net.runs.asnumpy().tolist() == [0]


def test_parameters_are_restored_where_it_fails(mode):
    net = Counting()
    with pytest.raises(AttributeError), on_trial(net) as run:
        run(None)
    assert net.runs.asnumpy().tolist() == [0]


class LossOf(nn.Cell):
    """A loss of pairs of vectors by a formula."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def construct(self, one, other):
        return self.rule(one, other)


def in_batch(one, other):
    """Take the other samples for wrong answers."""
    return nn.CrossEntropyLoss()(one @ other.T, ops.arange(one.shape[0]).astype(ms.int32))


LOSSES = {
    "mean": (lambda one, other: ((one - other[: one.shape[0]]) ** 2).mean(), False),
    "sum": (lambda one, other: ((one - other[: one.shape[0]]) ** 2).sum(), False),
    "in batch": (in_batch, True),
    "of each sample": (lambda one, other: (one * other).sum(1), False),
    "with noise": (lambda one, other: (one + 9 * ops.standard_normal(one.shape)).mean(), False),
    "square of a sum": (lambda one, other: (one * one).sum() ** 2, True),
}


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_compares_samples_is_told_by_its_halves(mode, name, rows):
    rule, compares = LOSSES[name]
    random = np.random.default_rng(0)
    pair = [Tensor(random.normal(size=(rows, 3)).astype("f")) for _ in range(2)]
    with on_trial(LossOf(rule)) as run:
        assert compares_samples(run, *pair) is compares


def test_rows_of_labels_go_with_their_samples(mode):
    """Labels of places in one row, and a number that belongs to no sample."""
    x = np.arange(24, dtype="f").reshape(4, 6)
    seen = []

    def rule(one, labels, factor):
        seen.append((one.shape, labels.shape, factor.shape))
        return (one.reshape(-1) * labels).mean() * factor.sum()

    with on_trial(LossOfThree(rule)) as run:
        assert not compares_samples(run, Tensor(x), Tensor(x.ravel()), Tensor([2.0, 1.0, 1.0]))
    assert seen == [((4, 6), (24,), (3,))] * 2 + [((2, 6), (12,), (3,))] * 2


class LossOfThree(LossOf):
    def construct(self, one, labels, factor):
        return self.rule(one, labels, factor)
