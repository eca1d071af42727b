"""``ops.masked_fill`` and ``ops.where`` after the import: the same bits, in less time."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from mindspore_boost_ext import _compat, tune_machine
from mindspore_boost_ext.runtime import masks

SHAPE = (2, 4, 128, 128)  # of scores; just enough values for the shorter way
MASKS = [(128, 128), (2, 1, 1, 128), (2, 4, 128, 1), (4, 1, 128)]
LARGER = (128, 1), (2, 4, 1, 128)  # a tensor and a mask; the result has the shape of scores


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def chances(*shape):
    return np.random.default_rng(shape).random(shape) < 0.5


class ByFunction(nn.Cell):
    def construct(self, x, mask, value):
        return ops.masked_fill(x, mask, value)


class ByMethod(nn.Cell):
    def construct(self, x, mask, value):
        return x.masked_fill(mask, value)


class OfNumber(nn.Cell):
    """Fills with a Python number, as scripts do."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def construct(self, x, mask):
        return ops.masked_fill(x, mask, self.value)


class Slopes(nn.Cell):
    """The gradients of a cell whose outputs have given weights, by all its inputs."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, one, two, three, weights):
        return self.gradient(self.cell)(one, two, three, weights)


@pytest.fixture
def left_to_mindspore(monkeypatch):
    """Record the shapes of masks that are left to MindSpore's functions."""
    seen, fills, chooses = [], masks.MASKED_FILL, masks.WHERE

    def masked_fill(x, mask, value):
        record(mask.shape)
        return fills(x, mask, value)

    def where(mask, one, other):
        record(mask.shape)
        return chooses(mask, one, other)

    @ops.constexpr(check=False)
    def record(shape):
        seen.append(shape)

    monkeypatch.setattr(masks, "MASKED_FILL", masked_fill)
    monkeypatch.setattr(masks, "WHERE", where)
    return seen


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("cell", [ByFunction, ByMethod])
def test_values_and_gradients(mode, cell, shape):
    x, mask, weights = normal(*SHAPE), chances(*shape), normal(*SHAPE, seed=1)
    inputs = Tensor(x), Tensor(mask), Tensor(-2.5)
    np.testing.assert_array_equal(cell()(*inputs).asnumpy(), np.where(mask, np.float32(-2.5), x))
    by_x, *others = Slopes(cell())(*inputs, Tensor(weights))
    np.testing.assert_array_equal(by_x.asnumpy(), np.where(mask, 0, weights))
    expected = np.where(mask, weights, 0).sum(dtype=np.float64)
    # Partial sums of 131,072 normal numbers reach some 400; each of n additions in float32 rounds
    # them by up to 1.5e-5, in all by about sqrt(n) of that, 5e-3.
    np.testing.assert_allclose(others[-1].asnumpy(), expected, rtol=1e-4, atol=1e-2)


def test_a_mask_with_more_axes(mode, left_to_mindspore):
    x, mask = (kind(*shape) for kind, shape in zip((normal, chances), LARGER))
    found = OfNumber(1.5)(Tensor(x), Tensor(mask)).asnumpy()
    np.testing.assert_array_equal(found, np.where(mask, np.float32(1.5), x))
    # Python repeats no numbers: there ops.tile has no second gradient.
    assert left_to_mindspore == ([] if mode == "graph" else [LARGER[1]])


@pytest.mark.parametrize("value", [-1e9, float("-inf"), float("nan")])
def test_a_number(mode, value, left_to_mindspore):
    x, mask = normal(*SHAPE), chances(128, 128)
    found = OfNumber(value)(Tensor(x), Tensor(mask)).asnumpy()
    np.testing.assert_array_equal(found, np.where(mask, np.float32(value), x))
    assert left_to_mindspore == []


@pytest.mark.skipif(_compat.VERSION < (2, 10), reason="the method then is MindSpore's own")
def test_the_method_takes_it_where_python_runs_it(pynative_mode, left_to_mindspore):
    Tensor(normal(*SHAPE)).masked_fill(Tensor(chances(4, 1, 128)), 1.0)
    Tensor(normal(4, 4)).masked_fill(Tensor(chances(4)), 1.0)
    assert left_to_mindspore == [(4,)]


