"""Cheaper operators: values and gradients against float64, and what is left alone."""

from __future__ import annotations

import copy
import types

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from cheaper_cases import replaced
from mindspore import Parameter, Tensor, nn, ops
from models import loss_of, model_of

from mindspore_boost_ext import Algorithm, AutoBoost, make_train_step
from mindspore_boost_ext.base.cells import layers_of
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell, is_known
from mindspore_boost_ext.cheaper_operators.known import KNOWN
from mindspore_boost_ext.cheaper_operators.rows import CheaperSoftmax

LEAST = {one.replacement.counted_as: one.replacement.least for one in KNOWN.values()}

pytestmark = pytest.mark.usefixtures("every_size")
ON = contract.switched(cheaper_operators=True)
OFF = contract.switched()
NAME = "cheaper_operators"
EPSILON = 1e-5
RNG = np.random.default_rng(4)


class Of(nn.Cell):
    """Calls one layer or operator, and multiplies what it returns by weights."""

    def __init__(self, inner, outputs):
        super().__init__()
        self.inner = inner
        self.weights = Tensor(np.random.default_rng(7).normal(size=outputs).astype("f"))

    def construct(self, x):
        return (self.inner(x) * self.weights).sum()


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.5, -0.5])
def test_a_leaky_relu_that_would_subtract_or_drop_infinities_stays(alpha):
    assert replaced(nn.SequentialCell(nn.LeakyReLU(alpha))).status == "skipped"


def test_a_layer_norm_of_another_shape_is_refused_as_by_mindspore(pynative_mode):
    """MindSpore's checks; what is computed here would be broadcast without a word."""
    net = nn.SequentialCell(nn.LayerNorm((1,)))
    assert replaced(net).status == "applied"
    with pytest.raises((ValueError, RuntimeError)):
        net(Tensor(np.ones((3, 7), np.float32)))


def test_a_layer_norm_of_rows_far_from_zero(mode):
    """Its values are MindSpore's, its gradients no further from the formula than those."""
    both = [Of(nn.LayerNorm((70,), epsilon=EPSILON), (4, 70)) for _ in range(2)]
    assert replaced(both[0]).status == "applied"
    slopes = [ms.grad(net) for net in both]
    random = np.random.default_rng(0)  # its own: of other numbers some are a matter of chance
    for far in (0.1, 100.1, 3333.3):
        x = (far + 0.1 * random.normal(size=(4, 70))).astype(np.float32)
        x[0], x[1, 0] = far, 3 * far  # a row of equals, one that begins far from the others
        values = [net.inner(Tensor(x)).asnumpy() for net in both]
        np.testing.assert_array_equal(*values)
        found = [slope(Tensor(x)).asnumpy() for slope in slopes]
        weights = both[0].weights.asnumpy()[1:].astype(np.float64)
        expected = differences(layer_norm, x[1:], weights)
        errors = [np.abs(one[1:] - expected).max() for one in found]
        # Both round: the better one is a matter of chance where neither is far off.
        assert errors[0] <= max(1.5 * errors[1], 1e-5 * np.abs(expected).max()), far
        assert np.isfinite(found[0]).all()


def test_a_network_with_cheaper_operators_can_be_copied(pynative_mode):
    net = nn.SequentialCell(all_kinds(), nn.MaxPool2d(2, 2))
    assert replaced(net).status == "applied"
    twin = copy.deepcopy(net)
    kinds = [[type(cell) for _, cell in one.cells_and_names()] for one in (net, twin)]
    assert kinds[0] == kinds[1]
    images = IMAGES.astype("f")
    np.testing.assert_array_equal(twin[1](Tensor(images)).asnumpy(), max_pool(2, 2)(images))


class Squared(nn.Cell):
    """The sum of the cubes of a gradient, for a second one."""

    def __init__(self, net):
        super().__init__()
        self.slope, self.net = ops.GradOperation(), net

    def construct(self, x):
        return (self.slope(self.net)(x) ** 3).sum()


class Cubes(nn.Cell):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def construct(self, x):
        return (self.inner(x) ** 3).sum()


def test_a_layer_norm_is_left_alone_where_python_runs_it(pynative_mode):
    """MindSpore would differentiate the cheaper one wrongly the second time; its own it refuses."""
    net = nn.SequentialCell(nn.LayerNorm((5,), epsilon=EPSILON))
    row = replaced(net, compiled=False)
    assert (row.status, row.reason[-21:]) == ("skipped", "without compiled_step")
    x = Tensor(RNG.normal(size=(3, 5)).astype("f"))
    with pytest.raises(RuntimeError):
        ms.grad(Squared(Cubes(net)))(x)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def celu(height):
    return lambda x: np.where(x > 0, x, height * np.expm1(np.minimum(x, 0) / height))


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * celu(1.0)(x))


