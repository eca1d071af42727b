"""Functions of mindspore.ops that a network calls, in graphs: against float64 and MindSpore's."""

from __future__ import annotations

import contextlib
import inspect
import threading

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import softmax as under_another_name
from models import model_of

from mindspore_boost_ext import _compat, make_train_step, tune_machine
from mindspore_boost_ext.cheaper_operators import functions

NAME = "cheaper_operators"
RNG = np.random.default_rng(12)
SHAPE = (130, 128)  # more than the 16,384 numbers from which on a softmax is replaced
ROWS = 2 * RNG.normal(size=SHAPE)
FACTORS = RNG.normal(size=SHAPE)
LABELS = RNG.integers(0, SHAPE[1], SHAPE[0])


class Softmax(nn.Cell):
    def construct(self, x):
        return ops.softmax(x)


class Renamed(nn.Cell):
    def construct(self, x):
        return under_another_name(x, 1)


class ToFloat32(nn.Cell):
    def construct(self, x):
        return ops.softmax(x, axis=-1, dtype=ms.float32)  # as attention is often written


class LogSoftmax(nn.Cell):
    def construct(self, x):
        return ops.log_softmax(x, axis=-1)


class Gelu(nn.Cell):
    def construct(self, x):
        return ops.gelu(x, approximate="tanh")


class Selu(nn.Cell):
    def construct(self, x):
        return ops.selu(x)


class LeakyRelu(nn.Cell):
    def construct(self, x):
        return ops.leaky_relu(x, 0.1)


class Elu(nn.Cell):
    def construct(self, x):
        return ops.elu(x)


class Held(nn.Cell):
    def __init__(self):
        super().__init__()
        self.shares = ops.softmax

    def construct(self, x):
        return self.shares(x)


class OfTheClass(nn.Cell):
    shares = ops.softmax

    def construct(self, x):
        return OfTheClass.shares(x)


def enclosed():
    shares = ops.softmax

    class Enclosed(nn.Cell):
        def construct(self, x):
            return shares(x)

    return Enclosed()


class HeldAndNamed(Held):
    def construct(self, x):
        return self.shares(x) if self.shares.__name__ == "softmax" else x


class OfLength1(nn.Cell):
    def construct(self, x):
        return ops.L2Normalize(-1)(x)


class OfLength1Along0(nn.Cell):
    def construct(self, x):
        return ops.L2Normalize(epsilon=1e-12)(x)


class Weighed(nn.Cell):
    """Sums what a function makes of a weight, times factors: the weight's gradient is known."""

    def __init__(self, function, dtype=ms.float32):
        super().__init__()
        self.function, self.weight = function, Parameter(ms.Tensor(ROWS, ms.float32))
        self.dtype = dtype

    def construct(self, factors):
        return (self.function(self.weight.astype(self.dtype)) * factors).sum()


class Loss(nn.Cell):
    def __init__(self, **settings):
        super().__init__()
        self.settings, self.weight = settings, Parameter(ms.Tensor(ROWS, ms.float32))

    def construct(self, labels):
        return ops.cross_entropy(self.weight, labels, **self.settings)


def trained(net, inputs, mode="graph", on=True):
    """Return the loss of a step, the gradient of the weight, and the row of the report."""
    config = contract.switched(cheaper_operators=on, compiled_step=mode == "pynative")
    optimizer = nn.SGD(net.trainable_params(), learning_rate=1.0)
    before = net.weight.asnumpy().astype(np.float64)
    step = make_train_step(net, None, optimizer, level="O1", config=config)
    loss = step(Tensor(inputs)).asnumpy()
    return loss, before - net.weight.asnumpy(), step.report()[NAME]


def shares_of(rows):
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def tanh_gelu(rows):
    return rows / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (rows + 0.044715 * rows**3)))


def selu(rows):
    scale, alpha = 1.0507009873554805, 1.6732632423543772  # Klambauer et al., 2017
    return scale * np.where(rows > 0, rows, alpha * (np.exp(rows) - 1))


CALLS = {
    "softmax": (Softmax, shares_of),
    "log_softmax": (LogSoftmax, lambda rows: np.log(shares_of(rows))),
    "gelu": (Gelu, tanh_gelu),
    "selu": (Selu, selu),
    "leaky_relu": (LeakyRelu, lambda rows: np.maximum(rows, 0.1 * rows)),
    "elu": (Elu, lambda rows: np.where(rows > 0, rows, np.exp(rows) - 1)),
    "l2_normalize": (OfLength1, lambda rows: rows / np.linalg.norm(rows, axis=-1, keepdims=True)),
}


