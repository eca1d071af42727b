"""What differs between many ranks, in words; threads stand for the ranks."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import numpy as np
import pytest
from mindspore import Tensor

from mindspore_boost_ext.runtime import ranks


@pytest.fixture
def found_by(monkeypatch):
    """Return a function that gives the facts to as many ranks, and returns what each finds."""
    this = threading.local()

    def run(every):
        together, vectors = threading.Barrier(len(every)), {}

        class AllGather:
            def __call__(self, vector):
                vectors[this.rank] = vector.asnumpy()
                together.wait(60)
                gathered = np.concatenate([vectors[rank] for rank in range(len(every))])
                together.wait(60)
                return Tensor(gathered)

        def rank(number):
            this.rank = number
            return ranks.differences_between_ranks(every[number], "the test")

        monkeypatch.setattr(ranks.ops, "AllGather", AllGather)
        monkeypatch.setattr(ranks, "rank_and_count", lambda: (this.rank, len(every)))
        with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
            return list(pool.map(rank, range(len(every))))

    return run


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("aaaa", []),
        ("aaba", ["x is a on ranks 0, 1, 3, b on rank 2"]),
        ("abbb", ["x is a on rank 0, b on ranks 1 to 3"]),
        ("abab", ["x is a on ranks 0, 2, b on ranks 1, 3"]),
        ("aabb", ["x is a on ranks 0, 1, b on ranks 2, 3"]),
    ],
)
def test_every_rank_is_told_the_same(found_by, values, said):
    assert found_by([{"x": one, "y": "same"} for one in values]) == [said] * 4


def test_what_one_rank_lacks_is_missing(found_by):
    said = ["x is é on rank 0, missing on rank 1", "y is missing on rank 0, 2 on rank 1"]
    assert found_by([{"x": "é"}, {"y": "2"}]) == [said] * 2


@pytest.mark.parametrize(("count", "last"), [(8, "x7"), (10, "and 2 more")])
def test_eight_differences_are_shown(found_by, count, last):
    first, second = ({f"x{place}": one for place in range(count)} for one in "ab")
    said, again = found_by([first, second])
    assert said == again
    assert [one[:2] for one in said[:8]] == [f"x{place}" for place in range(8)]
    assert said[-1].startswith(last)


def test_of_ranks_that_do_not_come_it_is_said_who_waits_and_for_what(monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(ranks, "_WAITING_NOTICE", 0.01)
    monkeypatch.setattr(
        ranks.LOGGER, "warning", lambda text, *names: said.set() if names == (0, "it") else None
    )
    with ranks._notice_of_waiting("it"):
        assert said.wait(10)


def test_once_all_ranks_are_there_nothing_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(ranks, "_WAITING_NOTICE", 0.05)
    monkeypatch.setattr(ranks.LOGGER, "warning", lambda *words: said.append(words))
    with ranks._notice_of_waiting("it"):
        pass
    time.sleep(0.1)
    assert said == []