def group_norm(groups):
    def rule(x):
        rows = x.reshape(x.shape[0], groups, -1)
        centered = rows - rows.mean(-1, keepdims=True)
        return (centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)).reshape(
            x.shape
        )

    return rule


def softmax(x, axis=-1):
    shares = np.exp(x - x.max(axis, keepdims=True))
    return shares / shares.sum(axis, keepdims=True)


def normalised(x, axis, epsilon):
    return x / np.sqrt(np.maximum((x**2).sum(axis, keepdims=True), epsilon))


def layer_norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)


def max_pool(size, step):
    def rule(x):
        rows, columns = ((length - size) // step + 1 for length in x.shape[2:])
        windows = [
            x[:, :, i * step : i * step + size, j * step : j * step + size].max((2, 3))
            for i in range(rows)
            for j in range(columns)
        ]
        return np.stack(windows, -1).reshape(*x.shape[:2], rows, columns)

    return rule


WIDE, IMAGES = RNG.normal(size=(3, 2, 70)).astype("f") * 3, RNG.normal(size=(2, 3, 7, 9))
CASES = {
    "nn.GELU": (nn.GELU, gelu, WIDE, "gelu"),
    "ops.GeLU": (ops.GeLU, gelu, WIDE, "gelu"),
    "nn.LeakyReLU": (lambda: nn.LeakyReLU(0.3), lambda x: np.where(x > 0, x, 0.3 * x), WIDE, None),
    "nn.ELU": (nn.ELU, celu(1.0), WIDE, "elu"),
    "ops.CeLU": (lambda: ops.CeLU(1.7), celu(1.7), WIDE, "celu"),
    "nn.SeLU": (nn.SeLU, selu, WIDE, "selu"),
    "nn.Softmax": (nn.Softmax, softmax, WIDE, "softmax"),
    "ops.Softmax": (lambda: ops.Softmax((-1,)), softmax, WIDE[0, 0], "softmax"),
    "nn.Softmax(1)": (lambda: nn.Softmax(1), lambda x: softmax(x, 1), IMAGES.astype("f"), None),
    "nn.LogSoftmax": (nn.LogSoftmax, lambda x: np.log(softmax(x)), WIDE, "log_softmax"),
    "ops.LogSoftmax(1)": (
        lambda: ops.LogSoftmax(1),
        lambda x: np.log(softmax(x, 1)),
        IMAGES.astype("f"),
        "log_softmax",
    ),
    "ops.L2Normalize": (
        lambda: ops.L2Normalize(-1, 1e-4),
        lambda x: normalised(x, -1, 1e-4),
        WIDE,
        "l2_normalize",
    ),
    "ops.L2Normalize([1])": (
        lambda: ops.L2Normalize([1], 1.5),  # of vectors of three numbers some are shorter
        lambda x: normalised(x, 1, 1.5),
        IMAGES.astype("f"),
        "l2_normalize",
    ),
    "nn.LayerNorm": (lambda: nn.LayerNorm((70,), epsilon=EPSILON), layer_norm, WIDE, None),
    "nn.GroupNorm": (
        lambda: nn.GroupNorm(2, 4, EPSILON),
        group_norm(2),
        RNG.normal(size=(3, 4, 5, 2)).astype("f"),
        "group_norm",
    ),
    "nn.MaxPool2d": (lambda: nn.MaxPool2d(2, 2), max_pool(2, 2), IMAGES.astype("f"), "max_pool"),
    "nn.Pad": (
        lambda: nn.Pad(((1, 0), (0, 0), (2, 1), (0, 3))),
        lambda x: np.pad(x, ((1, 0), (0, 0), (2, 1), (0, 3))),
        IMAGES.astype("f"),
        "pad",
    ),
    "ops.MaxPool": (lambda: ops.MaxPool(3, 2), max_pool(3, 2), IMAGES.astype("f"), "max_pool"),
}


def differences(rule, x, weights, step=1e-5):
    """Return the gradient of the weighted sum by central differences in float64."""
    x, found = x.astype(np.float64), np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        one = np.zeros(x.shape)
        one[place] = step
        found[place] = ((rule(x + one) - rule(x - one)) * weights).sum() / (2 * step)
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(mode, name):
    make, rule, x, _ = CASES[name]
    expected = rule(x.astype(np.float64))
    net = Of(make(), expected.shape)
    assert replaced(net).status == "applied"
    # float32 of sums over 70 values of size 10: 1e-7 * 70 would be the worst. The logarithms are
    # MindSpore's own, good to 4e-6 along an axis that is not the last one.
    atol = 5e-6 if "Log" in name else 1e-6
    np.testing.assert_allclose(net.inner(Tensor(x)).asnumpy(), expected, rtol=1e-5, atol=atol)
    gradient = ms.grad(net)(Tensor(x)).asnumpy()
    slope = differences(rule, x, net.weights.asnumpy().astype(np.float64))
    # central differences of float64 at 1e-5 are good to 1e-9, float32's gradients to 1e-6
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    ["gelu", "elu", "celu", "selu", "softmax", "log_softmax", "l2_normalize", "layer_norm"],
)
def test_second_gradients(mode, name):
    if name == "layer_norm" and ms.get_context("mode") != ms.GRAPH_MODE:
        pytest.skip("is left alone there")
    make, rule = {
        "gelu": (nn.GELU, gelu),
        "elu": (nn.ELU, celu(1.0)),
        "celu": (lambda: nn.CELU(1.7), celu(1.7)),
        "selu": (nn.SeLU, selu),
        "softmax": (nn.Softmax, softmax),
        "log_softmax": (nn.LogSoftmax, lambda x: np.log(softmax(x))),
        "l2_normalize": (lambda: ops.L2Normalize(-1), lambda x: normalised(x, -1, 1e-4)),
        "layer_norm": (lambda: nn.LayerNorm((5,), epsilon=EPSILON), layer_norm),
    }[name]
    net = Cubes(make())
    assert dict(replaced(net).counts) == {name: 1}
    x = np.random.default_rng(5).normal(size=(3, 5))

    def cubes(x):
        return rule(x) ** 3

    def slopes(x):
        return differences(cubes, x, np.ones(x.shape))

    expected = differences(lambda x: slopes(x) ** 3, x, np.ones(x.shape), step=1e-3)
    found = ms.grad(Squared(net))(Tensor(x.astype("f"))).asnumpy()
    # Steps of 1e-3 leave out terms of 1e-6, beside float32's of products of ten factors: in all
    # less than a ten-thousandth of the largest. A part that is missing is a tenth and more.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize(
    ("kernel", "stride"),
    [(2, 2), (3, 2), ((2, 3), 2), ((3, 2), 2), ((2, 3), (1, 3)), ((3, 2), (3, 1))],
)
def test_padded_pooling_is_mindspores_with_ties(pynative_mode, kernel, stride, size):
    """With one row of padding, which comes last, and with several, of which some come first.

    MindSpore's own need not be compiled.
    """
    x = RNG.integers(-3, 4, (2, 2, size, size + 1)).astype("f")
    plain = nn.MaxPool2d(kernel, stride, pad_mode="same")
    expected = plain(Tensor(x)).asnumpy()
    net = Of(nn.MaxPool2d(kernel, stride, pad_mode="same"), expected.shape)
    slope = ms.grad(net)(Tensor(x)).asnumpy()
    assert dict(replaced(net).counts) == {"max_pool": 1}
    ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_array_equal(net.inner(Tensor(x)).asnumpy(), expected)
    np.testing.assert_array_equal(ms.grad(net)(Tensor(x)).asnumpy(), slope)


