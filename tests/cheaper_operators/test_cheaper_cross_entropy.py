"""The cross-entropy, by cheaper operators in graphs and by the import where Python runs it.

Against float64, and MindSpore's own where that is the rule.
"""

from __future__ import annotations

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import make_train_step, tune_machine
from mindspore_boost_ext.base.cells import exchange, layers_of
from mindspore_boost_ext.cheaper_operators.algorithm import cheaper_operators
from mindspore_boost_ext.cheaper_operators.cross_entropy import CheaperCrossEntropy
from mindspore_boost_ext.runtime import cross_entropy

ON = contract.switched(cheaper_operators=True)
NAME = "cheaper_operators"
IGNORED = -100
RNG = np.random.default_rng(6)


class Loss(nn.Cell):
    """Returns a loss and its gradient; MindSpore would compile a loss that is called alone."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, logits, labels):
        return ms.value_and_grad(self.loss)(logits, labels)

    def run(self, logits, labels):
        found = self(Tensor(logits.astype("f")), Tensor(labels.astype(np.int32)))
        return [one.asnumpy() for one in found]


def cheaper(**settings):
    """Return a loss as the mode in force has it."""
    plain = nn.CrossEntropyLoss(**settings)
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        assert ops.cross_entropy is cross_entropy.cross_entropy
        return plain
    return cheaper_operators(plain)[id(plain)]


@pytest.fixture
def mindspores():
    """Return what calls something with MindSpore's own function in place."""

    def call(something, *inputs):
        tune_machine(False)
        try:
            return something(*inputs)
        finally:
            tune_machine()

    return call


def batch_of(shape, ignored=False):
    logits = 2 * RNG.normal(size=shape)
    labels = RNG.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignored:
        labels[0], labels.flat[-1] = IGNORED, IGNORED
    return logits, labels


def by_rule(logits, labels, smoothing=0.0, reduction="mean", ignore_index=IGNORED):
    """Return the loss and its gradient in float64."""
    x = np.moveaxis(logits.astype(np.float64), 1, -1)
    count = x.shape[-1]
    keep = (labels != ignore_index)[..., None]
    shares = np.exp(x - x.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    wanted = (1 - smoothing) * np.eye(count)[np.where(keep[..., 0], labels, 0)] + smoothing / count
    part = 1 / keep.sum() if reduction == "mean" else 1.0
    loss = part * (-(wanted * np.log(shares)).sum(-1, keepdims=True) * keep).sum()
    return loss, np.moveaxis(part * keep * (shares - wanted), -1, 1)


@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 4), (2, 4, 3, 3)])
@pytest.mark.parametrize(
    "settings", [{}, {"label_smoothing": 0.2}, {"reduction": "sum", "label_smoothing": 0.2}]
)
@pytest.mark.parametrize("ignored", [False, True])
def test_values_and_gradients(mode, shape, settings, ignored):
    logits, labels = batch_of(shape, ignored)
    loss, slope = Loss(cheaper(**settings)).run(logits, labels)
    smoothing, reduction = settings.get("label_smoothing", 0), settings.get("reduction", "mean")
    expected = by_rule(logits, labels, smoothing, reduction)
    # float32: logarithms are good to 4e-6, and so are sums of a few of them
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(slope, expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}])
def test_a_class_that_is_ignored(mode, settings):
    """Such as the padding of a language model, class 0."""
    logits, labels = batch_of((9, 4))
    labels[:3] = 0
    loss, slope = Loss(cheaper(ignore_index=0, **settings)).run(logits, labels)
    smoothing, reduction = settings.get("label_smoothing", 0), settings.get("reduction", "mean")
    expected = by_rule(logits, labels, smoothing, reduction, ignore_index=0)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=5e-6)  # float32, as above
    np.testing.assert_allclose(slope, expected[1], rtol=1e-4, atol=1e-6)


