"""Where a network uses its weights last: a weight that is used again later is frozen later."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, nn

from mindspore_boost_ext import _compat


def in_order_of_last_use(network: nn.Cell) -> list[Parameter]:
    """Return the trainable parameters of a network in the order in which they are used last.

    That is the order of ``trainable_params``, but for a parameter that several Cells hold, that is
    in a Cell which stands in several places, or that the code of another Cell reads: an embedding
    that is the output's matrix, too, stands where the output is. For such code it is the end of the
    Cell whose ``construct`` it is.

    Args:
        network (Cell): the network, with or without its loss.
    """
    last = {id(one): one for one in network.trainable_params()}
    for parameter in _uses(network):
        if id(parameter) in last:  # a dict keeps the order of insertion
            last[id(parameter)] = last.pop(id(parameter))
    return list(last.values())


def _uses(cell: nn.Cell) -> Iterator[Parameter]:
    """Yield the parameters that a Cell and those in it use, one more than once perhaps."""
    yield from cell.get_parameters(expand=False)
    for child in _compat.children(cell).values():
        if isinstance(child, nn.Cell):
            yield from _uses(child)
    read = {id(one): one for one in _read_by_code(cell)}
    # In the order in which the Cell holds them: its code may read a bias before its weight.
    held = [read.pop(id(one)) for one in cell.get_parameters() if id(one) in read]
    yield from (*held, *read.values())


def _read_by_code(cell: nn.Cell) -> Iterator[Parameter]:
    """Yield the parameters that the methods of a Cell read, as ``self.b`` or ``self.a.b``."""
    for kind in type(cell).__mro__:
        if kind.__module__.partition(".")[0] in ("mindspore", "builtins"):
            continue  # MindSpore's own Cells read no weights of others
        for function in _methods(kind):
            for node in ast.walk(function):
                found = _reached(cell, node) if isinstance(node, ast.Attribute) else None
                if isinstance(found, Parameter):
                    yield found


def _methods(kind: type) -> list[ast.FunctionDef]:
    """Return what a class defines, but its constructor; nothing where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # as in a console
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [one for one in functions if one.name != "__init__"]


def _reached(cell: nn.Cell, node: ast.expr) -> Any:
    """Return what ``self.a.b`` is for a Cell, None if that is no chain of attributes from self."""
    if isinstance(node, ast.Name):
        return cell if node.id == "self" else None
    if isinstance(node, ast.Attribute):
        return getattr(_reached(cell, node.value), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held, place = _reached(cell, node.value), node.slice.value
        ordered = isinstance(held, (nn.SequentialCell, nn.CellList, list, tuple))
        if ordered and isinstance(place, int) and -len(held) <= place < len(held):
            return held[place]
    return None
