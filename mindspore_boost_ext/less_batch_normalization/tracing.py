"""Symbolic tracing: what a network computes, found by running its ``construct`` on proxies."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Union

from mindspore import nn

from mindspore_boost_ext.less_batch_normalization.graph import Graph
from mindspore_boost_ext.less_batch_normalization.proxies import Tracer
from mindspore_boost_ext.less_batch_normalization.reach import reached

# Errors of a call with another number of tensors than the code takes.
_OF_NUMBER = re.compile("positional argument|index out of range|values to unpack")
# How many tensors to call a Cell with, and other arguments by name; there None is a tensor.
Call = tuple[int, dict[str, Union[bool, None]]]


def trace(network: nn.Cell) -> list[Graph]:
    """Return the graphs of a network, then those of the parts of Cells that were not understood."""
    graphs: list[Graph] = []
    pending, seen = [network], {id(network)}
    while pending:
        for graph in _graphs(pending.pop(0)):
            graphs.append(graph)
            for failed in list(graph.failures):
                unseen = [one for one in failed.cells() if one is not None and id(one) not in seen]
                seen.update(id(one) for one in unseen)
                whole = _note_reached(graph, failed, unseen) if unseen else []
                pending += [one for one in unseen if one not in whole]
    return graphs


def _graphs(cell: nn.Cell) -> list[Graph]:
    """Return a graph for each way to call a Cell, but for those that no script can take."""
    graphs, calls = [], _calls(cell)
    for tensors, options in calls:
        graph = Tracer().run(cell, tensors, options)
        given = f"with {', '.join(options)} given, " if options else ""
        graph.failures = {one: given + why for one, why in graph.failures.items()}
        graphs.append(graph)
    if len({tensors for tensors, _ in calls}) == 1:
        return graphs
    possible = [one for one in graphs if not any(map(_OF_NUMBER.search, one.failures.values()))]
    return possible or graphs[:1]


def _note_reached(graph: Graph, failed: nn.Cell, inner: list[nn.Cell]) -> list[nn.Cell]:
    """Return the inner Cells of one that was not understood whose parts it may use; note them."""
    found = reached(failed, inner)
    why = f"{type(failed).__name__} may use parts of it, but {graph.failures[failed]}"
    parts = [part for one in found for _, part in one.cells_and_names()]
    graph.failures.update(dict.fromkeys(parts, why))
    graph.fixed.update({id(part): why for part in parts})
    return found


@contextlib.contextmanager
def _kept(network: nn.Cell) -> Iterator[None]:
    """Give Cells their mode, and Parameters their names, back: a slice of Cells renames them."""
    flags = [(cell, cell.training) for _, cell in network.cells_and_names()]
    names = [(one, one.name) for one in network.get_parameters()]
    try:
        yield
    finally:
        for cell, training in flags:
            cell.training = training
        for parameter, name in names:
            parameter.name = name


def trace_both(network: nn.Cell) -> list[Graph]:
    """Return the graphs of a network in training mode, then those in evaluation mode."""
    graphs: list[Graph] = []
    with _kept(network):
        for training in (True, False):
            for _, cell in network.cells_and_names():
                cell.training = training
            graphs += trace(network)
    return graphs


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
        parameter.name: None if parameter.default is None else not parameter.default
        for parameter in parameters
        if (parameter.default is None or isinstance(parameter.default, bool))
        and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    calls += [(len(needed), {name: value}) for name, value in options.items()]
    return [*calls, (len(needed), options)] if len(options) > 1 else calls
