"""THOR: its rule against a float64 Kronecker solve, and its place in the training step."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
import thor_oracle as oracle
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import BoostTrainOneStepCell
from mindspore_boost_ext.thor import THOR

DAMPING, RATE = 0.04, 0.5
# float32 inverses of matrices with condition numbers up to 100, against float64: 1e-5 to 3e-5 seen.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class Weighted(nn.Cell):
    """Mean over the batch of <output, target>, so that the output gradient is target / N."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, target):
        return (self.layer(x) * target).sum() / x.shape[0]


def one_step(layer, x, target, **settings):
    """Train one step; return the direction of each parameter, by name."""
    net = Weighted(layer)
    before = nets.weights(net)
    optimizer = THOR(layer, RATE, DAMPING, 0.0, **settings)
    step = BoostTrainOneStepCell(net, optimizer)
    step.set_train()
    step(Tensor(x), Tensor(target))
    return optimizer, {
        name.partition(".")[2]: (before[name] - value) / RATE
        for name, value in nets.weights(net).items()
    }


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_is_the_kronecker_solve(mode, has_bias):
    x, target = random(16, 5), random(16, 4, seed=1)
    _, found = one_step(nn.Dense(5, 4, has_bias=has_bias), x, target)
    delta = target / 16
    expected = oracle.dense_direction(x, delta, delta.T @ x, DAMPING)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)
    if has_bias:
        np.testing.assert_allclose(found["bias"], delta.sum(0), **TOLERANCE)


CONVS = {
    "same": ({"pad_mode": "same"}, (1, 1, 1, 1)),
    "same, stride 2": ({"pad_mode": "same", "stride": 2}, (0, 1, 0, 1)),
    "valid, dilation": ({"pad_mode": "valid", "dilation": (1, 2)}, (0, 0, 0, 0)),
    "pad": (
        {"pad_mode": "pad", "padding": (1, 0, 2, 1), "stride": (2, 1), "has_bias": True},
        (1, 0, 2, 1),
    ),
}


@pytest.mark.parametrize("case", CONVS)
def test_convolution_is_the_kronecker_solve(mode, case):
    settings, pads = CONVS[case]
    layer = nn.Conv2d(2, 3, 3, **settings)
    x = random(4, 2, 6, 6)
    rows = oracle.patches(x, (3, 3), layer.stride, layer.dilation, pads)
    target = random(4, 3, *rows.shape[1:3], seed=1)
    delta = np.float64(target).transpose(0, 2, 3, 1) / 4
    gradient = np.einsum("nijo,nijk->ok", delta, rows)
    expected = oracle.conv_direction(rows, delta, gradient, DAMPING)
    _, found = one_step(layer, x, target)
    np.testing.assert_allclose(found["weight"].reshape(3, -1), expected, **TOLERANCE)
