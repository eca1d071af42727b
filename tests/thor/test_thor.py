"""THOR: its rule against a float64 Kronecker solve, and its place in the training step."""

from __future__ import annotations

import types

import mindspore as ms
import nets
import numpy as np
import pytest
import thor_oracle as oracle
from mindspore import ParameterTuple, Tensor, experimental, nn, ops
from thor_cases import DAMPING, RATE, Weighted, pairs, random, reference, train_layer

from mindspore_boost_ext import BoostTrainOneStepCell, BoostWarning, FreezeOpt
from mindspore_boost_ext.config.sections import ThorConfig
from mindspore_boost_ext.thor import layers
from mindspore_boost_ext.thor.layers import layer_plans
from mindspore_boost_ext.thor.optimizer import THOR
from mindspore_boost_ext.thor.switch import thor_in_place_of

# float32 inverses of matrices with condition numbers up to 100, against float64: 1e-5 to 3e-5 seen.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


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


@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_is_the_kronecker_solve(mode, has_bias):
    x, target = random(16, 5), random(16, 4, seed=1)
    _, found = one_step(nn.Dense(5, 4, has_bias=has_bias), x, target)
    delta = target / 16
    expected = oracle.dense_direction(x, delta, delta.T @ x, DAMPING)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)
    if has_bias:
        np.testing.assert_allclose(found["bias"], delta.sum(0), **TOLERANCE)


def test_the_features_of_one_sample_alone_are_one_sample(mode):
    x, target = random(5), random(4, seed=1)
    _, found = one_step(nn.Dense(5, 4, has_bias=False), x, target)
    delta = target[None] / 5  # Weighted divides by the first axis
    expected = oracle.dense_direction(x[None], delta, delta.T @ x[None], DAMPING)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)


CONVS = {
    "same": ({"pad_mode": "same"}, (1, 1, 1, 1)),
    "same, strides": ({"pad_mode": "same", "stride": (2, 1)}, (0, 1, 1, 1)),
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


def test_dense_of_three_axes_with_activation(mode):
    """Rows are samples times positions; the gradient is taken in front of the activation."""
    layer = nn.Dense(3, 2, activation="tanh")
    x, target = random(4, 5, 3), random(4, 5, 2, seed=1)
    weight, bias = layer.weight.asnumpy().astype(np.float64), layer.bias.asnumpy()
    delta = (1 - np.tanh(x @ weight.T + bias) ** 2) * target / 4
    a = oracle.second_moment(x.reshape(-1, 3))
    g = oracle.second_moment(4 * delta.reshape(-1, 2))
    gradient = np.einsum("nto,nti->oi", delta, x)
    expected = oracle.kronecker_solve(gradient, a, g, np.sqrt(DAMPING))
    _, found = one_step(layer, x, target)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)


def test_embedding_has_a_diagonal_factor(mode):
    ids = np.array([[0, 2], [2, 3], [2, 0], [4, 4]], np.int32)
    target = random(4, 2, 3, seed=1)
    delta = np.float64(target) / 4
    gradient = np.zeros((6, 3))
    np.add.at(gradient, ids, delta)
    expected = oracle.embedding_direction(ids, delta, gradient, DAMPING)
    _, found = one_step(nn.Embedding(6, 3), ids, target)
    np.testing.assert_allclose(found["embedding_table"], expected, **TOLERANCE)


def test_words_that_a_batch_lacks_stay_where_they_are_without_damping(mode):
    """Their entries of A are 0 then, and its inverse has none."""
    layer = nn.Embedding(6, 3)
    net = Weighted(layer)
    step = BoostTrainOneStepCell(net, THOR(layer, RATE, 0.0, 0.0)).set_train()
    before = layer.embedding_table.asnumpy().copy()
    ids = np.array([[0, 2], [2, 3], [2, 0], [4, 4]], np.int32)
    with pytest.warns(BoostWarning, match="its damping was raised"):
        step(Tensor(ids), Tensor(random(4, 2, 3)))
    after = layer.embedding_table.asnumpy()
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after[[1, 5]], before[[1, 5]])


def test_layer_norm(mode):
    x, target = random(8, 4), random(8, 4, seed=1)
    with pytest.warns(BoostWarning, match="no layer to precondition, so all gradients stay plain"):
        _, found = one_step(nn.LayerNorm((4,), epsilon=1e-12), x, target, batch_size=8)
    wide = np.float64(x)
    normal = (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True)
    for name, gradient in (("gamma", (target * normal).sum(0) / 8), ("beta", target.sum(0) / 8)):
        expected = oracle.layer_norm_direction(gradient, 8, DAMPING)
        np.testing.assert_allclose(found[name], expected, **TOLERANCE)