class Divided(nn.Cell):
    """A sum of losses, over the number of labels that count."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, logits, labels):
        return self.loss(logits, labels) / (labels != IGNORED).astype(ms.float32).sum()


def test_a_sum_over_no_rows_trains_nothing_whatever_divides_it(graph_mode):
    logits, labels = batch_of((2, 3))
    labels[:] = IGNORED
    value, slope = Loss(Divided(cheaper(reduction="sum"))).run(logits, labels)
    assert np.isnan(value)
    np.testing.assert_array_equal(slope, 0)


def test_the_mean_of_many_equal_rows_does_not_drift(mode):
    """The operator adds up one row after the other: it is off by 4.5e-4 here."""
    rows = np.zeros((65536, 21))
    loss, _ = Loss(cheaper()).run(rows, np.zeros(len(rows)))
    np.testing.assert_allclose(loss, np.log(21), rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}])
def test_the_label_before_the_first_is_the_last_class(mode, settings, mindspores):
    logits, labels = batch_of((3, 4))
    labels[1] = -1
    expected = mindspores(Loss(nn.CrossEntropyLoss(**settings)).run, logits, labels)
    found = Loss(cheaper(**settings)).run(logits, labels)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("value", [4, -5])
def test_labels_that_are_no_classes_are_refused(mode, value):
    """As by MindSpore; the operator of the gradient alone takes some of them."""
    logits, labels = batch_of((3, 4))
    labels[1] = value
    with pytest.raises((ValueError, RuntimeError), match="index"):
        cheaper()(Tensor(logits.astype("f")), Tensor(labels.astype(np.int32)))


class Slope(Loss):
    def construct(self, logits, labels):
        return ms.grad(self.loss)(logits, labels)


def test_labels_that_are_no_classes_are_refused_by_the_gradient_alone(graph_mode):
    logits, labels = batch_of((3, 4))
    labels[1] = 4
    with pytest.raises((ValueError, RuntimeError), match="index"):
        Slope(cheaper())(Tensor(logits.astype("f")), Tensor(labels.astype(np.int32))).asnumpy()


def test_an_empty_batch_is_mindspores(pynative_mode, mindspores):
    empty = Tensor(np.zeros((0, 3), np.float32)), Tensor(np.zeros(0, np.int32))
    found, expected = cheaper()(*empty), mindspores(nn.CrossEntropyLoss(), *empty)
    np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())


def test_a_given_loss_in_a_function_of_jit_looks_at_no_values(pynative_mode):
    loss = ms.jit(cheaper())
    for ignored in (False, True):
        logits, labels = batch_of((4, 3), ignored)
        found = loss(Tensor(logits.astype("f")), Tensor(labels.astype(np.int32))).asnumpy()
        expected = by_rule(logits, labels)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)  # float32, as above


@pytest.mark.parametrize("large", [1e4, 1e35])
def test_ignored_rows_and_classes_that_are_masked_out(graph_mode, large):
    """An ignored row counts for nothing, whatever stands in it."""
    logits, labels = batch_of((4, 3))
    labels[:] = [1, IGNORED, 2, IGNORED]
    logits[1], logits[:, 0] = large, -np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = by_rule(logits[[0, 2], 1:], labels[[0, 2]] - 1)
    loss, slope = Loss(cheaper()).run(logits, labels)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5, atol=5e-6)  # float32, as above
    np.testing.assert_allclose(slope[[0, 2], 1:], expected[1], rtol=1e-4, atol=1e-6)
    assert not slope[[1, 3]].any()
    assert not slope[:, 0].any()


def test_a_row_without_a_class_leaves_no_gradient_that_looks_right(mode):
    """MindSpore's gradient stops at a row of -inf alone: behind it stands what the memory held."""
    logits, labels = batch_of((64, 32))
    logits[5] = -np.inf
    filled = [Tensor(np.full((64, 32), 7.0, "f")) + 1 for _ in range(4)]
    assert all(one.asnumpy().all() for one in filled)
    del filled
    loss, slope = Loss(cheaper()).run(logits, labels)
    assert np.isnan(loss)
    assert np.isnan(slope).all(1)[[0, 4, 6, 63]].all()


def test_a_batch_of_ignored_rows_alone_trains_nothing(graph_mode):
    """It has no mean; its gradient is 0, as MindSpore 2.10's: the weights stay what they are."""
    logits, labels = batch_of((2, 3))
    labels[:] = IGNORED
    value, slope = Loss(cheaper()).run(logits, labels)
    assert np.isnan(value)
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize("settings", [{"weight": Tensor(np.ones(3, "f"))}, {"reduction": "none"}])
def test_other_losses_are_not_replaced(settings):
    assert not cheaper_operators(nn.CrossEntropyLoss(**settings))


