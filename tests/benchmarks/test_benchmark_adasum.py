"""The benchmark of AdaSum: its arithmetic on cases done by hand, and a run with tiny settings."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import oracles
import pytest

from mindspore_boost_ext import _compat

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="module")
def adasum():
    """Load the script under a name of its own: the package has a module of the same name."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("benchmark_adasum", BENCHMARKS / "adasum.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_rule_is_that_of_the_oracle(adasum):
    parts = list(np.random.default_rng(0).normal(size=(4, 3, 5)))
    np.testing.assert_allclose(adasum.adasum(parts), oracles.adasum(parts), rtol=1e-14)


def test_its_gradients_are_differences_of_its_loss(adasum):
    generator = np.random.default_rng(0)
    weights = adasum.first_weights(generator)
    images, labels = (one[:20] for one in adasum.digits())
    slopes = adasum.gradients(weights, images, labels)
    for index, slope in enumerate(slopes):
        step = generator.normal(size=slope.shape)
        losses = []
        for sign in (1, -1):
            moved = [one + 0.0 for one in weights]
            moved[index] += sign * 1e-6 * step
            losses.append(adasum.loss_of(moved, images, labels))
        # Central differences of step 1e-6: truncation 1e-12, rounding 1e-16 / 1e-6.
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((slope * step).sum(), abs=1e-7)


def test_rounds_and_cost_print_their_tables(adasum, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(adasum, "RATES", (1.0,))
    plot = tmp_path / "rounds.png"
    arguments = ["--seeds", "1", "--workers", "2", "--most", "3", "--plot", str(plot)]
    adasum.main(["--parts", "rounds", "cost", *arguments])
    shown = capsys.readouterr().out
    assert "| 2 | never | never | never |" in shown
    if _compat.reduces_in_groups():
        assert "| 4 | 1 | halved | 5 |" in shown  # collectives
    assert "| 4 | 1 | gathered | 1 |" in shown
    assert plot.stat().st_size > 1000
