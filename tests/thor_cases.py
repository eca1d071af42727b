"""THOR over a linear layer whose gradients are known, and the same in float64."""

from __future__ import annotations

import nets
import numpy as np
import thor_oracle as oracle
from mindspore import Tensor, nn

from mindspore_boost_ext import BoostTrainOneStepCell
from mindspore_boost_ext.thor.optimizer import THOR

DAMPING, RATE = 0.04, 0.5


class Weighted(nn.Cell):
    """Mean over the batch of <output, target>, so that the output gradient is target / N."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, target):
        return (self.layer(x) * target).sum() / x.shape[0]


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def train_layer(steps, mode_settings=None, net=None, step=None, **settings):
    """Train a fixed linear layer for some steps; return its step cell and optimizer."""
    net = Weighted(nn.Dense(3, 2, has_bias=False)) if net is None else net
    nets.fill(net)
    optimizer = THOR(net, **{"learning_rate": 0.1, "damping": DAMPING, "momentum": 0.9, **settings})
    step = (step or BoostTrainOneStepCell)(net, optimizer)
    step.set_train()
    for x, target in steps:
        step(Tensor(x), Tensor(target))
    return step, optimizer


def pairs(count):
    return [(random(8, 3, seed=2 * k), random(8, 2, seed=2 * k + 1)) for k in range(count)]


def reference(steps, frequency=1, rho=0.0, dampings=(DAMPING,), decay=0.0, nesterov=False):
    """Return the weight of ``train_layer`` by float64: the loss is linear, gradients are known."""
    weight = nets.fill(nn.Dense(3, 2, has_bias=False)).weight.asnumpy().astype(np.float64)
    moment, a, g = 0.0, None, None
    for number, (x, target) in enumerate(steps):
        delta = np.float64(target) / len(x)
        damping = dampings[min(number, len(dampings) - 1)]
        if number % frequency == 0:
            new_a, new_g = oracle.second_moment(x), oracle.second_moment(len(x) * delta)
            a = new_a if a is None else rho * a + (1 - rho) * new_a
            g = new_g if g is None else rho * g + (1 - rho) * new_g
            held = damping
        update = oracle.kronecker_solve(delta.T @ x, a, g, np.sqrt(held)) + decay * weight
        moment = 0.9 * moment + update
        weight = weight - 0.1 * (update + 0.9 * moment if nesterov else moment)
    return weight
