"""Refuses code that draws random numbers by Python or NumPy while it is compiled."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from mindspore import nn

from mindspore_boost_ext.base.order import is_of_libraries, names_of

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_WORDS = re.compile("rand|rng|choice|sample|shuffle|permut|uniform|normal|gauss|binom|beta")


@contextlib.contextmanager
def drawing_nothing(network: nn.Cell) -> Iterator[None]:
    """In the context, raise a ``ValueError`` if this thread draws a number by Python or NumPy.

    A graph would keep for all steps what is drawn while it is compiled, and so train some blocks of
    a network with stochastic depth always, and others never. Threads that make batches may draw.
    """
    if not any(map(_WORDS.search, _names(network))):
        yield  # a look at every call of Python makes compiling slower
        return
    drawn: list[str] = []

    def look(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), _GENERATORS):
            drawn.append(f"{type(function.__self__).__name__}.{function.__name__}")
            raise _refusal(drawn)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    except Exception:
        if drawn:
            raise _refusal(drawn) from None
        raise
    finally:
        sys.setprofile(before)
    if drawn:  # MindSpore has caught the error
        raise _refusal(drawn)


def _refusal(drawn: list[str]) -> ValueError:
    return ValueError(
        f"the network draws a number by {drawn[0]}, which the graph of compiled_step would keep "
        "for all steps: draw by ops.rand or a dropout, or leave compiled_step out"
    )


def _names(network: nn.Cell) -> set[str]:
    """Return the names in the scripts' code of a network, and in functions that it calls."""
    kinds = {kind for _, cell in network.cells_and_names() for kind in type(cell).__mro__}
    held = [one for kind in kinds if kind is not nn.Cell for one in vars(kind).values()]
    methods = [getattr(one, "__func__", one) for one in held]
    found, seen = set[str](), set[object]()
    waiting = [one for one in methods if getattr(one, "__name__", "") != "__init__"]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        if not is_of_libraries(function.__module__):
            names = names_of(function.__code__)
            found |= names
            known = [function.__globals__.get(name) for name in names]
            waiting += known
            for module in [one for one in known if isinstance(one, ModuleType)]:
                waiting += [vars(module).get(name) for name in names]
    return found
