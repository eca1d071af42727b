"""A network on trial: what comes of it, and that it leaves no mark."""

from __future__ import annotations

import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.stages.trial import depends_on_order, mixes_samples, on_trial


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
    assert found == [([(), (2, 3), (), (2, 3)], value == 1.0, value, 2.0**-23)] * 2
    assert net.runs.asnumpy().tolist() == [0]


def test_parameters_are_restored_where_it_fails(mode):
    net = Counting()
    with pytest.raises(AttributeError), on_trial(net) as run:
        run(None)
    assert net.runs.asnumpy().tolist() == [0]


class Drawing(nn.Cell):
    def construct(self, x):
        return x * random.random() * np.random.rand()


def test_the_random_numbers_of_python_and_numpy_go_on():
    net, x = Drawing(), Tensor([1.0])
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    with on_trial(net) as run:
        run(x)
    assert (random.random(), np.random.rand()) == expected


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


def squares(one, other):
    return (one - other) ** 2


LOSSES = {
    "mean": (lambda one, other: squares(one, other).mean(), False),
    "mean and penalty": (lambda one, other: squares(one, other).mean() + 5, False),
    "sum": (lambda one, other: squares(one, other).sum(), False),
    "sum and penalty": (lambda one, other: squares(one, other).sum() + 5, False),
    "of each sample": (lambda one, other: squares(one, other).sum(1), False),
    "of float16": (lambda one, other: squares(one, other).mean().half(), False),
    "with noise": (lambda one, other: (one + 9 * ops.standard_normal(one.shape)).mean(), False),
    "infinite": (lambda one, other: squares(one, other).mean() / 0, False),
    "in batch": (in_batch, True),
    "in batch, of each sample": (lambda one, other: one.shape[0] * in_batch(one, other), True),
    "square of a sum": (lambda one, other: squares(one, other).sum() ** 2, True),
}


@pytest.mark.parametrize("rows", [8, 11])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_mixes_samples_is_told_by_its_halves(mode, name, rows):
    rule, compares = LOSSES[name]
    random = np.random.default_rng(0)
    pair = [Tensor(random.normal(size=(rows, 3)).astype("f")) for _ in range(2)]
    with on_trial(LossOf(rule)) as run:
        assert mixes_samples(run, *pair) is compares


IN_ORDER = {
    "mean": (lambda one, labels: (one.sum(1) * labels.reshape((8, 2)).sum(1)).mean(), False),
    "with noise": (lambda one, labels: (one + 9 * ops.standard_normal(one.shape)).mean(), False),
    "of float16": (lambda one, labels: (one.half() ** 2).mean(), False),
    # A step of float16, which has no digits for less.
    "rounded": (lambda one, _: (1000 + 0.5 * ops.sign(one[0, 0] - one[7, 0])).half(), False),
    "along the first axis": (lambda one, labels: (ops.cumsum(one, 0) ** 2).mean(), True),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_loss_that_depends_on_the_order_of_samples_is_told(mode, name):
    """Labels have a row for each of the two places of a sample, and go with it."""
    rule, depends = IN_ORDER[name]
    random = np.random.default_rng(0)
    inputs = [Tensor(random.normal(size=size).astype("f")) for size in ((8, 2), (16,))]
    with on_trial(LossOf(rule)) as run:
        assert depends_on_order(run, *inputs) is depends


class Recurrent(nn.Cell):
    """A language model of a new LSTM, whose loss hardly depends on the order of its steps yet."""

    def __init__(self, batch_first):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Dense(16, 50)
        self.rnn = nn.LSTM(16, 16, batch_first=batch_first)

    def construct(self, tokens, targets):
        logits = self.head(self.rnn(self.embedding(tokens))[0]).reshape((-1, 50))
        return ops.cross_entropy(logits, targets.reshape((-1,)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_new_recurrent_network_shows_if_its_first_axis_is_time(mode, batch_first):
    ms.set_seed(0)
    random = np.random.default_rng(0)
    batch = [Tensor(random.integers(0, 50, (8, 16)).astype(np.int32)) for _ in range(2)]
    with on_trial(Recurrent(batch_first)) as run:
        assert depends_on_order(run, *batch) is not batch_first


class InTraining(nn.LossBase):
    """Compares samples, but not in evaluation, as AugMix's loss does the thirds of a batch."""

    def construct(self, one, other):
        return in_batch(one, other) if self.training else squares(one, other).mean()


def test_a_loss_is_looked_at_as_it_trains(mode):
    loss = InTraining()
    net = nn.WithLossCell(nn.Dropout(p=0.5), loss).set_train()
    pair = [Tensor(np.random.default_rng(0).normal(size=(8, 3)).astype("f")) for _ in range(2)]
    with on_trial(net) as run:
        assert mixes_samples(run, *pair)
        assert run(*pair).loss == run(*pair).loss  # the network evaluates
    assert loss.training


class DroppedInOrder(nn.LossBase):
    """Adds up along the first axis, of which it drops parts in training."""

    def construct(self, one, other):
        return (ops.cumsum(ops.dropout(one, 0.5, self.training), 0) ** 2).mean() + other.mean()


def test_order_is_tried_without_the_dropout_of_the_loss(pynative_mode):
    net = nn.WithLossCell(nn.ReLU(), DroppedInOrder()).set_train()
    pair = [Tensor(np.random.default_rng(0).normal(size=(8, 3)).astype("f")) for _ in range(2)]
    with on_trial(net) as run:
        assert depends_on_order(run, *pair)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_nothing_is_said_of_fewer_than_four_samples(mode, rows):
    with on_trial(LossOf(in_batch)) as run:
        assert not mixes_samples(run, *[Tensor(np.ones((rows, 3), np.float32))] * 2)


def test_rows_of_labels_go_with_their_samples(mode):
    """Labels of places, a row for each; and weights of classes, of which there may be 2 N."""
    x = np.arange(24, dtype="f").reshape(4, 6)
    seen = set()

    def rule(one, labels, factor):
        seen.add((one.shape, labels.shape, factor.shape))
        return (one.reshape(-1) * labels).mean() * factor.sum()

    with on_trial(LossOfThree(rule)) as run:
        assert not mixes_samples(run, Tensor(x), Tensor(x.ravel()), Tensor(np.ones(8, np.float32)))
    assert seen == {((rows, 6), (6 * rows,), (8,)) for rows in (4, 2, 1)}


class LossOfThree(LossOf):
    def construct(self, one, labels, factor):
        return self.rule(one, labels, factor)


class Dropped(nn.LossBase):
    """Compares samples, of which it drops parts in training; counts its calls there."""

    def __init__(self):
        super().__init__()
        self.calls = ms.Parameter(Tensor(np.zeros(1, "f")), name="calls")
        self.register_buffer("times", Tensor(np.zeros(1, "f")))

    def construct(self, one, other):
        if self.training:
            ops.assign_add(self.calls, Tensor(np.ones(1, "f")))
            ops.assign_add(self.times, Tensor(np.ones(1, "f")))
        return in_batch(ops.dropout(one, 0.5, self.training), other)


def test_a_loss_with_dropout_is_looked_at_as_it_evaluates_and_left_as_it_was(mode):
    loss = Dropped()
    net = nn.WithLossCell(nn.ReLU(), loss).set_train()
    pair = [Tensor(np.random.default_rng(0).normal(size=(8, 3)).astype("f")) for _ in range(2)]
    with on_trial(net) as run:
        assert mixes_samples(run, *pair)
    assert loss.calls.asnumpy() == loss.times.asnumpy() == 0
