"""Whether the code of a Cell may use parts of another one by itself."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import is_own
from mindspore_boost_ext.less_batch_normalization.bytecode import globals_named, uses_of
from mindspore_boost_ext.less_batch_normalization.copies import OPAQUE_MODULES, everything_in


def reached(cell: nn.Cell, inner: list[nn.Cell]) -> list[nn.Cell]:
    """Return the inner Cells whose parts or methods a Cell may use, and not only call them."""
    code = _Code(cell)
    held = set(map(id, code.held)) - {id(child) for child in _compat.children(cell).values()}
    names = code.names - vars(cell).keys() - _names_in(cell)
    return [one for one in inner if code.finds or _is_used(one, held, names)]


def _is_used(inner: nn.Cell, held: set[int], names: set[str]) -> bool:
    parts = [part for _, part in inner.cells_and_names()]
    return any(id(part) in held or names & _names_in(part) for part in parts)


def _names_in(cell: nn.Cell) -> set[str]:
    """Return the names of a Cell's children, and of the methods of the script's class."""
    kinds = [kind for kind in type(cell).__mro__ if not is_own(kind.__module__)]
    # nn.Cell has all names of ``object``, too.
    methods = {name for kind in kinds for name in vars(kind) if not hasattr(nn.Cell, name)}
    return methods | _compat.children(cell).keys()


class _Code:
    """The code that ``construct`` of a Cell runs or may run, other Cells' own left out.

    Attributes:
        names: of attributes of anything but the Cell itself.
        held: what it takes from the Cell or from the script.
        finds: whether it may find parts of others without their names.
    """

    def __init__(self, cell: nn.Cell) -> None:
        self.cell = cell
        self.names: set[str] = set()
        self.held: list[Any] = []
        self.finds = False
        pending: list[Any] = [*self._methods("construct"), vars(cell).get("construct")]
        methods, seen = set(map(id, pending)), set[FunctionType]()
        while pending:
            found = list(everything_in(pending.pop()))
            self.held += found
            for one in found:
                if issubclass(type(one), FunctionType) and one not in seen:
                    seen.add(one)
                    more, ours = self._used_by(one, id(one) in methods)
                    pending += [*more, *ours]
                    methods |= set(map(id, ours))

    def _used_by(self, function: FunctionType, is_method: bool) -> tuple[list[Any], list[Any]]:
        """Return what a function uses of the script and of the Cell, and methods of the Cell."""
        module = str(function.__module__)
        if is_own(module) or module.partition(".")[0] in OPAQUE_MODULES:
            return [], []
        uses, code = uses_of(function, is_method), function.__code__
        self.names |= uses.of_others
        self.finds |= uses.finds
        names = uses.of_self | uses.of_others
        known = [function.__globals__.get(name) for name in globals_named(code)]
        methods = [method for name in names for method in self._methods(name)]
        above = self._methods(code.co_name, 1) if "super" in code.co_names else []
        return [*known, *(vars(self.cell).get(name) for name in names)], [*above, *methods]

    def _methods(self, name: str, start: int = 0) -> list[Any]:
        """Return the Cell's method of a name; with ``start`` 1 those that it overrides."""
        kinds = [vars(kind)[name] for kind in type(self.cell).__mro__ if name in vars(kind)]
        return [getattr(one, "__func__", one) for one in (kinds[start:] if start else kinds[:1])]
