"""Tracing leaves the Python objects that a network holds as they were, and reads them rightly."""

from __future__ import annotations

import collections
import enum
import itertools
import logging
import random
import weakref

import mindspore as ms
import numpy as np
import pytest
import residual_nets
from mindspore import nn, ops

from mindspore_boost_ext.less_batch_normalization.copies import Copies, everything_in
from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn
from mindspore_boost_ext.less_batch_normalization.tracing import trace_both

WIDTH = residual_nets.WIDTH
Pair = collections.namedtuple("Pair", "one other")


class Held:
    """What scripts keep beside their layers: numbers, tables, results."""

    def __init__(self):
        self.calls, self.kept, self.names = 0, None, []

    def count(self):
        self.calls += 1
        return self.calls


class Holder(nn.Cell):
    """Writes into what it holds, in each call."""

    def __init__(self, write):
        super().__init__()
        self.write, self.held, self.counts = write, Held(), np.zeros(2)
        self.queue, self.ordered = collections.deque(), collections.OrderedDict()
        self.seen, self.method, self.pair = set(), self.held.count, Pair([], Held())
        self.number, self.entries = itertools.count(), iter([1, 2, 3, 4])
        self.generator, self.older = np.random.default_rng(0), np.random.RandomState(0)
        self.dense = nn.Dense(2, 2)

    def construct(self, x):
        x = self.dense(x)
        self.write(self, x)
        return x

    def state(self):
        held, pair = vars(self.held), vars(self.pair.other)
        seen = (held, pair, self.pair.one, self.counts, self.queue, self.ordered, self.seen)
        drawn = self.generator.bit_generator.state, self.older.get_state()
        return repr((seen, self.number, self.entries.__length_hint__(), drawn))


def counts(self, x):
    self.held.calls += 1


def keeps(self, x):
    if self.held.kept is None:
        self.held.kept = ops.ones_like(x)
    return x * self.held.kept


def appends(self, x):
    self.held.names.append("x")
    self.pair.one.append(x)


def counts_in_an_array(self, x):
    self.counts[0] += 1


def queues(self, x):
    self.queue.append(x)


def caches(self, x):
    if "x" not in self.ordered:
        self.ordered["x"] = x
    return x + self.ordered["x"]


def adds(self, x):
    self.seen.add("x")


def calls_a_method(self, x):
    self.held.count()
    self.pair.other.count()


def calls_a_method_that_is_held(self, x):
    self.method()


def draws(self, x):
    self.generator.random()
    self.older.rand()


def takes_the_next(self, x):
    next(self.number)
    next(self.entries)


WRITES = [counts, keeps, appends, counts_in_an_array, queues, caches, adds]
WRITES += [calls_a_method, calls_a_method_that_is_held, draws, takes_the_next]


@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_what_is_written_reaches_no_object_of_the_network(write):
    net = Holder(write)
    before = net.state()
    graphs = trace_both(net)
    assert net.state() == before
    assert [graph.failures for graph in graphs] == [{}, {}]


class Drawing(nn.Cell):
    """Skips its layer by a random number of Python or NumPy."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 2)

    def construct(self, x):
        return x if random.random() < np.random.rand() else self.dense(x)


def test_the_random_numbers_of_python_and_numpy_go_on():
    net = Drawing()
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    less_bn(net)
    assert (random.random(), np.random.rand()) == expected


def copy_of(thing):
    return Copies(lambda one: one).of(thing)


def test_each_object_has_one_copy_also_within_itself():
    held = Held()
    held.kept = [held]
    copies = Copies(lambda one: copies.of(one))
    fresh = copies.of(held)
    assert fresh is not held
    assert fresh.kept[0] is fresh
    assert copies.of(held) is fresh


def test_everything_is_found_at_any_depth_and_in_its_order():
    """A list of 10,000 levels, and one that holds itself."""
    deep = inner = []
    for _ in range(10_000):
        inner.append([])
        inner = inner[0]
    inner += [Held, {1: "x", "one": Pair(Colour, enum)}, deep]
    found = [one for one in everything_in(deep) if not isinstance(one, (list, dict, tuple))]
    assert found == [Held, Colour, enum]


def test_a_proxy_whose_object_is_gone_is_passed_over():
    gone = weakref.proxy(Held())
    assert len(list(everything_in([gone]))) == 2


class Ending:
    """Closes what the script uses at its end."""

    def __del__(self):
        pass


class Uncopyable:
    def __copy__(self):
        raise RuntimeError("one only")


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "thing",
    [Ending(), Uncopyable(), Colour.RED, Held, logging.getLogger("own"), ms.float32, 1, "x", None],
    ids=lambda one: type(one).__name__,
)
def test_what_cannot_or_must_not_be_copied_stands_for_itself(thing):
    assert copy_of(thing) is thing


class Branching(nn.Cell):
    """A residual block only if a condition is False; here it is True."""

    def __init__(self, is_plain):
        super().__init__()
        self.is_plain = is_plain
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3), nn.BatchNorm2d(WIDTH)

    def construct(self, x):
        y = self.norm(self.conv(x))
        return ops.relu(y) if self.is_plain(x) else ops.relu(x + y)


def by_dtype(x):
    return x.dtype in (ms.float32, ms.float16)


def by_rank(x):
    return x.ndim in {4}


def by_width(x):
    return x.shape[1] in {WIDTH: "narrow"}


@pytest.mark.parametrize("is_plain", [by_dtype, by_rank, by_width])
def test_a_branch_chosen_by_in_is_not_understood(is_plain):
    """The condition is unknown while the network is traced: taken for False, it adds x."""
    rewriting = less_bn(nn.SequentialCell(Branching(is_plain), Branching(is_plain)))
    assert {one.done for one in rewriting.changes} == {"kept"}
    assert all("looks" in one.reason for one in rewriting.changes)