def slope(function, rows, factors):
    """Return the gradient of a sum, by central differences in float64, along some of the places."""
    found, step = np.zeros_like(rows), 1e-5
    for place in range(0, rows.shape[1], 9):
        moved = np.zeros_like(rows)
        moved[:, place] = step
        change = (function(rows + moved) - function(rows - moved)) * factors
        found[:, place] = change.sum(-1) / (2 * step)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(mode, every_size, name):
    call, rule = CALLS[name]
    loss, gradient, row = trained(Weighed(call()), FACTORS.astype("f"), mode)
    assert (row.status, name in row.reason) == ("applied", True)
    # float32: sums of 16,640 numbers of up to 20, and gradients by sums of 128 numbers of up to 4
    np.testing.assert_allclose(loss, (rule(ROWS) * FACTORS).sum(), rtol=1e-5, atol=1e-3)
    expected = slope(rule, ROWS, FACTORS)
    np.testing.assert_allclose(gradient[:, ::9], expected[:, ::9], atol=2e-5)


def test_a_length_along_the_first_axis(graph_mode):
    loss, _, row = trained(Weighed(OfLength1Along0()), FACTORS.astype("f"))
    assert row.reason.endswith("functions called: l2_normalize")
    lengths = np.linalg.norm(ROWS, axis=0)
    # A sum, of about 10, of 16,640 numbers of up to 1, each rounded to 6e-8.
    np.testing.assert_allclose(loss, (ROWS / lengths * FACTORS).sum(), rtol=1e-5, atol=1e-4)


def test_vectors_shorter_than_epsilon_have_the_gradient_of_the_formula(graph_mode):
    net = Weighed(OfLength1())
    net.weight.set_data(Tensor(np.full(SHAPE, 1e-5), ms.float32))
    _, gradient, _ = trained(net, FACTORS.astype("f"))
    # Lengths of 1.1e-4, whose squares are below epsilon: divided by its root, 1e-2. The weights of
    # 1e-5 from which the gradient is taken back have its digits, of float32: up to 400 to 3e-5.
    np.testing.assert_allclose(gradient, FACTORS * 100, rtol=1e-6, atol=5e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ignore_index": 3},
        {"label_smoothing": 0.2, "reduction": "sum"},
        {"label_smoothing": 0.1, "ignore_index": 5},
    ],
)
def test_the_cross_entropy(mode, settings):
    labels = LABELS % 11  # each of the ignored ones is there
    smoothing, ignored = settings.get("label_smoothing", 0), settings.get("ignore_index", -100)
    keep = (labels != ignored)[:, None]
    wanted = (1 - smoothing) * np.eye(SHAPE[1])[labels] + smoothing / SHAPE[1]
    part = 1 if settings.get("reduction") == "sum" else 1 / keep.sum()
    shares = shares_of(ms.Tensor(ROWS, ms.float32).asnumpy().astype(np.float64))
    loss, gradient, row = trained(Loss(**settings), labels.astype(np.int32), mode)
    assert row.reason.endswith("functions called: cross_entropy")
    np.testing.assert_allclose(loss, -part * (keep * wanted * np.log(shares)).sum(), rtol=1e-5)
    # float32, beside weights of up to 8
    np.testing.assert_allclose(gradient, part * keep * (shares - wanted), atol=1e-6)


class OtherAxis(nn.Cell):
    def construct(self, x):
        return ops.softmax(x, axis=0)


class OtherDtype(nn.Cell):
    def construct(self, x):
        return ops.softmax(x, dtype=ms.float16)


class OtherForm(nn.Cell):
    def construct(self, x):
        return ops.gelu(x)


class SteepBelow(nn.Cell):
    def construct(self, x):
        return ops.leaky_relu(x, 1.5)