@pytest.mark.parametrize(
    ("kernel", "stride", "shape"), [(4, 4, (1, 9)), (4, 3, (2, 9)), (2, 2, (1, 9)), (4, 4, (9, 2))]
)
def test_pooling_of_an_image_smaller_than_the_window_is_mindspores(mode, kernel, stride, shape):
    """It clips the window, or refuses: MaxPoolWithArgmax gives nothing."""
    x, net = Tensor(RNG.normal(size=(2, 3, *shape)).astype("f")), Of(nn.Identity(), 1)
    found = []
    for exchanged in (False, True):
        net.inner = nn.MaxPool2d(kernel, stride)
        if exchanged:
            assert dict(replaced(net).counts) == {"max_pool": 1}
        try:
            found.append(net.inner(x).asnumpy())
        except ValueError as error:
            found.append(np.array(str(error).split("\n")[0]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("name", ["nn.LayerNorm", "nn.Softmax", "nn.LogSoftmax"])
def test_small_inputs_take_mindspores_gradient_bit_for_bit(graph_mode, monkeypatch, name, rows):
    """More operators would take longer; those of large inputs round otherwise."""
    for known in KNOWN.values():
        monkeypatch.setattr(known.replacement, "least", 2000)
    make, x = CASES[name][0], np.random.default_rng(3).normal(size=(rows, 70)).astype("f")
    net = Of(make(), x.shape)
    expected = ms.grad(net)(Tensor(x)).asnumpy()
    assert replaced(net).status == "applied"
    found = ms.grad(net)(Tensor(x)).asnumpy()
    assert np.array_equal(found, expected) == (rows == 16)


class Slimmed(nn.Cell):
    """Reads the scale of a layer, by its class and as an attribute: network slimming."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Dense(3, 4), nn.Dense(4, nets.CLASSES)
        self.norm = nn.BatchNorm1d(4)
        nets.fill(self)

    def construct(self, x):
        penalty = self.norm.gamma.abs().sum() if isinstance(self.norm, nn.BatchNorm1d) else 0.0
        return self.last(self.norm(self.first(x))) * (1 + 0.1 * penalty)


def test_a_batch_norm_keeps_its_class_parameters_and_their_names(mode):
    losses, names = [], []
    for config in (contract.switched(cheaper_operators=True, compiled_step=True), None):
        net = Slimmed()
        step = model_of(net, config, amp_level="O0").train_network
        losses.append([loss_of(step(*map(Tensor, one))) for one in nets.batches(3)])
        names.append([name for name, _ in net.parameters_and_names()])
        kinds = [type(one) for _, one in net.cells_and_names() if isinstance(one, nn.BatchNorm1d)]
        assert kinds == [nn.BatchNorm1d]
    np.testing.assert_allclose(*losses, rtol=1e-5)  # sums of a few float32 values
    assert names[0] == names[1]


def test_what_is_set_on_a_batch_norm_acts(graph_mode):
    net = Slimmed()
    step = model_of(net, ON).train_network
    x, y = map(Tensor, nets.batches(1)[0])
    step(x, y)
    net.norm.use_batch_statistics = False
    fixed = nn.SequentialCell(net.norm).set_train()
    before = net.norm.moving_mean.asnumpy().copy()
    fixed(Tensor(RNG.normal(size=(5, 4)).astype("f")))
    np.testing.assert_array_equal(net.norm.moving_mean.asnumpy(), before)


@pytest.mark.parametrize("shape", [(6, 5), (1, 5), (4, 5, 3)])
def test_a_batch_norm_of_features_or_signals(mode, shape):
    """Values, gradients, moving statistics and the evaluation, as MindSpore's layer has them."""
    x = RNG.normal(size=shape).astype("f") * 3 + 2
    found = []
    for cheaper in (True, False):
        layer = nn.BatchNorm1d(5)
        layer.gamma.set_data(Tensor(np.arange(1, 6).astype("f")))
        net = Of(layer, shape)
        if cheaper:
            assert dict(replaced(net).counts) == {"batch_norm": 1}
        net.set_train()
        values = [net.inner(Tensor(x)), ms.grad(net)(Tensor(x))]
        values += ms.grad(net, None, net.trainable_params())(Tensor(x))
        values += [layer.moving_mean.value(), layer.moving_variance.value()]
        # In a Cell of its own: MindSpore 2.7 compiles a layer that is called alone only once.
        values.append(nn.SequentialCell(net.inner).set_train(False)(Tensor(x)))
        found.append([one.asnumpy() for one in values])
    assert not np.allclose(found[0][4], 0, atol=0.1)  # the moving mean has moved
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)  # float32's sums of 12 values


def test_gradients_of_scale_and_shift(mode):
    x, weights = WIDE.reshape(6, 70), RNG.normal(size=(6, 70)).astype("f")
    net = Of(nn.LayerNorm((70,), epsilon=EPSILON), (6, 70))
    net.weights = Tensor(weights)
    assert dict(replaced(net).counts) == {"layer_norm": 1}
    gradient = ms.grad(net, None, net.trainable_params())(Tensor(x))
    normal = layer_norm(x.astype(np.float64))
    assert [one.name.rpartition(".")[2] for one in net.trainable_params()] == ["gamma", "beta"]
    np.testing.assert_allclose(gradient[0].asnumpy(), (weights * normal).sum(0), atol=1e-5)
    np.testing.assert_allclose(gradient[1].asnumpy(), weights.sum(0), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_extreme_values_are_mindspores(mode, name):
    make, _, x, _ = CASES[name]
    zero = 1.0 if name == "nn.LeakyReLU" else 0.0  # where its gradient is a matter of taste
    x = np.resize(np.array([zero, -zero, 1e4, -1e4, 30, -30, 1e-30, 2, 2, 2], "f"), x.shape)
    expected = make()(Tensor(x)).asnumpy()
    net = Of(make(), expected.shape)
    before = ms.grad(net)(Tensor(x)).asnumpy()
    replaced(net)
    np.testing.assert_allclose(net.inner(Tensor(x)).asnumpy(), expected, rtol=1e-5, atol=1e-6)
    after = ms.grad(net)(Tensor(x)).asnumpy()
    if name == "nn.SeLU":  # MindSpore's is wrong below 0
        after, before = after[x >= 0], before[x >= 0]
    np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-5)


def test_mindspores_own_gradient_of_selu_is_still_wrong(mode):
    """When this fails, MindSpore has mended its operator, and the cards can say so."""
    found = ms.grad(nn.SeLU())(Tensor([-1.0], ms.float32)).asnumpy()
    assert abs(found[0] - 1.0507009873554805 * 1.6732632423543772 * np.exp(-1)) > 0.5


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_nan(mode, name):
    """One NaN in a window: MaxPool keeps it if last, MaxPoolWithArgmax if first."""
    make, _, x, _ = CASES[name]
    x = x.copy()
    x[-1:] = np.nan
    expected = make()(Tensor(x)).asnumpy()
    assert np.isnan(expected).any()
    net = Of(make(), expected.shape)
    replaced(net)
    found = net.inner(Tensor(x)).asnumpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.parametrize("name", ["nn.GELU", "nn.LeakyReLU", "nn.Softmax", "ops.GeLU"])
def test_float16_is_mindspores_own(mode, name):
    make, _, x, _ = CASES[name]
    net, half = Of(make(), x.shape), Tensor(x.astype(np.float16))
    expected = net.inner(half).asnumpy()
    replaced(net)
    np.testing.assert_array_equal(net.inner(half).asnumpy(), expected)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("nn.Pad", "nn.MaxPool2d", "ops.MaxPool")]
)
def test_mixed_precision_auto_takes_no_sums_in_float16(mode, name):
    """It takes matrix products so, in which the squares of such rows are infinite."""
    make, rule, x, _ = CASES[name]
    x = (x * 20).astype("f")  # 70 squares of 60 are above 65504
    net = Of(make(), x.shape)
    net.weights *= 1e5  # so are sums of these
    assert replaced(net).status == "applied"
    net.inner = ms.amp.auto_mixed_precision(nn.SequentialCell(net.inner), "auto")
    found = net.inner(Tensor(x)).astype(ms.float32).asnumpy()
    np.testing.assert_allclose(found, rule(x.astype(np.float64)), rtol=1e-5, atol=1e-5)
    gradient = ms.grad(net)(Tensor(x)).asnumpy()
    weights = net.weights.asnumpy().astype(np.float64)
    # float16 would be off by 5e-4 of the largest, and infinite where sums are
    atol = 1e-6 * np.abs(weights).max()
    np.testing.assert_allclose(gradient, differences(rule, x, weights), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_statistics_move_in_mixed_precision(graph_mode, level):
    """A Cell of 16 bits casts its inputs; the statistics of a batch would go into copies."""

    def statistics(config):
        norm = nn.BatchNorm1d(8)
        net = nn.SequentialCell(nn.Dense(nets.FEATURES, 8), norm, nn.Dense(8, nets.CLASSES))
        nets.fill(net)
        model = model_of(net, config, amp_level=level, loss_scale_manager=None)
        model.train(2, nets.dataset(3), dataset_sink_mode=False)
        return norm.moving_mean.asnumpy(), norm.moving_variance.asnumpy()

    plain, found = statistics(None), statistics(ON)
    assert np.abs(plain[0]).max() > 0.01
    np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("level", "status", "counts"),
    [
        ("O2", "applied", {"layer_norm": 1, "batch_norm": 1}),
        ("O3", "skipped", {}),
        ("auto", "applied", {"layer_norm": 1, "batch_norm": 1, "gelu": 1}),
    ],
)
def test_layers_of_16_bits_are_not_counted(graph_mode, level, status, counts):
    layers = nn.LayerNorm((4,)), nn.GELU(), nn.BatchNorm1d(4)
    net = nn.SequentialCell(nn.Dense(3, 4), *layers, nn.Dense(4, nets.CLASSES))
    scale = {"loss_scale_manager": None}
    step = model_of(net, ON, amp_level=level, **scale).train_network
    row = step.report()[NAME]
    assert (row.status, dict(row.counts)) == (status, counts)
    assert np.isfinite(loss_of(step(*map(Tensor, nets.batches(1)[0]))))
    again = model_of(net, ON, **scale).train_network  # mixed precision has wrapped some layers
    assert np.isfinite(loss_of(again(*map(Tensor, nets.batches(1)[0]))))


