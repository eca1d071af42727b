"""What stands for tensors, and for operators and functions that take them, in traced code."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspore import Tensor

from mindspore_boost_ext.base.cells import leaves
from mindspore_boost_ext.less_batch_normalization.copies import everything_in
from mindspore_boost_ext.less_batch_normalization.graph import (
    FILLED,
    JOINED,
    SPLITS,
    Node,
    NotUnderstoodError,
)

if TYPE_CHECKING:
    from mindspore_boost_ext.less_batch_normalization.proxies import Tracer

ONLY_THE_FORM = frozenset(("shape", "dtype", "ndim", "size", "rank"))


class Value:
    """Stands for a tensor: whatever is done with it is recorded."""

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer = tracer
        self.node = node

    __class__ = property(lambda self: Tensor)  # for isinstance

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ONLY_THE_FORM or name == "T":
            return self.tracer.record(name, (self,))
        return Recorder(self.tracer, name, None, self)

    def __bool__(self) -> bool:
        raise NotUnderstoodError("it branches on the value or shape of a tensor")

    def __hash__(self) -> int:
        raise NotUnderstoodError("it looks up a tensor or its shape")

    def __iter__(self) -> Iterator[Any]:
        raise NotUnderstoodError("it unpacks a tensor or its shape")

    def __setitem__(self, key: object, value: object) -> None:
        raise NotUnderstoodError("it writes into a tensor")


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
    return isinstance(other, (tuple, list)) and bool(is_tuple or values_in(other))


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
            return self.tracer.record(_name, (self, *values_in(others)))

        setattr(Value, special, operator)


_add_operators()


@dataclass(eq=False, repr=False)
class Recorder:
    """Stands for an operator or a function of MindSpore, or for a method of a tensor."""

    tracer: Tracer
    name: str
    real: Callable[..., object] | None = None
    owner: Value | None = None

    def __bool__(self) -> bool:
        if self.owner is not None:  # it may be any attribute of what a caller gives
            raise NotUnderstoodError(f"it asks for the value of {self.name}")
        return True

    def __eq__(self, other: object) -> bool:
        return bool(self) and self is other

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Record the call; what no tensor enters is called in truth."""
        values = values_in((args, kwargs))
        if self.real is not None and not values:
            return self.tracer.wrap(self.real(*args, **kwargs))
        if self.owner is not None:
            values = (self.owner, *values)
        values_of_pad = (*args[3:], kwargs.get("value")) if self.name == "pad" else ()
        is_filled = any(isinstance(one, (int, float)) and one for one in values_of_pad)
        return self.tracer.record(FILLED if is_filled else self.name, values)


def values_in(thing: object) -> tuple[Value, ...]:
    """Return the proxies for tensors in arguments or results, however nested."""
    if any(issubclass(type(one), Iterator) for one in leaves(thing)):
        raise NotUnderstoodError("it passes an iterator on")
    return tuple(one for one in everything_in(thing) if type(one) is Value)
