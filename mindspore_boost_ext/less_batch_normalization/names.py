"""The names that code looks up, and whether it is MindSpore's."""

from __future__ import annotations

from types import FunctionType

from mindspore import nn

from mindspore_boost_ext.base.order import names_of


def names_in_code(cell: nn.Cell) -> set[str]:
    """Return the names that a Cell's methods look up, without ``__init__`` and MindSpore's own."""
    names: set[str] = set()
    for kind in type(cell).__mro__:
        for held in vars(kind).values():
            function = getattr(held, "__func__", held)  # of a static method, too
            own = isinstance(function, FunctionType) and not is_own(kind.__module__)
            if own and function.__name__ != "__init__":
                names |= names_of(function.__code__)
    return names


def is_own(module: str) -> bool:
    """Return whether a module is one of MindSpore's."""
    return module.partition(".")[0] == "mindspore"
