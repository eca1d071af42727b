"""Runs the code of a Cell on proxies, which record what happens."""

from __future__ import annotations

import dis
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import has_replaced_construct, leaves
from mindspore_boost_ext.base.order import is_own, names_of
from mindspore_boost_ext.less_batch_normalization.copies import Copies, everything_in
from mindspore_boost_ext.less_batch_normalization.graph import (
    JOINED,
    OPAQUE,
    SPLITS,
    Graph,
    Node,
    NotUnderstoodError,
)
from mindspore_boost_ext.runtime.replaced import is_replacement

_ONLY_THE_FORM = frozenset(("shape", "dtype", "ndim", "size", "rank"))
_OPAQUE_MODULES = frozenset(("numpy", "math", *getattr(sys, "stdlib_module_names", ())))


class Tracer:
    """Runs one Cell on proxies and records what happens."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.type_stand_in = _ClassStandIn(self, type)
        # By id: a thing, which keeps its id, and what stands for it. Code compares them.
        self._known: dict[int, tuple[object, object]] = {}
        self._copies = Copies(self.wrap)

    def run(self, root: nn.Cell, tensors: int, options: Mapping[str, bool | None]) -> Graph:
        """Return the graph of a Cell, called with so many tensors.

        ``options`` are other arguments, by name; None stands for a tensor.
        """
        given = tuple(self.record("input") for _ in range(tensors))
        named = {
            name: self.record("input") if one is None else one for name, one in options.items()
        }
        result = self.call_cell(root, given, named)
        # What the code has put into the objects of the script may be used later.
        found = (one for one in everything_in((result, self._copies.made)) if type(one) is Value)
        nodes = set(self.graph.nodes)
        self.graph.outputs = [one.node for one in found if one.node in nodes]
        return self.graph

    def record(
        self, name: str, inputs: tuple[Value, ...] = (), cell: nn.Cell | None = None
    ) -> Value:
        """Return what stands for the result of a new node."""
        name = name.replace("_", "").lower()
        nodes = tuple(value.node for value in inputs)
        constant = name != "input" and all(node.constant for node in nodes)
        node = Node(name, nodes, cell, constant or name in _ONLY_THE_FORM)
        self.graph.nodes.append(node)
        return Value(self, node)

    def call_cell(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Trace into a Cell; one that is a leaf, or not understood, becomes a node."""
        inputs, hooked = _values((args, kwargs)), _compat.has_hooks(cell)
        if _is_leaf(cell):
            name = OPAQUE if hooked or has_replaced_construct(cell) else type(cell).__name__
            return self.record(getattr(cell, "step_name", name), inputs, cell)
        if hooked:
            self.graph.failures[cell] = f"{type(cell).__name__} has hooks"
            return self.record(OPAQUE, inputs, cell)
        mark = len(self.graph.nodes)
        try:
            result = self._construct(cell, args, kwargs)
            _values(result)  # an iterator raises here
            return result
        except Exception as error:  # foreign code meets a proxy: anything may happen
            del self.graph.nodes[mark:]
            why = " ".join(str(error).split())
            if "<mindspore_boost_ext." in why or "'Value'" in why:  # it names a proxy
                why = "it makes a number or a layer from a tensor or its shape"
            reason = f"{type(cell).__name__}.construct was not understood: {why}"
            self.graph.failures[cell] = reason[:160]
            return self.record(OPAQUE, inputs, cell)

    def _construct(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run the code of a Cell: that of its class, or what the script has put in its place."""
        if not has_replaced_construct(cell):
            return self.call(type(cell).construct, (self.wrap(cell), *args), kwargs)
        code = self.wrap(cell.construct)
        if not isinstance(code, FunctionType):
            raise NotUnderstoodError("the script has replaced it by what is no function")
        return code(*args, **kwargs)

    def call(self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run a Python function with proxies for its globals and its closure."""
        # Only its globals show where a wrapper is defined; those of exec may have no __name__.
        while hasattr(function, "__wrapped__") and is_own(
            str(function.__globals__.get("__name__"))
        ):
            function = function.__wrapped__  # ms.jit and the like
        if obstacle := _obstacle(function.__code__):
            raise NotUnderstoodError(obstacle)
        known = function.__globals__
        own = {
            name: self.wrap(known[name]) for name in names_of(function.__code__) if name in known
        }
        own["__builtins__"] = known.get("__builtins__", __builtins__)
        own.update(type=self.type_stand_in, isinstance=_is_instance, id=_id_of)
        if args and "super" in function.__code__.co_names:
            kind = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
            own["super"] = lambda *_: _SuperStandIn(kind["__class__"].cell_contents, args[0])
        closure = tuple(self._cell(one) for one in function.__closure__ or ()) or None
        copy = FunctionType(function.__code__, own, function.__name__, None, closure)
        copy.__defaults__ = tuple(map(self.wrap, function.__defaults__ or ()))
        named = function.__kwdefaults__ or {}
        copy.__kwdefaults__ = {name: self.wrap(one) for name, one in named.items()}
        return copy(*args, **kwargs)

    def _cell(self, cell: CellType) -> CellType:
        """Return a cell of a closure with a proxy for what it holds."""
        try:
            held = cell.cell_contents
        except ValueError:  # still empty
            return cell
        cells = [one for one in leaves(held) if isinstance(one, nn.Cell)]
        self.graph.fixed.update({id(one): "a function of the script holds it" for one in cells})
        return CellType(self.wrap(held))

    def wrap(self, thing: Any) -> object:
        """Return what stands for ``thing`` in traced code; the same each time."""
        if type(thing) in (Value, _CellStandIn, _Recorder):
            return thing
        if isinstance(thing, Tensor):
            return self.record("constant")
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        stand_in = self._stand_in(thing)
        if stand_in is None:
            return self._copies.of(thing)
        self._known[id(thing)] = (thing, stand_in)
        return stand_in

    def _stand_in(self, thing: Any) -> object:
        """Return what stands for code or a Cell; itself if it is not traced; None for data."""
        if isinstance(thing, nn.Cell):
            return _CellStandIn(self, thing)
        if isinstance(thing, ops.Primitive):
            return _Recorder(self, thing.name)
        if isinstance(thing, type):
            layer = issubclass(thing, (nn.Cell, ops.Primitive)) and is_own(thing.__module__)
            return _ClassStandIn(self, thing) if layer else thing
        if isinstance(thing, ModuleType):
            foreign = thing.__name__.partition(".")[0] in _OPAQUE_MODULES
            return thing if foreign else _ModuleStandIn(self, thing)
        if isinstance(thing, MethodType) and isinstance(thing.__self__, nn.Cell):
            code: Any = thing.__func__
            cell = thing.__self__
            return lambda *args, **kwargs: self.call(code, (self.wrap(cell), *args), kwargs)
        return self._stand_in_of_callable(thing)

    def _stand_in_of_callable(self, thing: Any) -> object:
        module = getattr(thing, "__module__", None) or ""
        if isinstance(thing, (FunctionType, BuiltinFunctionType)):
            if is_replacement(thing):
                return _Recorder(self, thing.__name__)
            if is_own(module) or is_own(getattr(thing, "__name__", "")):
                computes = module.startswith(("mindspore.ops", "mindspore.mint", "mindspore._c"))
                return _Recorder(self, thing.__name__, None if computes else thing)
            is_opaque = module.partition(".")[0] in _OPAQUE_MODULES
            if is_opaque or isinstance(thing, BuiltinFunctionType):
                return thing
            return lambda *args, **kwargs: self.call(thing, args, kwargs)
        if callable(thing) and is_own(type(thing).__module__):
            return _Recorder(self, getattr(thing, "name", None) or type(thing).__name__)
        return None


class Value:
    """Stands for a tensor: whatever is done with it is recorded."""

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer = tracer
        self.node = node

    __class__ = property(lambda self: Tensor)  # for isinstance

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ONLY_THE_FORM or name == "T":
            return self.tracer.record(name, (self,))
        return _Recorder(self.tracer, name, None, self)

    def __bool__(self) -> bool:
        raise NotUnderstoodError("it branches on the value or shape of a tensor")

    def __hash__(self) -> int:
        raise NotUnderstoodError("it looks up a tensor or its shape")

    def __iter__(self) -> Iterator[Any]:
        raise NotUnderstoodError("it unpacks a tensor or its shape")

    def __setitem__(self, key: object, value: object) -> None:
        raise NotUnderstoodError("it writes into a tensor")


@functools.lru_cache(maxsize=1024)
def _obstacle(code: CodeType) -> str:
    """Return what in a function's code proxies would get wrong unnoticed; empty if nothing."""
    steps = list(_instructions(code))
    if any(one.opname == "STORE_GLOBAL" for _, one in steps):
        return "it writes into a global name"
    if any(one.opname == "STORE_DEREF" and one.argval in code.co_freevars for _, one in steps):
        return "it writes into a name of the function around it"
    if "dtype" not in names_of(code):
        return ""
    if any(one.opname == "CONTAINS_OP" for _, one in steps):
        return "it looks for a dtype among others"  # theirs answer: False
    constants = ("LOAD_CONST", "RETURN_CONST")
    identity = any(one.opname == "IS_OP" and last.opname not in constants for last, one in steps)
    return "it compares a dtype by 'is'" if identity else ""


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Yield each instruction of a function and of the functions in it, with the one before it."""
    steps = list(dis.get_instructions(code))
    yield from zip(steps[:1] + steps, steps)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _id_of(thing: object) -> int:
    """Return what ``id`` does; of what a proxy stands for, it would be another."""
    if type(thing) in (Value, _CellStandIn, _Recorder):
        raise NotUnderstoodError("it asks for the id of a tensor, a layer or an operator")
    return id(thing)


def _is_empty(addend: object) -> bool:
    """Return whether an addend changes nothing: Python's sum begins with 0, a tuple with ()."""
    if isinstance(addend, numbers.Number):
        return addend == 0
    return isinstance(addend, (tuple, list)) and not addend


def _are_tuples(one: Value, other: object) -> bool:
    """Return whether two addends are tuples, such as parts of a split: not added, but joined."""
    is_tuple = one.node.name in SPLITS
    if isinstance(other, Value):
        return is_tuple and other.node.name in SPLITS
    return isinstance(other, (tuple, list)) and bool(is_tuple or _values(other))


def _add_operators() -> None:
    """Give ``Value`` Python's operators, under the names of MindSpore's."""
    arithmetic = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    binary = (*arithmetic, "and", "or", "xor")
    names = {f"__{prefix}{name}__": name for name in binary for prefix in ("", "r", "i")}
    single = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne", "getitem")
    names.update({f"__{name}__": name for name in single})
    for special, name in names.items():

        def operator(self: Value, *others: object, _name: str = name) -> Value:
            if _name == "add":
                if _is_empty(others[0]):
                    return self
                _name = JOINED if _are_tuples(self, others[0]) else _name
            return self.tracer.record(_name, (self, *_values(others)))

        setattr(Value, special, operator)


_add_operators()


@dataclass(eq=False, repr=False)
class _Recorder:
    """Stands for an operator or a function of MindSpore, or for a method of a tensor."""

    _tracer: Tracer
    _name: str
    _real: Callable[..., object] | None = None
    _owner: Value | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        values = _values((args, kwargs))
        if self._real is not None and not values:
            return self._tracer.wrap(self._real(*args, **kwargs))
        if self._owner is not None:
            values = (self._owner, *values)
        return self._tracer.record(self._name, values)


class _ClassStandIn:
    """Stands for ``type``, or a class of layers or operators: what it makes is recorded too."""

    def __init__(self, tracer: Tracer, kind: type) -> None:
        self._tracer, self._kind = tracer, kind

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._kind is type and len(args) == 1:
            return self._tracer.wrap(args[0].__class__)  # of what a proxy stands for
        return self._tracer.wrap(self._kind(*args, **kwargs))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._kind)  # called by code that is not traced

    def __getattr__(self, name: str) -> object:
        return getattr(self._kind, name)


