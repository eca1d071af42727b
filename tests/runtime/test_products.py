"""``ops.matmul`` after the import: MindSpore's values; in graphs one product with a matrix."""

from __future__ import annotations

import operator

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from mindspore_boost_ext import _compat, tune_machine
from mindspore_boost_ext.runtime import products

# Rounding of float32 sums of up to 12 products of normal numbers.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SHAPES = [
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (4, 1)),
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 2, 3, 4), (2, 4, 5)),
    ((3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((4,), (4, 5)),
]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


class ByFunction(nn.Cell):
    def construct(self, x, y):
        return ops.matmul(x, y)


class BySign(nn.Cell):
    def construct(self, x, y):
        return x @ y


class ByMethod(nn.Cell):
    def construct(self, x, y):
        return x.matmul(y)


class ByMint(nn.Cell):
    def construct(self, x, y):
        return mint.matmul(x, y)


class Slopes(nn.Cell):
    """The gradients of a cell whose outputs have given weights, by both inputs."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, x, y, weights):
        return self.gradient(self.cell)(x, y, weights)


def slopes_by_numpy(x, y, weights):
    """Return both gradients in float64."""
    rows = np.atleast_2d(np.float64(x))
    columns = np.float64(y if y.ndim > 1 else y[:, None])
    weights = np.float64(weights).reshape((rows @ columns).shape)
    of_x, of_y = weights @ columns.swapaxes(-1, -2), rows.swapaxes(-1, -2) @ weights
    return summed(of_x, rows.shape).reshape(x.shape), summed(of_y, columns.shape).reshape(y.shape)


def summed(gradient, shape):
    """Sum over the first axes, along which a value was used again and again."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    repeated = [axis for axis, size in enumerate(shape) if size < gradient.shape[axis]]
    return gradient.sum(tuple(repeated), keepdims=True)


CASES = [(ByFunction, *shapes) for shapes in SHAPES]
CASES += [(cell, *SHAPES[0]) for cell in (BySign, ByMethod, ByMint)]


@pytest.mark.parametrize(("cell", "one", "other"), CASES)
def test_values_and_gradients(mode, cell, one, other):
    x, y = normal(*one), normal(*other, seed=1)
    expected = np.matmul(np.float64(x), np.float64(y))
    weights = normal(*expected.shape, seed=2)
    np.testing.assert_allclose(cell()(Tensor(x), Tensor(y)).asnumpy(), expected, **TOLERANCE)
    found = Slopes(cell())(Tensor(x), Tensor(y), Tensor(weights))
    for gradient, right in zip(found, slopes_by_numpy(x, y, weights)):
        np.testing.assert_allclose(gradient.asnumpy(), right, **TOLERANCE)


@pytest.fixture
def left_to_mindspore(monkeypatch):
    """Record the numbers of axes of what is left to MindSpore's function in a graph."""
    seen, mindspores = [], products.ORIGINAL

    def matmul(input, other):
        record(input.ndim, other.ndim)
        return mindspores(input, other)

    @ops.constexpr(check=False)
    def record(*axes):
        seen.append(axes)

    monkeypatch.setattr(products, "ORIGINAL", matmul)
    return seen


@pytest.mark.parametrize("cell", [ByFunction, BySign, ByMethod, ByMint])
@pytest.mark.parametrize("axes", [4, 3])
def test_a_graph_multiplies_all_rows_at_once(graph_mode, left_to_mindspore, cell, axes):
    x = normal(*[3, 2, 3, 4][-axes:])
    for other in (normal(4, 5), normal(2, 4, 5)):
        found = cell()(Tensor(x), Tensor(other)).asnumpy()
        np.testing.assert_allclose(found, x @ other, **TOLERANCE)
    assert set(left_to_mindspore) == {(axes, 3)}


def test_attention_multiplies_all_rows_at_once(graph_mode, left_to_mindspore):
    """By a function of MindSpore's own, which finds ``ops.matmul`` by its name."""
    layer, x = nn.MultiheadAttention(4, 2), Tensor(normal(3, 2, 4))
    layer(x, x, x)
    assert set(left_to_mindspore) == {(4, 4)}  # scores and sums


class Mapped(nn.Cell):
    """Maps the product over an axis of its first input."""

    def __init__(self, axis, place):
        super().__init__()
        self.axis, self.place = axis, place

    def construct(self, x, y):
        def product(x, y):
            return ops.matmul(x, y)

        return ops.vmap(product, (self.axis, None), self.place)(x, y)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mapped_over_any_axis(graph_mode, axis):
    """MindSpore's own product is wrong there, unless the axis is the first one."""
    x, y = normal(3, 2, 5, 4), normal(4, 6)
    moved = np.ascontiguousarray(np.moveaxis(x, 0, axis))
    found = Mapped(axis, 1)(Tensor(moved), Tensor(y)).asnumpy()
    np.testing.assert_allclose(found, np.moveaxis(x @ y, 0, 1), **TOLERANCE)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float64, ms.int32])
def test_other_dtypes_are_mindspores(mode, dtype):
    x, y = Tensor(np.arange(24).reshape(2, 3, 4), dtype), Tensor(np.ones((4, 2)), dtype)
    found = ByFunction()(x, y)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.asnumpy(), x.asnumpy() @ y.asnumpy())  # whole numbers


def test_shapes_known_at_the_step_alone(graph_mode):
    for shape in ([None, None, 4], [-2]):
        cell = ByFunction()
        cell.set_inputs(
            Tensor(shape=shape, dtype=ms.float32), Tensor(shape=[4, 5], dtype=ms.float32)
        )
        for count in (2, 3):
            x, y = normal(count, 3, 4), normal(4, 5)
            found = cell(Tensor(x), Tensor(y)).asnumpy()
            np.testing.assert_allclose(found, x @ y, **TOLERANCE)


@pytest.mark.parametrize(
    ("x", "y"), [(normal(2, 3, 4), np.ones((4, 5), np.int32)), (normal(2, 3, 4), normal(3, 5))]
)
def test_what_mindspore_refuses_is_refused_by_it(mode, untuned, x, y):
    def error():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            ByFunction()(Tensor(x), Tensor(y)).asnumpy()
        return type(caught.value), str(caught.value).partition("\n")[0]

    tune_machine(False)
    expected = error()
    tune_machine()
    assert error() == expected


def test_all_names_are_given_back(untuned):
    names = [(ops, "matmul"), (mint, "matmul"), (ops.functional, "matmul")]
    for tuned, expected in ((True, products.matmul), (False, products.ORIGINAL)):
        tune_machine(tuned)
        found = [getattr(where, name) for where, name in names]
        found.append(_compat.IN_GRAPHS[operator.matmul])
        assert all(one is expected for one in found)
