"""Recurrent layers with cheaper steps: values and gradients against float64, and what stays."""

from __future__ import annotations

import functools

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import AutoBoost
from mindspore_boost_ext.cheaper_operators.recurrent import CheaperRecurrence

STEPS, BATCH, WIDTH, HIDDEN = 4, 3, 2, 2
RNG = np.random.default_rng(8)
X = RNG.normal(size=(STEPS, BATCH, WIDTH)).astype("f")
CASES = {
    "GRU": (nn.GRU, {}),
    "GRU of two layers, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "GRU without biases": (nn.GRU, {"has_bias": False}),
    "RNN": (nn.RNN, {}),
    "RNN of two layers, both ways": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    "RNN with ReLU": (nn.RNN, {"nonlinearity": "relu"}),
}


class Summed(nn.Cell):
    """A weighted sum of all states that a layer returns, and of its last ones."""

    def __init__(self, layer, lengths=None):
        super().__init__()
        self.layer, self.lengths = layer, lengths
        ways = (1 + layer.bidirectional) * HIDDEN
        random = np.random.default_rng(9)
        self.all = Tensor(random.normal(size=(STEPS, BATCH, ways)).astype("f"))
        rows = layer.num_layers * (1 + layer.bidirectional)
        self.last = Tensor(random.normal(size=(rows, BATCH, HIDDEN)).astype("f"))

    def construct(self, x, h):
        states, last = self.layer(x, h, self.lengths)
        return (states * self.all).sum() + (last * self.last).sum()


def made(name, lengths=None, dtype=ms.float32):
    kind, options = CASES[name]
    np.random.seed(3)  # where MindSpore draws the weights of these layers
    return Summed(kind(WIDTH, HIDDEN, dtype=dtype, **options), lengths)


def first_states(net):
    return np.random.default_rng(5).normal(size=net.last.shape).astype("f")


