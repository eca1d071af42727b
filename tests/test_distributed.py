"""Data parallel with two real processes: all ranks end with the same weights and scales."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import distributed_worker
import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", params=["graph", "pynative"])
def ranks(request, tmp_path_factory):
    """Run the worker on two ranks; return its mode and what each rank ended with."""
    folder = tmp_path_factory.mktemp(request.param)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    interpreter = pathlib.Path(sys.executable).parent
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2"),
        *("--local_worker_num=2", f"--master_port={port}", f"--log_dir={folder}", "--join=True"),
        *(str(TESTS / "distributed_worker.py"), request.param, str(folder)),
    ]
    subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        timeout=240,
        env={**os.environ, "PATH": f"{interpreter}{os.pathsep}{os.environ['PATH']}"},
    )
    found = sorted(folder.glob("rank*.json"))
    logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("worker_*.log"))
    assert len(found) == 2, logs
    return request.param, [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize("name", ["plain", "accumulation", "freezing", "dynamic", "grouped"])
def test_ranks_end_bitwise_equal(ranks, name):
    _, (first, second) = ranks
    assert first[name]["weights"] == second[name]["weights"]
    assert first[name]["observations"] == second[name]["observations"]


def single_process(name):
    """Train one process on the whole batches, without the overflow of rank 1."""
    net, step = distributed_worker.case(name)
    for index, (x, y) in enumerate(nets.batches(distributed_worker.STEPS)):
        if index == distributed_worker.OVERFLOW_AT and name in ("dynamic", "grouped"):
            x = np.full_like(x, np.inf)
        step(Tensor(x), Tensor(y))
    return nets.weights(net), step.observations()


@pytest.mark.parametrize("name", ["plain", "accumulation", "freezing", "dynamic", "grouped"])
def test_two_ranks_train_like_one_process_on_all_the_data(ranks, name):
    """The mean over ranks of means over halves is the mean over the whole, but for rounding."""
    mode, (first, _) = ranks
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    try:
        weights, observations = single_process(name)
    finally:
        ms.set_context(mode=before)
    for key, value in weights.items():
        np.testing.assert_allclose(np.array(first[name]["weights"][key]), value, atol=1e-6)
    assert first[name]["observations"].get("skipped_steps") == observations.get("skipped_steps")


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    _, results = ranks
    for result in results:
        for name in ("dynamic", "grouped"):
            assert result[name]["observations"]["skipped_steps"] == 1


def test_gradients_are_reduced_once_in_a_window(ranks):
    mode, results = ranks
    if mode == "graph":
        pytest.skip("calls are counted in PYNATIVE_MODE")
    assert [result["accumulation"]["reductions"] for result in results] == [3, 3]  # 6 steps by 2
