"""What instructions say about a function, alike on every version of Python."""

from __future__ import annotations

import math

import pytest

from mindspore_boost_ext.less_batch_normalization.bytecode import (
    globals_named,
    unsafe_reason,
    uses_of,
    written_outside,
)

COUNT = 1


def names(self, x, block):
    return self.net[0].bn1(x) + math.sin(x).real + block.first(x)


def in_a_lambda(self, x, block):
    return lambda y: block.first(y) + self.second(y)


def own_by_getattr(self, x, block):
    return [getattr(self, f"layer{place}")(x) for place in range(3)]


def own_by_cells(self, x, block):
    y = x + 1; z = self._cells["a"](y)  # fmt: skip  # noqa: E702
    return [z, vars(self), self.__dict__, *self.cells()]


def by_constant_names(self, x, block):
    return getattr(block, "bn1", None), getattr(self.settings, "deep"), getattr(math, self.kind)  # noqa: B009


def by_getattr(self, x, block):
    return getattr(block, "bn" + str(1))


def of_its_part(self, x, block):
    return getattr(self.block, x)


def by_cells(self, x, block):
    return helper(self, block.cells())


def by_vars(self, x, block):
    return vars(block)["bn1"]


def by_all(self, x, block):
    return list(self.cells_and_names())


def under_another_name(self, x, block):
    get = getattr
    return get(block, x)


def helper(one, other):
    return one, other


USES = {
    names: ({"net"}, {"bn1", "real", "first"}, False),
    in_a_lambda: ({"second"}, {"first"}, False),
    own_by_getattr: (set(), set(), False),
    own_by_cells: ({"_cells", "__dict__", "cells"}, set(), False),
    by_constant_names: ({"settings", "kind"}, {"bn1", "deep"}, False),
    by_getattr: (set(), set(), True),
    of_its_part: ({"block"}, set(), True),
    by_cells: (set(), {"cells"}, True),
    by_vars: (set(), set(), True),
    by_all: ({"cells_and_names"}, set(), True),
    under_another_name: (set(), set(), True),
}


@pytest.mark.parametrize("function", USES, ids=lambda one: one.__name__)
def test_the_attributes_that_a_function_uses(function):
    uses = uses_of(function, is_method=True)
    assert (uses.of_self, uses.of_others, uses.finds) == USES[function]


@pytest.mark.parametrize("function", [own_by_getattr, own_by_cells], ids=lambda one: one.__name__)
def test_the_first_argument_of_a_plain_function_is_not_self(function):
    assert uses_of(function, is_method=False).finds


def test_the_global_names_without_those_of_attributes():
    def function(x):
        return [COUNT + x.math for _ in range(3)]

    assert globals_named(function.__code__) == {"COUNT", "range"}


def test_where_a_function_writes():
    outer = inner = 0

    def function():
        global COUNT
        nonlocal outer
        COUNT = outer = mine = 1

        def deeper():
            nonlocal inner, mine
            inner = mine = 2

        return deeper

    assert written_outside(function.__code__) == (["COUNT"], ["outer", "inner"])


COMPARISONS = {
    "x.dtype in kinds": "it looks for a dtype among others",
    "x.dtype is kinds": "it asks for a dtype, and compares by 'is'",
    "x.dtype and x is not y": "it asks for a dtype, and compares by 'is'",
    "x.dtype and x is None": "",
    "x.dtype and type(x) is tuple": "",
    "x is not y": "",
}


@pytest.mark.parametrize("code", COMPARISONS)
def test_comparisons_that_proxies_get_wrong(code):
    function = eval(f"lambda x, y, kinds: {code}")
    assert unsafe_reason(function.__code__) == COMPARISONS[code]
