"""``ops.pad`` after the import: MindSpore's values, and gradients that stay right in graphs."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import padding

SHAPE = (2, 3, 5, 6)
# As ops.pad takes it: two numbers an axis, the last axis first.
PADDINGS = [
    (1, 1, 1, 1),
    (0, 2),
    (0, 0, 3, 0),
    (0, 0, 0, 0, 1, 2),  # channels, as a shortcut of ResNet does
    (1, 2, 0, 1, 0, 0, 2, 0),
    (-1, -2),
    (2, -1, -2, 3),
]


class Padded(nn.Cell):
    """Pads."""

    def __init__(self, widths=(1, 1, 1, 1), **kwargs):
        super().__init__()
        self.widths, self.kwargs = widths, kwargs

    def construct(self, x):
        return ops.pad(x, self.widths, **self.kwargs)


class Slope(nn.Cell):
    """The gradient of a cell whose outputs have given weights."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, x, weights):
        return self.gradient(self.cell)(x, weights)


def by_numpy(values, widths, value=0.0):
    """Return the same by NumPy: one axis after the other."""
    for axis, (first, last) in enumerate(zip(widths[::2], widths[1::2]), start=1):
        around = [(0, 0)] * values.ndim
        around[-axis] = (max(first, 0), max(last, 0))
        kept = slice(max(-first, 0), values.shape[-axis] - max(-last, 0))
        values = values[(..., kept, *[slice(None)] * (axis - 1))]
        values = np.pad(values, around, constant_values=value)
    return values


@pytest.mark.parametrize("widths", PADDINGS, ids=str)
@pytest.mark.parametrize("by", ["cell", "jit"])
def test_values_and_gradients_are_right_in_every_step(mode, by, widths):
    values = np.arange(1, 181, dtype=np.float32).reshape(SHAPE)
    x, expected = Tensor(values), by_numpy(values, widths)
    weights = np.random.default_rng(3).normal(size=expected.shape).astype("f")
    # Each input's weight is that of the place where its number lies.
    slopes = np.zeros(SHAPE, np.float32)
    slopes.reshape(-1)[expected[expected > 0].astype(int) - 1] = weights[expected > 0]
    cell = Padded(widths)
    slope = Slope(cell)
    value, gradient = (ms.jit(cell), ms.jit(slope)) if by == "jit" else (cell, slope)
    for _ in range(4):  # MindSpore's own is wrong from the second step on
        np.testing.assert_array_equal(value(x).asnumpy(), expected)
        np.testing.assert_array_equal(gradient(x, Tensor(weights)).asnumpy(), slopes)


def test_mindspores_own_gradient_is_still_wrong(graph_mode, untuned):
    """When this fails, MindSpore has mended its operator, and the cure can go."""
    tune_machine(False)
    assert ops.pad is padding.ORIGINAL
    slope, x = Slope(Padded((0, 2))), Tensor(np.ones(SHAPE, np.float32))
    weights = Tensor(np.random.default_rng(3).normal(size=(2, 3, 5, 8)).astype("f"))
    first, second = (slope(x, weights).asnumpy() for _ in range(2))
    np.testing.assert_array_equal(first, weights.asnumpy()[..., :6])
    assert (second != first).any()


@pytest.mark.parametrize("layer", [nn.ZeroPad2d(1), nn.ConstantPad2d((1, 1, 1, 1), 0.0)])
def test_layers_that_pad_learn_as_in_pynative_mode(layer):
    def losses(mode):
        ms.set_context(mode=mode)
        ms.set_seed(1)
        first, last = nn.Conv2d(2, 3, 3, pad_mode="valid"), nn.Dense(3 * 64, 1)
        network = nn.SequentialCell(first, layer, nn.Flatten(), last)
        step = nn.TrainOneStepCell(
            nn.WithLossCell(network, nn.MSELoss()),
            nn.Momentum(network.trainable_params(), 0.1, 0.0),
        ).set_train()
        rng = np.random.default_rng(5)
        batch = [Tensor(rng.normal(size=size).astype("f")) for size in ((4, 2, 8, 8), (4, 1))]
        return [float(step(*batch)) for _ in range(5)]

    # The same sums of some hundred numbers, in another order.
    np.testing.assert_allclose(losses(ms.GRAPH_MODE), losses(ms.PYNATIVE_MODE), rtol=1e-5)


