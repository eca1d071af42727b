"""Copies of networks, with BatchNorm and dropout of some layers in evaluation mode."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchanged


def eval_copy(
    network: nn.Cell, in_evaluation: Iterable[nn.Cell], shared: Iterable[nn.Cell] = ()
) -> nn.Cell:
    """Return ``network`` with some Cells, and what is in them, in evaluation mode.

    They stay in evaluation mode whatever ``set_train`` says. The given network and its Cells do not
    change. The copy has the same Parameters; if ``in_evaluation`` is empty, it is the network
    itself. ``shared`` Cells are never copied: they act alike in training and evaluation, and must
    stay the same objects.
    """
    copier = _Copier({id(cell) for cell in in_evaluation})
    copier.done.update({(id(cell), within): cell for cell in shared for within in (False, True)})
    return copier.copy(network, False)


class _Copier:
    """Copies each Cell at most once, so that a Cell used in two places stays one Cell.

    Except MindSpore's own Cells without Parameters, such as a dropout, that are used both inside
    and outside of the layers in evaluation mode.
    """

    def __init__(self, in_evaluation: set[int]) -> None:
        self.in_evaluation = in_evaluation
        self.done: dict[tuple[int, bool], nn.Cell] = {}

    def copy(self, cell: nn.Cell, within: bool) -> nn.Cell:
        key = _key(cell, within)
        if key not in self.done:
            self.done[key] = self._made(cell, within or id(cell) in self.in_evaluation)
        return self.done[key]

    def _made(self, cell: nn.Cell, evaluates: bool) -> nn.Cell:
        children = {
            name: child if child is None else self.copy(child, evaluates)
            for name, child in _compat.children(cell).items()
        }
        changed = any(children[name] is not child for name, child in _compat.children(cell).items())
        if not evaluates and not changed:
            return cell
        made: nn.Cell = _compat.shallow_copy(cell)
        self.done[_key(cell, evaluates)] = made  # found when lists of its own methods are copied
        for name, child in children.items():
            _compat.set_child(made, name, child)
        for name, value in _compat.own_attributes(made).items():
            vars(made)[name] = exchanged(value, lambda one: self._replaced(one, evaluates))
        if evaluates:
            # No subclass: super() in a method would find the method itself, in a graph.
            vars(made)["add_flags"] = functools.partial(_add_flags, made)
            made.add_flags(training=False)
        return made

    def _replaced(self, value: Any, within: bool) -> object:
        """Return a Cell's copy, or a method of the copy; if there is none, the value itself."""
        if isinstance(value, nn.Cell):
            here, elsewhere = _key(value, within), (id(value), not within)
            return self.done.get(here, self.done.get(elsewhere, value))
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Cell):
            owner = self._replaced(value.__self__, within)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        return value


def _key(cell: nn.Cell, within: bool) -> tuple[int, bool]:
    own = type(cell).__module__.startswith("mindspore.")
    return id(cell), within and own and not any(True for _ in cell.get_parameters())


def _add_flags(cell: nn.Cell, **flags: object) -> nn.Cell:
    """Add flags to a Cell that never trains."""
    if "training" in flags:
        flags["training"] = False
    return type(cell).add_flags(cell, **flags)