class WholeSlope(nn.Cell):
    def construct(self, x):
        return ops.leaky_relu(x, 1)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [(one, ms.float32) for one in (OtherAxis, OtherDtype, OtherForm, SteepBelow, WholeSlope)]
    + [(call, ms.float16) for call, _ in CALLS.values()],
)
def test_what_is_left_to_mindspore(graph_mode, call, dtype):
    factors = FACTORS.astype("f")
    *found, row = trained(Weighed(call(), dtype), factors)
    *expected, _ = trained(Weighed(call(), dtype), factors, on=False)
    assert (row.status, "no function" in row.reason) == ("skipped", True)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    "settings",
    [{"reduction": "none"}, {"weight": True}, {"label_smoothing": 1.5}],
)
def test_losses_that_are_left_to_mindspore(graph_mode, settings):
    if "weight" in settings:
        settings = {"weight": Tensor(np.ones(SHAPE[1], np.float32))}
    *found, row = trained(Loss(**settings), LABELS.astype(np.int32))
    *expected, _ = trained(Loss(**settings), LABELS.astype(np.int32), on=False)
    assert row.status == "skipped"
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_small_input_is_left_to_mindspore(graph_mode):
    """And the report does not say otherwise."""
    net = Weighed(CALLS["softmax"][0]())
    net.weight = Parameter(Tensor(ROWS[:1], ms.float32), name="weight")
    _, _, row = trained(net, FACTORS[:1].astype("f"))
    assert row.status == "skipped"
    assert row.reason.endswith("no function in the first step's graphs has a size that gains")


@pytest.mark.parametrize("call", [Renamed, Held, HeldAndNamed, OfTheClass, enclosed, ToFloat32])
def test_a_name_that_the_script_chose(graph_mode, call):
    _, gradient, row = trained(Weighed(call()), FACTORS.astype("f"))
    assert row.reason.endswith("functions called: softmax")
    expected = slope(shares_of, ROWS, FACTORS)
    np.testing.assert_allclose(gradient[:, ::9], expected[:, ::9], atol=2e-5)  # float32, as above


class Raises(nn.Cell):
    def construct(self, x):
        return ops.softmax(x) @ x  # of shapes that do not fit


@pytest.mark.parametrize("call", [Renamed, Raises])
def test_after_a_step_graphs_have_mindspores_functions(graph_mode, call):
    before = dict(_compat.IN_GRAPHS)
    with pytest.raises(RuntimeError) if call is Raises else contextlib.nullcontext():
        trained(Weighed(call()), FACTORS.astype("f"))
    assert before == _compat.IN_GRAPHS
    found = []
    for one in (Renamed(), nn.Softmax()):
        net = Weighed(one)
        slope_of = ms.grad(net, None, net.trainable_params())
        found.append(slope_of(Tensor(FACTORS.astype("f")))[0].asnumpy())
    np.testing.assert_array_equal(*found)  # ours rounds otherwise


def test_a_network_that_was_compiled_before(graph_mode):
    """Its graph is that of the evaluation, and stays it."""
    net = Weighed(Softmax())
    factors = FACTORS.astype("f")
    first = net(Tensor(factors)).asnumpy()
    _, gradient, row = trained(net, factors)
    assert row.reason.endswith("functions called: softmax")
    assert gradient.any()
    net.weight.set_data(ms.Tensor(ROWS, ms.float32))
    np.testing.assert_array_equal(net(Tensor(factors)).asnumpy(), first)


class Attention(nn.Cell):
    """MindSpore's own, which calls functions."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dense = nn.Dense(16, nets.CLASSES)

    def construct(self, x):
        return self.dense(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_layers_of_mindspore_that_call_functions(graph_mode, every_size):
    """Their steps are MindSpore's."""
    generator = np.random.default_rng(5)
    x, labels = generator.normal(size=(8, 5, 16)), generator.integers(0, nets.CLASSES, 8)
    batch = x.astype("f"), labels.astype(np.int32)
    losses = []
    for on in (False, True):
        ms.set_seed(4)
        model = model_of(Attention(), contract.switched(cheaper_operators=on))
        losses.append([float(model.train_network(*map(Tensor, batch))) for _ in range(4)])
    row = model.train_network.report()[NAME]
    assert "softmax" in row.reason
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # float32, four updates later


def test_pynative_mode_without_a_compiled_step_is_left_alone(pynative_mode):
    net = Weighed(Softmax())
    config = contract.switched(cheaper_operators=True)
    optimizer = nn.SGD(net.trainable_params())
    row = make_train_step(net, None, optimizer, level="O1", config=config).report()[NAME]
    assert (row.status, "add compiled_step" in row.reason) == ("skipped", True)


@ops.constexpr
def table(length):
    """Return a constant that Python computes while MindSpore makes a graph."""
    return ops.softmax(ops.log_softmax(ops.gelu(Tensor(np.ones((1, length), np.float32)))))