@pytest.mark.parametrize("flagged", ["before", "after"])
@pytest.mark.parametrize("name", ["nn.GELU", "nn.Softmax", "nn.LayerNorm", "nn.LeakyReLU"])
def test_a_layer_that_computes_in_float16_goes_on_doing_so(mode, name, flagged):
    """Sums of float16 would lose digits; mixed precision sets the dtype of all layers."""
    net, plain = (Of(CASES[name][0](), WIDE.shape) for _ in range(2))
    plain.inner.to_float(ms.float16)
    if flagged == "before":
        net.inner.to_float(ms.float16)
    replaced(net)
    assert layers_of(net, (CheaperCell,))
    net.inner.to_float(ms.float16)
    found, expected = (one.inner(Tensor(WIDE)).asnumpy() for one in (net, plain))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("alpha", "status"),
    [(2.0, "applied"), (2.1, "skipped"), (1e6, "skipped"), (-1.0, "skipped")],
)
def test_a_celu_that_would_lose_digits_stays(alpha, status):
    assert replaced(nn.CellList([nn.CELU(alpha)])).status == status


@pytest.mark.parametrize("shape", [(-1, -1, 4), (None, None, 4), (-1, 4), None, (0, 0, 4)])
def test_a_shape_that_is_not_known(shape):
    assert not is_known(shape)
    assert is_known((2, 4))


