"""Copies of the Python objects that a network holds: traced code may write into them."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import MethodType
from typing import Any

import numpy as np

from mindspore_boost_ext.base.order import is_own

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
        if id(thing) not in self._known:
            fresh = _copy_of(thing) if _may_be_written(thing) else thing
            self._known[id(thing)] = (thing, fresh)
            if fresh is not thing:
                self._fill(fresh)
        return self._known[id(thing)][1]

    def _fill(self, fresh: Any) -> None:
        """Replace what a new copy holds by what stands for it."""
        if isinstance(fresh, dict):
            for key in list(fresh):
                dict.__setitem__(fresh, key, self._wrap(dict.__getitem__(fresh, key)))
        elif isinstance(fresh, (list, deque)):
            for place, one in enumerate(list(fresh)):
                fresh[place] = self._wrap(one)
        for name, held in list(getattr(fresh, "__dict__", {}).items()):
            vars(fresh)[name] = self._wrap(held)


def _may_be_written(thing: object) -> bool:
    kind = type(thing)
    if isinstance(thing, (list, dict, set, deque, np.ndarray, *_RANDOM)):
        return True
    # The end of a copy must not close what the script uses.
    has_end = is_own(kind.__module__) or hasattr(kind, "__del__")
    has_state = hasattr(thing, "__dict__") or hasattr(kind, "__next__")
    return has_state and not has_end and not isinstance(thing, (type, Enum))


def _copy_of(thing: object) -> object:
    """Return a copy of an object; itself if it cannot be copied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12: itertools will lose its copies
            # A shallow copy of a generator draws from the same stream.
            fresh = copy.deepcopy(thing) if isinstance(thing, _RANDOM) else copy.copy(thing)
    except Exception:  # of a foreign class: anything may happen
        return thing
    return fresh if type(fresh) is type(thing) else thing
