"""What the compiled code of a function says about it: the names it uses, and where it writes."""

from __future__ import annotations

import builtins
import dis
import functools
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import names_of

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_CALLS = ("CALL", "PRECALL")
# By these, code finds Cells without their names: those that a Cell holds, and those at any depth.
_FINDING = frozenset(("cells", "name_cells", "__dict__", _compat.CHILDREN))
_FINDING_ALL = "cells_and_names"
_SELF = object()  # stands for the first argument of a method


def _instructions(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of a function, then those of the functions in it."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "PUSH_NULL"]
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return steps + [step for one in inner for step in _instructions(one)]


@functools.lru_cache(maxsize=1024)
def unsafe_reason(code: CodeType) -> str:
    """Return what in a function proxies would get wrong unnoticed; empty if nothing."""
    if "dtype" not in names_of(code):
        return ""
    steps = _instructions(code)
    for last, one in zip(steps, steps[1:]):
        if one.opname == "CONTAINS_OP":
            return "it looks for a dtype among others"  # theirs answer: False
        known = last.opname == "LOAD_GLOBAL" and hasattr(builtins, last.argval)
        if one.opname == "IS_OP" and last.opname != "LOAD_CONST" and not known:
            return "it asks for a dtype, and compares by 'is'"
    return ""


@functools.lru_cache(maxsize=1024)
def globals_named(code: CodeType) -> frozenset[str]:
    """Return the global names that a function, or one in it, reads."""
    return frozenset(step.argval for step in _instructions(code) if step.opname == "LOAD_GLOBAL")


@functools.lru_cache(maxsize=1024)
def written_outside(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the global names, and those of functions around it, that a function writes."""
    steps = _instructions(code)
    outer = [step.argval for step in steps if step.opname == "STORE_DEREF"]
    return (
        [step.argval for step in steps if step.opname == "STORE_GLOBAL"],
        [name for name in outer if name in code.co_freevars],
    )


@dataclass
class Uses:
    """The attributes that a function uses, without those of modules."""

    of_self: set[str] = field(default_factory=set)
    of_others: set[str] = field(default_factory=set)
    finds: bool = False  # whether it may find parts of others without their names


def uses_of(function: FunctionType, is_method: bool) -> Uses:
    """Return what a function uses; the first argument of a method is ``self``."""
    found, steps = Uses(), _instructions(function.__code__)
    own = function.__code__.co_varnames[:1] if is_method else ()
    value: object = None  # what the last instruction has loaded, if it is known
    for place, one in enumerate(steps):
        if one.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(one.argval)
            if one.argval in ("getattr", "vars"):
                _note_getattr(steps[place + 1 :], function, own, found)
        elif one.opname in _ATTRIBUTES and isinstance(value, ModuleType):
            value = getattr(value, one.argval, None)
        elif one.opname in _ATTRIBUTES:
            (found.of_self if value is _SELF else found.of_others).add(one.argval)
            value = None
        else:
            value = _SELF if own and _loaded(one)[-1:] == own else None
    found.finds |= _FINDING_ALL in found.of_self | found.of_others
    found.finds |= bool(_FINDING & found.of_others)
    return found


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """Return the local names that an instruction loads or, before these, stores."""
    is_local = step.opname.endswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW"))
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names if is_local else ()


def _note_getattr(
    steps: list[dis.Instruction], function: FunctionType, own: tuple[str, ...], found: Uses
) -> None:
    """Note what ``getattr`` or ``vars``, with its arguments in the next steps, may find."""
    calls = (place for place, one in enumerate(steps) if one.opname.startswith(_CALLS))
    given = steps[: next(calls, 0)]
    constants = [one for one in given[-2:] if one.opname == "LOAD_CONST"]
    texts = [constant for constant in constants if isinstance(constant.argval, str)]
    if texts and all(one.opname == "LOAD_CONST" for one in given[given.index(texts[0]) :]):
        found.of_others.add(texts[0].argval)  # perhaps before a default
        return
    first = steps[0]
    is_chained = any(step.opname in _ATTRIBUTES for step in steps[1:2])
    is_self = bool(own) and _loaded(first)[:1] == own and not is_chained
    known = function.__globals__.get(first.argval) if first.opname == "LOAD_GLOBAL" else None
    found.finds |= not (is_self or isinstance(known, ModuleType))