def test_a_network_without_a_layer_to_precondition_is_reported():
    net = nn.LayerNorm((4,))
    with pytest.warns(BoostWarning, match="no layer to precondition"):
        optimizer = THOR(net, RATE, 0.0, 0.0)
    row = BoostTrainOneStepCell(Weighted(net), optimizer).report()["thor"]
    words = (
        "the network has no layer to precondition, so all gradients stay plain: it takes nn.Dense"
    )
    assert row.reason.startswith(words)
    assert dict(row.counts)["layers"] == 0


def test_layers_of_mint_are_left_alone_with_the_remedy():
    """They are no subclasses of those of ``mindspore.nn``."""
    net = nn.SequentialCell(ms.mint.nn.Linear(4, 3), nn.Dense(3, 2))
    row = THOR(net, RATE, 0.0, 0.0).rows()[0]
    assert row.reason == "parameter of Linear of mindspore.mint: use nn.Dense"


def test_an_optimizer_of_another_kind_is_refused_with_the_remedy():
    net = nn.Dense(4, 2)
    optimizer = experimental.optim.AdamW(net.trainable_params(), lr=0.1)
    words = r"thor needs an nn\.Optimizer, got mindspore\.experimental\..*\.AdamW: .*leave thor out"
    with pytest.raises(TypeError, match=words):
        thor_in_place_of(optimizer, net, ThorConfig())


def test_a_layer_norm_without_gradient_stays_where_it_is_without_damping(mode):
    """Its curvature is 0 then, and 0 / 0 no direction."""
    layer = nn.LayerNorm((4,))
    net = Weighted(layer)
    with pytest.warns(BoostWarning, match="no layer to precondition"):
        step = BoostTrainOneStepCell(net, THOR(layer, RATE, 0.0, 0.0)).set_train()
    before, x = nets.weights(net), random(8, 4)
    step(Tensor(x), Tensor(np.zeros_like(x)))
    for name, value in nets.weights(net).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_grouped_convolution_keeps_its_plain_gradient(mode):
    layer = nn.SequentialCell(nn.Conv2d(2, 2, 1, group=2), nn.Conv2d(2, 1, 1))
    x, target = random(4, 2, 3, 3), random(4, 1, 3, 3, seed=1)
    weight = layer[1].weight.asnumpy().astype(np.float64).reshape(2)
    optimizer, found = one_step(layer, x, target)
    expected = (target / 4 * x).sum((0, 2, 3)) * weight
    np.testing.assert_allclose(found["0.weight"].reshape(2), expected, **TOLERANCE)
    rows = {row.algorithm: (row.status, row.reason) for row in optimizer.report().rows}
    assert rows["layer.0.weight"] == ("plain", "Conv2d with group=2, NCHW")
    assert rows["layer.1.weight"] == ("preconditioned", "Conv2d: A 2x2, G 1x1")


def test_blocks_are_the_solve_with_the_diagonal_blocks(mode):
    """Size 3 and factors of 5 and 4: two blocks each, of which the last is filled up."""
    x, target = random(16, 5), random(16, 4, seed=1)
    delta = target / 16
    a, g = oracle.second_moment(x), oracle.second_moment(16 * delta)
    for factor in (a, g):
        factor[:3, 3:] = 0
        factor[3:, :3] = 0
    expected = oracle.kronecker_solve(delta.T @ x, a, g, np.sqrt(DAMPING))
    optimizer, found = one_step(nn.Dense(5, 4), x, target, block_size=3)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)
    assert optimizer.factors[0].shape == (2, 3, 3)


def test_pi_damping_shares_out_by_the_traces(mode):
    x, target = 3 * random(16, 5), random(16, 4, seed=1)
    delta = target / 16
    a, g = oracle.second_moment(x), oracle.second_moment(16 * delta)
    pi = np.sqrt((np.trace(a) / 5) / (np.trace(g) / 4))
    root = np.sqrt(DAMPING)
    left = np.linalg.inv(g + root / pi * np.eye(4))
    expected = left @ (delta.T @ x) @ np.linalg.inv(a + root * pi * np.eye(5))
    _, found = one_step(nn.Dense(5, 4), x, target, pi_damping=True)
    np.testing.assert_allclose(found["weight"], expected, **TOLERANCE)


def test_kl_clip_bounds_the_predicted_change(mode):
    x, target = random(16, 5), random(16, 4, seed=1)
    delta = target / 16
    plain = oracle.dense_direction(x, delta, delta.T @ x, DAMPING)
    factor = np.sqrt(1e-3 / (RATE**2 * (plain * (delta.T @ x)).sum()))
    assert factor < 1
    _, found = one_step(nn.Dense(5, 4), x, target, kl_clip=1e-3)
    np.testing.assert_allclose(found["weight"], factor * plain, **TOLERANCE)
    np.testing.assert_allclose(found["bias"], delta.sum(0), **TOLERANCE)


