"""Training in a subspace with two real processes: shared rows, one line search, clear errors."""

from __future__ import annotations

import functools

import dim_reduce_worker
import mindspore as ms
import numpy as np
import pytest


@pytest.fixture(params=["graph", "pynative"])
def ranks(request, ended):
    """Return mode, folder, and what each of two ranks ended with."""
    folder, results = ended(2, request.param)
    return request.param, folder, [result["dim_reduce"] for result in results]


def test_ranks_end_bitwise_equal(ranks):
    mode, _, (first, second) = ranks
    for name in dim_reduce_worker.CASES[mode]:
        assert first[name] == second[name], name


of_one_process = functools.cache(dim_reduce_worker.result)


def test_two_ranks_train_like_one_process_on_all_the_data(ranks):
    """The same line search too: losses are averaged in floating point."""
    mode, folder, (first, _) = ranks
    ms.set_context(mode=ms.PYNATIVE_MODE)  # nothing to compile; both modes train the same
    for name in dim_reduce_worker.CASES[mode]:
        alone = of_one_process(name, folder / "snapshots")
        for key, value in alone["weights"].items():
            # float32 means of halves against means of the whole, over 6 quasi-Newton steps.
            got = np.array(first[name]["weights"][key])
            np.testing.assert_allclose(got, np.array(value), atol=1e-5, err_msg=name)
        assert first[name]["observations"] == pytest.approx(alone["observations"])


def test_a_rank_without_its_snapshots_is_named(ranks):
    _, _, (first, second) = ranks
    told = "rank 1 could not read its snapshots or basis: see its own error"
    assert told in first["missing on rank 1"]
    assert "cannot use the snapshots in" in second["missing on rank 1"]


def test_other_snapshots_on_a_rank_are_told_on_all(ranks):
    for result in ranks[2]:
        assert (
            "rank 1 read other snapshots or another basis than rank 0" in result["others on rank 1"]
        )


def test_a_rank_that_comes_too_late_is_named(ended):
    _, (first, _) = ended(2, "pynative")
    first = first["dim_reduce"]
    assert first["late rank 1"].startswith("TimeoutError: dim_reduce: rank 1 has not answered")
    assert "dim_reduce.timeout = 2 seconds" in first["late rank 1"]