def test_from_which_size_on_operators_are_replaced():
    """As the card says. Other tests look at small inputs, too."""
    rows = ("layer_norm", "group_norm", "softmax", "log_softmax")
    assert {name: size for name, size in LEAST.items() if size} == dict.fromkeys(rows, 16384) | {
        "elu": 32768
    }


@pytest.mark.parametrize(
    "make",
    [
        *(nn.ELU, lambda: nn.GroupNorm(1, 2), lambda: nn.Pad(((0, 0), (1, 1)))),
        *(nn.CrossEntropyLoss, lambda: nn.BatchNorm1d(2), lambda: nn.LayerNorm((2,))),
    ],
)
def test_what_would_not_gain_stays_where_python_runs_it(pynative_mode, make):
    assert replaced(nn.CellList([make()]), compiled=False).status == "skipped"


def test_a_padding_of_another_rank_is_refused_as_by_mindspore(pynative_mode):
    net = nn.SequentialCell(nn.Pad(((0, 0), (1, 1))))
    assert replaced(net).status == "applied"
    with pytest.raises((ValueError, RuntimeError)):
        net(Tensor(np.ones((1, 2, 3), np.float32))).asnumpy()


def test_a_padding_of_nothing(mode):
    net = nn.SequentialCell(nn.Pad(((0, 0), (1, 1))))
    assert replaced(net).status == "applied"
    assert net(Tensor(np.zeros((0, 3), np.float32))).shape == (0, 5)


