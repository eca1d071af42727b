"""The inverse of a damped factor, on the host and by the operators of other devices."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from mindspore_boost_ext.thor.inverse import (
    ByCholesky,
    by_lu,
    damped_inverse,
    inverse_for_device,
)

# Indefinite (an eigenvalue is -0.2), though its diagonal and all its 2 x 2 minors are positive.
HIDDEN = np.array([[1.0, -0.6, -0.6], [-0.6, 1.0, -0.6], [-0.6, -0.6, 1.0]], np.float32)
EPS = np.finfo(np.float32).eps


class Function(nn.Cell):
    """Makes a Cell of a function, so that it is compiled in GRAPH_MODE."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, factor, damping):
        return self.function(factor, damping)


@pytest.fixture(params=["cholesky", "lu"])
def invert(request, mode):
    cell = ByCholesky() if request.param == "cholesky" else Function(by_lu)

    def inverted(factor, damping):
        found = cell(Tensor(np.float32(factor)), Tensor(np.float32(damping)))
        return tuple(one.asnumpy() for one in found)

    return inverted


def gram(size, rows, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, size))
    return np.float32(values.T @ values / rows)


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 130, 257])
def test_it_is_the_inverse(invert, size):
    """As NumPy's in float64; sizes on both sides of those at which the halving begins and ends."""
    factor, damping = gram(size, 2 * size), 0.01
    inverse, used, good = invert(factor, damping)
    exact = np.linalg.inv(np.float64(factor) + damping * np.eye(size))
    assert good
    assert used == pytest.approx(damping)
    # The input's rounding, times the condition (about 400), with room for the order of sums.
    np.testing.assert_allclose(inverse, exact, rtol=0, atol=2000 * EPS * np.abs(exact).max())
    np.testing.assert_array_equal(inverse.shape, factor.shape)


def test_blocks_are_inverted_each_by_itself(invert):
    factor = np.stack([gram(70, 200, seed) for seed in range(3)])
    inverse, _, good = invert(factor, 0.1)
    assert good
    for block, found in zip(factor, inverse):
        exact = np.linalg.inv(np.float64(block) + 0.1 * np.eye(70))
        # Condition about 25; room for the order of sums as above.
        np.testing.assert_allclose(found, exact, rtol=0, atol=200 * EPS * np.abs(exact).max())


def test_a_singular_factor_is_damped_as_rounding_needs(invert):
    """Rank 2 of 50 and a damping of nearly 0: finite, positive definite, and said to be raised."""
    factor = gram(50, 2)
    inverse, used, good = invert(factor, 1e-12)
    largest = np.linalg.eigvalsh(np.float64(factor)).max()
    assert good
    assert EPS * largest < used < 1e-3 * largest  # above rounding, and far below the factor
    assert np.isfinite(inverse).all()
    assert np.linalg.eigvalsh(np.float64(inverse)).min() > 0


def test_an_indefinite_factor_that_looks_definite_raises_the_damping():
    """Enough to invert it, and no more than ten times that: 0.2 is the least."""
    inverse, used, good = damped_inverse(HIDDEN, 1e-3)
    assert good
    assert 0.2 < used <= 2.0
    # float64, condition below 100
    np.testing.assert_allclose(inverse @ (HIDDEN + used * np.eye(3)), np.eye(3), atol=1e-12)
    assert np.linalg.eigvalsh(inverse).min() > 0


def test_an_indefinite_factor_never_makes_a_bad_inverse(invert):
    """Cholesky raises the damping; LU cannot see this one before, and says that it is not good."""
    inverse, used, good = invert(HIDDEN, 1e-3)
    assert np.isfinite(inverse).all()
    assert not good or used > 0.2


@pytest.mark.parametrize("sign", [-1.0, -1e6, -1e-6])
def test_a_negative_definite_factor(invert, sign):
    inverse, used, good = invert(sign * np.eye(4), 1e-9)
    assert good
    assert used > abs(sign)
    assert (np.diag(inverse) > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_factor_that_is_not_finite_is_not_good(invert, bad):
    factor = gram(5, 20)
    factor[1, 2] = bad
    inverse, _, good = invert(factor, 0.1)
    assert not good
    assert np.isfinite(inverse).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damping_that_is_not_finite_is_not_good(invert, bad):
    """π-damping makes one where the other factor is not finite; the search must still end."""
    _, _, good = invert(-gram(5, 20), bad)
    assert not good


def test_an_inverse_that_leaves_float32_is_not_good(invert):
    _, _, good = invert(1e-42 * np.eye(3), 0.0)  # its inverse is 1e42
    assert not good


def test_nothing_at_all_is_not_good(invert):
    """No factor and no damping: there is no inverse, and no search that never ends."""
    _, _, good = invert(np.zeros((3, 3)), 0.0)
    assert not good


@pytest.mark.parametrize(("target", "times"), [("Ascend", 1), ("GPU", 0)])
def test_other_devices_do_not_ask_the_host(monkeypatch, target, times):
    """On Ascend mint.inverse inverts, which cannot run here: ops.inverse has no kernel there."""
    asked = []

    def recorded(matrix):
        asked.append(matrix)
        return ops.inverse(matrix)

    monkeypatch.setattr(mint, "inverse", recorded)
    with monkeypatch.context() as patch:
        patch.setattr(ms, "get_context", {"device_target": target}.__getitem__)
        chosen = inverse_for_device()
    inverse, _, good = chosen(Tensor(np.diag([1.0, 2.0]).astype(np.float32)), Tensor(0.0))
    assert good.asnumpy()
    # It is damped by 16 eps of the norm, 2, at the least: 32 eps, and some for rounding.
    assert np.allclose(inverse.asnumpy(), np.diag([1.0, 0.5]), rtol=40 * EPS, atol=0.0)
    assert len(asked) == times