@pytest.mark.parametrize("value", [2, 1.5, True, Tensor([[1.5]], ms.float32)], ids=repr)
def test_borders_hold_the_value(mode, value):
    values = np.random.default_rng(4).normal(size=SHAPE).astype("f")
    number = float(value.asnumpy().item()) if isinstance(value, Tensor) else float(value)
    found = Padded((1, 2, 0, 1), value=value)(Tensor(values))
    np.testing.assert_array_equal(found.asnumpy(), by_numpy(values, (1, 2, 0, 1), number))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.int64, np.uint8, np.bool_])
def test_dtypes_stay(mode, dtype):
    values = np.random.default_rng(4).integers(0, 2, SHAPE).astype(dtype)
    found = Padded((1, 0, 0, 1))(Tensor(values)).asnumpy()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, by_numpy(values, (1, 0, 0, 1)))


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint16, np.float64])
def test_cutting_stays_right(mode, dtype):
    values = (np.arange(12).reshape(2, 6) % 2 + np.arange(2)[:, None]).astype(dtype)
    cell = Padded((-1, -2))
    for _ in range(3):  # MindSpore's own is wrong from the second time on
        np.testing.assert_array_equal(cell(Tensor(values)).asnumpy(), values[:, 1:4])


@pytest.mark.parametrize("mode_of_padding", ["reflect", "replicate", "circular"])
def test_other_modes_are_mindspores(mode, mode_of_padding, untuned):
    values, found = Tensor(np.random.default_rng(4).normal(size=SHAPE).astype("f")), []
    for tuned in (True, False):
        tune_machine(tuned)
        found.append(Padded((1, 2, 0, 1), mode=mode_of_padding)(values).asnumpy())
    np.testing.assert_array_equal(*found)


class SlopeOfSum(nn.Cell):
    """The gradient of a weighted sum of what a cell gives."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.gradient = ops.GradOperation()

    def total(self, x, weights):
        return (self.cell(x) * weights).sum()

    def construct(self, x, weights):
        return self.gradient(self.total)(x, weights)


def test_shapes_known_at_the_step_alone(graph_mode):
    slope = SlopeOfSum(Padded((1, 1)))
    slope.set_inputs(*[Tensor(shape=(None, None), dtype=ms.float32)] * 2)
    for columns in (3, 4, 3):
        values = np.random.default_rng(columns).normal(size=(2, columns)).astype("f")
        weights = np.random.default_rng(6).normal(size=(2, columns + 2)).astype("f")
        found = slope(Tensor(values), Tensor(weights)).asnumpy()
        np.testing.assert_array_equal(found, weights[:, 1:-1])


def test_a_rank_known_at_the_step_alone(graph_mode):
    cell = Padded((1, 1))
    cell.set_inputs(Tensor(shape=[-2], dtype=ms.float32))
    np.testing.assert_array_equal(cell(Tensor([[1.0]], ms.float32)).asnumpy(), [[0, 1, 0]])


def test_widths_that_are_a_tensor_are_left_to_mindspore(pynative_mode):
    values = np.ones((2, 3), np.float32)
    found = ops.pad(Tensor(values), Tensor([1, 0], ms.int64)).asnumpy()
    np.testing.assert_array_equal(found, by_numpy(values, (1, 0)))


@pytest.mark.parametrize(
    ("x", "widths", "kwargs"),
    [
        (Tensor(np.ones((2, 3), np.float32)), (1, 1, 1), {}),
        (Tensor(np.ones((2, 3), np.float32)), (1, 1, 1, 1, 1, 1), {}),
        (Tensor(np.ones((2, 3), np.float32)), (1.0, 1), {}),
        (Tensor(np.ones((2, 3), np.float32)), (-2, -2), {}),
        (Tensor(np.ones((2, 3), np.float32)), (-1, -2), {}),
        (Tensor(np.ones((2, 3), np.float32)), 1, {}),
        (Tensor(np.ones((2, 3), np.float32)), (1, 1), {"mode": "mirror"}),
        (np.ones((2, 3), np.float32), (1, 1), {}),
    ],
)
def test_what_mindspore_refuses_is_refused_in_its_words(pynative_mode, x, widths, kwargs, untuned):
    errors = []
    for tuned in (True, False):
        tune_machine(tuned)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            ops.pad(x, widths, **kwargs).asnumpy()
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


class PaddedAndPooled(nn.Cell):
    """Calls functions that the import has replaced."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def construct(self, x):
        return ops.max_pool2d(ops.pad(self.conv(x), (1, 1, 1, 1)), 2)