def test_a_padding_of_any_rank(graph_mode):
    net = nn.SequentialCell(nn.Pad(((0, 0), (1, 1))))
    assert replaced(net).status == "applied"
    net.set_inputs(Tensor(shape=[-2], dtype=ms.float32))
    assert net(Tensor(np.ones((2, 3), np.float32))).shape == (2, 5)


def test_features_of_any_rank(graph_mode):
    net = nn.SequentialCell(nn.BatchNorm1d(3)).set_train()
    assert replaced(net).status == "applied"
    net.set_inputs(Tensor(shape=None, dtype=ms.float32))
    inputs = np.array([[1, 2, 3], [3, 4, 7]], np.float32)
    expected = np.sign(inputs - inputs.mean(0))  # of two samples
    np.testing.assert_allclose(net(Tensor(inputs)).asnumpy(), expected, atol=1e-5)  # epsilon: 5e-6


def test_a_softmax_of_nothing(mode):
    net = nn.SequentialCell(nn.Softmax(0))
    assert replaced(net).status == "applied"
    assert net(Tensor(np.zeros((0, 3), np.float32))).shape == (0, 3)


def test_an_axis_out_of_range_ends_in_an_error_and_in_nothing_else(pynative_mode, monkeypatch):
    monkeypatch.setattr(CheaperSoftmax, "least", 0)
    net = nn.SequentialCell(nn.Softmax(1))
    assert replaced(net).status == "applied"
    with pytest.raises(ValueError, match="axis"):
        net(Tensor(np.zeros(3, np.float32)))
    assert ops.relu(Tensor(np.zeros(3, np.float16))).dtype == ms.float16


