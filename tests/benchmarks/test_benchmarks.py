"""The benchmarks' own arithmetic, on cases small enough to do by hand. Nothing is timed here."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import loss_scaling  # noqa: E402
from mindspore import Tensor  # noqa: E402


def scalar_case():
    """Four layers of one number each: x = 1, 1.5, 2.5, 3, 3.5 and e = 0.5 at the top."""
    weights = [[[0.5]], [[1.0]], [[2.0]], [[0.25]]]
    biases = [[1.0], [1.0], [-2.0], [2.75]]
    return loss_scaling.Case(
        [np.array(weight, np.float32) for weight in weights],
        [np.array(bias, np.float32) for bias in biases],
        np.array([[1.0]], np.float32),
        np.array([[3.0]], np.float32),
    )


def test_the_oracle_is_the_chain_rule():
    # Gradient of W_l: x_(l-1) * 0.5 * (the weights above it).
    expected = [1.0 * 0.5 * 0.25 * 2.0 * 1.0, 1.5 * 0.5 * 0.25 * 2.0, 2.5 * 0.5 * 0.25, 3.0 * 0.5]
    assert [float(one[0, 0]) for one in loss_scaling.oracle(scalar_case())] == expected


def test_a_closed_relu_lets_no_gradient_through():
    case = scalar_case()
    case.biases[1][:] = -2.0
    assert [float(one[0, 0]) for one in loss_scaling.oracle(case)[:2]] == [0.0, 0.0]


def test_zero_share_and_relative_error():
    gradient, exact = np.array([0.0, 3.0, 0.0, 5.0]), np.array([0.0, 3.0, 0.0, 4.0])
    assert loss_scaling.zero_share(gradient) == 0.5
    assert loss_scaling.relative_error(gradient, exact) == pytest.approx(0.2, rel=1e-15)
    assert loss_scaling.relative_error(np.array([np.inf, 1.0]), exact[:2]) == float("inf")


# All numbers of the scalar case are exact in float16, and so are products with powers of two.
@pytest.mark.parametrize("scheme", ["no scale", "2^10"])
def test_gradients_pass_the_step_unchanged(scheme, mode):
    outcome = loss_scaling.run_scheme(scalar_case(), loss_scaling.SCHEMES[scheme]())
    assert outcome.errors == [0.0] * 4
    assert outcome.zeros == [0.0] * 4
    assert not outcome.overflow
    assert outcome.steps == 1


def test_an_overflow_shows_in_the_layer_that_has_it(mode):
    # 2^16 times 0.25, 0.375, 0.3125 and 1.5: only the last is above 65504, float16's largest
    # number.
    outcome = loss_scaling.run_scheme(scalar_case(), Tensor(2.0**16, ms.float32))
    assert outcome.overflow
    assert outcome.errors == [0.0, 0.0, 0.0, float("inf")]
