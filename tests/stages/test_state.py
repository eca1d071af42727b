"""What the host sets between two steps is what the next step uses."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import BoostTrainOneStepCell, GradientAccumulation

SCALES = {
    "no scale": {},
    "fixed": {"loss_scale_manager": ms.FixedLossScaleManager(8.0, drop_overflow_update=True)},
    "dynamic": {"loss_scale_manager": ms.DynamicLossScaleManager(8, 2, 100)},
}


def train_network(scale, window):
    net = nets.MLP()
    config = switched(grad_accumulation=window > 1)
    if window > 1:
        config["grad_accumulation"] = {"grad_accumulation_step": window}
    optimizer = nets.momentum(net.trainable_params())
    return net, optimizer, model_of(net, config, optimizer, **SCALES[scale]).train_network


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("scale", SCALES)
def test_a_rate_of_zero_stops_training_and_moments_start_again(mode, scale, window):
    net, optimizer, step = train_network(scale, window)
    x, y = map(Tensor, nets.batches(1)[0])
    for _ in range(2 * window):
        step(x, y)
    optimizer.learning_rate.set_data(Tensor(0.0, ms.float32))
    for moment in optimizer.moments:
        moment.set_data(Tensor(np.zeros(moment.shape, np.float32)))
    before = nets.weights(net)
    for _ in range(window):
        step(x, y)
    nets.assert_same(nets.weights(net), before)
    assert all(moment.asnumpy().any() for moment in optimizer.moments)
    optimizer.learning_rate.set_data(Tensor(0.5, ms.float32))
    for _ in range(window):
        step(x, y)
    assert all((value != before[name]).any() for name, value in nets.weights(net).items())


def test_a_window_by_itself_closes_with_what_was_set(graph_mode):
    """In PYNATIVE_MODE it is the step that sees to it."""
    net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    window = GradientAccumulation(2, nn.SGD(net.trainable_params(), 1.0))
    gradient = (Tensor([[1.0]], ms.float32),)
    for _ in range(2):
        window(Tensor(0.0), gradient)
    net.weight.set_data(Tensor([[5.0]], ms.float32))
    for _ in range(2):
        window(Tensor(0.0), gradient)
    assert float(net.weight.asnumpy().reshape(())) == 4.0


def test_a_window_that_is_closed_early_has_what_was_set(mode):
    net, optimizer, step = train_network("dynamic", 3)
    x, y = map(Tensor, nets.batches(1)[0])
    for _ in range(4):
        step(x, y)
    step.flush_accumulation()
    step(x, y)
    optimizer.learning_rate.set_data(Tensor(0.0, ms.float32))
    before = nets.weights(net)
    assert step.flush_accumulation()
    nets.assert_same(nets.weights(net), before)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_parameters_keep_their_memory_when_nothing_is_set(mode):
    net = nets.ConvNet()
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    step = BoostTrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), optimizer)
    x, y = map(Tensor, nets.batches(1, image=True)[0])
    step(x, y)
    places = [one.data_ptr() for one in step.get_parameters()]
    step(x, y)
    assert [one.data_ptr() for one in step.get_parameters()] == places


class Rows(nn.Cell):
    """Numbers that are not trained, as many as the script likes."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([1.0]), name="weight")
        self.rows = ms.Parameter(Tensor([1.0, 2.0]), name="rows", requires_grad=False)

    def construct(self):
        return (self.weight * self.rows).sum()


def test_a_parameter_may_get_another_shape(pynative_mode):
    net = Rows()
    step = BoostTrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.0))
    assert step().asnumpy() == 3
    net.rows.set_data(Tensor([1.0, 2.0, 4.0]), slice_shape=True)
    assert step().asnumpy() == 7


class Pair(nn.Cell):
    """Two weights, of which each is exchanged for the other while it trains."""

    def __init__(self):
        super().__init__()
        self.first = ms.Parameter(Tensor([1.0], ms.float32))
        self.second = ms.Parameter(Tensor([5.0], ms.float32))

    def construct(self, x):
        return (self.first * x + 10.0 * self.second * x).sum()


@pytest.mark.parametrize("by_numpy", [False, True])
def test_two_weights_that_were_exchanged_go_on_in_each_others_place(mode, by_numpy):
    net = Pair()
    step = BoostTrainOneStepCell(net, nn.SGD(net.trainable_params(), 1.0))
    x = Tensor([1.0], ms.float32)
    step(x)
    assert (net.first.asnumpy(), net.second.asnumpy()) == (0.0, -5.0)
    kept = net.second.copy()
    net.second.set_data(Tensor(net.first.asnumpy()) if by_numpy else net.first)
    net.first.set_data(kept)
    step(x)
    assert (net.first.asnumpy(), net.second.asnumpy()) == (-6.0, -10.0)
