"""Runs the code of a Cell on proxies, which record what happens."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchanged, has_replaced_construct, leaves
from mindspore_boost_ext.base.order import contents, is_own
from mindspore_boost_ext.less_batch_normalization.bytecode import (
    globals_named,
    unsafe_reason,
    written_outside,
)
from mindspore_boost_ext.less_batch_normalization.copies import (
    OPAQUE_MODULES,
    Copies,
    everything_in,
)
from mindspore_boost_ext.less_batch_normalization.graph import (
    OPAQUE,
    Graph,
    Node,
    NotUnderstoodError,
)
from mindspore_boost_ext.less_batch_normalization.values import (
    ONLY_THE_FORM,
    Recorder,
    Value,
    values_in,
)
from mindspore_boost_ext.runtime.replaced import is_replacement


class Tracer:
    """Runs one Cell on proxies and records what happens."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.type_proxy = _ClassProxy(self, type)
        # By id: a thing, which keeps its id, and what stands for it. Code compares them.
        self._known: dict[int, tuple[object, object]] = {}
        self._looked_into: dict[int, object] = {}  # by id
        self._copies = Copies(self.wrap)
        self._values: list[weakref.ref[Value]] = []

    def run(self, root: nn.Cell, tensors: int, options: Mapping[str, bool | None]) -> Graph:
        """Return the graph of a Cell, called with so many tensors.

        ``options`` are other arguments, by name; None stands for a tensor.
        """
        given = tuple(self.record("input") for _ in range(tensors))
        named = {
            name: self.record("input") if one is None else one for name, one in options.items()
        }
        result = self.call_cell(root, given, named)
        del given, named
        found = [one for one in everything_in(result) if type(one) is Value]
        present = set(self.graph.nodes)
        nodes = dict.fromkeys(one.node for one in [*found, *self._left(found)])
        self.graph.outputs = [node for node in nodes if node in present and not node.constant]
        return self.graph

    def _left(self, found: list[Value]) -> list[Value]:
        """Return the proxies that are left, but for those found: the code has put them somewhere.

        It may use them later.
        """
        known = set(map(id, found))

        def living() -> list[Value]:
            values = [value for one in self._values if (value := one()) is not None]
            return [one for one in values if id(one) not in known and not one.node.constant]

        if living():
            gc.collect()  # circles of references, as of a function that calls itself
        return living()

    def record(
        self, name: str, inputs: tuple[Value, ...] = (), cell: nn.Cell | None = None
    ) -> Value:
        """Return what stands for the result of a new node."""
        name = name.replace("_", "").lower()
        nodes = tuple(value.node for value in inputs)
        constant = name != "input" and all(node.constant for node in nodes)
        node = Node(name, nodes, cell, constant or name in ONLY_THE_FORM)
        self.graph.nodes.append(node)
        value = Value(self, node)
        self._values.append(weakref.ref(value))
        return value

    def call_cell(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Trace into a Cell; one that is a leaf, or not understood, becomes a node."""
        given, hooked = (args, kwargs), _compat.has_hooks(cell)
        if _is_leaf(cell):
            name = OPAQUE if hooked or has_replaced_construct(cell) else type(cell).__name__
            return self.record(getattr(cell, "step_name", name), values_in(given), cell)
        if hooked:
            args, kwargs = exchanged(given, self._seen_by_hooks)
        mark = len(self.graph.nodes)
        try:
            result = self._construct(cell, args, kwargs)
            return exchanged(result, self._seen_by_hooks) if hooked else result
        except Exception as error:  # foreign code meets a proxy: anything may happen
            del self.graph.nodes[mark:]
            why = " ".join(str(error).split())
            if "<mindspore_boost_ext." in why or "'Value'" in why:  # it names a proxy
                why = "it makes a number or a layer from a tensor or its shape"
            reason = f"{type(cell).__name__}.construct was not understood: {why}"
            self.graph.failures[cell] = reason[:160]
            return self.record(OPAQUE, values_in(given), cell)

    def _seen_by_hooks(self, thing: object) -> object:
        return self.record(OPAQUE, (thing,)) if type(thing) is Value else thing

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
        if reason := unsafe_reason(function.__code__):
            raise NotUnderstoodError(reason)
        known = function.__globals__
        names = globals_named(function.__code__).intersection(known)
        own = {name: self._wrap_held(known[name]) for name in names}
        own["__builtins__"] = known.get("__builtins__", __builtins__)
        own.update(type=self.type_proxy, isinstance=_is_instance, id=_id_of)
        if args and "super" in function.__code__.co_names:
            kind = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
            own["super"] = lambda *_: _SuperProxy(kind["__class__"].cell_contents, args[0])
        closure = tuple(self._cell(one) for one in function.__closure__ or ()) or None
        copy = FunctionType(function.__code__, own, function.__name__, None, closure)
        copy.__defaults__ = tuple(map(self._wrap_held, function.__defaults__ or ()))
        named = function.__kwdefaults__ or {}
        copy.__kwdefaults__ = {name: self._wrap_held(one) for name, one in named.items()}
        result = copy(*args, **kwargs)
        _check_written(copy)
        return result

    def _cell(self, cell: CellType) -> CellType:
        """Return a cell of a closure with a proxy for what it holds."""
        held = contents(cell)
        return CellType(self._wrap_held(held[0])) if held else cell

    def _wrap_held(self, thing: Any) -> object:
        """Return what stands for what the script holds: Cells in it cannot be exchanged."""
        self.fix(thing)
        return self.wrap(thing)

    def fix(self, thing: Any, spared: Iterable[object] = ()) -> None:
        """Note that the Cells in a thing must stay; the network itself holds the spared ones."""
        if id(thing) in self._looked_into:
            return
        self._looked_into[id(thing)] = thing
        ids = {id(one) for one in spared}
        cells = (one for one in everything_in(thing) if issubclass(type(one), nn.Cell))
        why = "an object or a function of the script holds it"
        self.graph.fixed.update({id(cell): why for cell in cells if id(cell) not in ids})

    def wrap(self, thing: Any) -> object:
        """Return what stands for ``thing`` in traced code; the same each time."""
        if type(thing) in (Value, _CellProxy, Recorder):
            return thing
        if isinstance(thing, Tensor):
            if isinstance(thing, Parameter):
                self.graph.read.add(id(thing))
            return self.record("constant")
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        proxy = self._proxy(thing)
        if proxy is None:
            return self._copies.of(thing)
        self._known[id(thing)] = (thing, proxy)
        return proxy

    def _proxy(self, thing: Any) -> object:
        """Return what stands for code or a Cell; itself if it is not traced; None for data."""
        if isinstance(thing, nn.Cell):
            return _CellProxy(self, thing)
        if isinstance(thing, type):
            layer = issubclass(thing, (nn.Cell, ops.Primitive)) and is_own(thing.__module__)
            return _ClassProxy(self, thing) if layer else thing
        if isinstance(thing, ModuleType):
            foreign = thing.__name__.partition(".")[0] in OPAQUE_MODULES
            return thing if foreign else _ModuleProxy(self, thing)
        if isinstance(thing, MethodType) and isinstance(thing.__self__, nn.Cell):
            code: Any = thing.__func__
            cell = thing.__self__
            return lambda *args, **kwargs: self.call(code, (self.wrap(cell), *args), kwargs)
        return self._proxy_of_callable(thing)

    def _proxy_of_callable(self, thing: Any) -> object:
        module = getattr(thing, "__module__", None) or ""
        if isinstance(thing, (FunctionType, BuiltinFunctionType)):
            if is_replacement(thing):
                return Recorder(self, thing.__name__)
            if is_own(module) or is_own(getattr(thing, "__name__", "")):
                computes = module.startswith(("mindspore.ops", "mindspore.mint", "mindspore._c"))
                return Recorder(self, thing.__name__, None if computes else thing)
            is_opaque = module.partition(".")[0] in OPAQUE_MODULES
            if is_opaque or isinstance(thing, BuiltinFunctionType):
                return thing
            return lambda *args, **kwargs: self.call(thing, args, kwargs)
        is_operator = isinstance(thing, ops.Primitive) or is_own(type(thing).__module__)
        if is_operator and callable(thing):
            return Recorder(self, getattr(thing, "name", None) or type(thing).__name__)
        return None


def _check_written(copy: FunctionType) -> None:
    """Raise if the copy of a function has put a tensor into a name that the script reads."""
    names, outer = written_outside(copy.__code__)
    cells = dict(zip(copy.__code__.co_freevars, copy.__closure__ or ()))
    held = [copy.__globals__.get(name) for name in names]
    held += [content for name in outer for content in contents(cells[name])]
    if values_in(held):
        raise NotUnderstoodError("it keeps a tensor in a name outside of its function")


def _id_of(thing: object) -> int:
    """Return what ``id`` does; of what a proxy stands for, it would be another."""
    if type(thing) in (Value, _CellProxy, Recorder):
        raise NotUnderstoodError("it asks for the id of a tensor, a layer or an operator")
    return id(thing)


class _ClassProxy:
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
    plain = tuple(one._kind if isinstance(one, _ClassProxy) else one for one in leaves(kinds))
    if type(thing) is not _CellProxy:
        return isinstance(thing, plain)
    answer = isinstance(thing._real, plain)
    if answer and not issubclass(nn.Cell, plain):
        thing._asked()
    return answer


class _ModuleProxy:
    """Stands for a module, so that what is taken from it is recorded."""

    def __init__(self, tracer: Tracer, module: ModuleType) -> None:
        self._tracer, self._module = tracer, module

    def __getattr__(self, name: str) -> object:
        return self._tracer.wrap(getattr(self._module, name))


class _CellProxy:
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
        tracer.fix(held, leaves(held) if type(held) in (list, tuple, dict) else ())
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


class _SuperProxy:
    """Stands for ``super()`` in a method of a Cell."""

    def __init__(self, kind: type, proxy: _CellProxy) -> None:
        self._kind, self._proxy = kind, proxy

    def __getattr__(self, name: str) -> object:
        line = type(self._proxy._real).__mro__
        above = line[line.index(self._kind) + 1 :]
        held = next(vars(one)[name] for one in above if name in vars(one))
        tracer = self._proxy._tracer
        return lambda *args, **kwargs: tracer.call(held, (self._proxy, *args), kwargs)


def _listed(result: Any) -> object:
    """Return the Cells that a method of MindSpore's gives one after the other as a list."""
    is_view = type(result).__name__.endswith(("dict_values", "dict_items"))
    return list(result) if is_view or isinstance(result, GeneratorType) else result


def _is_leaf(cell: nn.Cell) -> bool:
    """Return whether a Cell is one step: a layer whose code is MindSpore's, without Cells in it."""
    if getattr(cell, "one_step", False):
        return True
    owner = next(kind for kind in type(cell).__mro__ if "construct" in vars(kind))
    if not is_own(owner.__module__):
        return False
    layer = isinstance(cell, nn.Dense) or not any(True for _ in cell.cells())
    return layer and not isinstance(cell, (nn.SequentialCell, nn.CellList))