def test_shares_of_classes_and_16_bits_are_left_to_mindspore(mode, mindspores):
    logits = RNG.normal(size=(4, 3))
    shares = Tensor(RNG.dirichlet(np.ones(3), 4).astype("f"))
    for dtype, target in ((ms.float32, shares), (ms.float16, Tensor([0, 1, 2, 0], ms.int32))):
        inputs = Tensor(logits, dtype), target
        found = Loss(cheaper())(*inputs)
        expected = mindspores(Loss(nn.CrossEntropyLoss()), *inputs)
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_sizes_that_are_open(graph_mode):
    loss = Loss(cheaper())
    loss.set_inputs(Tensor(shape=[None, 3], dtype=ms.float32), Tensor(shape=[None], dtype=ms.int32))
    for rows in (5, 3):
        logits, labels = batch_of((rows, 3), ignored=True)
        found, expected = (rule(logits, labels)[0] for rule in (loss.run, by_rule))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)  # logarithms, as above


class SquaredSlope(nn.Cell):
    def __init__(self, loss, labels):
        super().__init__()
        self.loss, self.labels = loss, Tensor(labels.astype(np.int32))

    def construct(self, logits):
        return (ms.grad(self.loss)(logits, self.labels) ** 2).sum()


def test_second_gradients(pynative_mode):
    """MindSpore has none of its own loss, and none in graphs."""
    logits, labels = batch_of((3, 4))
    found = ms.grad(SquaredSlope(cheaper(), labels))(Tensor(logits.astype("f"))).asnumpy()
    expected = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        one = np.zeros_like(logits)
        one[place] = 1e-5
        up, down = ((by_rule(logits + each, labels)[1] ** 2).sum() for each in (one, -one))
        expected[place] = (up - down) / 2e-5
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)  # float32


class Jitted(nn.Cell):
    """Returns its loss, as a graph also where Python runs the rest."""

    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Dense(4, 3), nn.CrossEntropyLoss()

    @ms.jit
    def construct(self, x, labels):
        return self.loss(self.head(x), labels)


@pytest.mark.parametrize("ignore_index", [IGNORED, -1, 0])
def test_labels_of_later_batches_are_looked_at_anew(pynative_mode, ignore_index):
    """A graph is compiled by the labels of its first batch, in which none is ignored."""
    x, labels = RNG.normal(size=(5, 4)).astype("f"), np.array([2, 1, 2, 2, 1], np.int32)
    losses = []
    on = contract.switched(cheaper_operators=True, compiled_step=True)
    for config in (on, None):
        ms.set_seed(3)
        net = Jitted()
        net.loss.ignore_index = ignore_index
        level = "O0" if config is None else "O1"
        sgd = nn.SGD(net.trainable_params(), 0.5)
        step = make_train_step(net, None, sgd, level=level, config=config)
        assert (type(net.loss) is CheaperCrossEntropy) is (config is not None)
        losses.append([])
        for ignored in (0, 3, 1):
            some = np.where(np.arange(5) < ignored, ignore_index, labels)
            losses[-1].append(float(step(Tensor(x), Tensor(some)).asnumpy()))
    np.testing.assert_allclose(*losses, rtol=1e-5)  # float32's logarithms


def test_a_loss_stays_where_python_runs_it(pynative_mode):
    """There the import has mended it."""
    net = Jitted()
    row = model_of(net, ON, loss_fn=None).train_network.report()[NAME]
    assert type(net.loss) is nn.CrossEntropyLoss
    assert (row.status, row.reason[-21:]) == ("skipped", "without compiled_step")


def test_the_loss_of_a_model_is_replaced_in_its_step_alone(graph_mode):
    net, loss = nets.MLP(), nn.CrossEntropyLoss()
    model = model_of(net, ON, loss_fn=loss, metrics={"loss"})
    row = model.train_network.report()[NAME]
    assert (row.status, dict(row.counts)) == ("applied", {"cross_entropy": 1})
    assert layers_of(model.train_network, (CheaperCrossEntropy,))
    assert model._loss_fn is loss
    assert type(loss) is nn.CrossEntropyLoss


def test_what_is_in_place_is_not_replaced_again():
    net = nn.SequentialCell(nn.CrossEntropyLoss(), nn.LogSoftmax())
    exchange(net, cheaper_operators(net))
    assert not cheaper_operators(net)


def test_a_smoothed_loss_is_replaced_inside(graph_mode):
    losses = {}
    x, labels = map(Tensor, nets.batches(1)[0])
    for cheap in (True, False):
        net = nets.MLP()
        config = contract.switched(cheaper_operators=cheap, label_smoothing=True)
        step = model_of(net, config, loss_fn=nn.CrossEntropyLoss()).train_network
        losses[cheap] = [float(step(x, labels).asnumpy()) for _ in range(3)]
        if cheap:
            assert dict(step.report()[NAME].counts) == {"cross_entropy": 2}
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)  # float32's logarithms
