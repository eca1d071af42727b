"""Real processes: all ranks end with the same weights and scales, and with the right ones."""

from __future__ import annotations

import functools
import json
import re

import adasum_cases
import distributed_worker
import exit_worker
import launch
import mindspore as ms
import nets
import numpy as np
import oracles
import psutil
import pytest
from dying_worker import DIES_AT, MSRUN_RESTS
from mindspore import Tensor

from mindspore_boost_ext import _compat

RUNS = distributed_worker.CASES
EVERY_CASE = [(*run, name) for run, names in RUNS.items() for name in names]
PLAIN_CASES = [one for one in EVERY_CASE if not one[2].startswith("adasum")]
ADASUM_CASES = [one for one in EVERY_CASE if one[2].startswith("adasum")]


@pytest.fixture
def mode_of():
    """Return a function that sets a mode until the test ends."""
    before = ms.get_context("mode")
    yield lambda mode: ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_context(mode=before)


@pytest.mark.parametrize(("ranks", "mode", "name"), EVERY_CASE)
def test_ranks_end_bitwise_equal(ended, ranks, mode, name):
    _, results = ended(ranks, mode)
    for result in results[1:]:
        assert result[name]["weights"] == results[0][name]["weights"]
        assert result[name]["observations"] == results[0][name]["observations"]


@functools.cache  # of both modes of the ranks
def single_process(name):
    """Train one process on the whole batches, with the overflow of rank 1."""
    net, step = distributed_worker.case(name)
    for index, (x, y) in enumerate(distributed_worker.steps_of(name)):
        if index == distributed_worker.OVERFLOW_AT and name in distributed_worker.OVERFLOWING:
            x = np.full_like(x, np.inf)
        if name == "in parts":  # the first halves of both ranks, then the second
            x, y = (
                np.concatenate([*np.split(one, 4)[::2], *np.split(one, 4)[1::2]]) for one in (x, y)
            )
        step(Tensor(x), Tensor(y))
    return nets.weights(net), step.observations()


@pytest.mark.parametrize(("ranks", "mode", "name"), [one for one in PLAIN_CASES if one[2] != "sum"])
def test_ranks_train_like_one_process_on_all_the_data(ended, mode_of, ranks, mode, name):
    """The mean over ranks of means over shares is the mean over the whole, but for rounding."""
    _, results = ended(ranks, mode)
    mode_of("pynative")  # nothing to compile; both modes train the same
    weights, observations = single_process(name)
    for key, value in weights.items():
        np.testing.assert_allclose(np.array(results[0][name]["weights"][key]), value, atol=1e-6)
    assert results[0][name]["observations"].get("skipped_steps") == observations.get(
        "skipped_steps"
    )


def test_without_gradients_mean_the_ranks_are_summed(ended, mode_of):
    """Two ranks at rate 0.1 are one process at twice the rate."""
    _, results = ended(2, "graph")
    mode_of("graph")
    net = nets.Deep()
    optimizer = ms.nn.SGD(net.trainable_params(), 0.2)
    step = ms.nn.TrainOneStepCell(ms.nn.WithLossCell(net, nets.loss_fn()), optimizer)
    for x, y in nets.batches(distributed_worker.STEPS):
        step(Tensor(x), Tensor(y))
    for key, value in nets.weights(net).items():
        np.testing.assert_allclose(np.array(results[0]["sum"]["weights"][key]), value, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "mode", "name"),
    [one for one in EVERY_CASE if one[2] in distributed_worker.OVERFLOWING],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ended, ranks, mode, name):
    _, results = ended(ranks, mode)
    assert [result[name]["observations"]["skipped_steps"] for result in results] == [1] * ranks


def test_gradients_are_reduced_once_in_a_window(ended):
    _, results = ended(2, "pynative")  # where calls can be counted
    assert [result["accumulation"]["reductions"] for result in results] == [3, 3]  # 6 steps by 2


