"""Copies of networks, with BatchNorm and dropout of some layers in evaluation mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchanged

_UNSEEN = (object(), object())


class EvalCopy:
    """Has a copy of a network, with some Cells, and what is in them, in evaluation mode.

    They stay in evaluation mode whatever ``set_train`` says. The given network and its Cells do not
    change. The copy has the same Parameters; if ``in_evaluation`` is empty, it is the network
    itself. ``shared`` Cells are never copied: they act alike in training and evaluation, and must
    stay the same objects.

    Each Cell is copied at most once, so that a Cell used in two places stays one Cell. Except
    MindSpore's own Cells without Parameters, such as a dropout, that are used both inside and
    outside of the layers in evaluation mode.

    Attributes:
        network (Cell): the copy.
    """

    def __init__(
        self, network: nn.Cell, in_evaluation: Iterable[nn.Cell], shared: Iterable[nn.Cell] = ()
    ) -> None:
        self._in_evaluation = {id(cell) for cell in in_evaluation}
        self._done = {(id(cell), within): cell for cell in shared for within in (False, True)}
        self._pairs: list[_Pair] = []
        self.network = self._copy(network, False)

    def follow(self) -> None:
        """Give the copies the attributes and hooks that their originals have now."""
        for pair in self._pairs:
            pair.follow(self._replaced)

    @contextlib.contextmanager
    def followed(self, around: Callable[[], Any]) -> Iterator[None]:
        """Within the context ``around``, let the copies follow; then give back what they wrote."""
        with around():
            self.follow()
            try:
                yield
            finally:
                for pair in self._pairs:
                    pair.give_back()

    def _copy(self, cell: nn.Cell, within: bool) -> nn.Cell:
        key = _key(cell, within)
        if key not in self._done:
            self._done[key] = self._made(cell, within or id(cell) in self._in_evaluation)
        return self._done[key]

    def _made(self, cell: nn.Cell, evaluates: bool) -> nn.Cell:
        children = {
            name: child if child is None else self._copy(child, evaluates)
            for name, child in _compat.children(cell).items()
        }
        changed = any(children[name] is not child for name, child in _compat.children(cell).items())
        if not evaluates and not changed:
            return cell
        made: nn.Cell = _compat.shallow_copy(cell)
        self._done[_key(cell, evaluates)] = made  # found when lists of its own methods are copied
        for name, child in children.items():
            _compat.set_child(made, name, child)
        self._pairs.append(_Pair(cell, made, evaluates))
        self._pairs[-1].follow(self._replaced)
        if evaluates:
            # No subclass: super() in a method would find the method itself, in a graph.
            vars(made)["add_flags"] = functools.partial(_add_flags, made)
            made.add_flags(training=False)
        return made

    def _replaced(self, value: Any, within: bool) -> object:
        """Return a Cell's copy, or a method of the copy; if there is none, the value itself."""
        if isinstance(value, nn.Cell):
            here, elsewhere = _key(value, within), (id(value), not within)
            return self._done.get(here, self._done.get(elsewhere, value))
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Cell):
            owner = self._replaced(value.__self__, within)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        return value


@dataclass
class _Pair:
    """A Cell and its copy: a script sets attributes of the Cell, and its code those of the copy."""

    original: nn.Cell
    copy: nn.Cell
    evaluates: bool
    # By name the attribute of the original when the copy got it, and what the copy got.
    seen: dict[str, tuple[object, object]] = field(default_factory=dict)

    def follow(self, replaced: Callable[[Any, bool], object]) -> None:
        held = vars(self.copy)
        for name, value in _compat.own_attributes(self.original).items():
            if self.seen.get(name, _UNSEEN)[0] is not value:
                held[name] = exchanged(value, lambda one: replaced(one, self.evaluates))
                self.seen[name] = (value, held[name])
        held.update(_compat.hooks(self.original))

    def give_back(self) -> None:
        held = vars(self.original)
        for name, value in _compat.own_attributes(self.copy).items():
            if self.seen.get(name, _UNSEEN)[1] is not value and name != "add_flags":
                held[name] = value
                self.seen[name] = (value, value)


def _key(cell: nn.Cell, within: bool) -> tuple[int, bool]:
    own = type(cell).__module__.startswith("mindspore.")
    return id(cell), within and own and not any(True for _ in cell.get_parameters())


def _add_flags(cell: nn.Cell, **flags: object) -> nn.Cell:
    """Add flags to a Cell that never trains."""
    if "training" in flags:
        flags["training"] = False
    return type(cell).add_flags(cell, **flags)
