"""The names that code looks up, and whether it is MindSpore's."""

from __future__ import annotations

from types import CodeType, FunctionType

from mindspore import nn


def names_in_code(cell: nn.Cell) -> set[str]:
    """Return the names that the methods of a Cell's class look up, if it is the script's own."""
    names: set[str] = set()
    for kind in type(cell).__mro__:
        for held in vars(kind).values():
            function = getattr(held, "__func__", held)  # of a static method, too
            own = isinstance(function, FunctionType) and not is_own(kind.__module__)
            if own and function.__name__ != "__init__":
                names |= names_of(function.__code__)
    return names


def names_of(code: CodeType) -> set[str]:
    """Return the names that code and the functions inside it may look up."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_of(constant)
    return found


def is_own(module: str) -> bool:
    """Return whether a module is one of MindSpore's."""
    return module.partition(".")[0] == "mindspore"
