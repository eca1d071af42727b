"""The Cells of a network: found by their kind, named, and put in each other's places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspore import Parameter, nn

from mindspore_boost_ext import _compat


def layers_of(network: nn.Cell, kinds: tuple[type, ...]) -> list[Any]:
    """Return the layers of some kinds, each once."""
    found = [cell for _, cell in network.cells_and_names() if isinstance(cell, kinds)]
    return list(dict.fromkeys(found))


def name_of(parameter: Parameter) -> str:
    """Return the name of a layer from that of one of its parameters."""
    return str(parameter.name.rpartition(".")[0] or parameter.name)


def exchange(network: nn.Cell, table: Mapping[int, Any]) -> None:
    """Put Cells or operators in the places of others, wherever the network holds them.

    Args:
        network (Cell): the network.
        table: from the id of a Cell or an operator to what takes its place.
    """
    for _, cell in list(network.cells_and_names()) if table else ():
        _compat.forget_compiled(cell)  # graphs compiled before are those of the other network
        for name, inner in [*_compat.children(cell).items(), *_compat.primitives(cell).items()]:
            if id(inner) in table:
                _compat.set_child(cell, name, table[id(inner)])
        for name, held in list(vars(cell).items()):
            if type(held) in (list, tuple, dict) and _holds(held, table):
                setattr(cell, name, _exchanged(held, table))


def _holds(thing: Any, table: Mapping[int, Any]) -> bool:
    if type(thing) in (list, tuple, dict):
        inner = thing.values() if isinstance(thing, dict) else thing
        return any(_holds(one, table) for one in inner)
    return id(thing) in table


def _exchanged(thing: object, table: Mapping[int, Any]) -> object:
    if isinstance(thing, dict):
        return {name: _exchanged(one, table) for name, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(_exchanged(one, table) for one in thing)
    return table.get(id(thing), thing)


def open_shapes(cell: nn.Cell, first_axis: int = 0) -> str:
    """Return which shapes of a Cell's inputs ``set_inputs`` leaves open; empty if none.

    Args:
        cell (Cell): a network or a step.
        first_axis (int): from which axis on it matters. Default: 0.
    """
    shapes = [getattr(one, "shape", ()) for one in cell.get_inputs() or ()]
    sizes = [size for shape in shapes for size in shape[first_axis:]]
    is_open = any(size is None or size < 0 for size in sizes)
    return ", ".join(map(str, shapes)) if is_open else ""


__all__ = ["exchange", "layers_of", "name_of", "open_shapes"]
