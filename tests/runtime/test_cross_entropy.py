"""``ops.cross_entropy`` after the import: who calls it, and what stays MindSpore's."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import functional

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import cross_entropy

RNG = np.random.default_rng(2)
LOGITS = RNG.normal(size=(6, 5)).astype("f")
LABELS = np.array([0, 3, 4, 1, 1, 2], np.int32)


@pytest.fixture
def untuned():
    """Tune again after a test that has switched the tuning off."""
    yield
    tune_machine()


def both(call):
    """Return what something gives with the import's function, and with MindSpore's."""
    tune_machine()
    assert ops.cross_entropy is cross_entropy.cross_entropy
    tuned = call()
    tune_machine(False)
    assert ops.cross_entropy is cross_entropy.ORIGINAL
    return tuned, call()


def test_all_names_of_the_function_are_replaced():
    assert functional.cross_entropy is cross_entropy.cross_entropy


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
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
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
    for ignored in (0, 2, 0, 6):
        labels = np.where(np.arange(6) < ignored, -100, LABELS)
        expected = (shares - np.eye(5)[LABELS]) / max(6 - ignored, 1)
        expected[:ignored] = 0
        found = slope(Tensor(LOGITS), Tensor(labels.astype(np.int32))).asnumpy()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)  # float32