class Compiled(nn.Cell):
    """Is a function of ``ms.jit`` itself."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, nets.CLASSES)
        self.norm, self.softmax = ops.L2Normalize(-1), nn.Softmax()
        nets.fill(self)

    @ms.jit
    def construct(self, x):
        return self.softmax(self.norm(self.dense(x)))


def test_a_construct_of_ms_jit_trains_as_without(pynative_mode):
    losses = []
    for config in (ON, None):
        step = model_of(Compiled(), config).train_network
        losses.append([loss_of(step(*map(Tensor, one))) for one in nets.batches(2)])
    np.testing.assert_allclose(*losses, rtol=1e-5)  # sums of a few float32 values


def test_forward_derivatives_of_a_softmax_are_mindspores(mode):
    x, along = (Tensor(RNG.normal(size=(3, 5)).astype("f")) for _ in range(2))
    net = nn.SequentialCell(nn.Softmax())
    expected = ms.jvp(net, x, along)[1].asnumpy()
    assert replaced(net).status == "applied"
    found = ms.jvp(net, x, along)[1].asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)  # float32's sums of five


def test_a_layer_with_a_hook_stays():
    net, seen = nn.CellList([nn.GELU(), nn.GELU()]), []
    net[0].register_forward_hook(lambda cell, inputs, output: seen.append(type(cell)))
    assert dict(replaced(net).counts) == {"gelu": 1}
    assert type(net[0]) is nn.GELU


def test_a_layer_with_another_construct_stays():
    net = nn.CellList([nn.GELU(), nn.GELU()])
    net[0].construct = types.MethodType(lambda self, x: x * 2, net[0])
    assert dict(replaced(net).counts) == {"gelu": 1}
    assert type(net[0]) is nn.GELU


def test_a_batch_norm_that_is_recomputed_stays():
    """Its statistics would move twice in a step."""
    net = nn.CellList([nn.BatchNorm1d(2), nn.SequentialCell(nn.BatchNorm1d(2))])
    net[1].recompute()
    ms.set_context(mode=ms.GRAPH_MODE)
    assert dict(replaced(net).counts) == {"batch_norm": 1}


class Narrow(nn.GELU):
    """A GELU of the user's own."""


class OverTwo(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = ops.LayerNorm(1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GELU(approximate=False),
        lambda: nn.MaxPool2d(3, 2, pad_mode="pad", padding=1),
        # At any size of image these add rows or columns in front.
        lambda: nn.MaxPool2d(5, 1, pad_mode="same"),
        lambda: nn.MaxPool2d((2, 4), 2, pad_mode="same"),
        lambda: nn.MaxPool2d((4, 2), 2, pad_mode="same"),
        Narrow,
        OverTwo,
        nn.ReLU,
    ],
)
def test_others_stay_and_the_report_says_so(make):
    net = nn.CellList([make()])
    before = [type(one) for _, one in net.cells_and_names()]
    row = replaced(net)
    assert row.status == "skipped"
    assert "no layer has an operator to replace" in row.reason
    assert [type(one) for _, one in net.cells_and_names()] == before


def all_kinds():
    held = nn.SequentialCell(nn.LayerNorm((4,)), nn.GELU(), nn.LeakyReLU(), nn.Softmax())
    return nn.SequentialCell(nn.Dense(3, 4), held, held[1], nn.Dense(4, nets.CLASSES))


def test_each_place_is_counted_once_and_a_second_model_changes_nothing_more(mode):
    net = all_kinds()
    names = [one.name for one in net.get_parameters()]
    x = Tensor(nets.batches(1)[0][0])
    expected = {"gelu": 1, "leaky_relu": 1, "softmax": 1}
    if ms.get_context("mode") == ms.GRAPH_MODE:
        expected["layer_norm"] = 1
    for _ in range(2):
        row = model_of(net, ON).train_network.report()[NAME]
        assert dict(row.counts) == expected
        cells = len(list(net.cells_and_names()))
        answer = net(x).asnumpy()
    assert [one.name for one in net.get_parameters()] == names
    model_of(net, ON)
    assert len(list(net.cells_and_names())) == cells
    np.testing.assert_array_equal(net(x).asnumpy(), answer)


class Refusing(Algorithm):
    switch = "refusing"

    def build(self, build):
        raise ValueError("refused")


def test_a_refused_model_gives_layers_and_operators_back(mode):
    net = all_kinds()
    x = Tensor(nets.batches(1)[0][0])
    before, answer = [type(one) for _, one in net.cells_and_names()], net(x).asnumpy()
    boost = AutoBoost("O1", ON, algorithms=[Refusing()])
    with pytest.raises(ValueError, match="refused"):
        boost.network_auto_process_train(net, nets.momentum(net.trainable_params()))
    assert [type(one) for _, one in net.cells_and_names()] == before
    assert type(net[1][0].layer_norm) is ops.LayerNorm
    np.testing.assert_array_equal(net(x).asnumpy(), answer)


