"""AdamWeightDecay by the kernel of Adam: against the rule in float64."""

from __future__ import annotations

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import make_train_step

NAME = "cheaper_operators"
RNG = np.random.default_rng(5)
START = {name: RNG.normal(size=(5, 3)) for name in ("first", "second")}
FACTORS = RNG.normal(size=(3, 5, 3)) * [[[1.0]], [[1e-3]], [[100.0]]]  # of three steps
RATES = [0.1, 0.02, 0.05]


class Weighed(nn.Cell):
    """Sums two weights times factors, which are so their gradients."""

    def __init__(self):
        super().__init__()
        self.first = Parameter(Tensor(START["first"], ms.float32))
        self.second = Parameter(Tensor(START["second"], ms.float32))

    def construct(self, factors):
        return (self.first * factors).sum() - (self.second * factors).sum()


def by_rule(weight, gradients, rates, decay, beta1=0.8, beta2=0.95, epsilon=1e-4):
    """Return a weight after some updates, in float64: AdamWeightDecay corrects no moment."""
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        weight = weight - rate * (mean / (np.sqrt(square) + epsilon) + decay * weight)
    return weight


def trained(groups, net, on=True, steps=3, **switches):
    optimizer = nn.AdamWeightDecay(groups, RATES, 0.8, 0.95, 1e-4, weight_decay=0.3)
    config = contract.switched(cheaper_operators=on, **switches)
    step = make_train_step(net, None, optimizer, level="O1", config=config)
    for factors in FACTORS[:steps]:
        step(Tensor(factors, ms.float32))
    return step


GROUPS = {
    "alike": lambda net: net.trainable_params(),
    "by decay": lambda net: [
        {"params": [net.first], "weight_decay": 0.0},
        {"params": [net.second]},
    ],
    "by rate": lambda net: [
        {"params": [net.second], "lr": 0.01},
        {"params": [net.first], "weight_decay": 0.0},
    ],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_weights_after_some_steps(mode, groups):
    net = Weighed()
    row = trained(GROUPS[groups](net), net).report()[NAME]
    assert (row.status, dict(row.counts)) == ("applied", {"adam_weight_decay": 1})
    first_decay = 0.3 if groups == "alike" else 0.0
    second_rates = [0.01] * 3 if groups == "by rate" else RATES
    # float32: three updates of weights of about 1
    first = by_rule(START["first"], FACTORS, RATES, first_decay)
    np.testing.assert_allclose(net.first.asnumpy(), first, atol=1e-6)
    second = by_rule(START["second"], -FACTORS, second_rates, 0.3)
    np.testing.assert_allclose(net.second.asnumpy(), second, atol=1e-6)


def test_weights_of_16_bits_are_left_to_mindspore(mode):
    ends = []
    for on in (True, False):
        net = Weighed()
        net.second.set_dtype(ms.float16)
        row = trained(net.trainable_params(), net, on).report()[NAME]
        ends.append(nets.weights(net))
    assert row.status != "applied"
    nets.assert_same(*ends)


def test_state_goes_on_with_and_without(mode):
    """Names and values are those of MindSpore's."""
    net, ends = Weighed(), {}
    step = trained(net.trainable_params(), net, steps=2)
    state = {one.name: Tensor(one.asnumpy()) for one in step.train_network.get_parameters()}
    for on in (True, False):
        other = Weighed()
        further = trained(other.trainable_params(), other, on, steps=0)
        assert ms.load_param_into_net(further.train_network, dict_of(state), True)[0] == []
        further(Tensor(FACTORS[2], ms.float32))
        ends[on] = nets.weights(other)
    for name, end in ends[True].items():
        np.testing.assert_allclose(end, ends[False][name], atol=1e-6)  # one update, float32


def dict_of(state):
    return {name: Parameter(value, name) for name, value in state.items()}


def test_groups_that_freeze(mode):
    """Views of the optimizer update some of the weights."""
    ends = {}
    for on in (True, False):
        net = nets.Deep()
        optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01, weight_decay=0.1)
        freezing = {"grad_freeze": {"schedule": [0, 1, 1], "param_groups": 2}}
        config = {**contract.switched(cheaper_operators=on, grad_freeze=True), **freezing}
        ms.set_seed(1)
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)
        for x, y in nets.batches(3):
            step(Tensor(x), Tensor(y))
        ends[on] = nets.weights(net)
    for name, end in ends[True].items():
        np.testing.assert_allclose(end, ends[False][name], atol=1e-6, err_msg=name)
