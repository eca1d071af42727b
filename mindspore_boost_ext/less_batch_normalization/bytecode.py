"""What the compiled code of a function says about it: the names it uses, and where it writes."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import names_of

# By these, code finds a Cell without its name; of an own Cell, the first finds its children alone.
_FINDING = frozenset(("getattr", "vars", "__dict__", "cells", "name_cells", _compat.CHILDREN))
_FINDING_ALL = frozenset(("cells_and_names",))
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


@functools.lru_cache(maxsize=1024)
def obstacle(code: CodeType) -> str:
    """Return what in a function proxies would get wrong unnoticed; empty if nothing."""
    steps = list(_instructions(code))
    if "dtype" not in names_of(code):
        return ""
    if any(one.opname == "CONTAINS_OP" for _, one in steps):
        return "it looks for a dtype among others"  # theirs answer: False
    for last, one in steps:
        if one.opname == "IS_OP" and last.opname != "LOAD_CONST":
            return "it asks for a dtype, and compares by 'is'"
    return ""


@functools.lru_cache(maxsize=1024)
def written_outside(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the global names, and those of functions around it, that a function writes."""
    steps = [one for _, one in _instructions(code)]
    outer = [one.argval for one in steps if one.opname == "STORE_DEREF"]
    return (
        [one.argval for one in steps if one.opname == "STORE_GLOBAL"],
        [name for name in outer if name in code.co_freevars],
    )


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction of a function and of the functions in it, with the one before it."""
    steps = list(dis.get_instructions(code))
    yield from zip(steps[:1] + steps, steps)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def attributes_named(function: FunctionType) -> set[str]:
    """Return the names of attributes that a function uses, without those of modules."""
    names = set()
    value: object = None
    for _, one in _instructions(function.__code__):
        if one.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(one.argval)
        elif one.opname in _ATTRIBUTES and isinstance(value, ModuleType):
            value = getattr(value, one.argval, None)
        elif one.opname in _ATTRIBUTES:
            names.add(one.argval)
            value = None
    return names


def finds_cells(code: CodeType) -> bool:
    """Return whether a function may find parts of Cells without their names.

    What finds the children of the function's first argument, ``self``, alone does not count.
    """
    steps = [one for _, one in _instructions(code) if one.opname != "PUSH_NULL"]
    for place, one in enumerate(steps):
        if one.argval in _FINDING_ALL:
            return True
        is_global = one.opname == "LOAD_GLOBAL"  # getattr(self, name) or self.cells()
        of = steps[place + 1 : place + 3] if is_global else steps[max(place - 1, 0) : place]
        is_finding = one.argval in _FINDING and (is_global or one.opname in _ATTRIBUTES)
        if is_finding and not _is_first(of, code):
            return True
    return False


def _is_first(of: list[dis.Instruction], code: CodeType) -> bool:
    """Return whether what is loaded first is the first argument, and no attribute of it."""
    loaded = of[0].argval if of and of[0].opname.startswith("LOAD_FAST") else ()
    names = loaded if isinstance(loaded, tuple) else (loaded,)
    is_chained = len(of) > 1 and of[1].opname in _ATTRIBUTES
    return not is_chained and bool(code.co_varnames[:1]) and code.co_varnames[0] in names
