"""Symbolic tracing: what a network computes, found by running its ``construct`` on proxies."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Union

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import is_own, names_of
from mindspore_boost_ext.less_batch_normalization.copies import everything_in
from mindspore_boost_ext.less_batch_normalization.graph import Graph
from mindspore_boost_ext.less_batch_normalization.proxies import Tracer

# Names by which code finds a Cell without its name.
_FINDING = frozenset(("getattr", "vars", "__dict__", "cells", "cells_and_names", "name_cells"))
# How many tensors to call a Cell with, and other arguments by name; there None is a tensor.
Call = tuple[int, dict[str, Union[bool, None]]]


def trace(network: nn.Cell) -> list[Graph]:
    """Return the graph of a network, then those of the parts of Cells that were not understood."""
    graphs: list[Graph] = []
    pending, seen = [(network, call) for call in _calls(network)], {id(network)}
    while pending:
        cell, call = pending.pop(0)
        graphs.append(graph := Tracer().run(cell, *call))
        for failed, reason in list(graph.failures.items()):
            fresh = [one for one in failed.cells() if one is not None and id(one) not in seen]
            seen.update(id(one) for one in fresh)
            for one in fresh:
                if not _reaches_into(failed, one):
                    pending += [(one, call) for call in _calls(one)]
                    continue
                why = f"{type(failed).__name__} uses parts of it, but {reason}"
                parts = [part for _, part in one.cells_and_names()]
                graph.failures.update(dict.fromkeys(parts, why))
                seen.update(map(id, parts))
    return graphs


def trace_both(network: nn.Cell) -> list[Graph]:
    """Return the graphs of a network in training mode, then those in evaluation mode."""
    cells = list({id(cell): cell for _, cell in network.cells_and_names()}.values())
    flags = [cell.training for cell in cells]
    graphs: list[Graph] = []
    try:
        for training in (True, False):
            for cell in cells:
                cell.training = training
            graphs += trace(network)
    finally:
        for cell, training in zip(cells, flags):
            cell.training = training
    return graphs


def _reaches_into(cell: nn.Cell, inner: nn.Cell) -> bool:
    """Return whether a Cell's code may call parts of an inner one directly."""
    held = list(everything_in(vars(cell)))
    names, own = _names_reached(cell, held), _compat.children(cell)
    below = {id(part) for _, part in inner.cells_and_names()} - set(map(id, own.values()))
    if names & _FINDING or below & set(map(id, held)):
        return True
    return bool(names.intersection(_compat.children(inner)) - own.keys())


def _names_reached(cell: nn.Cell, held: list[Any]) -> set[str]:
    """Return the names in ``construct``, and in what it names or the Cell holds of functions."""
    names: set[str] = set()
    pending, seen = ["construct", *held], set[FunctionType]()
    kinds = [vars(kind) for kind in type(cell).__mro__]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            pending += [getattr(kind[one], "__func__", kind[one]) for kind in kinds if one in kind]
        elif isinstance(one, FunctionType) and one not in seen and not is_own(one.__module__):
            seen.add(one)
            fresh = names_of(one.__code__)
            names |= fresh
            pending += [*fresh, *(one.__globals__.get(name) for name in fresh)]
    return names


def _calls(cell: nn.Cell) -> list[Call]:
    """Return the ways in which a script may call a Cell, the first one with what it needs.

    An argument that is None by default may be a tensor, a flag may be the other one.
    """
    parameters = list(inspect.signature(cell.construct).parameters.values())
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind not in named]
    calls: list[Call] = [(len(needed), {})]
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in needed):
        calls = [(len(needed) + more, {}) for more in (0, -1, 1, 2) if len(needed) + more]
    options = {
        one.name: None if one.default is None else not one.default
        for one in parameters
        if one.default is None or isinstance(one.default, bool)
    }
    calls += [(len(needed), {name: value}) for name, value in options.items()]
    return [*calls, (len(needed), options)] if len(options) > 1 else calls