def replaced(net):
    """Return the row of the report after AutoBoost has seen a network."""
    boost = AutoBoost("O1", contract.switched(cheaper_operators=True))
    boost.network_auto_process_train(net, nets.momentum(net.trainable_params()))
    return boost.report()["cheaper_operators"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(of_input, of_state, h):
    reset, keep = (
        sigmoid(a + b) for a, b in zip(np.split(of_input, 3)[:2], np.split(of_state, 3)[:2])
    )
    candidate = np.tanh(np.split(of_input, 3)[2] + reset * np.split(of_state, 3)[2])
    return (1 - keep) * candidate + keep * h


@functools.cache
def factors(name):
    """Return what ``Summed`` multiplies states and last states by."""
    net = made(name)
    return net.all.asnumpy(), net.last.asnumpy()


def oracle(name, weights, x, first):
    """Return the weighted sum in float64, from the formulas, sample by sample."""
    kind, options = CASES[name]
    activation = {"relu": lambda v: np.maximum(v, 0)}.get(options.get("nonlinearity"), np.tanh)
    rule = gru if kind is nn.GRU else lambda a, b, h: activation(a + b)
    ways, layers = 1 + options.get("bidirectional", False), options.get("num_layers", 1)
    (of_all, of_last), total = factors(name), 0.0
    for sample in range(BATCH):
        sequence = x[:, sample]
        for layer in range(layers):
            outputs = []
            for way in range(ways):
                row, suffix = layer * ways + way, f"l{layer}" + "_reverse" * way
                h, states = first[row, sample], []
                for one in sequence[:: 1 - 2 * way]:
                    given = [
                        weights[f"weight_{what}_{suffix}"] @ vector
                        + weights.get(f"bias_{what}_{suffix}", 0)
                        for what, vector in (("ih", one), ("hh", h))
                    ]
                    h = rule(*given, h)
                    states.append(h)
                total += (h * of_last[row, sample]).sum()
                outputs.append(np.array(states)[:: 1 - 2 * way])
            sequence = np.concatenate(outputs, axis=1)
        total += (sequence * of_all[:, sample]).sum()
    return total


def slopes(rule, values, step=1e-5):
    """Return the gradient of ``rule`` by each of these arrays, by central differences."""
    found = []
    for array in values:
        one = np.zeros(array.shape)
        for place in np.ndindex(*array.shape):
            kept = array[place]
            array[place] = kept + step
            above = rule()
            array[place] = kept - step
            one[place] = (above - rule()) / (2 * step)
            array[place] = kept
        found.append(one)
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_inputs_states_and_weights(mode, name):
    net = made(name)
    row = replaced(net)
    assert (row.status, set(row.counts)) == ("applied", {"recurrence"})
    first, weights = first_states(net), net.trainable_params()
    value, (by_inputs, by_weights) = ms.value_and_grad(net, (0, 1), weights)(
        Tensor(X), Tensor(first)
    )
    exact = {one.name.rpartition(".")[2]: one.asnumpy().astype("d") for one in weights}
    x, h = X.astype("d"), first.astype("d")
    expected = slopes(lambda: oracle(name, exact, x, h), [x, h, *exact.values()])
    # MindSpore's tanh and sigmoid are good to 1e-7, sums here have a few tens of terms of size 1.
    np.testing.assert_allclose(float(value), oracle(name, exact, x, h), rtol=1e-5, atol=1e-5)
    for found, one in zip((*by_inputs, *by_weights), expected):
        np.testing.assert_allclose(found.asnumpy(), one, rtol=1e-4, atol=1e-5)


class Slope(nn.Cell):
    """The sum of the squares of a gradient, for a second one."""

    def __init__(self, net, first):
        super().__init__()
        self.slope, self.net, self.first = ops.GradOperation(), net, first

    def construct(self, x):
        return (self.slope(self.net)(x, self.first) ** 2).sum()


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_second_gradients(graph_mode, name):
    """In PYNATIVE_MODE MindSpore has none through these layers."""
    net = made(name)
    first = Tensor(first_states(net))
    expected = ms.grad(Slope(net, first))(Tensor(X)).asnumpy()
    assert np.abs(expected).max() > 0.01  # else nothing is compared
    replaced(net)
    found = ms.grad(Slope(net, first))(Tensor(X)).asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def results(net, x, h):
    return [one.asnumpy() for one in net.layer(x, h, net.lengths)]


@pytest.mark.parametrize("name", ["GRU", "RNN"])
def test_sequences_of_several_lengths_one_step_and_float16_are_mindspores(mode, name):
    """Bit for bit: MindSpore's own steps compute them."""
    for x, lengths, dtype in (
        (X, Tensor(np.array([4, 2, 1], np.int32)), ms.float32),
        (X[:1], None, ms.float32),
        (X, None, ms.float16),
    ):
        found = []
        for cheaper in (False, True):
            net = made(name, lengths, dtype)
            if cheaper:
                replaced(net)
                assert isinstance(net.layer.rnn, CheaperRecurrence)
            found.append(results(net, Tensor(x, dtype), Tensor(first_states(net), dtype)))
        for one, other in zip(*found):
            np.testing.assert_array_equal(one, other)


def test_mixed_precision_auto_takes_no_product_in_float16(mode):
    net = made("GRU")
    x, h = Tensor(X), Tensor(first_states(net))
    expected = results(net, x, h)
    replaced(net)
    slopes = ms.grad(net, (0, 1))(x, h)
    net.layer = ms.amp.auto_mixed_precision(net.layer, "auto")
    # float16 would be off by 5e-4
    np.testing.assert_allclose(results(net, x, h)[0], expected[0], rtol=1e-5, atol=1e-6)
    for found, one in zip(ms.grad(net, (0, 1))(x, h), slopes):
        np.testing.assert_allclose(found.asnumpy(), one.asnumpy(), rtol=1e-5, atol=1e-5)


def test_an_empty_batch_has_no_states(mode):
    """As the rest of an evaluation; in GRAPH_MODE no operator unstacks nothing."""
    net = nn.SequentialCell(nn.GRU(WIDTH, HIDDEN))
    assert replaced(net).status == "applied"
    states, last = net(Tensor(np.zeros((STEPS, 0, WIDTH), np.float32)))
    assert (states.shape, last.shape) == ((STEPS, 0, HIDDEN), (1, 0, HIDDEN))


def test_an_lstm_stays(mode):
    net = nn.SequentialCell(nn.LSTM(WIDTH, HIDDEN))
    assert replaced(net).status == "skipped"
