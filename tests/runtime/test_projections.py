"""The projections of ``nn.MultiheadAttention`` after the import: MindSpore's values, faster."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.function import nn_func

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import projections

# Rounding of float32 sums of up to 12 products of normal numbers.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


class Projection(nn.Cell):
    """Calls the function as ``nn.MultiheadAttention`` does: by its name in MindSpore's module."""

    def construct(self, x, w, b):
        return nn_func.linear(x, w, b)


class Slopes(nn.Cell):
    """The gradients of a cell whose outputs have given weights, by all its inputs."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, x, w, b, weights):
        return self.gradient(self.cell)(x, w, b, weights)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_values_and_gradients(mode, shape):
    x, w, b = normal(*shape), normal(5, 4), normal(5)
    weights = normal(*shape[:-1], 5, seed=1)
    inputs = [Tensor(one) for one in (x, w, b)]
    expected = np.float64(x) @ np.float64(w).T + b
    np.testing.assert_allclose(Projection()(*inputs).asnumpy(), expected, **TOLERANCE)
    slopes = Slopes(Projection())(*inputs, Tensor(weights))
    rows = np.float64(weights).reshape(-1, 5)
    right = np.float64(weights) @ w, rows.T @ x.reshape(-1, 4), rows.sum(0)
    for found, gradient in zip(slopes, right):
        np.testing.assert_allclose(found.asnumpy(), gradient, **TOLERANCE)


def test_without_a_bias(mode):
    x, w = normal(2, 3, 4), normal(5, 4)
    found = Projection()(Tensor(x), Tensor(w), None).asnumpy()
    np.testing.assert_allclose(found, x @ w.T, **TOLERANCE)


class Attention(nn.Cell):
    """An attention layer's output, for a loss of one number."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **settings)

    def construct(self, x, other):
        return self.attention(x, other, other)[0]


@pytest.fixture
def left_to_mindspore(monkeypatch):
    """Record the dtypes of what is left to MindSpore's function."""
    seen, mindspores = [], projections.ORIGINAL

    def linear(x, w, b):
        record(x.dtype, w.dtype)
        return mindspores(x, w, b)

    @ops.constexpr(check=False)
    def record(*dtypes):
        seen.append(dtypes)

    monkeypatch.setattr(projections, "ORIGINAL", linear)
    return seen


@pytest.mark.parametrize("settings", [{}, {"kdim": 3, "vdim": 3}, {"has_bias": False}])
def test_attention_takes_it_and_keeps_its_values(mode, left_to_mindspore, settings):
    layer = Attention(**settings)
    x, other = Tensor(normal(3, 2, 4)), Tensor(normal(5, 2, settings.get("kdim", 4), seed=1))
    found = layer(x, other).asnumpy()
    assert left_to_mindspore == []
    plain = Attention(**settings)
    for own, same in zip(plain.get_parameters(), layer.get_parameters()):
        own.set_data(same)
    tune_machine(False)
    try:
        np.testing.assert_allclose(found, plain(x, other).asnumpy(), **TOLERANCE)
    finally:
        tune_machine()


def test_sixteen_bits_are_left_to_mindspore(graph_mode, left_to_mindspore):
    inputs = [Tensor(one, mstype.float16) for one in (normal(3, 4), normal(5, 4), normal(5))]
    Projection()(*inputs)
    assert set(left_to_mindspore) == {(mstype.float16, mstype.float16)}


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_bias_of_one_number_is_added_as_by_mindspore(mode, left_to_mindspore, shape):
    x, w, b = normal(3, 4), normal(5, 4), normal(*shape)
    found = Projection()(*(Tensor(one) for one in (x, w, b))).asnumpy()
    np.testing.assert_allclose(found, np.float64(x) @ np.float64(w).T + b, **TOLERANCE)
    assert left_to_mindspore


def test_a_matrix_of_another_size_ends_in_mindspores_error(pynative_mode, left_to_mindspore):
    with pytest.raises((RuntimeError, ValueError)):
        Projection()(*(Tensor(normal(*one)) for one in ((3, 4), (5, 6), (5,)))).asnumpy()
    assert left_to_mindspore


def test_a_bias_of_16_bits_is_left_to_mindspore(mode, left_to_mindspore):
    x, w, b = normal(3, 4), normal(5, 4), normal(5).astype(np.float16)
    found = Projection()(Tensor(x), Tensor(w), Tensor(b)).asnumpy()
    np.testing.assert_allclose(found, x @ w.T + b, **TOLERANCE)
    assert left_to_mindspore


def test_mixed_precision_auto(graph_mode, monkeypatch, tmp_path):
    """MindSpore casts the inputs of the product to float16, and not those of the sum."""
    monkeypatch.chdir(tmp_path)  # MindSpore writes files of rewritten networks
    x = Tensor(normal(3, 2, 4))
    plain = Attention()
    expected = plain(x, x).asnumpy()
    found = amp.auto_mixed_precision(plain, "auto", mstype.float16)(x, x)
    # Numbers below 4 have 11 bits in float16; the deviations of three products add up.
    np.testing.assert_allclose(found.asnumpy(), expected, atol=1e-2)


class Mapped(nn.Cell):
    """Maps the layer over an axis of its first input."""

    def __init__(self, axis):
        super().__init__()
        self.layer, self.axis = Attention(), axis

    def construct(self, x, other):
        return ops.vmap(self.layer, (self.axis, None))(x, other)


@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_over_any_axis(graph_mode, axis):
    """MindSpore's own layer is wrong there, unless the axis is the first one."""
    x, other = normal(2, 3, 2, 4), Tensor(normal(5, 2, 4, seed=1))
    mapped = Mapped(axis)
    each = [mapped.layer(Tensor(one), other).asnumpy() for one in x]
    moved = Tensor(np.ascontiguousarray(np.moveaxis(x, 0, axis)))
    np.testing.assert_allclose(mapped(moved, other).asnumpy(), each, **TOLERANCE)
