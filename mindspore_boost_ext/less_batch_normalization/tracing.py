"""Symbolic tracing: what a network computes, found by running its ``construct`` on proxies."""

from __future__ import annotations

import inspect

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import names_in_code
from mindspore_boost_ext.less_batch_normalization.graph import Graph
from mindspore_boost_ext.less_batch_normalization.proxies import Tracer


def trace(network: nn.Cell) -> list[Graph]:
    """Return the graph of a network, then those of the parts of Cells that were not understood."""
    graphs: list[Graph] = []
    pending, seen = [network], {id(network)}
    while pending:
        cell = pending.pop(0)
        graphs.append(graph := Tracer().run(cell, _arguments(cell)))
        for failed, reason in list(graph.failures.items()):
            fresh = [one for one in failed.cells() if one is not None and id(one) not in seen]
            seen.update(id(one) for one in fresh)
            for one in fresh:
                if not _reaches_into(failed, one):
                    pending.append(one)
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
    """Return whether a Cell's code names parts of an inner one, and so may call them directly."""
    parts = names_in_code(cell).intersection(_compat.children(inner))
    return bool(parts - _compat.children(cell).keys())


def _arguments(cell: nn.Cell) -> int:
    """Return how many tensors to call a Cell with: the arguments without default."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cell.construct).parameters.values()
    return sum(one.default is one.empty and one.kind not in kinds for one in parameters)