def test_the_example_trains_together(ended):
    _, results = ended(2, "graph")
    shown = [result["example"] for result in results]
    (line,) = [line for line in shown[0].splitlines() if line.startswith("test accuracy")]
    assert re.fullmatch(r"test accuracy (0\.\d{4}|1\.0000)", line)
    assert "test accuracy" not in shown[1]  # rank 0 speaks for all


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_ranks_end_after_the_same_step_when_all_have_been_asked(ended, mode):
    """A rank asked at the end of step 4 says so in step 5; the first one has gone on till then."""
    _, results = ended(2, mode)
    last = max(exit_worker.ASKED_AT) + 1
    for result in results:
        assert result["exit"] == {name: [last, True] for name in result["exit"]}


# ---- AdaSum ----


def simulated(name, ranks):
    """Train every server in this process, by the library without AdaSum; combine in float64."""
    devices = distributed_worker.devices(name)
    servers = [distributed_worker.case(name, with_adasum=False) for _ in range(ranks // devices)]
    for index, (x, y) in enumerate(distributed_worker.steps_of(name)):
        old = in_float64(servers[0][0])
        for number, (_, step) in enumerate(servers):
            parts = [
                [distributed_worker.share(one, number * devices + c, ranks) for c in range(devices)]
                for one in (x, y)
            ]
            data, labels = (np.concatenate(part) for part in parts)
            if index == distributed_worker.OVERFLOW_AT and name in distributed_worker.OVERFLOWING:
                data[0, 0] = np.inf
            step(Tensor(data), Tensor(labels))
        steps = [
            {key: old[key] - value for key, value in in_float64(net).items()} for net, _ in servers
        ]
        new = {key: old[key] - oracles.adasum([step[key] for step in steps]) for key in old}
        for net, _ in servers:
            for one in net.trainable_params():
                ms.ops.assign(one, Tensor(new[one.name].astype(np.float32)))
    return [in_float64(net) for net, _ in servers], servers


def in_float64(net):
    return {one.name: np.float64(one.asnumpy()) for one in net.trainable_params()}


@pytest.mark.parametrize(("ranks", "mode", "name"), ADASUM_CASES)
def test_a_model_with_adasum_trains_by_the_rule(ended, mode_of, ranks, mode, name):
    _, results = ended(ranks, mode)
    mode_of("pynative")  # nothing to compile; both modes train the same
    (weights, *_), servers = simulated(name, ranks)
    # float32 steps against the same steps combined in float64, 20 of them at most. Adam divides by
    # the root of squared gradients, some of which are rounding errors themselves.
    tolerance = 1e-4 if "adam" in name else 1e-5
    for key, value in weights.items():
        found = np.array(results[0][name]["weights"][key])
        np.testing.assert_allclose(found, value, atol=tolerance, err_msg=key)
    for rank, result in enumerate(results):
        net = servers[rank // distributed_worker.devices(name)][0]
        for one in net.get_parameters():
            if not one.requires_grad:  # BatchNorm's statistics are those of the rank's own data
                found = np.array(result[name]["others"][one.name])
                np.testing.assert_allclose(found, one.asnumpy(), atol=1e-5)


def test_statistics_differ_between_ranks(ended):
    _, results = ended(4, "graph")
    assert (
        len(
            {json.dumps(result["adasum clipped accumulation norm"]["others"]) for result in results}
        )
        == 4
    )


@pytest.mark.parametrize(("ranks", "mode", "name"), ADASUM_CASES)
def test_the_report_tells_servers_and_cost(ended, ranks, mode, name):
    _, results = ended(ranks, mode)
    devices = distributed_worker.devices(name)
    _, _, status, reason, counts = results[0][name]["row"]
    assert status == "applied"
    assert reason.startswith(f"{ranks // devices} servers of {devices}")
    halved = name in distributed_worker.HALVED and _compat.reduces_in_groups()
    levels = int(np.ceil(np.log2(ranks // devices)))
    assert f"collectives_a_step={2 * levels + 1 if halved else 1}" in counts


@pytest.mark.parametrize(("ranks", "mode"), [(2, "pynative"), (8, "graph")])
def test_a_run_resumes_bit_identically_from_a_checkpoint_of_each_rank(ended, ranks, mode):
    """The moments, which differ between the ranks, too."""
    _, results = ended(ranks, mode)
    first, second = (result["adasum resumed"] for result in results[:2])
    assert first["resumed"] == first["uninterrupted"]
    assert second["resumed"] == second["uninterrupted"]
    assert first["resumed"]["moments.first.weight"] != second["resumed"]["moments.first.weight"]


CLASS_RUNS = [
    (*run, *how) for run in distributed_worker.CLASS_RUNS for how in adasum_cases.runs(*run)
]


@pytest.mark.parametrize(("ranks", "mode", "devices", "large"), CLASS_RUNS)
def test_the_cell_agrees_with_the_tree_in_float64(ended, ranks, mode, devices, large):
    folder, _ = ended(ranks, mode)
    names = [f"{mode}_adasum{devices}_{large}_rank{rank}.npz" for rank in range(ranks)]
    found = [np.load(folder / name) for name in names]
    steps = adasum_cases.steps(ranks, large, mode)
    for index in range(len(steps[0])):
        result = found[0][str(index)]
        assert all(one[str(index)].tobytes() == result.tobytes() for one in found[1:])
        expected = -oracles.adasum([row[index] for row in steps], devices)
        error = np.linalg.norm(np.float64(result) - expected)
        bound = 100 * np.finfo(result.dtype).eps  # Horovod's
        assert error <= bound * np.linalg.norm(expected), (index, result.dtype, result.shape)


# ---- A rank that dies ----


def assert_the_kill_is_named(folder, mode):
    """The launcher names the rank that was killed, so do the others, and nobody is left waiting."""
    code, logs = json.loads((folder / "end.json").read_text(encoding="utf-8"))
    pids = [int((folder / f"rank{rank}.pid").read_text()) for rank in range(2)]
    told = [(folder / f"worker_{rank}.log").read_text(errors="replace") for rank in range(2)]
    for rank in range(2):
        words = [mode, str(folder), "1"]
        assert f"rank {rank} {words} mindspore_boost_ext.boost" in told[rank]
    assert code == 1
    if MSRUN_RESTS:  # else it ends the others before they can say anything
        assert f"rank 1 (process {pids[1]}) was ended by SIGKILL; the run cannot go on" in told[0]
    assert f"Worker process {pids[1]} exit with exception. Error code: -9" in logs
    assert not any(psutil.pid_exists(pid) for pid in pids)


AS_ONE_RUN = {"resumed_at": DIES_AT, "missing": [], "different": []}  # moments of a rank, too


def test_a_killed_rank_is_named_ends_the_run_and_every_rank_resumes(ended):
    """A script under msrun and our launcher; the ranks of all other tests finish what it began."""
    folder, results = ended(2, "pynative")
    assert_the_kill_is_named(folder / "killed", "pynative")
    assert [result["killed"] for result in results] == [AS_ONE_RUN] * 2


@pytest.mark.slow
def test_a_rank_is_killed_and_resumes_in_a_graph(tmp_path):
    """And without our launcher."""
    folder = tmp_path / "killed"
    launch.kill_a_rank(folder, "graph")
    assert_the_kill_is_named(folder, "graph")
    code, logs = launch.launch(2, folder, launch.TESTS / "dying_worker.py", "graph", folder)
    assert code == 0, logs
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [AS_ONE_RUN] * 2


# ---- A rank that leaves, stops, or has less data ----

LEAVING = {
    "exit": "ended with exit code 0 after 4 updates, and update 5 of this rank needs it",
    "data ends": "ended with exit code 0 after 4 updates, and update 5 of this rank needs it",
    "stop": "is stopped, and all others wait for it: continue it with 'kill -CONT ",
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("how", LEAVING)
def test_a_rank_that_leaves_or_stops_is_named_and_nobody_is_left(tmp_path, mode, how):
    worker = launch.TESTS / "leaving_worker.py"
    code, _ = launch.launch(2, tmp_path, worker, how, mode, tmp_path, timeout=150)
    pids = [int((tmp_path / f"rank{rank}.pid").read_text()) for rank in range(2)]
    said = (tmp_path / "worker_0.log").read_text(errors="replace")
    assert f"rank 1 (process {pids[1]}) {LEAVING[how]}" in said
    assert code == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
