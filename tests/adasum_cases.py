"""Tensors in the manner of Horovod's AdaSum tests, one list for each rank; and how to run them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn

KINDS = ("random", "orthogonal", "parallel", "tiny", "spread", "zero on some")
LARGE = 1 << 19


def sizes(ranks):
    """Return lengths that no number of halves divides, and one value alone."""
    return (20 * ranks - 17, 2 * ranks + 1, ranks + 2, 1)


def runs(ranks, mode):
    """Return devices in a server, and whether the large tensor comes along: all are then halved.

    With 2 ranks, 2 devices are one server of all, which PYNATIVE_MODE shows.
    """
    second = (1, False) if ranks == 3 else (2, False)
    return [(1, True)] if (ranks, mode) == (2, "graph") else [(1, True), second]


def steps(ranks, large, mode):
    """Return for each rank a list of arrays: kinds x sizes x dtypes, then a large one if asked.

    In GRAPH_MODE, where each compiles, 2 and 4 ranks take every fourth, and in PYNATIVE_MODE every
    other one, so that each kind, size and dtype comes; 3 and 8 ranks, in ``-m slow``, take all.
    """
    every = {"graph": 4, "pynative": 2}[mode] if ranks in (2, 4) else 1
    table = [[] for _ in range(ranks)]
    for group, dtype in enumerate((np.float32, np.float16)):
        for row, kind in enumerate(KINDS):
            for column, size in enumerate(sizes(ranks)):
                if (group + row + column) % every == 0:
                    for rank, value in enumerate(values(kind, size, ranks, dtype)):
                        table[rank].append(value)
    if large:
        for rank, value in enumerate(values("random", LARGE, ranks, np.float32)):
            table[rank].append(value)
    return table


def values(kind, size, ranks, dtype):
    """Return an array for each rank."""
    generator = np.random.default_rng(size)
    base = generator.normal(size=(ranks, size))
    if kind == "orthogonal":
        base = np.where(np.arange(size) % ranks == np.arange(ranks)[:, None], base, 0)
    elif kind == "parallel":
        base = np.arange(1, ranks + 1)[:, None] * base[:1]
    elif kind == "tiny":
        base *= 1e-30 if dtype == np.float32 else 1e-4
    elif kind == "spread":
        reach = 24 if dtype == np.float32 else 3
        base *= 10.0 ** np.linspace(-reach, reach, ranks)[:, None]
    elif kind == "zero on some":
        base[::2] = 0
    return base.astype(dtype)


class Run(nn.Cell):
    """Calls AdaSum inside one graph, as a training step does."""

    def __init__(self, adasum, parameters):
        super().__init__(auto_prefix=False)
        self.adasum = adasum
        self.parameters = ms.ParameterTuple(parameters)

    def construct(self, *old):
        steps = ()
        for index in range(len(old)):
            steps += (old[index] - self.parameters[index],)
        return self.adasum(steps, self.parameters, old)