# ---- over several steps ----


CASES = {
    "every step": ({"frequency": 1}, {}),
    "stale factors": ({"frequency": 3}, {"frequency": 3}),
    "moving average": ({"frequency": 2, "moving_average": 0.7}, {"frequency": 2, "rho": 0.7}),
    "damping list": (
        {"frequency": 1, "damping": [0.4, 0.2, 0.1]},
        {"dampings": (0.4, 0.2, 0.1)},
    ),
    "decay, nesterov": (
        {"frequency": 1, "weight_decay": 0.1, "use_nesterov": True},
        {"decay": 0.1, "nesterov": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_follows_the_rule(mode, case):
    settings, expected = CASES[case]
    steps = pairs(7)
    step, _ = train_layer(steps, **settings)
    (weight,) = step.network.trainable_params()
    # Seven updates, each with an inverse of its own in float32.
    np.testing.assert_allclose(weight.asnumpy(), reference(steps, **expected), rtol=1e-4, atol=1e-5)


def test_damping_by_a_schedule(mode):
    steps = pairs(4)
    schedule = nn.ExponentialDecayLR(0.4, 0.5, 1)
    step, _ = train_layer(steps, damping=schedule, frequency=1)
    (weight,) = step.network.trainable_params()
    expected = reference(steps, dampings=[0.4 * 0.5**k for k in range(4)])
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_trace_rule_refreshes_keeps_and_stops(mode):
    """Equal batches: no change, so the first inversion is the last; then nothing is captured."""
    steps = pairs(1) * 3
    _, optimizer = train_layer(steps, frequency=1, trace_rule=(0.01, 0.001))
    observed = optimizer.observations()
    assert (observed["thor.refreshes"], observed["thor.inversions"]) == (2, 1)
    assert int(optimizer.next_refresh.asnumpy()) == 2**30
    x, target = steps[0]
    traces = [np.trace(oracle.second_moment(one)) for one in (x, target)]
    expected = traces[0] * traces[1] + DAMPING * 3 * 2
    # Sums of a few products in float32.
    assert observed["thor.trace.layer.weight"] == pytest.approx(expected, rel=1e-5)
    # 3 % more of A changes the trace by less than 10 % and more than 1 %: the old factors stay.
    # 12 % more are 9 % more than in the last refresh, but counted from the last inversion.
    _, optimizer = train_layer(
        [(x, target), (1.015 * x, target), (1.06 * x, target)], frequency=1, trace_rule=(0.1, 0.01)
    )
    observed = optimizer.observations()
    assert (observed["thor.refreshes"], observed["thor.inversions"]) == (3, 2)
    # Sums of a few products in float32.
    np.testing.assert_allclose(
        optimizer.factors[0].asnumpy(), oracle.second_moment(1.06 * x), rtol=1e-5
    )


class TwoTasks(nn.Cell):
    """Two layers over the input and over the target, whose factors know no weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(3, 2), nn.Dense(2, 1)

    def construct(self, x, target):
        return ((self.first(x) * target).sum() + self.second(target).sum()) / x.shape[0]


def test_a_layer_that_has_stopped_stays_so_and_the_other_goes_on(mode):
    """In the second batch nothing changes for the first layer: twice A, and half of G."""
    ((x, target),) = pairs(1)
    factors = [(1, 1), (2, 0.5), (2, 1), (2, 2)]
    steps = [(a * x, np.float32(b) * target) for a, b in factors]
    _, optimizer = train_layer(steps, net=TwoTasks(), frequency=1, trace_rule=(0.01, 0.001))
    _, inversions, *_ = optimizer.curvature.counters.asnumpy()
    assert inversions.tolist() == [1, 4]
    assert optimizer.observations()["thor.refreshes"] == 4


def test_averages_go_on_where_the_trace_rule_keeps_the_inverses(mode):
    ((x, target),) = pairs(1)
    steps = [(x, target), (1.1 * x, target)]
    _, optimizer = train_layer(steps, frequency=1, moving_average=0.5, trace_rule=(5.0, 0.0))
    assert optimizer.observations()["thor.inversions"] == 1
    expected = (oracle.second_moment(x) + oracle.second_moment(1.1 * x)) / 2
    # Sums of a few products in float32.
    np.testing.assert_allclose(optimizer.factors[0].asnumpy(), expected, rtol=1e-5)


class Tied(nn.Cell):
    """Its output is the matrix of the embedding, or another layer that holds the same weight."""

    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, embedding_table="normal")
        self.hidden = nn.Dense(4, 4)
        self.output = nn.Dense(4, 6, has_bias=False) if layer else None
        if layer:
            self.output.weight = self.embedding.embedding_table

    def construct(self, x):
        x = self.hidden(self.embedding(x))
        if self.output is not None:
            return self.output(x)
        return ops.matmul(x, self.embedding.embedding_table.T)


class Decoder(nn.Cell):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def construct(self, x):
        return ops.matmul(x, self.weight)


class Autoencoder(nn.Cell):
    """Its Dense is used backwards, by a holder that stands in front of it or behind."""

    def __init__(self, in_front, around):
        super().__init__()
        encoder = nn.Dense(4, 3)
        if around:
            self.weight = encoder.weight
        elif in_front:
            self.decoder = Decoder(encoder.weight)
        self.encoder = encoder
        if not (around or in_front):
            self.decoder = Decoder(encoder.weight)

    def construct(self, x):
        x = self.encoder(x)
        return self.decoder(x) if hasattr(self, "decoder") else ops.matmul(x, self.weight)


@pytest.mark.parametrize(
    ("in_front", "around"), [(True, False), (False, False), (False, True)], ids=str
)
def test_a_weight_that_another_cell_holds_keeps_its_plain_gradient(in_front, around):
    net = Autoencoder(in_front, around)
    plans, reasons = layer_plans(net, net.trainable_params(), 128)
    assert (plans, reasons[id(net.encoder.weight)]) == ([], "shared")


class Penalised(nn.Cell):
    """Holds its weights in a tuple, as for the norm of all."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Dense(4, 3), nn.LayerNorm((3,))
        self.all = ParameterTuple(self.trainable_params())

    def construct(self, x):
        return self.norm(self.dense(x))


def test_a_tuple_of_weights_is_no_layer_that_shares_them():
    net = Penalised()
    plans, reasons = layer_plans(net, net.trainable_params(), 128)
    assert [plan.weight for plan in plans] == [net.dense.weight]
    assert reasons[id(net.norm.gamma)] == "LayerNorm"


def test_an_embedding_of_another_package_keeps_its_plain_gradient(monkeypatch):
    """MindNLP puts one with a "weight" in the place of nn.Embedding."""

    class Embedding(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(Tensor(np.ones((4, 3), np.float32)))

    monkeypatch.setitem(layers._CLASSES, layers.EMBEDDING, Embedding)
    net = Embedding()
    plans, reasons = layer_plans(net, net.trainable_params(), 128)
    assert (plans, reasons) == ([], {id(net.weight): "parameter of Embedding"})


def doubled(self, x):
    return ops.matmul(x, self.weight.T) * 2


def test_a_layer_with_another_construct_keeps_it_and_its_plain_gradient(mode):
    net = nn.Dense(3, 2)
    net.construct = types.MethodType(doubled, net)
    x = Tensor(random(4, 3))
    expected = net(x).asnumpy()
    plans, reasons = layer_plans(net, net.trainable_params(), 128)
    assert (plans, reasons[id(net.weight)]) == ([], "Dense has its own construct")
    layers._remove(net)
    np.testing.assert_array_equal(net(x).asnumpy(), expected)


def test_a_weight_that_other_code_reads_keeps_its_plain_gradient(mode):
    """Its factors would be those of one use, its gradient the sum of both."""
    x, target = np.arange(6).astype(np.int32), random(6, 6)
    rows, found = {}, {}
    for layer in (True, False):
        ms.set_seed(1)
        optimizer, found[layer] = one_step(Tied(layer), x, target)
        (rows[layer],) = [row for row in optimizer.rows() if "hidden" not in row.algorithm]
    assert rows[True].status == rows[False].status == "plain"
    assert rows[False].reason == "read by the code of Tied, too"
    # The same sums in another order, in float32, through inverses as above.
    for name, one in found[False].items():
        np.testing.assert_allclose(one, found[True][name], **TOLERANCE)


def test_a_filter_of_decay_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="THOR: decay_filter must be a function, got None"):
        THOR(nn.Dense(3, 2), RATE, DAMPING, 0.9, decay_filter=None)


class OneWord(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table, self.dense = nn.Embedding(6, 3), nn.Dense(3, 2)

    def construct(self, x):
        return self.dense(x + self.table(Tensor(3)))


def test_a_lookup_of_one_word_is_trained(mode):
    """Also with as many dampings, one for each step, as there are weights, and with freezing."""
    net = OneWord()
    before = nets.weights(net)
    thor = THOR(net, 0.1, [0.3, 0.2, 0.1], 0.9)
    freezing = FreezeOpt(thor, [net.trainable_params(), net.dense.trainable_params()], [0, 1])
    step = BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), freezing)
    step(Tensor(np.ones((4, 3), np.float32)), Tensor(np.zeros((4, 2), np.float32)))
    assert all((value != before[name]).any() for name, value in nets.weights(net).items())
