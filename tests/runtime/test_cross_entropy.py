"""``ops.cross_entropy`` after the import: who calls it, and what stays MindSpore's."""

from __future__ import annotations

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import functional
from mindspore.ops.function import nn_func

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import cross_entropy

RNG = np.random.default_rng(2)
LOGITS = RNG.normal(size=(6, 5)).astype("f")
LABELS = np.array([0, 3, 4, 1, 1, 2], np.int32)


def both(call):
    """Return what something gives with the import's function, and with MindSpore's."""
    tune_machine()
    assert ops.cross_entropy is cross_entropy.cross_entropy
    tuned = call()
    tune_machine(False)
    assert ops.cross_entropy is cross_entropy.ORIGINAL
    return tuned, call()


@pytest.mark.parametrize("name", ["cross_entropy", "max_pool2d", "pad"])
def test_all_names_of_a_function_are_replaced(name):
    tune_machine()
    found = {getattr(space, name) for space in (ops, ops.function, functional, nn_func)}
    (only,) = found
    assert only.__module__.startswith("mindspore_boost_ext.runtime")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_of_the_scripts_own_stays(when):
    tune_machine(when == "after")
    try:
        ops.cross_entropy = len
        row = next(one for one in tune_machine() if "cross_entropy" in one.algorithm)
        tune_machine(False)
        assert ops.cross_entropy is len
    finally:
        ops.cross_entropy = cross_entropy.ORIGINAL
        tune_machine()
    assert (row.status, row.reason) == ("inactive", "the script has replaced it")


def test_graphs_keep_mindspores_to_the_last_bit(graph_mode, untuned):
    class Slope(nn.Cell):
        def __init__(self):
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def construct(self, x, labels):
            return ms.grad(self.loss)(x, labels)

    one, other = both(lambda: Slope()(Tensor(LOGITS), Tensor(LABELS)))
    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("gap", [87.0, 100.0, 1000.0])
def test_a_class_far_below_the_others_has_a_finite_loss(mode, gap, reduction):
    """Its share is no float32; MindSpore's operator of both takes the logarithm of that."""
    logits, labels = Tensor([[0, gap, -1], [0, 0, 0]], ms.float32), Tensor([0, 1], ms.int32)
    found = nn.CrossEntropyLoss(reduction=reduction)(logits, labels).asnumpy()
    expected = (gap + np.log(3)) / (2 if reduction == "mean" else 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # float32


@pytest.mark.parametrize("ignored", [0, 2])
def test_a_loss_that_computes_in_float16(pynative_mode, ignored, untuned):
    """Of logits of float32: Python's operators cast them one by one."""
    labels = Tensor(np.where(np.arange(6) < ignored, -100, LABELS).astype(np.int32))

    def slope():
        loss = nn.CrossEntropyLoss().to_float(ms.float16)
        return ms.value_and_grad(loss)(Tensor(LOGITS), labels)

    for one, other in zip(*both(slope)):
        # float16 is good to 5e-4 of a number, and here are sums of six.
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("ignored", [0, 2])
def test_a_gradient_by_the_labels_is_zero(pynative_mode, ignored):
    labels = Tensor(np.where(np.arange(6) < ignored, -100, LABELS).astype(np.int32))
    slopes = ms.grad(nn.CrossEntropyLoss(), (0, 1))(Tensor(LOGITS), labels)
    assert not slopes[1].asnumpy().any()


class Overwriting(nn.Cell):
    """Takes a loss, and writes into its labels before the gradient is taken."""

    def __init__(self):
        super().__init__()
        self.labels = Parameter(Tensor(LABELS), name="labels", requires_grad=False)

    def construct(self, x):
        loss = ops.cross_entropy(x, self.labels)
        ops.assign(self.labels, Tensor(LABELS[::-1].copy()))
        return loss


def test_labels_that_change_before_the_gradient(pynative_mode):
    found = ms.grad(Overwriting())(Tensor(LOGITS)).asnumpy()
    expected = ms.grad(ops.cross_entropy)(Tensor(LOGITS), Tensor(LABELS)).asnumpy()
    np.testing.assert_array_equal(found, expected)


def test_second_gradients_of_smoothed_sequences_are_mindspores(pynative_mode, untuned):
    x = Tensor(RNG.normal(size=(2, 5, 3)).astype("f"))
    labels = Tensor(LABELS.reshape(2, 3))

    def second():
        def squares(x):
            loss = nn.CrossEntropyLoss(label_smoothing=0.1)
            return (ms.grad(loss)(x, labels) ** 2).sum()

        return ms.grad(squares)(x).asnumpy()

    np.testing.assert_array_equal(*both(second))


TRACED = """
import mindspore as ms
from mindspore import Tensor, ops

import mindspore_boost_ext

x = Tensor([[1.0, 2.0], [3.0, 1.0]])


def loss(x, labels):
    return ops.cross_entropy(x, labels)


def padded(x, labels):
    return ops.pad(x, (1, 0)).sum()


for function in (loss, padded):
    traced = ms.jit(function, capture_mode="trace")
    for labels in ([0, 1], [-100, 1]):
        labels = Tensor(labels, ms.int32)
        print(float(traced(x, labels)), float(function(x, labels)))
"""


def test_a_function_that_is_traced_looks_at_no_labels(tmp_path):
    """MindSpore's tracer raises below pytest, where some frames have no source."""
    script = tmp_path / "script.py"
    script.write_text(TRACED)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [tuple(map(float, line.split())) for line in ended.stdout.splitlines()]
    assert len(found) == 4
    np.testing.assert_allclose(*zip(*found), rtol=1e-5)  # logarithms are good to 4e-6


def test_a_loop_of_the_scripts_own_trains_as_with_mindspores(mode, untuned):
    """As in MindSpore's introduction, where nothing else of this package acts."""

    def losses():
        ms.set_seed(4)
        net = nn.SequentialCell(nn.Dense(5, 8), nn.ReLU(), nn.Dense(8, 5)).set_train()
        loss, sgd = nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.5)

        def forward(x, labels):
            return loss(net(x), labels)

        slopes = ms.value_and_grad(forward, None, sgd.parameters)
        found = []
        for _ in range(5):
            value, gradients = slopes(Tensor(LOGITS), Tensor(LABELS))
            sgd(gradients)
            found.append(float(value))
        return found

    np.testing.assert_allclose(*both(losses), rtol=1e-5)  # float32's logarithms


