"""Whether the code of a Cell may use parts of another one by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import is_own, names_of
from mindspore_boost_ext.less_batch_normalization.bytecode import attributes_named, finds_cells
from mindspore_boost_ext.less_batch_normalization.copies import everything_in


def reached(cell: nn.Cell, inner: list[nn.Cell]) -> list[nn.Cell]:
    """Return the inner Cells whose parts or methods a Cell may use, and not only call them."""
    code, children = _Code(cell), _compat.children(cell)
    own = {id(one) for one in children.values()}
    held = set(map(id, code.held)) - own
    names = code.names - children.keys() - _names_in(cell)
    return [one for one in inner if code.finds or _is_used(one, held, names)]


def _is_used(inner: nn.Cell, held: set[int], names: set[str]) -> bool:
    parts = [part for _, part in inner.cells_and_names()]
    used = any(id(part) in held for part in parts)
    return used or any(names & _names_in(part) for part in parts)


def _names_in(cell: nn.Cell) -> set[str]:
    """Return the names of a Cell's children, and of the methods of the script's class."""
    kinds = [kind for kind in type(cell).__mro__ if not is_own(kind.__module__)]
    methods = {name for kind in kinds[:-1] for name in vars(kind) if not hasattr(nn.Cell, name)}
    return methods | _compat.children(cell).keys()


@dataclass
class _Code:
    """The code that ``construct`` of a Cell runs or may run, other Cells' own left out."""

    cell: nn.Cell
    names: set[str] = field(default_factory=set)  # of attributes
    held: list[Any] = field(default_factory=list)  # what it takes from the Cell or the script
    finds: bool = False  # whether it finds Cells without their names

    def __post_init__(self) -> None:
        pending: list[Any] = [*self._methods("construct"), vars(self.cell).get("construct")]
        seen: set[FunctionType] = set()
        while pending:
            found = list(everything_in(pending.pop()))
            self.held += found
            functions = {one for one in found if isinstance(one, FunctionType)} - seen
            seen |= functions
            for one in functions:
                pending += [] if is_own(str(one.__module__)) else self._used_by(one)

    def _used_by(self, function: FunctionType) -> list[Any]:
        """Return what a function uses of the script, and of the Cell."""
        code, names = function.__code__, attributes_named(function)
        self.names |= names
        self.finds = self.finds or finds_cells(code)
        above = self._methods(code.co_name, 1) if "super" in code.co_names else []
        known = [function.__globals__.get(name) for name in names_of(code)]
        attributes = [vars(self.cell).get(name) for name in names]
        return [
            *above,
            *known,
            *attributes,
            *(one for name in names for one in self._methods(name)),
        ]

    def _methods(self, name: str, start: int = 0) -> list[Any]:
        """Return the Cell's method of a name; with ``start`` 1 those that it overrides."""
        kinds = [vars(kind)[name] for kind in type(self.cell).__mro__ if name in vars(kind)]
        return [getattr(one, "__func__", one) for one in (kinds[start:] if start else kinds[:1])]
