"""The THOR benchmark on settings small enough for a test. Nothing is timed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="module")
def benchmark():
    """Load by path: ``thor`` alone is too short a name to import."""
    spec = importlib.util.spec_from_file_location("benchmark_thor", BENCHMARKS / "thor.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_thor"] = module
    spec.loader.exec_module(module)
    return module


def test_thor_needs_fewer_steps_than_momentum(benchmark, graph_mode):
    problem = benchmark.PROBLEMS["ill-conditioned"]
    methods = {one.name: one for one in benchmark.methods(problem, 20)}
    # The best rates of the benchmark's grids; the demand is half of momentum's steps.
    momentum = benchmark.Trainer(problem, methods["momentum"]).run(1.0, 0, 200)
    thor = benchmark.Trainer(problem, methods[benchmark.EVERY_STEP]).run(0.1, 0, 200)
    assert momentum.reached
    assert thor.reached
    assert thor.steps <= 0.5 * momentum.steps
    assert thor.inversions == 3 * thor.steps


def test_the_model_of_a_refresh_counts_flops_and_bytes(benchmark):
    import thor_speed

    class Plan:
        kind, a_size, g_size = "Conv2d", 3, 2

    class Optimizer:
        class curvature:
            plans = (Plan(),)

    products, inverses, moved = thor_speed.refresh_work(Optimizer, [10])
    assert products == 2 * 10 * (9 + 4)
    assert inverses == 8 / 3 * (27 + 8)
    assert moved == 4 * 10 * (3 * 3 + 2 * 2)