def test_layers_of_a_list_train_as_mindspores(mode):

    class Listed(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Dense(3, 4), nn.Dense(4, nets.CLASSES)
            self.gelus = nn.CellList([nn.GELU(), nn.GELU()])
            self.gain = Parameter(np.ones(4, np.float32))

        def construct(self, x):
            x = self.first(x)
            for one in self.gelus:
                x = one(x) * self.gain
            return self.last(x)

    net, plain = Listed(), Listed()
    for one, other in zip(net.get_parameters(), plain.get_parameters()):
        other.set_data(Tensor(one.asnumpy().copy()))  # loading would share the memory
    models = model_of(net, ON), model_of(plain)
    assert dict(models[0].train_network.report()[NAME].counts) == {"gelu": 2}
    for x, y in nets.batches(4):
        for model in models:
            model.train_network(Tensor(x), Tensor(y))
    for name, value in nets.weights(plain).items():
        np.testing.assert_allclose(nets.weights(net)[name], value, rtol=1e-4, atol=1e-6)


class Beside(nn.Cell):
    """Layers side by side between two Dense ones, at the top of a file, where O1 finds a source."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Dense(3, 4), nn.Dense(4, nets.CLASSES)
        self.gelu, self.elu, self.softmax = nn.GELU(), nn.ELU(), nn.Softmax()
        self.layer_norm, self.group_norm = nn.LayerNorm((4,)), nn.GroupNorm(1, 1)
        self.pool, self.pad = nn.MaxPool1d(2, 1, pad_mode="same"), nn.Pad(((0, 0),) * 3)

    def construct(self, x):
        x = ops.expand_dims(self.first(x), 1)
        y = self.gelu(x) + self.elu(x) + self.softmax(x) + self.pool(x) + self.pad(x)
        y = y + self.layer_norm(x) + self.group_norm(x)
        return self.last(ops.squeeze(y, 1))


def test_mixed_precision_o1_trains_as_without_it(mode):
    """It writes the source of Cells anew, in which the names of their modules are not known."""
    losses, names = [], {"gelu", "softmax", "max_pool"}
    if mode == "graph":
        names |= {"elu", "layer_norm", "group_norm", "pad"}
    for config in (ON, None):
        if config is None:  # what it is compared with need not be compiled
            ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(1)
        step = model_of(Beside(), config, amp_level="O1").train_network
        losses.append([loss_of(step(*map(Tensor, one))) for one in nets.batches(3)])
        if config is ON:
            assert step.report()[NAME].counts.keys() == names
    # The Dense layers compute in float16, where a rounding is 5e-4.
    np.testing.assert_allclose(*losses, rtol=2e-3)


def test_a_network_may_ask_for_class_and_settings_of_a_layer(mode):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Dense(3, 4), nn.Dense(4, nets.CLASSES)
            self.layers = nn.CellList([nn.LeakyReLU(0.3), nn.GELU()])
            self.loss = nn.CrossEntropyLoss()

        def construct(self, x, labels):
            x = self.first(x)
            for one in self.layers:
                if isinstance(one, nn.LeakyReLU):
                    x = one(x) * one.alpha
                elif isinstance(one, nn.GELU):
                    x = one(x) * 3
            loss = self.loss(self.last(x), labels)
            return loss * 3 if isinstance(self.loss, nn.CrossEntropyLoss) else loss

    losses = []
    for config in (ON, OFF):
        ms.set_seed(1)
        net = Net()
        optimizer = nets.momentum(net.trainable_params())
        step = make_train_step(net, None, optimizer, level="O1", config=config)
        losses.append(loss_of(step(*map(Tensor, nets.batches(1)[0]))))
    np.testing.assert_allclose(*losses, rtol=1e-5)  # sums of four float32 values


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_with_accumulation_and_freezing_it_trains_as_without_it(mode):
    ends, moved = [], []
    for cheaper in (True, False):
        config = contract.switched(
            cheaper_operators=cheaper, grad_accumulation=True, grad_freeze=True
        )
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
        config["grad_freeze"] = {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}
        net = nets.Normalised()
        rate_of_one = nn.SGD(net.trainable_params(), 1.0)
        step = model_of(net, config, rate_of_one).train_network
        assert step.report()[NAME].status == ("applied" if cheaper else "inactive")
        for number, (x, y) in enumerate(nets.batches(8)):
            before = net.first.weight.asnumpy().copy()
            step(Tensor(x), Tensor(y))
            if not np.array_equal(net.first.weight.asnumpy(), before):
                moved.append(number)
        ends.append(nets.weights(net))
    assert moved == [1, 5] * 2  # the windows of group 0
    for name, value in ends[1].items():
        # Four updates at rate 1, of gradients below 1 that differ in float32's last places; a
        # thousandth more in the slope of GELU makes ten times this.
        np.testing.assert_allclose(ends[0][name], value, rtol=0, atol=1e-6, err_msg=name)


def test_other_devices_keep_their_operators(untuned):
    net, before = all_kinds(), ms.get_context
    told = {"device_target": "Ascend"}
    with pytest.MonkeyPatch.context() as patch:  # ends before the machine is tuned again
        patch.setattr(ms, "get_context", lambda name: told.get(name) or before(name))
        row = replaced(net)
    assert (row.status, row.reason[-20:]) == ("skipped", "those on Ascend stay")
    assert type(net[1][1]) is nn.GELU
