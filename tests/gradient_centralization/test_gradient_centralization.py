"""Centralized gradients by a switch: the formula, groups of freezing, what cannot have it."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindspore_boost_ext import AutoBoost, FreezeOpt, make_train_step

X = np.random.default_rng(7).normal(size=(6, 4)).astype("f")
LABELS = np.array([0, 2, 1, 2, 2, 0], np.int32)
RATE, DECAY = 0.5, 0.1


def config_of(**switches):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    return {"boost": {"mode": "manual", **off, "gradient_centralization": True, **switches}}


def step_of(net, optimizer, **switches):
    return make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config_of(**switches))


def by_hand(weight, bias):
    """Return weight and bias after a step of SGD with decay, in float64."""
    weight, bias = weight.astype(np.float64), bias.astype(np.float64)
    logits = X.astype(np.float64) @ weight.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    delta = (shares - np.eye(3)[LABELS]) / len(X)
    gradient = delta.T @ X + DECAY * weight
    gradient -= gradient.mean(1, keepdims=True)
    return weight - RATE * gradient, bias - RATE * (delta.sum(0) + DECAY * bias)


@pytest.mark.parametrize("frozen", [False, True], ids=["plain", "FreezeOpt"])
def test_a_step_follows_the_formula(mode, frozen):
    net = nn.Dense(4, 3)
    optimizer = nn.SGD(net.trainable_params(), RATE, weight_decay=DECAY)
    if frozen:
        optimizer = FreezeOpt(optimizer, train_parameter_groups=[net.trainable_params()])
    expected = by_hand(*(one.asnumpy() for one in net.trainable_params()))
    step = step_of(net, optimizer)
    assert step.train_network.report()["gradient_centralization"].counts == {"weights": 1}
    step(Tensor(X), Tensor(LABELS))
    for one, value in zip(net.trainable_params(), expected):
        # float32 of values near 1, six samples summed
        np.testing.assert_allclose(one.asnumpy(), value, rtol=2e-6, atol=2e-6, err_msg=one.name)


def test_beside_less_bn_it_is_done_once(mode):
    """Centralizing twice would be the same; the reports of both say what they did."""
    net = nn.Dense(4, 3)
    config = config_of(less_bn=True)
    config["less_bn"] = {"fn_flag": False}
    expected = by_hand(*(one.asnumpy() for one in net.trainable_params()))
    optimizer = nn.SGD(net.trainable_params(), RATE, weight_decay=DECAY)
    with pytest.warns(UserWarning, match=r"less_bn has no effect.*gc_flag still centralizes gradi"):
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)
    step(Tensor(X), Tensor(LABELS))
    np.testing.assert_allclose(net.weight.asnumpy(), expected[0], rtol=2e-6, atol=2e-6)


def test_thor_and_weights_of_one_input_are_left_alone():
    net = nn.Dense(4, 3)
    step = step_of(net, nets.momentum(net.trainable_params()), thor=True)
    row = step.train_network.report()["gradient_centralization"]
    assert (row.status, row.reason) == ("skipped", "THOR has its own rule for each weight")
    net = nn.Dense(1, 3)
    row = step_of(net, nets.momentum(net.trainable_params())).train_network.report()
    assert "more than one input" in row["gradient_centralization"].reason


def test_what_is_no_optimizer_is_refused():
    net = nn.Dense(4, 3)
    with pytest.raises(TypeError, match=r"gradient_centralization needs an nn\.Optimizer, got"):
        AutoBoost("O1", config_of()).network_auto_process_train(net, nn.ReLU())


def test_the_users_rate_still_counts(mode):
    """The optimizer that trains is another one, over the same rate."""
    net = nn.Dense(4, 3)
    optimizer = nn.SGD(net.trainable_params(), RATE)
    step = step_of(net, optimizer)
    step(Tensor(X), Tensor(LABELS))
    before = net.weight.asnumpy().copy()
    optimizer.learning_rate.set_data(Tensor(0.0, ms.float32))
    step(Tensor(X), Tensor(LABELS))
    np.testing.assert_array_equal(net.weight.asnumpy(), before)
