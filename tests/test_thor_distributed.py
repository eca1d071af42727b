"""THOR on two real processes: their factors are averaged, so both train as one does."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import thor_worker
from test_thor import pairs, reference

from mindspore_boost_ext.thor_factors import MeanOverRanks

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("mode_name", ["graph", "pynative"])
def test_two_ranks_train_like_one_process_on_all_the_data(mode_name, tmp_path):
    """The mean over ranks of moments of halves is the moment of the whole batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2"),
        *("--local_worker_num=2", f"--master_port={port}", f"--log_dir={tmp_path}", "--join=True"),
        *(str(TESTS / "thor_worker.py"), mode_name, str(tmp_path)),
    ]
    folder = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=240, env=environment)
    logs = "\n".join(log.read_text()[-2000:] for log in tmp_path.glob("worker_*.log"))
    found = sorted(tmp_path.glob("rank*.json"))
    assert len(found) == 2, logs
    first, second = (json.loads(path.read_text()) for path in found)
    assert first == second
    expected = reference(pairs(thor_worker.STEPS), frequency=thor_worker.FREQUENCY)
    np.testing.assert_allclose(first["layer.weight"], expected, rtol=1e-4, atol=1e-5)


def test_split_indices_end_the_groups_that_are_reduced_together():
    assert MeanOverRanks(2, [1, 3], 6).bounds == ((0, 2), (2, 4), (4, 6))
    assert MeanOverRanks(2, [1, 5], 6).bounds == ((0, 2), (2, 6))
    assert MeanOverRanks(2, None, 6).bounds == ((0, 6),)
