"""Benchmarks start, and some of them come to a table in seconds. Nothing is timed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import matplotlib
import mindspore as ms
import pytest
import scripts

from mindspore_boost_ext import _compat

matplotlib.use("Agg")
BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))
SCRIPTS = [one for one in sorted(BENCHMARKS.glob("*.py")) if "__main__" in one.read_text("utf-8")]


@pytest.fixture(autouse=True)
def _mode_as_before():
    before = ms.get_context("mode")
    yield
    ms.set_context(mode=before)


def load(name):
    """Load a script under a name of its own: the package has modules of the same names."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [one.stem for one in SCRIPTS])
def test_its_docstring_says_how_to_start_it_and_its_help_lists_the_options(
    name, capsys, monkeypatch
):
    module = load(name)
    assert f"python examples/benchmarks/{name}.py" in module.__doc__
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "reference"),
    [([], ("LeNet", "plain")), (["--over-graph"], ("LeNet in GRAPH_MODE", "tuned"))],
)
def test_a_compiled_step_runs_by_turns_with_its_reference(option, reference, capsys, monkeypatch):
    machine = load("machine")
    result = {"seconds": 1.0, "weights": 1.0}
    process = mock.create_autospec(machine.in_own_process, return_value=result)
    monkeypatch.setattr(machine, "in_own_process", process)
    machine.main(["--compiled", *option, "LeNet", "--cores", "1", "--rounds", "2", "--isa", "AVX2"])
    assert "| LeNet, step | 1 | 1000.0 | 1000.0 | 1.000 |" in capsys.readouterr().out
    runs = [("LeNet", "compiled"), reference, reference, ("LeNet", "compiled")]
    assert process.mock_calls == [mock.call(*run, 1, "AVX2", "machine") for run in runs]


def test_adasum_counts_rounds_and_cost(capsys, monkeypatch):
    adasum = load("adasum")
    monkeypatch.setattr(adasum, "RATES", (1.0,))
    arguments = ["--seeds", "1", "--workers", "2", "--most", "3"]
    adasum.main(["--parts", "rounds", "cost", *arguments])
    shown = capsys.readouterr().out
    assert "| 2 | never | never | never |" in shown
    if _compat.reduces_in_groups():
        assert "| 4 | 1 | halved | 5 |" in shown  # collectives
    assert "| 4 | 1 | gathered | 1 |" in shown


def test_subspace_methods_run_and_are_drawn(graph_mode, tmp_path, capsys):
    dim_reduce = load("dim_reduce")
    plan = dim_reduce.Plan(first=4, second=1, snapshots=6, directions=4, hidden=8)
    runs = dim_reduce.races(plan, 0.0, 0, tmp_path)
    dim_reduce.run_table({"clean": [runs]}, plan)
    dim_reduce.plot_runs({"clean": [runs]}, tmp_path / "runs.png")
    assert "| clean | P-BFGS |" in capsys.readouterr().out
    assert (tmp_path / "runs.png").stat().st_size > 0


def test_thor_needs_fewer_steps_than_momentum(graph_mode):
    """The claim of THOR's card, at the best rates of the benchmark's grids."""
    thor = load("thor")
    problem = thor.PROBLEMS["ill-conditioned"]
    methods = {one.name: one for one in thor.methods(problem)}
    momentum = thor.Trainer(problem, methods["momentum"]).run(1.0, 0, 200)
    second_order = thor.Trainer(problem, methods[thor.EVERY_STEP]).run(0.1, 0, 200)
    assert momentum.reached
    assert second_order.reached
    assert second_order.steps <= 0.5 * momentum.steps


def test_a_short_soak_prints_its_table():
    ended = scripts.run(BENCHMARKS / "soak.py", "grad_accumulation", "--steps", "60")
    assert ended.returncode in (0, 1), ended.stderr  # so few steps may well drift
    row = [cell.strip() for cell in ended.stdout.splitlines()[-1].split("|")[1:-1]]
    assert row[0] == "grad_accumulation"
    assert row[-3] == row[-2]  # no more graphs at the end