def test_mixed_precision_o1_reads_a_construct_that_calls_it(mode):
    """It would write the function anew, without the globals of its module."""
    net = ms.amp.auto_mixed_precision(PaddedAndPooled(), "O1")
    assert net(Tensor(np.ones((1, 2, 8, 8), np.float32))).shape == (1, 3, 5, 5)


def test_second_gradients_of_two_paddings(mode):
    """Those of two ``ops.cat`` are wrong where Python runs them."""
    x = Tensor(np.random.default_rng(0).normal(size=(2, 3)).astype("f"))

    def cubes(x):
        padded = ops.pad(x, (1, 2))
        return (padded * ops.pad(x, (1, 2)) * padded).sum()

    def slopes(x):
        return ms.grad(cubes)(x).sum()

    found = ms.grad(slopes)(x).asnumpy()
    np.testing.assert_allclose(found, 6 * x.asnumpy(), rtol=1e-5)  # float32


@pytest.mark.parametrize("dtype", [ms.float32, ms.int64])
def test_borders_hold_a_large_whole_number(mode, dtype):
    found = Padded((1, 0), value=2**40)(Tensor(np.ones((1, 1)), dtype)).asnumpy()
    np.testing.assert_array_equal(found, [[2**40, 1]])


class PaddedWith(nn.Cell):
    """Takes the border's value as an input."""

    def construct(self, x, value):
        return ops.pad(x, (1, 1), "constant", value)


class SlopesByBoth(nn.Cell):
    """The gradients by the input and by the border's value."""

    def __init__(self):
        super().__init__()
        self.padded, self.gradient = PaddedWith(), ops.GradOperation(get_all=True)

    def construct(self, x, value):
        return self.gradient(self.padded)(x, value)


def test_the_value_of_the_border_has_no_gradient(mode):
    """As in MindSpore's function."""
    slopes = SlopesByBoth()(Tensor(np.ones((1, 2), np.float32)), Tensor(2.5, ms.float32))
    assert [one.asnumpy().tolist() for one in slopes] == [[[1, 1]], 0]


def test_a_value_that_a_graph_does_not_know(mode):
    found = PaddedWith()(Tensor(np.ones((1, 2), np.float32)), ms.mutable(2.5)).asnumpy()
    assert found.tolist() == [[2.5, 1, 1, 2.5]]


@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 1, 1, 1, 1, 1)])
def test_a_graph_refuses_widths_that_are_too_many(graph_mode, widths):
    with pytest.raises(ValueError, match="padding"):
        Padded(widths)(Tensor(np.ones((2, 3), np.float32)))


def test_nothing_may_be_left_where_something_is_added(mode):
    found = Padded((-3, 1))(Tensor(np.ones((2, 3), np.float32))).asnumpy()
    np.testing.assert_array_equal(found, [[0], [0]])


@pytest.mark.parametrize("axes", [8, 9])
def test_many_axes(graph_mode, axes):
    """Of nine MindSpore alone can cut; its gradient is right in the first step."""
    x = Tensor(np.arange(3, dtype=np.float32).reshape((1,) * (axes - 1) + (3,)))
    weights = Tensor(np.arange(4, dtype=np.float32).reshape((1,) * (axes - 1) + (4,)))
    cell = Padded((-1, 2))
    slope = Slope(cell)
    for _ in range(3 if axes == 8 else 1):
        np.testing.assert_array_equal(cell(x).asnumpy().ravel(), [1, 2, 0, 0])
        np.testing.assert_array_equal(slope(x, weights).asnumpy().ravel(), [0, 0, 1])


@pytest.mark.parametrize("dtype", [ms.float16, ms.int32])
def test_a_border_of_another_dtype_is_left_to_mindspore(mode, untuned, dtype):
    x, ends = Tensor(np.ones((2, 3), np.float32)), []
    for tuned in (True, False):
        tune_machine(tuned)
        try:
            found = Padded((1, 0), value=Tensor(2, dtype))(x)
            ends.append((found.dtype, found.asnumpy().tolist()))
        except (TypeError, ValueError, RuntimeError) as error:
            ends.append(type(error))
    assert ends[0] == ends[1]