LEFT = {
    "few values": (normal(2, 128, 128), chances(128, 128), 1.5),
    "equal shapes": (normal(*SHAPE), chances(*SHAPE), 1.5),
    "another dtype": (normal(*SHAPE).astype(np.float16), chances(128, 128), 1.5),
    "one for all": (normal(*SHAPE), chances(1), 1.5),
    "short rows": (normal(2**16, 2), chances(2**16, 1), 1.5),
    "nine axes": (normal(*[2] * 7, 8, 128), chances(*[1] * 8, 128), 1.5),
    "another dtype of the value": (normal(*SHAPE), chances(128, 128), Tensor(1.5, mstype.float64)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_mindspore(pynative_mode, case, left_to_mindspore):
    x, mask, value = LEFT[case]
    found = ops.masked_fill(Tensor(x), Tensor(mask), value).asnumpy()
    np.testing.assert_array_equal(found, np.where(mask, 1.5, x).astype(x.dtype))
    assert left_to_mindspore == [mask.shape]


@pytest.mark.parametrize("value", [[2.5], [2.5] * 128])
def test_a_value_with_axes_is_refused_as_by_mindspore(pynative_mode, value):
    """For few values and for many."""
    for shape in ((4, 128), SHAPE):
        with pytest.raises((TypeError, ValueError)):
            ops.masked_fill(Tensor(normal(*shape)), Tensor(chances(128)), Tensor(value)).asnumpy()


@pytest.mark.parametrize("value", [2, True])
def test_a_whole_number_is_refused_as_by_mindspore(pynative_mode, value):
    for shape in ((4, 128), SHAPE):
        with pytest.raises(TypeError):
            ops.masked_fill(Tensor(normal(*shape)), Tensor(chances(128)), value).asnumpy()


def test_an_input_that_is_a_number_is_refused_as_by_mindspore(pynative_mode):
    with pytest.raises(TypeError):
        ops.masked_fill(1.5, Tensor(chances(*SHAPE)), Tensor(2.5)).asnumpy()


def test_a_wrong_mask_ends_in_mindspores_error(pynative_mode):
    with pytest.raises(ValueError, match="need to broadcast"):
        ops.masked_fill(Tensor(normal(*SHAPE)), Tensor(chances(127)), 1.0)


def test_unknown_sizes_are_left_to_mindspore(graph_mode, left_to_mindspore):
    cell, x, mask = OfNumber(1.5), normal(*SHAPE), chances(128, 128)
    cell.set_inputs(Tensor(shape=[None, 4, 128, 128], dtype=mstype.float32), Tensor(mask))
    found = cell(Tensor(x), Tensor(mask)).asnumpy()
    np.testing.assert_array_equal(found, np.where(mask, np.float32(1.5), x))
    assert left_to_mindspore


class Mapped(nn.Cell):
    def __init__(self, axes):
        super().__init__()
        self.cell, self.axes = OfNumber(-3.0), axes

    def construct(self, x, mask):
        return ops.vmap(self.cell, self.axes)(x, mask)


MAPPED = [
    ((0, None), (128, 128)),
    ((1, None), (128, 128)),
    ((0, 0), (8, 128, 128)),
    ((None, 1), (128, 3, 128)),
]


@pytest.mark.parametrize(("axes", "shape"), MAPPED)
def test_mapped_over_any_axis(graph_mode, axes, shape):
    """MindSpore's own operator refuses most of these shapes."""
    given = normal(8, 8, 128, 128), chances(*shape)
    found = Mapped(axes)(*map(Tensor, given)).asnumpy()
    x, mask = (one if axis is None else np.moveaxis(one, axis, 0) for one, axis in zip(given, axes))
    for place, one in enumerate(found):
        of_x = x if axes[0] is None else x[place]
        of_mask = mask if axes[1] is None else mask[place]
        np.testing.assert_array_equal(one, np.where(of_mask, np.float32(-3.0), of_x))


def test_the_import_replaces_them_and_undoes_that():
    replaced = masks.masked_fill, masks.where
    assert (ops.masked_fill, ops.where) == replaced
    tune_machine(False)
    try:
        assert (ops.masked_fill, ops.where) == (masks.MASKED_FILL, masks.WHERE)
    finally:
        tune_machine()
    assert (ops.masked_fill, ops.where) == replaced


# ---- ops.where ----


class Choice(nn.Cell):
    """Chooses by a mask between tensors, and a number if it has one."""

    def __init__(self, number=None):
        super().__init__()
        self.number = number

    def construct(self, mask, x, y):
        if self.number is None:
            return ops.where(mask, x, y)
        return ops.where(mask, self.number, x) + ops.where(mask, y, self.number)


OPERANDS = [
    (SHAPE, (128, 128), (2, 1, 128, 128)),
    ((128, 128), SHAPE, SHAPE),
    ((2, 4, 1, 128), (128, 1), ()),
    (SHAPE, (1,), SHAPE),
]


@pytest.mark.parametrize("shapes", OPERANDS)
def test_a_choice_and_its_gradients(mode, shapes, left_to_mindspore):
    mask, x, y = chances(*shapes[0]), *(normal(*one, seed=2) for one in shapes[1:])
    inputs, weights = [Tensor(one) for one in (mask, x, y)], normal(*SHAPE)
    np.testing.assert_array_equal(Choice()(*inputs).asnumpy(), np.where(mask, x, y))
    *_, by_x, by_y = Slopes(Choice())(*inputs, Tensor(weights))
    repeats = any(one.size > 1 and one.shape != SHAPE for one in (x, y))
    assert bool(left_to_mindspore) == (mode == "pynative" and repeats)
    for found, given, chosen in ((by_x, x, mask), (by_y, y, ~mask)):
        slopes = np.where(chosen, np.float64(weights), 0)
        axes = slopes.ndim - given.ndim
        fixed = [axes + at for at, size in enumerate(given.shape) if size == 1]
        slopes = slopes.sum(tuple(range(axes))).sum(tuple(at - axes for at in fixed), keepdims=True)
        # As above: sums of up to 131,072 normal numbers.
        np.testing.assert_allclose(
            found.asnumpy(), slopes.reshape(given.shape), rtol=1e-4, atol=1e-2
        )


@pytest.mark.parametrize("shape", [(4, 1, 128), ()])
def test_a_second_gradient(mode, shape):
    """Of the sum of cubes, where each of them was chosen several times."""
    mask, x, y = chances(128, 128), Tensor(normal(*SHAPE)), normal(*shape)

    def slope(y):
        return ops.grad(lambda y: (ops.where(Tensor(mask), x, y) ** 3).sum())(y).sum()

    found = ops.grad(slope)(Tensor(y)).asnumpy()
    chosen = np.broadcast_to(~mask, SHAPE).astype(np.float64)
    times = chosen.sum() if shape == () else chosen.sum((0, 2), keepdims=True)[0]
    expected = np.broadcast_to(6 * np.float64(y) * times, shape)
    # Up to 65,536 terms, added in float32: each of n additions rounds by up to 6e-8 of the sum, all
    # together by about sqrt(n) of that, 2e-5.
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("number", [0.5, 3, True, float("-inf")])
def test_a_choice_of_a_number(mode, number, left_to_mindspore):
    mask, x, y = chances(*SHAPE), normal(*SHAPE), normal(*SHAPE, seed=1)
    found = Choice(number)(*map(Tensor, (mask, x, y))).asnumpy()
    value = np.float32(number)
    np.testing.assert_array_equal(found, np.where(mask, value, x) + np.where(mask, y, value))
    assert left_to_mindspore == []


NOT_CHOSEN = {
    "few values": (chances(128, 128), normal(128, 128), 1.5),
    "equal shapes": (chances(*SHAPE), normal(*SHAPE), normal(*SHAPE, seed=1)),
    "one for all": (chances(1), normal(*SHAPE), 1.5),
    "short rows": (chances(2**16, 2), normal(2**16, 1), 1.5),
    "two numbers": (chances(*SHAPE), 1.5, 2.5),
    "another dtype": (chances(128, 128), normal(*SHAPE), normal(128).astype(np.float16)),
    "whole numbers": (chances(128, 128), np.ones(SHAPE, np.int32), 2),
}


@pytest.mark.parametrize("case", NOT_CHOSEN)
def test_a_choice_that_is_left_to_mindspore(pynative_mode, case, left_to_mindspore):
    given = NOT_CHOSEN[case]
    found = ops.where(*(Tensor(one) if isinstance(one, np.ndarray) else one for one in given))
    np.testing.assert_array_equal(found.asnumpy(), np.where(*given))
    assert left_to_mindspore == [given[0].shape]
