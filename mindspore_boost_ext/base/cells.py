"""Finds Cells of a network by their class, names them, and replaces them by others."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.config.rules import shown

_CONTAINERS = (list, tuple, dict)
_REWRITTEN = re.compile(r"Opt(_\d+)+$")  # of a module, such as NetOpt_140110865456912


def check_cells(**given: object) -> None:
    """Raise a ``TypeError`` for an argument that is no Cell, with its name."""
    for name, one in given.items():
        if not isinstance(one, nn.Cell):
            raise TypeError(f"{name} must be a Cell, got {shown(one)}")


def layers_of(network: nn.Cell, kinds: tuple[type, ...]) -> list[Any]:
    """Return the layers of some kinds, each once."""
    return [cell for _, cell in network.cells_and_names() if is_a(cell, kinds)]


def leaves(thing: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples and dicts, however nested; anything else itself.

    ``around`` has the ids of the outer ones: one of them within itself is left out.
    """
    kind = type(thing)  # isinstance would ask proxies, which say that they are something else
    if not issubclass(kind, _CONTAINERS):
        yield thing
    elif id(thing) not in around:
        for one in thing.values() if issubclass(kind, dict) else thing:
            yield from leaves(one, (*around, id(thing)))


def tensors_within(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the Tensors that inputs of a network hold: those in tuples, lists and dicts."""
    held = [one for one in inputs if not isinstance(one, Tensor)]
    return [one for one in leaves(held) if isinstance(one, Tensor)]


def is_a(cell: nn.Cell, kinds: tuple[type, ...]) -> bool:
    """Return whether a Cell is of one of some classes, also after mixed precision O1.

    From its second use in a process on, O1 derives layers from copies of MindSpore's classes.
    """
    names = {kind.__name__ for kind in kinds} if is_rewritten(cell) else ()
    return isinstance(cell, kinds) or any(kind.__name__ in names for kind in type(cell).__mro__)


def is_rewritten(cell: nn.Cell) -> bool:
    """Return whether mixed precision O1 has rewritten the class of a Cell."""
    return bool(_REWRITTEN.search(type(cell).__module__))


def has_replaced_construct(cell: nn.Cell) -> bool:
    """Return whether a script has given this Cell another ``construct`` than its class has."""
    held = vars(cell).get("construct")
    ours = str(getattr(held, "__module__", None)).startswith("mindspore_boost_ext.")
    return held is not None and not ours  # ours are taps


def parameters_in_lists(cell: nn.Cell) -> list[Parameter]:
    """Return the Parameters that a Cell holds in Python lists and tuples."""
    lists = [value for value in vars(cell).values() if isinstance(value, (list, tuple))]
    return [one for value in lists for one in value if isinstance(one, Parameter)]


def name_of(parameter: Parameter) -> str:
    """Return the name of a layer, from the name of one of its parameters."""
    return str(parameter.name.rpartition(".")[0] or parameter.name)


def copy_settings(source: object, target: nn.Cell) -> None:
    """Give a Cell the settings of the layer or operator that it replaces: code may read them."""
    for name, value in vars(source).items():
        is_setting = not name.startswith("_") and not isinstance(value, ops.Primitive)
        if is_setting and not hasattr(target, name):
            setattr(target, name, value)


def exchange(network: nn.Cell, table: Mapping[int, Any], spared: Container[int] = ()) -> None:
    """Replace Cells, operators or Parameters by others, wherever the network holds them.

    ``table`` maps their ids to the replacements. Cells with ids in ``spared`` keep what they hold.
    """

    def replaced(one: object) -> object:
        return table.get(id(one), one)

    for _, cell in list(network.cells_and_names()) if table else ():
        _compat.forget_compiled(cell)  # graphs compiled before are of the network as it was
        if id(cell) in spared:
            continue
        for name, inner in [*_compat.children(cell).items(), *_compat.primitives(cell).items()]:
            if id(inner) in table:
                _compat.set_child(cell, name, table[id(inner)])
        own = _compat.own_parameters(cell)
        if any(id(one) in table for one in own.values()):
            _compat.set_own_parameters(cell, type(own)(zip(own, map(replaced, own.values()))))
        for name, held in _compat.own_attributes(cell).items():
            if isinstance(held, _CONTAINERS):
                vars(cell)[name] = exchanged(held, replaced)


def exchanged(thing: Any, change: Callable[[Any], Any], around: tuple[int, ...] = ()) -> Any:
    """Return nested lists, tuples and dicts, with ``change`` applied to each value in them.

    Each is of its own kind. A container with nothing new is returned itself. ``around`` has the ids
    of the outer ones.
    """
    kind = type(thing)
    if not issubclass(kind, _CONTAINERS):
        return change(thing)
    if id(thing) in around:
        return thing
    held = list(thing.values()) if issubclass(kind, dict) else thing
    made = [exchanged(one, change, (*around, id(thing))) for one in held]
    if not any(map(operator.is_not, made, held)):
        return thing
    if issubclass(kind, tuple):  # a subclass's own constructor may take other arguments
        return tuple.__new__(kind, made)
    changed = copy.copy(thing)
    if issubclass(kind, dict):
        changed.update(zip(thing, made))
    else:
        changed[:] = made
    return changed


def declared_shapes(cell: nn.Cell) -> list[tuple[int | None, ...]]:
    """Return the shapes that ``set_inputs`` has declared for a Cell; empty if none."""
    return [getattr(one, "shape", ()) for one in cell.get_inputs() or ()]


def is_open(shape: tuple[int | None, ...], axes: slice) -> bool:
    """Return whether the size of one of these axes, or the number of axes, is not declared."""
    return shape == (-2,) or any(size is None or size < 0 for size in shape[axes])
