"""GroupNorm by the kernel of BatchNorm: gradients of all, shapes, and what a bad batch leaves."""

from __future__ import annotations

import copy

import cheaper_cases
import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import loss_of, model_of

pytestmark = pytest.mark.usefixtures("every_size")
RNG = np.random.default_rng(8)


def replaced(net):
    """Return what is replaced in a network, by the report."""
    return dict(cheaper_cases.replaced(net).counts)


class Weighted(nn.Cell):
    """The weighted sum of what a layer gives."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.weights = Tensor(np.random.default_rng(1).normal(size=shape).astype("f"))

    def construct(self, x):
        return (self.layer(x) * self.weights).sum()


def layer_of(groups, channels):
    """Return a GroupNorm whose channels have scales and shifts of their own."""
    layer = nn.GroupNorm(groups, channels)
    layer.gamma.set_data(Tensor(np.linspace(0.5, 2, channels).astype("f")))
    layer.beta.set_data(Tensor(np.linspace(-1, 1, channels).astype("f")))
    return layer


def by_formula(x, groups, layer, weights):
    """Return values, and gradients by x, scale and shift, in float64.

    For normal = (x - mean) / deviation, the gradient by x is what the weights leave beside their
    mean and their part along ``normal``, over the deviation.
    """
    column = (-1, *[1] * (x.ndim - 2))
    gamma, beta = (one.asnumpy().astype(np.float64) for one in (layer.gamma, layer.beta))
    rows = x.astype(np.float64).reshape(x.shape[0], groups, -1)
    deviation = np.sqrt(rows.var(-1, keepdims=True) + layer.eps)
    normal = (rows - rows.mean(-1, keepdims=True)) / deviation
    scaled = (weights * gamma.reshape(column)).reshape(rows.shape)
    along = (scaled * normal).mean(-1, keepdims=True)
    slope = (scaled - scaled.mean(-1, keepdims=True) - normal * along) / deviation
    normal = normal.reshape(x.shape)
    others = tuple(axis for axis in range(x.ndim) if axis != 1)
    value = normal * gamma.reshape(column) + beta.reshape(column)
    return value, slope.reshape(x.shape), (normal * weights).sum(others), weights.sum(others)


@pytest.mark.parametrize(
    ("groups", "shape"),
    [(2, (3, 4, 5, 6)), (1, (2, 4, 3, 3)), (4, (2, 4, 3, 3)), (3, (5, 12)), (2, (1, 4, 2, 3, 2))],
    ids=str,
)
@pytest.mark.parametrize("far", [0.0, 300.0])  # where a float32 is good to 3e-5
def test_values_and_all_gradients(mode, groups, shape, far):
    layer = layer_of(groups, shape[1])
    x = (far + np.random.default_rng(8).normal(size=shape)).astype("f")
    net = Weighted(layer, shape)
    assert replaced(net) == {"group_norm": 1}
    found = [net.layer(Tensor(x)), ms.grad(net)(Tensor(x))]
    found += ms.grad(net, None, net.trainable_params())(Tensor(x))
    expected = by_formula(x, groups, layer, net.weights.asnumpy().astype(np.float64))
    # float32's sums of up to 72 values; where a group of four spreads by a tenth, ten times that.
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one.asnumpy(), other, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("value", [3.3, 1003.7])
def test_a_group_of_equals_is_zero(mode, value):
    """Were its mean rounded, that would be divided by the root of epsilon."""
    net = nn.SequentialCell(nn.GroupNorm(2, 4))
    assert replaced(net) == {"group_norm": 1}
    found = net(Tensor(np.full((2, 4, 64, 64), value, np.float32))).asnumpy()
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("eps", [0.0, 2.0])
def test_an_epsilon_that_batch_norm_refuses_stays(eps):
    assert replaced(nn.SequentialCell(nn.GroupNorm(2, 4, eps=eps))) == {}


def test_scales_of_float16_stay():
    assert replaced(nn.SequentialCell(nn.GroupNorm(2, 4, dtype=ms.float16))) == {}


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16])
def test_another_scale_counts(mode, dtype):
    """Also where MindSpore's own layer computes, as for 16 bits."""
    net = nn.SequentialCell(nn.GroupNorm(2, 4))
    assert replaced(net) == {"group_norm": 1}
    net[0].gamma = Parameter(Tensor(np.zeros(4, np.float32)), name="other")
    names = [one.name.rpartition(".")[2] for one in net.trainable_params()]
    assert names == ["other", "beta"]
    x = Tensor(np.random.default_rng(8).normal(size=(2, 4, 3, 3)), dtype)
    np.testing.assert_array_equal(net(x).asnumpy(), 0)


