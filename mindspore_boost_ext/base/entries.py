"""Values of an optimizer that have one entry for each of its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import leaves
from mindspore_boost_ext.base.order import is_of_libraries

# Each has a number, Tensor or string for each parameter. Others are recognised by their entries.
ALIGNED = frozenset(
    ("weight_decay", "group_weight_decay", "group_lr", "learning_rate", "param_rank", "param_names")
)
_RATES = "init_learning_rate"  # MindSpore's base class keeps the argument: a list is one of steps
_MOST = 10_000  # entries: what has more is data
ONE_A_PARAMETER = (Parameter, bool, ops.Primitive, nn.Cell)


def _has_entry_for_each(value: object, optimizer: nn.Optimizer) -> bool:
    """Return whether a value has as many entries as there are parameters, perhaps by chance."""
    count = len(optimizer.parameters)
    if isinstance(value, (Tensor, np.ndarray)):
        return count > 1 and tuple(value.shape) == (count,)
    return isinstance(value, (tuple, list, nn.CellList)) and len(value) == count


def is_divided(name: str, value: object, optimizer: nn.Optimizer) -> bool:
    """Return whether a value under a name has one entry for each parameter of an optimizer.

    Raises:
        ValueError: if the class is the user's own and the numbers may be equal by chance, or if a
            container or a Cell holds such a value.
    """
    if not _has_entry_for_each(value, optimizer):
        _check_within(name, value, optimizer)
        return False
    kind, entries = type(optimizer), cast(Iterable[object], value)
    if isinstance(value, Parameter):
        if name in getattr(kind, "parameter_aligned", ()):
            raise ValueError(
                f"{kind.__name__}.{name} is one Parameter with the entries of all weights, which "
                "cannot be split: make it a tuple with one Parameter for each weight"
            )
        return False
    if name in ALIGNED or name in getattr(kind, "parameter_aligned", ()):
        return True
    if all(isinstance(entry, ONE_A_PARAMETER) for entry in entries):
        return True
    if kind.__module__.startswith("mindspore."):
        return False
    if name == _RATES or name in getattr(kind, "parameter_free", ()):
        return False
    raise ValueError(
        f"{kind.__name__}.{name} has as many entries as there are parameters. If each entry "
        "belongs to one parameter, name it in the class attribute parameter_aligned = "
        f"({name!r},), otherwise in parameter_free = ({name!r},)"
    )


def _check_within(name: str, value: object, optimizer: nn.Optimizer) -> None:
    """Raise a ``ValueError`` if a value holds a list with state for each weight, or all weights."""
    kind, trained = type(optimizer), {id(parameter) for parameter in optimizer.parameters}
    if len(trained) == 1 or name in getattr(kind, "parameter_free", ()):
        return
    seen, asked = set[int](), list[object]([{name: value}])
    while asked:
        holder = asked.pop()
        seen.add(id(holder))
        in_cell = isinstance(holder, nn.Cell) and not _has_layers(holder, trained)
        for key, entry in _items(holder, trained, kind):
            if reason := _why_whole(entry, trained, in_cell):
                raise ValueError(f"{kind.__name__}.{name} has {reason.format(key=key, name=name)}")
            asked += [] if id(entry) in seen else [entry]


def _items(holder: object, trained: set[int], kind: type) -> Iterable[tuple[object, object]]:
    """Return what a container, a partial, a Cell or an object holds, by key or name.

    Cells and objects are those of the user's own, objects those of the optimizer's own package.
    """
    if isinstance(holder, (dict, tuple, list)) and len(holder) > _MOST:
        return ()
    if isinstance(holder, dict):
        return holder.items()
    if isinstance(holder, (tuple, list)):
        return enumerate(holder)
    if isinstance(holder, functools.partial):
        return (*enumerate(holder.args), *holder.keywords.items())
    module = type(holder).__module__
    is_own = not is_of_libraries(module)
    if not isinstance(holder, nn.Cell):
        beside = is_own and module.partition(".")[0] == kind.__module__.partition(".")[0]
        return getattr(holder, "__dict__", {}).items() if beside else ()
    if isinstance(holder, nn.Optimizer):
        return ()
    # In a network, and beside one, other Cells may be layers that are not trained.
    within = {} if _has_layers(holder, trained) else _compat.children(holder)
    ours = _compat.own_attributes(holder) if is_own else {}
    return {**ours, **within}.items()


def _has_layers(holder: nn.Cell, trained: set[int]) -> bool:
    """Return whether a Cell is a network, or holds one: its children have weights."""
    within = _compat.children(holder).values()
    return any(id(one) in trained for cell in within for one in _parameters(cell))


def _why_whole(entry: object, trained: set[int], in_cell: bool) -> str:
    """Return what an entry has that a group of weights cannot use as it is; or an empty text."""
    in_order = _in_order(entry)
    if len(in_order) != len(trained):
        return ""
    held = [list(leaves(each)) for each in in_order]
    if all(bool(things) and all(_is_state(thing, trained) for thing in things) for things in held):
        return (
            "a Parameter for each weight under {key!r}, which cannot be split there: hold it as a "
            "tuple that is an attribute of the optimizer itself, or, if its entries do not belong "
            "to weights, name it in the class attribute parameter_free = ({name!r},)"
        )
    if in_cell and {id(thing) for things in held for thing in things} == trained:
        return (
            "all weights under {key!r}, and a group of weights has fewer gradients: give them in "
            "the call, or, if they do not meet gradients there, name it in the class attribute "
            "parameter_free = ({name!r},)"
        )
    return ""


def _in_order(entry: object) -> Sequence[object]:
    """Return the entries of a list, or of a dict by their number; of anything else none."""
    if isinstance(entry, dict):
        numbers = range(len(entry))
        return [entry[number] for number in numbers] if entry.keys() == set(numbers) else ()
    return entry if isinstance(entry, (tuple, list, nn.CellList)) else ()


def _is_state(thing: object, trained: set[int]) -> bool:
    """Return whether a thing is a Parameter, or a Cell with some, that is not trained."""
    if isinstance(thing, Parameter):
        return id(thing) not in trained
    held = _parameters(thing)
    return bool(held) and not any(id(one) in trained for one in held)


def _parameters(thing: object) -> list[Parameter]:
    return list(thing.get_parameters()) if isinstance(thing, nn.Cell) else []


def entries_at(value: object, positions: Sequence[int]) -> object:
    """Return the entries at some positions, in a value of the same kind."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value[list(positions)]
    held: Any = value
    entries = [held[position] for position in positions]
    if isinstance(value, nn.CellList):
        return nn.CellList(entries, auto_prefix=False)
    if isinstance(value, ParameterTuple):
        return ParameterTuple(entries)
    return entries if isinstance(value, list) else tuple(entries)
