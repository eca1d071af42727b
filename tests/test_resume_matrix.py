"""Every algorithm, and every sound pair, goes on in a fresh process bit for bit, in both modes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nets
import numpy as np
import pytest
import resume_worker

WORKER = Path(resume_worker.__file__)


# Combinations that a process tries one after the other: MindSpore takes seconds to start.
TOGETHER = 6


@pytest.fixture(scope="module")
def arrays_of(tmp_path_factory):
    """Return a function that gives what two processes ended with, of a mode and a combination."""
    done = {}

    def arrays(mode, combination):
        start = resume_worker.COMBINATIONS.index(combination) // TOGETHER * TOGETHER
        if (mode, start) not in done:
            done[mode, start] = folder = tmp_path_factory.mktemp(f"{mode}{start}")
            places = [str(start), str(start + TOGETHER)]
            for role in ("first", "second"):
                subprocess.run([sys.executable, WORKER, mode, role, folder, *places], check=True)
        name = "-".join(combination)
        files = [done[mode, start] / f"{name}.{role}.npz" for role in ("first", "second")]
        return [dict(np.load(file)) for file in files]

    return arrays


@pytest.mark.slow
@pytest.mark.parametrize("combination", resume_worker.COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_a_fresh_process_goes_on_bit_identically(mode, combination, arrays_of):
    first, second = arrays_of(mode, combination)
    nets.assert_same(second, first)
