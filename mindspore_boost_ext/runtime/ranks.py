"""What ranks compare on the host before they train together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from mindspore_boost_ext.config.rules import launched_processes
from mindspore_boost_ext.report import LOGGER

_WAITING_NOTICE = 10.0  # seconds after which a rank says that it waits for the others
_MOST_SHOWN = 8


def rank_and_count() -> tuple[int, int]:
    """Return this rank and how many there are: (0, 1) unless MindSpore's ``init`` has run."""
    return (int(get_rank()), int(get_group_size())) if GlobalComm.INITED else (0, 1)


def rank_count() -> int:
    """Return how many ranks there are: 1 unless MindSpore's ``init`` has run."""
    return rank_and_count()[1]


def launched_rank() -> int:
    """Return this rank, also before MindSpore's ``init``: then as the launcher has set it."""
    if GlobalComm.INITED:
        return rank_and_count()[0]
    text = os.environ.get("RANK_ID", "0")
    return int(text) if text.isdigit() else 0


def launched_count() -> int:
    """Return how many ranks there are, also before MindSpore's ``init``: as msrun has started."""
    is_worker = os.environ.get("MS_ROLE") == "MS_WORKER"
    return rank_count() if GlobalComm.INITED or not is_worker else launched_processes()


def check_equal_on_ranks(facts: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise a ``ValueError`` on every rank if a fact is not the same on all.

    The message has names, values and ranks. Every rank must call this; it waits for the others.

    Args:
        facts (dict[str, str]): names and values, as they are to be shown.
        what (str): what is compared, for the messages, such as ``"the training step"``.
        remedy (str): what to do when it differs.
    """
    found = differences_between_ranks(facts, what)
    if found:
        raise ValueError(f"{what} is not the same on all ranks: {'; '.join(found)}. {remedy}")


def differences_between_ranks(facts: Mapping[str, str], what: str) -> list[str]:
    """Return one phrase for each fact that differs; see :func:`check_equal_on_ranks`."""
    if rank_count() == 1:
        return []
    text = json.dumps(dict(facts))
    with _notice_of_waiting(what):
        digests = _rows(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32))
        if (digests == digests[0]).all():
            return []
        return _differences([json.loads(one) for one in _texts(text)])


def _texts(text: str) -> list[str]:
    """Return the text of every rank, in the order of the ranks."""
    coded = np.frombuffer(text.encode(), np.uint8).astype(np.int32)  # CPU gathers no uint8
    lengths = _rows(np.array([len(coded)], np.int32))[:, 0]
    rows = _rows(np.pad(coded, (0, int(lengths.max()) - len(coded))))
    return [row[:length].astype(np.uint8).tobytes().decode() for row, length in zip(rows, lengths)]


def _rows(vector: np.ndarray) -> np.ndarray:
    """Return an int32 vector of every rank, of one length, as the rows of a matrix."""
    gathered: np.ndarray = ops.AllGather()(Tensor(vector)).asnumpy()
    return gathered.reshape(rank_count(), -1)


def _differences(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return one phrase for each fact that is not the same on all ranks."""
    names = list(dict.fromkeys(name for facts in of_ranks for name in facts))
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = (f"{value} on {_named(where)}" for value, where in ranks.items())
            found.append(f"{name} is {', '.join(values)}")
    more = len(found) - _MOST_SHOWN
    return found[:_MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])


def _named(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0, 2``, ``ranks 1 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def _notice_of_waiting(what: str) -> Iterator[None]:
    text = "rank %d is still waiting for the other ranks to compare %s: each of them must do so"
    notice = threading.Timer(_WAITING_NOTICE, LOGGER.warning, (text, rank_and_count()[0], what))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
