"""The benchmark of training in a subspace, with settings of a few seconds. Nothing is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import dim_reduce as benchmark  # noqa: E402


def test_the_noise_is_drawn_for_its_share_of_the_training_labels():
    clean, noisy = benchmark.digits(0.0, 1), benchmark.digits(0.3, 1)
    changed = (clean.labels != noisy.labels).mean()
    assert 0.22 < changed < 0.32  # 0.3 are drawn, one in ten of them as it was
    assert np.array_equal(clean.test_labels, noisy.test_labels)


def test_all_methods_run_and_are_drawn(graph_mode, tmp_path, capsys):
    plan = benchmark.Plan(first=6, second=1, snapshots=6, directions=4, hidden=8)
    runs = benchmark.races(plan, 0.0, 0, tmp_path)
    assert set(runs) == set(benchmark.METHODS)
    results = {"clean": [runs]}
    benchmark.run_table(results, plan)
    benchmark.plot_runs(results, tmp_path / "runs.png")
    assert "| clean | P-BFGS |" in capsys.readouterr().out
    assert (tmp_path / "runs.png").stat().st_size > 0


def test_the_basis_is_compared(capsys):
    pytest.importorskip("sklearn")
    benchmark.basis_cost(count=6, size=2000, k=3, pairs=2)
    assert "Basis of 6 x 2000 float32, k = 3" in capsys.readouterr().out


def test_upstream_stalls_and_ours_does_not(graph_mode):
    zero, loss = benchmark._stalled("mindspore.boost", 12, 50.0)
    assert zero == 12
    assert abs(loss - 1.0) < 1e-6  # float32
    zero, loss = benchmark._stalled("mindspore_boost_ext", 12, 50.0)
    assert zero <= 5
    assert loss < 0.1