def test_gradients_are_not_those_of_mindspore_to_the_last_bit(pynative_mode, untuned):
    """That is how one sees that they are others."""

    def slope():
        return ms.grad(lambda x: ops.cross_entropy(input=x, target=Tensor(LABELS)))(Tensor(LOGITS))

    one, other = (found.asnumpy() for found in both(slope))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)  # float32
    assert (one != other).any()


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": Tensor(np.arange(1, 6).astype("f"))},
        {"reduction": "none"},
    ],
    ids=str,
)
def test_others_are_mindspores_to_the_last_bit(mode, settings, untuned):
    def call():
        return ops.cross_entropy(Tensor(LOGITS), Tensor(LABELS), **settings)

    one, other = both(call)
    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        ((Tensor(LOGITS), Tensor(LABELS)), {"reduction": "median"}),
        ((Tensor(LOGITS), Tensor(LABELS)), {"label_smoothing": 1.5}),
        ((Tensor(LOGITS), Tensor(LABELS)), {"label_smoothing": "a"}),
        ((Tensor(LOGITS), Tensor(LABELS)), {"label_smoothing": 0}),
        ((Tensor(LOGITS), Tensor(LABELS)), {"ignore_index": 1.5}),
        ((Tensor(LOGITS), Tensor(LABELS[:3])), {}),
        ((Tensor(LOGITS), Tensor(LABELS.reshape(-1, 1))), {}),
        ((Tensor(LOGITS), LABELS), {}),
        ((LOGITS, Tensor(LABELS)), {}),
    ],
)
def test_what_mindspore_refuses_is_refused_in_its_words(pynative_mode, inputs, settings, untuned):
    errors = []
    for tuned in (True, False):
        tune_machine(tuned)
        try:
            ops.cross_entropy(*inputs, **settings).asnumpy()
            errors.append(None)
        except Exception as error:  # MindSpore raises what it likes
            errors.append((type(error), str(error)[:80]))
    assert errors[0] == errors[1]


def test_labels_are_looked_at_in_each_batch(pynative_mode):
    """Some of one batch are to be ignored, none of another; so in turn."""
    slope = ms.grad(lambda x, labels: ops.cross_entropy(x, labels))
    shares = np.exp(LOGITS.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    for ignored in (0, 2, 0, 5):
        labels = np.where(np.arange(6) < ignored, -100, LABELS)
        expected = (shares - np.eye(5)[LABELS]) / (6 - ignored)
        expected[:ignored] = 0
        found = slope(Tensor(LOGITS), Tensor(labels.astype(np.int32))).asnumpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)  # float32
