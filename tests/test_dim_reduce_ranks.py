"""Training in a subspace with two real processes: shared rows, one line search, clear errors."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import dim_reduce_worker
import mindspore as ms
import nets
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", params=["graph", "pynative"])
def ranks(request, tmp_path_factory):
    """Run the worker on two ranks; return mode, folder, and what each rank ended with."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, first in (("snapshots", 0), ("others", 50)):
        (folder / name).mkdir()
        for index in range(8):
            net = nets.MLP(seed=first + index)
            ms.save_checkpoint(net, str(folder / name / f"run-{index}.ckpt"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    interpreter = pathlib.Path(sys.executable).parent
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2"),
        *("--local_worker_num=2", f"--master_port={port}", f"--log_dir={folder}", "--join=True"),
        *(str(TESTS / "dim_reduce_worker.py"), request.param, str(folder)),
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
    return request.param, folder, [json.loads(path.read_text()) for path in found]


def test_ranks_end_bitwise_equal(ranks):
    _, _, (first, second) = ranks
    for name in dim_reduce_worker.CASES:
        assert first[name] == second[name], name


def test_two_ranks_train_like_one_process_on_all_the_data(ranks):
    """The same line search too: losses are averaged in floating point."""
    mode, folder, (first, _) = ranks
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    try:
        for name in dim_reduce_worker.CASES:
            alone = dim_reduce_worker.result(name, folder / "snapshots")
            for key, value in alone["weights"].items():
                # float32 means of halves against means of the whole, over 6 quasi-Newton steps.
                got = np.array(first[name]["weights"][key])
                np.testing.assert_allclose(got, np.array(value), atol=1e-5, err_msg=name)
            assert first[name]["observations"] == pytest.approx(alone["observations"])
    finally:
        ms.set_context(mode=before)


def test_a_rank_without_its_snapshots_is_named(ranks):
    _, _, (first, second) = ranks
    told = "rank 1 could not read its snapshots or basis: its own error says why"
    assert told in first["missing on rank 1"]
    assert "cannot use the snapshots in" in second["missing on rank 1"]


def test_other_snapshots_on_a_rank_are_told_on_all(ranks):
    for result in ranks[2]:
        assert (
            "rank 1 read other snapshots or another basis than rank 0" in result["others on rank 1"]
        )


def test_a_rank_that_comes_too_late_is_named(ranks):
    _, _, (first, _) = ranks
    assert first["late rank 1"].startswith("TimeoutError: dim_reduce: rank 1 has not answered")
    assert "dim_reduce.timeout = 2 seconds" in first["late rank 1"]
