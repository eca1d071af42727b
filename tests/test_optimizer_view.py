"""Views of optimizers: only their parameters move, by the plain optimizer's own arithmetic.

The reference is the plain optimizer over copies of the parameters. It updates everything; then the
parameters outside the view, and their state, are put back. All optimizers here treat each parameter
by itself, so what is left is what a view must do, bit for bit.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.optimizer_view import optimizer_view, parameter_positions

SHAPES = [(3, 4), (4,), (4, 4), (4,), (2, 4)]
NAMES = ["conv.weight", "conv.bias", "norm.gamma", "norm.beta", "head.weight"]
EVERYTHING = (0, 1, 2, 3, 4)
# Frozen at first, changed groups, a gap, everything, one parameter.
STEPS = [(2, 3, 4), EVERYTHING, (0, 2, 4), (4,), (2, 3, 4), EVERYTHING]

PLAIN = {
    "SGD": lambda p: nn.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "Momentum": lambda p: nn.Momentum(p, 0.05, 0.9, weight_decay=1e-2, loss_scale=8.0),
    "Adam": lambda p: nn.Adam(p, 0.05, weight_decay=1e-2),
    "Adam amsgrad": lambda p: nn.Adam(p, 0.05, use_amsgrad=True),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.05, weight_decay=1e-2),
    "RMSProp": lambda p: nn.RMSProp(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "RMSProp centered": lambda p: nn.RMSProp(p, 0.05, momentum=0.9, centered=True),
    "Adagrad": lambda p: nn.Adagrad(p, learning_rate=0.05, weight_decay=1e-2),
    "FTRL": lambda p: nn.FTRL(p, learning_rate=0.05, weight_decay=1e-2),
    "LazyAdam": lambda p: nn.LazyAdam(p, 0.05, weight_decay=1e-2),
    "AdaFactor": lambda p: nn.AdaFactor(p, weight_decay=1e-2),
    "AdaFactor beta1=0": lambda p: nn.AdaFactor(p, beta1=0.0),
    "AdaMax": lambda p: nn.AdaMax(p, 0.05, weight_decay=1e-2),
    "Adadelta": lambda p: nn.Adadelta(p, 0.5, weight_decay=1e-2),
    "ASGD": lambda p: nn.ASGD(p, 0.05, weight_decay=1e-2, t0=2.0),
    "Rprop": lambda p: nn.Rprop(p, 0.05, weight_decay=1e-2),
    "ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.05, weight_decay=1e-2),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.05, weight_decay=1e-2),
}


class Decay(nn.Cell):
    """A weight decay that depends on the step."""

    def construct(self, global_step):
        return 0.01 / (global_step.astype(ms.float32) + 1.0)


def grouped(params, rate, weight_decay=0.02):
    """Three groups out of the network's order, put back into it by ``order_params``."""
    return [
        {"params": [params[4], params[1]], "lr": rate},
        {"params": [params[0]], "weight_decay": weight_decay, "grad_centralization": False},
        {"params": [params[3], params[2]]},
        {"order_params": params},
    ]


RATES = [0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.001]
GROUPED = {
    "fixed rates": lambda p: nn.Momentum(grouped(p, 0.2), 0.05, 0.9),
    "list rates": lambda p: nn.Momentum(grouped(p, RATES), RATES[::-1], 0.9),
    "one list rate": lambda p: nn.Adam(p, RATES),
    "schedules": lambda p: nn.AdamWeightDecay(
        grouped(p, nn.ExponentialDecayLR(0.1, 0.5, 2)), 0.05, weight_decay=0.01
    ),
    "one schedule": lambda p: nn.SGD(p, nn.ExponentialDecayLR(0.1, 0.5, 2), momentum=0.9),
    "schedule of decay": lambda p: nn.Momentum(grouped(p, 0.1, Decay()), 0.05, 0.9),
    "one schedule of decay": lambda p: nn.Momentum(p, 0.05, 0.9, weight_decay=Decay()),
    "groups, SGD": lambda p: nn.SGD(grouped(p, 0.1), 0.05, momentum=0.9),
    "groups, ASGD": lambda p: nn.ASGD(grouped(p, 0.1), 0.05),
    "groups, Rprop": lambda p: nn.Rprop(grouped(p, 0.1), 0.05),
    "a generator": lambda p: nn.Adam(filter(lambda one: one.requires_grad, p), 0.05),
}


def parameters(shapes=SHAPES, names=NAMES):
    generator = np.random.default_rng(0)
    return [
        Parameter(Tensor(generator.normal(size=shape).astype(np.float32)), name=name)
        for shape, name in zip(shapes, names)
    ]


def gradients(step, shapes=SHAPES):
    generator = np.random.default_rng(100 + step)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def tensors(arrays):
    return tuple(Tensor(array) for array in arrays)


def state(optimizer):
    """All Parameters of an optimizer as a dict name -> value."""
    return {one.name: one.asnumpy().copy() for one in optimizer.get_parameters()}


def put_back(optimizer, frozen, before):
    """Give the parameters called ``frozen``, and whatever is named after them, their old values."""
    for one in optimizer.get_parameters():
        if any(one.name.endswith(name) for name in frozen):
            ops.assign(one, Tensor(before[one.name]))


def assert_same_state(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def compare(make, steps=STEPS):
    """Run views of one optimizer beside the plain optimizer that is put back after each step."""
    optimizer, reference = make(parameters()), make(parameters())
    names = [one.name for one in optimizer.get_parameters()]
    views = {positions: optimizer_view(optimizer, positions) for positions in set(steps)}
    for step, positions in enumerate(steps):
        every, before = gradients(step), state(reference)
        reference(tensors(every))
        put_back(reference, [NAMES[i] for i in EVERYTHING if i not in positions], before)
        views[positions](tensors(every[i] for i in positions))
        assert_same_state(state(optimizer), state(reference))
        assert int(optimizer.global_step.asnumpy()[0]) == step + 1
    assert [one.name for one in optimizer.get_parameters()] == names
    every = gradients(len(steps))
    optimizer(tensors(every))
    reference(tensors(every))
    assert_same_state(state(optimizer), state(reference))


@pytest.mark.parametrize("name", PLAIN)
def test_a_view_does_what_the_plain_optimizer_does_to_its_parameters(name, mode):
    compare(PLAIN[name])


@pytest.mark.parametrize("name", GROUPED)
def test_rates_decay_and_order_of_groups_stay_with_their_parameters(name, mode):
    compare(GROUPED[name], STEPS[:4])
