"""Finds what the code of a Cell uses, and in which order."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, Union

from mindspore import Parameter, nn

Use = Union[Parameter, tuple[Any, ...], nn.Cell]
Things = list[Any]
Bindings = Mapping[str, Sequence[ast.expr]]
_ANY = ast.Name("any")  # stands for an index that is not a constant
# Code that fills or counts weights reads these attributes, not their values.
_NO_VALUE = (
    *("set_data", "init_data", "requires_grad", "asnumpy"),
    *("name", "shape", "dtype", "size", "ndim"),
)


def names_of(code: CodeType) -> set[str]:
    """Return the names that code and the functions inside it may look up."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_of(constant)
    return found


def names_in_code(cell: nn.Cell) -> set[str]:
    """Return the names that a Cell's methods look up, without ``__init__`` and MindSpore's own."""
    names: set[str] = set()
    for kind in type(cell).__mro__:
        for held in () if is_own(kind.__module__) else vars(kind).values():
            function = getattr(held, "__func__", held)  # of a static method, too
            if isinstance(function, FunctionType) and function.__name__ != "__init__":
                names |= names_of(function.__code__)
    return names


def is_own(module: str) -> bool:
    """Return whether a module is one of MindSpore's."""
    return module.partition(".")[0] == "mindspore"


def is_of_libraries(module: str) -> bool:
    """Return whether a module is one of MindSpore's or of this package, and no script's."""
    return module.partition(".")[0] in ("mindspore", "mindspore_boost_ext")


def contents(cell: CellType) -> list[Any]:
    """Return what a cell of a closure holds; it may be empty yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def parameters_read(cell: nn.Cell) -> Iterator[Parameter]:
    """Yield the parameters that the methods of a Cell read, as ``self.b`` or ``self.a.b``.

    Methods that only its constructor calls, to fill weights, do not count.
    """
    for kind in type(cell).__mro__:
        # MindSpore's own Cells read no weights of others.
        for node, names in () if is_own(kind.__module__) else _values_read(kind):
            yield from _parameters(cell, _reached(cell, node, names))


def _parameters(cell: nn.Cell, things: Iterable[Any]) -> list[Parameter]:
    """Return the Parameters among things, and those in tuples that the Cell itself holds.

    A tuple may also list all weights of the network, as for the norm that a loss adds.
    """
    found: list[Parameter] = []
    for one in things:
        if isinstance(one, Parameter):
            found.append(one)
        elif _is_of_parameters(one):
            below = {id(each) for child in cell.cells() for each in child.get_parameters()}
            found += [each for each in one if id(each) not in below]
    return found


def _is_of_parameters(thing: object) -> bool:
    return isinstance(thing, tuple) and all(isinstance(one, Parameter) for one in thing)


@functools.lru_cache(maxsize=1024)
def _source_of(code: type | Callable[..., Any]) -> ast.AST:
    """Return the source of a class or function; an empty one if there is none, as in a console."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def methods_of(kind: type) -> dict[str, ast.FunctionDef]:
    """Return the methods in the source of a class, by name; none if there is no source."""
    body = [one for each in getattr(_source_of(kind), "body", ()) for one in each.body]
    return {one.name: one for one in body if isinstance(one, ast.FunctionDef)}


@functools.lru_cache(maxsize=1024)
def _values_read(kind: type) -> list[tuple[ast.expr, Bindings]]:
    """Return each ``a.b`` and ``a[i]`` whose value a method uses, with the local names there."""
    functions = [one for one in ast.walk(_source_of(kind)) if isinstance(one, ast.FunctionDef)]
    filling = _called_from("__init__", functions) - _called_from("construct", functions)
    found: list[tuple[ast.expr, Bindings]] = []
    for function in functions:
        inside = () if function.name in filling else ast.walk(function)
        nodes = [one for one in inside if isinstance(one, (ast.Attribute, ast.Subscript))]
        aside = {id(node.value) for node in nodes if getattr(node, "attr", "") in _NO_VALUE}
        names = _bindings(function) if nodes else {}
        found += [(node, names) for node in nodes if id(node) not in aside]
    return found


def _called_from(name: str, functions: Sequence[ast.FunctionDef]) -> set[str]:
    """Return the names of a method and of the methods of its class that it calls, at any depth."""
    names, found, asked = {function.name for function in functions}, set[str](), {name}
    while asked:
        found |= asked
        inside = (node for one in functions if one.name in asked for node in ast.walk(one))
        own = (one for one in inside if isinstance(one, ast.Attribute) and _is_self(one.value))
        asked = {one.attr for one in own} & names - found
    return found


