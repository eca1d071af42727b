"""The Python objects that a network holds: what is in them, and copies to write into."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from enum import Enum
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
from mindspore import nn

from mindspore_boost_ext.base.order import contents, is_of_libraries, is_own
from mindspore_boost_ext.less_batch_normalization.graph import NotUnderstoodError

OPAQUE_MODULES = frozenset(("numpy", "math", *getattr(sys, "stdlib_module_names", ())))
_COLLECTIONS = (list, tuple, set, frozenset, deque, KeysView, ValuesView, ItemsView)
_ATOMS = frozenset((int, float, bool, str, bytes, type(None)))
_RANDOM = (np.random.Generator, np.random.RandomState)


class Copies:
    """Gives traced code a copy of each object, the same one each time, with proxies in it.

    ``wrap`` returns what stands for a value. Objects that cannot be copied stand for themselves.
    """

    def __init__(self, wrap: Callable[[object], object]) -> None:
        self._wrap = wrap
        self._known: dict[int, tuple[object, object]] = {}  # id: the object, which keeps it; copy

    def of(self, thing: Any) -> object:
        """Return the copy of a container or an object; anything else itself."""
        if isinstance(thing, tuple):
            make = getattr(thing, "_make", type(thing))  # of a namedtuple
            return make(self._wrap(one) for one in thing)
        if isinstance(thing, MethodType):
            return MethodType(thing.__func__, self.of(thing.__self__))
        if isinstance(thing, GeneratorType):
            return _Undrawn()
        if id(thing) not in self._known:
            made = _copy_of(thing) if _may_be_written(thing) else thing
            self._known[id(thing)] = (thing, made)
            if made is not thing:
                self._fill(made)
        return self._known[id(thing)][1]

    def _fill(self, made: Any) -> None:
        """Replace what a new copy holds by what stands for it."""
        if isinstance(made, dict):
            for key in list(made):
                dict.__setitem__(made, key, self._wrap(dict.__getitem__(made, key)))
        elif isinstance(made, (list, deque)):
            for place, one in enumerate(list(made)):
                if type(one) not in _ATOMS:
                    made[place] = self._wrap(one)
        for name, held in _attributes(made).items():
            object.__setattr__(made, name, self._wrap(held))  # a frozen class forbids its own


class _Undrawn:
    """Stands for a generator, which cannot be copied."""

    def __next__(self) -> object:
        raise NotUnderstoodError("it draws from a generator that the script holds")

    __iter__ = __next__


def everything_in(thing: Any) -> Iterator[Any]:
    """Yield a thing and what is in it, however nested, in containers, objects and closures.

    Numbers and texts are left out. So is what an object of the script does not let one look into.
    """
    pending, seen = [thing], dict[int, Any]()
    while pending:
        one = pending.pop()
        if type(one) not in _ATOMS:
            yield one
            if id(one) not in seen:
                seen[id(one)] = one  # it keeps its id
                with contextlib.suppress(Exception):
                    pending += [*_parts(one)][::-1]


def _parts(thing: Any) -> Iterable[Any]:
    """Return what a container, a function or an object of the script holds."""
    kind = type(thing)  # isinstance would ask proxies, which say that they are something else
    attributes: Iterable[Any] = ()
    is_code = issubclass(kind, (type, ModuleType, Enum, nn.Cell))
    if not (is_code or is_of_libraries(str(kind.__module__))):
        attributes = _attributes(thing).values()
    if issubclass(kind, dict):
        return *dict.values(thing), *attributes
    if issubclass(kind, _COLLECTIONS):
        return *thing, *attributes
    if issubclass(kind, functools.partial):
        return thing.func, thing.args, thing.keywords
    if issubclass(kind, MethodType):
        return thing.__self__, thing.__func__
    if issubclass(kind, FunctionType):
        cells = [held for one in thing.__closure__ or () for held in contents(one)]
        held = (*cells, thing.__defaults__, thing.__kwdefaults__)
        return () if is_of_libraries(str(thing.__module__)) else held
    return attributes


def _attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of an object itself, also those in slots."""
    names = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    held = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return {**held, **getattr(thing, "__dict__", {})}


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") else name
        for name in ((names,) if isinstance(names, str) else names)
        if not name.endswith("__")  # those for the dict and for weak references
    ]


def _may_be_written(thing: object) -> bool:
    kind = type(thing)
    if isinstance(thing, (list, dict, set, deque, np.ndarray, array, bytearray, *_RANDOM)):
        return True
    # The end of a copy must not close what the script uses.
    has_end = is_own(kind.__module__) or hasattr(kind, "__del__")
    has_state = any(hasattr(thing, name) for name in ("__dict__", "__slots__", "__next__"))
    return has_state and not has_end and not isinstance(thing, (type, Enum))


def _copy_of(thing: object) -> object:
    """Return a copy of an object; itself if it cannot be copied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12: itertools will lose its copies
            # A shallow copy of a generator draws from the same stream.
            made = copy.deepcopy(thing) if isinstance(thing, _RANDOM) else copy.copy(thing)
    except Exception:  # of a foreign class: anything may happen
        return thing
    return made if type(made) is type(thing) else thing
