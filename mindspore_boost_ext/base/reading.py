"""What the code of a Cell reads: its own parameters and those of others, found in its source."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mindspore import Parameter, nn

_LOOPS = (ast.For, ast.While, ast.ListComp)
# Code that fills or counts weights asks them for these, and not for their values.
_NO_VALUE = (
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
            found = _reached(cell, node)
            if isinstance(found, Parameter):
                yield found


def in_order_of_construct(cell: nn.Cell) -> list[Parameter | nn.Cell]:
    """Return the Cells and parameters that ``construct`` uses, in the order in which that runs.

    One may be there more than once. A parameter is used when what stands beside it has run: in a
    loop behind each of its layers, under another name at the end of the method.
    """
    return list(_used_by(cell, "construct", ()))


def _used_by(cell: nn.Cell, method: str, callers: tuple[str, ...]) -> Iterator[Parameter | nn.Cell]:
    """Yield what a method of a Cell uses; of methods that it calls, what they do."""
    function = getattr(type(cell), method, None)
    if method in callers or not inspect.isfunction(function):
        return
    renamed: list[Parameter | nn.Cell] = []

    def used_in(node: ast.AST) -> Iterator[Parameter | nn.Cell]:
        if isinstance(node, ast.Attribute):
            yield from used_in_attribute(node)
            return
        parts = [list(used_in(part)) for part in _as_they_run(node)]
        called = [parts.pop()] if isinstance(node, ast.Call) else []
        if isinstance(node, (ast.BinOp, ast.Call)):
            parts.sort(key=lambda uses: not any(isinstance(one, nn.Cell) for one in uses))
        inside = [one for uses in (*parts, *called) for one in uses]
        if isinstance(node, _LOOPS):
            inside.sort(key=lambda one: isinstance(one, Parameter))
        if _renames(node):
            renamed.extend(inside)
        else:
            yield from inside

    def used_in_attribute(node: ast.Attribute) -> Iterator[Parameter | nn.Cell]:
        if _is_no_value(cell, node):
            return
        yield from used_in(node.value)
        value = _reached(cell, node)
        if isinstance(value, (Parameter, nn.Cell)):
            yield value
        elif inspect.ismethod(value) and value.__self__ is cell:
            yield from _used_by(cell, node.attr, (*callers, method))

    yield from used_in(_tree(function))
    yield from sorted(renamed, key=lambda one: isinstance(one, Parameter))


def _as_they_run(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of a node: what a call is given, and what is assigned, run first."""
    parts = list(ast.iter_child_nodes(node))
    return reversed(parts) if isinstance(node, (ast.Call, ast.Assign)) else parts


def _renames(node: ast.AST) -> bool:
    """Return whether a statement gives attributes other names, and does nothing with them."""
    values = getattr(node, "value", None) if isinstance(node, ast.Assign) else None
    each = values.elts if isinstance(values, ast.Tuple) else [values]
    return all(isinstance(one, ast.Attribute) for one in each)


def _is_no_value(cell: nn.Cell, node: ast.Attribute) -> bool:
    return node.attr in _NO_VALUE and isinstance(_reached(cell, node.value), Parameter)


@functools.lru_cache(maxsize=1024)
def _tree(code: type | Callable[..., Any]) -> ast.AST:
    """Return the source of a class or a function; nothing where there is none, as in a console."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=1024)
def _attributes_read(kind: type) -> list[ast.Attribute]:
    """Return the attributes whose values the methods of a class use."""
    functions = [one for one in ast.walk(_tree(kind)) if isinstance(one, ast.FunctionDef)]
    filling = _called_from("__init__", functions) - _called_from("construct", functions)
    nodes = [node for one in functions if one.name not in filling for node in _attributes(one)]
    aside = {id(one.value) for one in nodes if one.attr in _NO_VALUE}
    return [one for one in nodes if id(one) not in aside]


def _called_from(name: str, functions: Sequence[ast.FunctionDef]) -> set[str]:
    """Return the names of a function of a class and of those of the class that it leads to."""
    names, found, asked = {one.name for one in functions}, set[str](), {name}
    while asked:
        found |= asked
        inside = (node for one in functions if one.name in asked for node in _attributes(one))
        asked = {node.attr for node in inside if _is_self(node.value)} & names - found
    return found


def _attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Attribute))


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _reached(cell: nn.Cell, node: ast.expr) -> Any:
    """Return what ``self.a.b`` is for a Cell, None if that is no chain of attributes from self."""
    if _is_self(node):
        return cell
    if isinstance(node, ast.Attribute):
        with contextlib.suppress(Exception):  # of a property of the user's
            return getattr(_reached(cell, node.value), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held, place = _reached(cell, node.value), node.slice.value
        ordered = isinstance(held, (nn.SequentialCell, nn.CellList, list, tuple))
        if ordered and isinstance(place, int) and -len(held) <= place < len(held):
            return held[place]
    return None
