"""Sums over all values, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn

from mindspore_boost_ext.base.sums import finite_sums, sum_of_squares

SHAPES = [(), (1,), (7,), (3, 5), (4, 2, 3, 3), (1000, 1000), (8191, 3)]


class Sums(nn.Cell):
    """Both functions, compiled in GRAPH_MODE."""

    def construct(self, value):
        return sum_of_squares(value), finite_sums(value)


def values(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_of_squares(mode, shape):
    value = values(shape)
    squares, sums = Sums()(Tensor(value))
    assert squares.shape == ()
    # 6e-8 an addition of float32, of up to 1,000 in a row.
    np.testing.assert_allclose(squares.asnumpy(), np.square(value, dtype=np.float64).sum(), 2e-6)
    assert np.isfinite(sums.asnumpy()).all()


@pytest.mark.parametrize("shape", [(2**12, 2**12), (2**24 + 43,)], ids=["2 ** 24", "a prime"])
def test_equal_squares_lose_no_digits(mode, shape):
    """Added up one after the other, those of 2 ** 24 equal values would lose two per cent."""
    value = np.full(shape, 0.1, np.float32)
    squares, _ = Sums()(Tensor(value))
    expected = value.size * np.float64(np.float32(0.1)) ** 2
    np.testing.assert_allclose(squares.asnumpy(), expected, 2e-6)  # as above


def test_the_largest_values_have_a_finite_sum(mode):
    value = np.full((3, 100_000), np.finfo(np.float32).max, np.float32)
    assert np.isfinite(Sums()(Tensor(value))[1].asnumpy()).all()


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (40, 2, 3, 3)])
@pytest.mark.parametrize("bad", [[np.inf], [-np.inf], [np.nan], [np.inf, -np.inf]])
def test_what_is_not_finite_is_found_at_every_place(mode, shape, bad):
    net = Sums()
    for place in range(np.prod(shape)):
        value = values(shape)
        for offset, one in enumerate(bad):
            value.flat[(place + offset) % value.size] = one
        assert not np.isfinite(net(Tensor(value))[1].asnumpy()).all(), (shape, place)