def _is_instance(thing: object, kinds: type | tuple[Any, ...]) -> bool:
    """Return what ``isinstance`` does; note a layer whose replacement would change the answer."""
    plain = tuple(_plain_kinds(kinds))
    if type(thing) is not _CellStandIn:
        return isinstance(thing, plain)
    answer = isinstance(thing._real, plain)
    if answer and not issubclass(nn.Cell, plain):
        thing._asked()
    return answer


def _plain_kinds(kinds: type | tuple[Any, ...]) -> Iterator[type]:
    if isinstance(kinds, tuple):
        for one in kinds:
            yield from _plain_kinds(one)
    else:
        yield kinds._kind if isinstance(kinds, _ClassStandIn) else kinds


class _ModuleStandIn:
    """Stands for a module, so that what is taken from it is recorded."""

    def __init__(self, tracer: Tracer, module: ModuleType) -> None:
        self._tracer, self._module = tracer, module

    def __getattr__(self, name: str) -> object:
        return self._tracer.wrap(getattr(self._module, name))


class _CellStandIn:
    """Stands for a Cell: ``self`` in its own code, an attribute in that of others."""

    __slots__ = ("_real", "_tracer")

    def __init__(self, tracer: Tracer, cell: nn.Cell) -> None:
        object.__setattr__(self, "_tracer", tracer)
        object.__setattr__(self, "_real", cell)

    def _asked(self) -> type:
        self._tracer.graph.fixed[id(self._real)] = "the network's code asks for its class"
        return type(self._real)

    __class__ = property(_asked)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._tracer.call_cell(self._real, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        cell, tracer = self._real, self._tracer
        if name == "__dict__":
            raise NotUnderstoodError("it uses the dict of its attributes")
        if name == "cls_name":
            return self.__class__.__name__
        if name in _compat.own_parameters(cell):
            tracer.graph.read.add(id(cell))
        held = vars(cell).get(name)
        if isinstance(held, MethodType) and held.__self__ is cell:
            held = held.__func__
        elif name not in vars(cell):
            held = inspect.getattr_static(type(cell), name, None)
        else:
            return tracer.wrap(held)
        if isinstance(held, FunctionType) and not hasattr(nn.Cell, name):
            return lambda *args, **kwargs: tracer.call(held, (self, *args), kwargs)
        if name == "construct":
            return lambda *args, **kwargs: tracer.call_cell(cell, args, kwargs)
        if isinstance(held, FunctionType):
            return lambda *args, **kwargs: tracer.wrap(_listed(held(cell, *args, **kwargs)))
        return tracer.wrap(getattr(cell, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise NotUnderstoodError(f"it writes into its attribute {name!r}")

    def __repr__(self) -> str:
        self._asked()
        return repr(self._real)

    def __bool__(self) -> bool:
        return bool(self._real)

    def __len__(self) -> int:
        return len(self._real)

    def __iter__(self) -> Iterator[Any]:
        return (self._tracer.wrap(one) for one in iter(self._real))

    def __getitem__(self, index: object) -> object:
        return self._tracer.wrap(self._real[index])


class _SuperStandIn:
    """Stands for ``super()`` in a method of a Cell."""

    def __init__(self, kind: type, stand_in: _CellStandIn) -> None:
        self._kind, self._stand_in = kind, stand_in

    def __getattr__(self, name: str) -> object:
        line = type(self._stand_in._real).__mro__
        above = line[line.index(self._kind) + 1 :]
        held = next(vars(one)[name] for one in above if name in vars(one))
        tracer = self._stand_in._tracer
        return lambda *args, **kwargs: tracer.call(held, (self._stand_in, *args), kwargs)


def _listed(result: Any) -> object:
    """Return the views of a dict, as ``Cell.cells()`` gives them, as a list."""
    return list(result) if type(result).__name__.endswith(("dict_values", "dict_items")) else result


def _values(thing: object) -> tuple[Value, ...]:
    """Return the proxies for tensors in arguments or results, however nested."""
    found = tuple(everything_in(thing))
    if any(issubclass(type(one), Iterator) for one in found):
        raise NotUnderstoodError("it passes an iterator on")
    return tuple(one for one in found if type(one) is Value)


def _is_leaf(cell: nn.Cell) -> bool:
    """Return whether a Cell is one step: a layer whose code is MindSpore's, without Cells in it."""
    if getattr(cell, "one_step", False):
        return True
    owner = next(kind for kind in type(cell).__mro__ if "construct" in vars(kind))
    if not is_own(owner.__module__):
        return False
    layer = isinstance(cell, nn.Dense) or not any(True for _ in cell.cells())
    return layer and not isinstance(cell, (nn.SequentialCell, nn.CellList))