def _bindings(code: ast.AST) -> Bindings:
    """Return for each local name in some code the expressions that it may stand for."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _bind(target, node.value, found)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            _bind(node.target, node.value, found)
        elif isinstance(node, (ast.For, ast.comprehension)):
            _bind(node.target, _element(node.iter), found)
    return found


def _bind(target: ast.expr, value: ast.expr, found: dict[str, list[ast.expr]]) -> None:
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) else []
        if len(parts) != len(target.elts):
            places = range(len(target.elts))
            parts = [ast.Subscript(value, ast.Constant(place)) for place in places]
        for inner, part in zip(target.elts, parts):
            _bind(inner, part, found)


def _element(iterable: ast.expr) -> ast.expr:
    """Return an expression for the elements that a loop goes through."""
    if isinstance(iterable, ast.Call):
        name = getattr(iterable.func, "attr", getattr(iterable.func, "id", ""))
        if name in ("values", "items") and isinstance(iterable.func, ast.Attribute):
            one = ast.Subscript(iterable.func.value, _ANY)
            return ast.Tuple([_ANY, one]) if name == "items" else one
        if name in ("enumerate", "zip"):
            counter = [_ANY] if name == "enumerate" else []
            several = iterable.args[:1] if counter else iterable.args
            return ast.Tuple([*counter, *map(_element, several)])
        if name in ("reversed", "list", "tuple") and iterable.args:
            return _element(iterable.args[0])
    return ast.Subscript(iterable, _ANY)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _reached(cell: nn.Cell, node: ast.expr, names: Bindings, seen: tuple[str, ...] = ()) -> Things:
    """Return the objects that ``self.a.b`` or ``self.a[i].b`` may be, also through a local name.

    There are several if the code goes through them in a loop, and none for other expressions.
    """
    if _is_self(node):
        return [cell]
    if isinstance(node, ast.Name):
        known = () if node.id in seen else names.get(node.id, ())
        return [one for value in known for one in _reached(cell, value, names, (*seen, node.id))]
    if isinstance(node, ast.IfExp):
        return _reached(cell, node.body, names, seen) + _reached(cell, node.orelse, names, seen)
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return []
    held = _reached(cell, node.value, names, seen)
    if isinstance(node, ast.Subscript):
        return [element for thing in held for element in _elements(thing, node.slice)]
    found = []
    for thing in held:
        with contextlib.suppress(Exception):  # the user's property may raise any
            found.append(getattr(thing, node.attr, None))
    return found


def _elements(held: Any, index: ast.expr) -> Things:
    """Return the element of a container; all elements if the index is not a constant."""
    is_dict = isinstance(held, (dict, nn.CellDict))
    if not is_dict and not isinstance(held, (nn.SequentialCell, nn.CellList, list, tuple)):
        return []
    if isinstance(index, ast.Slice):
        return [held]  # it holds the elements of the slice
    try:
        return [held[ast.literal_eval(index)]]
    except (ValueError, TypeError):  # not a constant, or one of another type
        if _is_of_parameters(held):
            return [held]  # code that goes through all weights, as for a norm
        return list(held.values() if is_dict else held)
    except LookupError:
        return []


# ---- In which order ----


def in_order_of_construct(cell: nn.Cell) -> list[Use]:
    """Return the Cells and parameters that ``construct`` uses, in the order in which it runs.

    One may occur several times. A parameter is used where it, or a value made of parameters alone,
    is combined with an input or a value made of inputs. Within a statement or a loop, parameters
    come after Cells. A parameter that is never combined so is left out. A tuple of parameters that
    is used as a whole stands for itself.
    """
    return _used_by(getattr(type(cell), "construct", None), cell, {})


def _used_by(function: object, cell: nn.Cell, known: dict[object, list[Use]]) -> list[Use]:
    """Return what a method of a Cell uses, with what the methods that it calls use."""
    if function not in known and inspect.isfunction(function):
        known[function] = []  # it may call itself
        for node in ast.iter_child_nodes(_source_of(function)):
            if isinstance(node, ast.FunctionDef):
                known[function] = _Reader(function, cell, known).read(node)
    return known.get(function, [])


class _Reader:
    """Reads a method of a Cell; knows its local names, and what other methods use."""

    def __init__(self, function: object, cell: nn.Cell, known: dict[object, list[Use]]) -> None:
        self.function, self.cell, self.known = function, cell, known
        self.names = _bindings(_source_of(function))
        self.values: set[str] = set()  # names of values made of inputs
        self.made_of: dict[str, list[Use]] = {}  # by name: what values without inputs are made of
        self.at_the_end: list[Use] = []

    def read(self, node: ast.FunctionDef) -> list[Use]:
        given = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        self.values = given - {"self"}
        return [*self._block(node.body), *self.at_the_end]

    def _block(self, statements: Iterable[ast.AST]) -> Iterator[Use]:
        for statement in statements:
            yield from self._statement(statement)

    def _statement(self, node: ast.AST) -> list[Use]:
        parts = ("body", "handlers", "orelse", "finalbody")
        inner = [one for part in parts for one in getattr(node, part, [])]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.at_the_end += self._block(inner)
            return []
        if not inner:
            return self._simple(node)
        heads = [one for one in ast.iter_child_nodes(node) if one not in inner]
        used = [*self._together(heads), *self._block(inner)]
        if isinstance(node, (ast.For, ast.While)):
            used.sort(key=lambda one: not isinstance(one, nn.Cell))
        return used

    def _simple(self, node: ast.AST) -> list[Use]:
        """Return what a statement uses; none if it only gives parameters another name or form."""
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        value = getattr(node, "value", None)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or value is None:
            return self._together([node])
        if isinstance(value, ast.Tuple) and isinstance(targets[0], ast.Tuple):
            pairs = zip(targets[0].elts, value.elts)
            return [use for pair in pairs for use in self._bound([pair[0]], pair[1])]
        return self._bound(targets, value)

    def _bound(self, targets: list[ast.expr], value: ast.expr) -> list[Use]:
        used = self._together([value])
        nodes = (node for target in targets for node in ast.walk(target))
        named = {one.id for one in nodes if isinstance(one, ast.Name) and not _is_self(one)}
        if self._has_value(value) or any(isinstance(one, nn.Cell) for one in used):
            self.values |= named
            return used
        self.values -= named
        self.made_of.update(dict.fromkeys(named, used))
        return []

    def _together(self, nodes: Iterable[ast.AST]) -> list[Use]:
        """Return what expressions use: first Cells and the Cell's own methods, then parameters."""
        parameters: list[Use] = []
        used = [use for node in nodes for use in self._uses(node, parameters)]
        return [*used, *parameters]

    def _uses(self, node: ast.AST, parameters: list[Use]) -> Iterator[Use]:
        if isinstance(node, ast.Name):
            held = () if node.id in self.values else self.made_of.get(node.id, ())
            parameters += [one for one in held if not isinstance(one, nn.Cell)]
        elif isinstance(node, ast.NamedExpr):
            yield from self._bound([node.target], node.value)
        elif isinstance(node, ast.Lambda):
            self.at_the_end += self._together([node.body])
        elif isinstance(node, ast.Attribute):
            yield from self._uses_of_attribute(node, parameters)
        elif isinstance(node, ast.Subscript) and (chosen := self._parameters(node)):
            parameters += chosen
            yield from self._uses(node.slice, parameters)
        else:
            parts = list(ast.iter_child_nodes(node))
            # The arguments of a call are computed before it.
            for part in parts[::-1] if isinstance(node, ast.Call) else parts:
                yield from self._uses(part, parameters)

    def _uses_of_attribute(self, node: ast.Attribute, parameters: list[Use]) -> Iterator[Use]:
        if node.attr in _NO_VALUE and self._parameters(node.value):
            return  # this does not use the parameter's value
        if _is_super(node.value):
            yield from _used_by(self._above(node.attr), self.cell, self.known)
            return
        yield from self._uses(node.value, parameters)
        for value in self._reached(node):
            if isinstance(value, Parameter) or _is_of_parameters(value):
                parameters.append(value)
            elif isinstance(value, nn.Cell):
                yield value
            elif inspect.ismethod(value) and value.__self__ is self.cell:
                yield from _used_by(value.__func__, self.cell, self.known)

    def _reached(self, node: ast.expr) -> Things:
        return _reached(self.cell, node, self.names)

    def _parameters(self, node: ast.expr) -> list[Parameter]:
        return [one for one in self._reached(node) if isinstance(one, Parameter)]

    def _has_value(self, node: ast.AST) -> bool:
        """Return whether an expression takes the value, not the shape alone, of an input."""
        if isinstance(node, ast.Attribute) and node.attr in _NO_VALUE:
            return False
        if isinstance(node, ast.Name):
            return node.id in self.values
        return any(map(self._has_value, ast.iter_child_nodes(node)))

    def _above(self, name: str) -> object:
        """Return the method that ``super()`` finds."""
        for kind in type(self.cell).__mro__:
            if any(one is self.function for one in vars(kind).values()):
                return getattr(super(kind, type(self.cell)), name, None)
        return None


def _is_super(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) and not node.args else None
    return isinstance(called, ast.Name) and called.id == "super"