class WithTable(nn.Cell):
    def construct(self, x):
        return ops.softmax(x) * table(SHAPE[1])


def test_what_python_runs_while_a_graph_is_made_is_mindspores(graph_mode):
    """A Cell called there would be compiled within the other, which ends the process."""
    loss, _, row = trained(Weighed(WithTable()), FACTORS.astype("f"))
    assert row.reason.endswith("functions called: softmax")
    # The table holds the share 1 / 128 everywhere; float32's sum of 16,640 numbers of up to 3.
    expected = (shares_of(ROWS) * FACTORS).sum() / SHAPE[1]
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)


def test_a_thread_beside_the_step_has_mindspores(graph_mode):
    """Such as one of a dataset's: it would compile a Cell meanwhile."""
    found = []

    def beside():
        rows = Tensor(ROWS, ms.float32)
        while not done.is_set():
            found.append(ops.softmax(rows).asnumpy())

    done, thread = threading.Event(), threading.Thread(target=beside)
    thread.start()
    try:
        _, _, row = trained(Weighed(Softmax()), FACTORS.astype("f"))
    finally:
        done.set()
        thread.join()
    assert row.reason.endswith("functions called: softmax")
    np.testing.assert_allclose(found[-1], shares_of(ROWS), rtol=1e-5)  # float32's exponentials


def test_a_shape_that_comes_later_adds_to_the_report(graph_mode):
    net = Later()
    config = contract.switched(cheaper_operators=True)
    step = make_train_step(net, None, nn.SGD(net.trainable_params()), level="O1", config=config)
    for rows, names in ((129, "softmax"), (130, "log_softmax, softmax")):
        step(Tensor(FACTORS[:129].repeat(2, 0)[:rows].astype("f")))
        assert step.report()[NAME].reason.endswith(f"functions called: {names}")


class Later(nn.Cell):
    """Calls another function for inputs of 130 rows alone."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(ms.Tensor(ROWS[0], ms.float32))

    def construct(self, x):
        if x.shape[0] == 130:
            return ops.log_softmax(x * self.weight).sum()
        return (ops.softmax(x * self.weight) * x).sum()


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"ignore_index": True}, TypeError), ({"label_smoothing": -0.5}, ValueError)],
)
def test_a_wrong_argument_has_mindspores_error(graph_mode, settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        trained(Loss(**settings), LABELS.astype(np.int32))


def test_the_loss_of_a_script_that_is_not_tuned(graph_mode, untuned):
    tune_machine(False)
    _, _, row = trained(Loss(), LABELS.astype(np.int32))
    assert row.reason.endswith("functions called: cross_entropy")


class WithAlpha(nn.Cell):
    def __init__(self, function, alpha):
        super().__init__()
        self.function, self.alpha = function, alpha

    def construct(self, x):
        return self.function(x, self.alpha)


@pytest.mark.parametrize(
    ("function", "alpha", "error"),
    [
        (ops.elu, 1, TypeError),
        (ops.elu, 2.0, ValueError),
        (ops.leaky_relu, Tensor(0.5, ms.float32), TypeError),
    ],
)
def test_a_wrong_slope_has_mindspores_error(graph_mode, function, alpha, error):
    with pytest.raises(error, match="alpha"):
        trained(Weighed(WithAlpha(function, alpha)), FACTORS.astype("f"))


PLAIN = {one.__name__: one for one in functions._OWN if not isinstance(one, type)}


@pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN)
def test_they_take_what_mindspores_functions_take(plain):
    own, mindspores = (inspect.signature(one) for one in (functions._OWN[plain], plain))
    for one, other in zip(own.parameters.values(), mindspores.parameters.values()):
        assert (one.name, one.kind, one.default) == (other.name, other.kind, other.default)
    assert len(own.parameters) == len(mindspores.parameters)


def test_other_devices_keep_their_functions(graph_mode, untuned):
    net, before, told = Weighed(Softmax()), ms.get_context, {"device_target": "Ascend"}
    with pytest.MonkeyPatch.context() as patch:  # ends before the machine is tuned again
        patch.setattr(ms, "get_context", lambda name: told.get(name) or before(name))
        config = contract.switched(cheaper_operators=True)
        optimizer = nn.SGD(net.trainable_params())
        step = make_train_step(net, None, optimizer, level="O1", config=config).train_network
    assert step.surrounding_part is contextlib.nullcontext
