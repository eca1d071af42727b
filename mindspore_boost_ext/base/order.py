"""What the code of a Cell uses, and in which order, found in its source."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from mindspore import Parameter, nn

Use = Union[Parameter, nn.Cell]
# Code that fills or counts weights asks them for these, and not for their values.
_NO_VALUE = (
    *("set_data", "init_data", "requires_grad", "asnumpy"),
    *("name", "shape", "dtype", "size", "ndim"),
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


def _is_no_value(cell: nn.Cell, node: ast.Attribute) -> bool:
    """Return whether an attribute is one of a parameter that is not made of its value."""
    return node.attr in _NO_VALUE and isinstance(_reached(cell, node.value), Parameter)


@functools.lru_cache(maxsize=1024)
def _source_of(code: type | Callable[..., Any]) -> ast.AST:
    """Return the source of a class or a function; nothing where there is none, as in a console."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=1024)
def _attributes_read(kind: type) -> list[ast.Attribute]:
    """Return the attributes whose values the methods of a class use."""
    functions = [one for one in ast.walk(_source_of(kind)) if isinstance(one, ast.FunctionDef)]
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
    """Return whether an expression is ``self``."""
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


# ---- In which order ----


def in_order_of_construct(cell: nn.Cell) -> list[Use]:
    """Return the Cells and parameters that ``construct`` uses, in the order in which that runs.

    One may be there more than once. A parameter is used where it, or what was made of it alone,
    meets an input of the method or what was made of one; within a statement or a loop that is
    behind its Cells. What never meets one is left out.
    """
    return _Reader(cell).used_by(getattr(type(cell), "construct", None))


@dataclass
class _Names:
    """The local names of a method: what is made of its inputs, and what of parameters alone."""

    function: object
    values: set[str]
    made_of: dict[str, list[Use]] = field(default_factory=dict)
    at_the_end: list[Use] = field(default_factory=list)


class _Reader:
    """Follows the methods of a Cell."""

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = cell
        self.known: dict[object, list[Use]] = {}

    def used_by(self, function: object) -> list[Use]:
        """Return what a method uses; of methods that it calls, what they do."""
        if function not in self.known and inspect.isfunction(function):
            self.known[function] = []  # for one that calls itself
            for node in ast.iter_child_nodes(_source_of(function)):
                if isinstance(node, ast.FunctionDef):
                    given = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
                    names = _Names(function, given - {"self"})
                    used = [*self._block(node.body, names), *names.at_the_end]
                    self.known[function] = used
        return self.known.get(function, [])

    def _block(self, statements: Iterable[ast.AST], names: _Names) -> Iterator[Use]:
        for one in statements:
            yield from self._statement(one, names)

    def _statement(self, node: ast.AST, names: _Names) -> list[Use]:
        parts = ("body", "handlers", "orelse", "finalbody")
        inner = [one for part in parts for one in getattr(node, part, [])]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.at_the_end += self._block(inner, names)
            return []
        if not inner:
            return self._simple(node, names)
        heads = [one for one in ast.iter_child_nodes(node) if one not in inner]
        used = [*self._together(heads, names), *self._block(inner, names)]
        if isinstance(node, (ast.For, ast.While)):
            used.sort(key=lambda one: isinstance(one, Parameter))
        return used

    def _simple(self, node: ast.AST, names: _Names) -> list[Use]:
        """Return what a statement uses; none if it only gives parameters another name or form."""
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or value is None:
            return self._together([node], names)
        if isinstance(value, ast.Tuple) and isinstance(targets[0], ast.Tuple):
            pairs = zip(targets[0].elts, value.elts)
            return [use for pair in pairs for use in self._bound([pair[0]], pair[1], names)]
        return self._bound(targets, value, names)

    def _bound(self, targets: list[ast.expr], value: ast.expr, names: _Names) -> list[Use]:
        used = self._together([value], names)
        nodes = (node for one in targets for node in ast.walk(one))
        fresh = {one.id for one in nodes if isinstance(one, ast.Name) and not _is_self(one)}
        if _has_value(value, names) or any(isinstance(one, nn.Cell) for one in used):
            names.values |= fresh
            return used
        names.values -= fresh
        names.made_of.update(dict.fromkeys(fresh, used))
        return []

    def _together(self, nodes: Iterable[ast.AST], names: _Names) -> list[Use]:
        """Return what expressions use: Cells and methods of one's own, and then parameters."""
        parameters: list[Parameter] = []
        used = [use for one in nodes for use in self._uses(one, names, parameters)]
        return [*used, *parameters]

    def _uses(self, node: ast.AST, names: _Names, parameters: list[Parameter]) -> Iterator[Use]:
        if isinstance(node, ast.Name):
            held = () if node.id in names.values else names.made_of.get(node.id, ())
            parameters += [one for one in held if isinstance(one, Parameter)]
        elif isinstance(node, ast.NamedExpr):
            yield from self._bound([node.target], node.value, names)
        elif isinstance(node, ast.Lambda):
            names.at_the_end += self._together([node.body], names)
        elif isinstance(node, ast.Attribute):
            yield from self._uses_of_attribute(node, names, parameters)
        else:
            parts = list(ast.iter_child_nodes(node))
            # What a call is given runs before it.
            for one in parts[::-1] if isinstance(node, ast.Call) else parts:
                yield from self._uses(one, names, parameters)

    def _uses_of_attribute(
        self, node: ast.Attribute, names: _Names, parameters: list[Parameter]
    ) -> Iterator[Use]:
        if _is_no_value(self.cell, node):
            return
        if _is_super(node.value):
            yield from self.used_by(self._above(names.function, node.attr))
            return
        yield from self._uses(node.value, names, parameters)
        value = _reached(self.cell, node)
        if isinstance(value, Parameter):
            parameters.append(value)
        elif isinstance(value, nn.Cell):
            yield value
        elif inspect.ismethod(value) and value.__self__ is self.cell:
            yield from self.used_by(value.__func__)

    def _above(self, function: object, name: str) -> object:
        """Return the method that ``super()`` finds in a function of a class of the Cell's."""
        kinds = type(self.cell).__mro__
        for place, kind in enumerate(kinds):
            if any(one is function for one in vars(kind).values()):
                above = (vars(one) for one in kinds[place + 1 :])
                return next((one[name] for one in above if name in one), None)
        return None


def _has_value(node: ast.AST, names: _Names) -> bool:
    """Return whether an expression takes the value, not the shape alone, of an input."""
    if isinstance(node, ast.Attribute) and node.attr in _NO_VALUE:
        return False
    if isinstance(node, ast.Name):
        return node.id in names.values
    return any(_has_value(one, names) for one in ast.iter_child_nodes(node))


def _is_super(node: ast.AST) -> bool:
    """Return whether an expression is ``super()``."""
    called = node.func if isinstance(node, ast.Call) and not node.args else None
    return isinstance(called, ast.Name) and called.id == "super"
