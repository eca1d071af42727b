"""Values of an optimizer that have one entry for each of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

# Each has a number, Tensor or string for each parameter. Others are recognised by their entries.
ALIGNED = frozenset(
    ("weight_decay", "group_weight_decay", "group_lr", "learning_rate", "param_rank", "param_names")
)
_RATES = "init_learning_rate"  # MindSpore's base class keeps the argument: a list is one of steps
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
            dict holds such a value.
    """
    if isinstance(value, dict):
        _check_dict(name, value, optimizer)
    if not _has_entry_for_each(value, optimizer):
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


def _check_dict(name: str, held: dict[Any, object], optimizer: nn.Optimizer) -> None:
    """Raise a ``ValueError`` if a dict has a list of state with one Parameter for each weight."""
    kind, trained = type(optimizer), {id(parameter) for parameter in optimizer.parameters}
    if len(trained) == 1 or name in getattr(kind, "parameter_free", ()):
        return
    for key, value in held.items():
        entries = list(value) if isinstance(value, (tuple, list)) else []
        is_state = all(isinstance(one, Parameter) and id(one) not in trained for one in entries)
        if isinstance(value, dict):
            _check_dict(name, value, optimizer)
        elif len(entries) == len(trained) and is_state:
            raise ValueError(
                f"{kind.__name__}.{name} has a Parameter for each weight under {key!r}, which "
                "cannot be split within a dict: hold it as an attribute of its own, or, if its "
                f"entries do not belong to weights, name the dict in parameter_free = ({name!r},)"
            )


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