def test_a_bad_batch_leaves_nothing(mode):
    """The operator moves statistics in place: were these those of a constant, NaN would stay."""
    net = Weighted(layer_of(2, 4), (2, 4, 3, 3))
    x = Tensor(RNG.normal(size=(2, 4, 3, 3)).astype("f"))
    assert replaced(net) == {"group_norm": 1}
    gradient = ms.grad(net, 0, net.trainable_params())
    before = [one.asnumpy() for one in (gradient(x)[0], *gradient(x)[1])]
    assert np.isnan(gradient(x * float("nan"))[0].asnumpy()).all()
    gradient(x * float("inf"))
    after = [one.asnumpy() for one in (gradient(x)[0], *gradient(x)[1])]
    for one, other in zip(after, before):
        np.testing.assert_array_equal(one, other)


def test_inputs_stay_as_they_are(mode):
    x = Tensor(RNG.normal(size=(2, 4, 3, 3)).astype("f"))
    before, net = x.asnumpy().copy(), nn.SequentialCell(layer_of(2, 4))
    assert replaced(net) == {"group_norm": 1}
    net(x)
    np.testing.assert_array_equal(x.asnumpy(), before)


@pytest.mark.parametrize("shape", [(2, 6, 3), (4,)], ids=str)
def test_what_mindspore_refuses_is_refused(pynative_mode, shape):
    net = nn.SequentialCell(nn.GroupNorm(2, 4))
    assert replaced(net) == {"group_norm": 1}
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        net(Tensor(np.ones(shape, np.float32))).asnumpy()


class Grouped(nn.Cell):
    """A convolution, a GroupNorm that is read in passing, and a classifier."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.flat, self.last = nn.Flatten(), nn.Dense(4 * nets.FEATURES, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        images = self.norm(self.first(x.reshape((x.shape[0], 1, 1, -1))))
        penalty = self.norm.gamma.abs().sum() if isinstance(self.norm, nn.GroupNorm) else 0.0
        return self.last(self.flat(ops.relu(images))) * (1 + 0.1 * penalty)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_network_trains_as_with_mindspores(mode, compiled):
    ends, names, losses = [], [], []
    for cheaper in (True, False):
        net = Grouped()
        config = contract.switched(cheaper_operators=cheaper, compiled_step=compiled)
        model = model_of(net, config)
        names.append([name for name, _ in net.parameters_and_names()])
        names.append([one.name for one in net.trainable_params()])
        steps = [loss_of(model.train_network(*map(Tensor, one))) for one in nets.batches(4)]
        losses.append(steps)
        ends.append(nets.weights(net))
        twin = copy.deepcopy(net).set_train(False)
        x = Tensor(nets.batches(1)[0][0])
        np.testing.assert_array_equal(twin(x).asnumpy(), net.set_train(False)(x).asnumpy())
    assert names[0] == names[2]
    assert names[1] == names[3]
    np.testing.assert_allclose(*losses, rtol=1e-5)  # float32's sums of some dozen values
    for name, value in ends[1].items():
        # Four updates, each by float32's sums over a batch, normalised by a deviation below 1.
        np.testing.assert_allclose(ends[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
