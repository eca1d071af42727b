"""CommonHeadLastFN: the formula, its edges, and which Dense it takes the place of."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import oracles
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import NoEffectWarning
from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.less_batch_normalization.head import in_place_of
from mindspore_boost_ext.less_batch_normalization.rewrite import CommonHeadLastFN, less_bn

DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(5, 6)).astype(np.float32)
W = DRAWN.normal(size=(3, 6)).astype(np.float32)
B = DRAWN.normal(size=3).astype(np.float32)


def head(**settings):
    return CommonHeadLastFN(6, 3, Tensor(W), Tensor(B), **settings)


@pytest.mark.parametrize("multiplier", [1.0, 7.0])
def test_the_formula(mode, multiplier):
    expected = oracles.cosine_head(X, W, B, multiplier)
    result = head(multiplier=multiplier)(Tensor(X)).asnumpy()
    # Sums of six float32 products.
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6 * multiplier)
    without = head(multiplier=multiplier, has_bias=False)(Tensor(X)).asnumpy()
    np.testing.assert_allclose(
        without, oracles.cosine_head(X, W, 0 * B, multiplier), rtol=1e-5, atol=1e-6 * multiplier
    )


def numerical(function, value, step=1e-6):
    """Return the gradient of a float64 function by central differences."""
    gradient = np.zeros_like(value, np.float64)
    for place in np.ndindex(value.shape):
        ends = []
        for sign in (1, -1):
            moved = value.astype(np.float64)
            moved[place] += sign * step
            ends.append(function(moved))
        gradient[place] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def gradients(layer, x, direction):
    def forward(x):
        return (layer(x) * Tensor(direction)).sum()

    parameters = [layer.weight, layer.multiplier]
    (to_x, to_parameters) = ms.grad(forward, 0, parameters)(Tensor(x))
    return [one.asnumpy() for one in (to_x, *to_parameters)]


def test_the_gradients(mode):
    direction = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    to_x, to_weight, to_multiplier = gradients(head(multiplier=2.0), X, direction)
    expected_x = numerical(lambda x: (oracles.cosine_head(x, W, B, 2) * direction).sum(), X)
    expected_w = numerical(lambda w: (oracles.cosine_head(X, w, B, 2) * direction).sum(), W)
    expected_m = (oracles.cosine_head(X, W, B, 1) * direction).sum()
    np.testing.assert_allclose(to_x, expected_x, rtol=1e-4, atol=1e-5)  # float32
    np.testing.assert_allclose(to_weight, expected_w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_multiplier, [expected_m], rtol=1e-5)
    assert abs((to_weight * W).sum(axis=1)).max() < 1e-5  # orthogonal, row by row


def test_rows_of_zeros_give_the_bias_and_finite_gradients(mode):
    x, weight = X.copy(), W.copy()
    x[1], weight[2], x[3] = 0, 0, 1e-3
    layer = CommonHeadLastFN(6, 3, Tensor(weight), Tensor(B))
    assert "6, 3, has_bias=True" in repr(layer)  # as a Dense shows them
    result = layer(Tensor(x)).asnumpy()
    np.testing.assert_allclose(result, oracles.cosine_head(x, weight, B, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result[1], B)
    assert all(np.isfinite(one).all() for one in gradients(layer, x, np.ones((5, 3), np.float32)))


def test_float16_features_may_be_long(mode):
    # The square of 300 is above float16's largest number.
    result = head()(Tensor((X * 300).astype(np.float16)))
    assert result.dtype == ms.float16
    expected = oracles.cosine_head((X * 300).astype(np.float16), W, B, 1)
    # float16 has 11 bits; three roundings and a sum of six.
    np.testing.assert_allclose(result.asnumpy(), expected, atol=8e-3)


def test_more_axes_and_an_activation(mode):
    layer = head(activation=nn.ReLU())
    result = layer(Tensor(np.stack([X, 2 * X]))).asnumpy()
    expected = np.maximum(oracles.cosine_head(X, W, B, 1), 0)
    assert result.shape == (2, 5, 3)
    np.testing.assert_allclose(result, [expected, expected], rtol=1e-5, atol=1e-6)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"multiplier must be a number in \(0, inf\), got -1"):
        CommonHeadLastFN(2, 2, multiplier=-1)
    with pytest.raises(ValueError, match=r"weight_init must have the shape \(3, 2\), got \(2, 3\)"):
        CommonHeadLastFN(2, 3, Tensor(np.ones((2, 3), np.float32)))
    with pytest.raises(TypeError, match="bias_init must be a Tensor, str or number, got None"):
        CommonHeadLastFN(2, 2, bias_init=None)
    with pytest.raises(TypeError, match="bias_init must be a Tensor, str or number, got True"):
        CommonHeadLastFN(2, 2, bias_init=True)


def test_it_takes_over_what_the_dense_has():
    dense = nn.Dense(4, 2, activation="relu").to_float(ms.float16).set_train()
    layer = in_place_of(dense, 3.0)
    assert (layer.weight is dense.weight, layer.bias is dense.bias) == (True, True)
    assert layer.activation is dense.activation
    assert layer.get_flags()["fp16"]
    assert layer.training
    assert float(layer.multiplier.asnumpy()[0]) == 3.0


def test_its_multiplier_has_a_name_beside_that_of_the_weight():
    net = nn.SequentialCell(nn.Dense(4, 2))
    names = [in_place_of(one, 3.0).multiplier.name for one in (net[0], nn.Dense(4, 2))]
    assert names == ["0.multiplier", "multiplier"]


@pytest.mark.parametrize("dtypes", [(ms.float16, ms.float32), (ms.float32, ms.float16)], ids=str)
def test_it_computes_in_the_precision_that_the_dense_was_given(mode, dtypes):
    given, computed = dtypes
    layer = in_place_of(nn.Dense(4, 2).to_float(computed), 3.0)
    assert layer(Tensor(np.ones((3, 4)), given)).dtype == computed
    later = in_place_of(nn.Dense(4, 2).to_float(given), 3.0).to_float(computed)
    assert later(Tensor(np.ones((3, 4)), given)).dtype == computed


# ---- Which Dense ----


class Named(nn.Cell):
    """Attribute order is not the order of execution; the classifier is nested in sequences."""

    def __init__(self, **dense):
        super().__init__()
        self.odd_name = nn.SequentialCell(nn.ReLU(), nn.SequentialCell([nn.Dense(4, 3, **dense)]))
        self.fc = nn.Dense(4, 4)

    def construct(self, x):
        return self.odd_name(self.fc(x))


@pytest.mark.parametrize("dense", [{}, {"has_bias": False}, {"activation": "sigmoid"}], ids=str)
def test_the_last_dense_that_runs_and_no_other(mode, dense):
    """Defect row 18b: one head, its prefix, its bias and its activation."""
    net = Named(**dense)
    names = list(nets.weights(net))
    old = net.odd_name[1][0]
    x = Tensor(X[:, :4])
    features = ops.relu(net.fc(x)).asnumpy()
    rewriting = less_bn(net, True, multiplier=2.0)
    assert [(one.name, one.done) for one in rewriting.changes] == [("odd_name.1.0", "normalised")]
    assert type(net.fc) is nn.Dense
    assert set(nets.weights(net)) == {*names, "odd_name.1.0.multiplier"}
    bias = old.bias.asnumpy() if old.has_bias else 0.0
    expected = oracles.cosine_head(features, old.weight.asnumpy(), bias, 2.0)
    if "activation" in dense:
        expected = 1 / (1 + np.exp(-expected))
    np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=1e-5, atol=1e-5)


def test_named_heads_instead_of_the_classifier():
    rewriting = less_bn(Named(), True, heads=["fc"])
    assert [one.name for one in rewriting.changes if one.done == "normalised"] == ["fc"]
    both = less_bn(Named(), True, heads=["*"])
    assert [one.name for one in both.added_parameters] == [
        "odd_name.1.0.multiplier",
        "fc.multiplier",
    ]
    with pytest.warns(NoEffectWarning, match="no layer matches 'no'"):
        nothing = less_bn(Named(), True, heads=["no"])
    assert "no Dense matches" in nothing.changes[0].reason


class Gated(nn.Cell):
    def __init__(self):
        super().__init__()
        self.gate = nn.Dense(4, 4)

    def construct(self, x):
        return x * ops.sigmoid(self.gate(x))


class Generator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.conv = nn.Dense(4, 16), nn.Conv2d(4, 1, 3)

    def construct(self, x):
        return self.conv(self.dense(x).reshape((x.shape[0], 4, 2, 2)))


class Twice(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x):
        return self.dense(self.dense(x))


class Hidden(nn.Cell):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        return self.one(x) if x.sum() > 0 else self.two(x)


class Asked(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, x):
        return self.dense(x) if isinstance(self.dense, nn.Dense) else x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Asked, "the network's code asks for its class"),
        (Gated, "joined with other features (mul)"),
        (Generator, "layers with weights come after the last Dense (conv2d)"),
        (Twice, "called more than once"),
        (Hidden, "Hidden.construct was not understood"),
        (lambda: nn.Dense(4, 4), "the network itself is this Dense"),
        (lambda: nn.SequentialCell(nn.ReLU()), "the network has no Dense"),
    ],
)
def test_a_dense_that_is_no_classifier_stays(kind, reason):
    net = kind()
    (change,) = less_bn(net, True).changes
    assert change.done == "kept"
    assert reason in change.reason


def test_labels_do_not_keep_a_classifier_from_being_one():
    rewriting = less_bn(nn.WithLossCell(Named(), nets.loss_fn()), True)
    assert [change.done for change in rewriting.changes] == ["normalised"]


def test_heads_of_one_shape_share_what_is_compiled():
    """Each had left a graph behind, which MindSpore keeps until the process ends."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    features = Tensor(np.ones((2, 3), np.float32))

    def train_a_new_head():
        head = CommonHeadLastFN(3, 4)
        ms.value_and_grad(lambda x: head(x).sum(), None, head.trainable_params())(features)

    train_a_new_head()
    before = compiled_graphs()
    train_a_new_head()
    assert compiled_graphs() == before


@pytest.mark.parametrize("has_bias", [True, False])
def test_features_get_their_gradient_after_steps_without(mode, has_bias):
    """While the layers below are frozen nobody asks for it; MindSpore then forgot it for good."""
    net = nn.SequentialCell(nn.Dense(3, 4), CommonHeadLastFN(4, 2, has_bias=has_bias))
    net = nn.WithLossCell(net, nn.MSELoss())
    x, y = Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones((2, 2), np.float32))
    every = net.trainable_params()

    def gradients(weights):
        return ops.GradOperation(get_by_list=True)(net, ms.ParameterTuple(weights))(x, y)

    gradients(every[2:])
    first = [one.asnumpy() for one in gradients(every)]
    for _ in range(2):
        for one, before in zip(gradients(every), first):
            np.testing.assert_array_equal(one.asnumpy(), before)
    assert np.abs(first[0]).max() > 1e-3
