"""What the code of a Cell reads: its own parameters and those of others, found in its source."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Parameter, nn

# Code that fills or counts weights asks them for these, and not for their values.
NO_VALUE = (
    "set_data",
    "init_data",
    "requires_grad",
    "name",
    "shape",
    "dtype",
    "size",
    "ndim",
    "asnumpy",
)


def parameters_read(cell: nn.Cell) -> Iterator[Parameter]:
    """Yield the parameters that the methods of a Cell read, as ``self.b`` or ``self.a.b``.

    What only its constructor calls, to fill weights, does not count.
    """
    for kind in type(cell).__mro__:
        if kind.__module__.partition(".")[0] in ("mindspore", "builtins"):
            continue  # MindSpore's own Cells read no weights of others
        for node in _attributes_read(kind):
            found = reached(cell, node)
            if isinstance(found, Parameter):
                yield found


def is_no_value(cell: nn.Cell, node: ast.Attribute) -> bool:
    """Return whether an attribute is one of a parameter that is not made of its value."""
    return node.attr in NO_VALUE and isinstance(reached(cell, node.value), Parameter)


@functools.lru_cache(maxsize=1024)
def source_of(code: type | Callable[..., Any]) -> ast.AST:
    """Return the source of a class or a function; nothing where there is none, as in a console."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=1024)
def _attributes_read(kind: type) -> list[ast.Attribute]:
    """Return the attributes whose values the methods of a class use."""
    functions = [one for one in ast.walk(source_of(kind)) if isinstance(one, ast.FunctionDef)]
    filling = _called_from("__init__", functions) - _called_from("construct", functions)
    nodes = [node for one in functions if one.name not in filling for node in _attributes(one)]
    aside = {id(one.value) for one in nodes if one.attr in NO_VALUE}
    return [one for one in nodes if id(one) not in aside]


def _called_from(name: str, functions: Sequence[ast.FunctionDef]) -> set[str]:
    """Return the names of a function of a class and of those of the class that it leads to."""
    names, found, asked = {one.name for one in functions}, set[str](), {name}
    while asked:
        found |= asked
        inside = (node for one in functions if one.name in asked for node in _attributes(one))
        asked = {node.attr for node in inside if is_self(node.value)} & names - found
    return found


def _attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Attribute))


def is_self(node: ast.AST) -> bool:
    """Return whether an expression is ``self``."""
    return isinstance(node, ast.Name) and node.id == "self"


def reached(cell: nn.Cell, node: ast.expr) -> Any:
    """Return what ``self.a.b`` is for a Cell, None if that is no chain of attributes from self."""
    if is_self(node):
        return cell
    if isinstance(node, ast.Attribute):
        with contextlib.suppress(Exception):  # of a property of the user's
            return getattr(reached(cell, node.value), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held, place = reached(cell, node.value), node.slice.value
        ordered = isinstance(held, (nn.SequentialCell, nn.CellList, list, tuple))
        if ordered and isinstance(place, int) and -len(held) <= place < len(held):
            return held[place]
    return None
