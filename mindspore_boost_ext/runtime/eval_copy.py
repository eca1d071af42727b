"""Copies of networks, with BatchNorm and dropout of some layers in evaluation mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchanged, leaves
from mindspore_boost_ext.base.order import is_own

_UNSEEN = (object(), object())


class EvalCopy:
    """Has a copy of a network, with some Cells, and what is in them, in evaluation mode.

    They stay in evaluation mode whatever ``set_train`` says. The copy has the same Parameters; if
    ``in_evaluation`` is empty, it is the network itself. ``shared`` Cells are never copied: they
    act alike in training and evaluation, and must stay the same objects.

    Each Cell is copied at most once, so that a Cell used in two places stays one Cell. Only for
    MindSpore's own Cells without Parameters, such as a dropout, there may be two: inside and
    outside of the layers in evaluation mode. A list or dict that holds a copied Cell is copied, and
    what is written into that one stays there.

    Attributes:
        network (Cell): the copy.
    """

    def __init__(
        self, network: nn.Cell, in_evaluation: Iterable[nn.Cell], shared: Iterable[nn.Cell] = ()
    ) -> None:
        self._done = {(id(cell), within): cell for cell in shared for within in (False, True)}
        self._in_evaluation = {
            id(cell) for cell in in_evaluation if (id(cell), True) not in self._done
        }
        self._reaching = _reaching(network, self._in_evaluation)
        self._pairs: list[_Pair] = []
        self._originals: dict[int, nn.Cell] = {}
        self._followed_in: int | None = None  # the mode
        self.network = self._copy(network, False)
        self._follow()

    def follow(self) -> None:
        """Give the copies what a script has set on their originals since the last time.

        In GRAPH_MODE that is done once: a graph keeps what it was compiled with.
        """
        before, self._followed_in = self._followed_in, ms.get_context("mode")
        if before == self._followed_in == ms.GRAPH_MODE:
            return
        self._follow()

    @contextlib.contextmanager
    def followed(self, around: Callable[[], Any]) -> Iterator[None]:
        """Within the context ``around``, let the copies follow; then give back what they wrote."""
        with around():
            self.follow()
            try:
                yield
            finally:
                for pair in self._pairs if self._followed_in == ms.PYNATIVE_MODE else ():
                    if pair.has_code:
                        pair.give_back(self._original)

    def _copy(self, cell: nn.Cell, within: bool) -> nn.Cell:
        key = _key(cell, within)
        if key not in self._done:
            self._done[key] = self._made(cell, within or id(cell) in self._in_evaluation)
        return self._done[key]

    def _made(self, cell: nn.Cell, evaluates: bool) -> nn.Cell:
        if not (evaluates or id(cell) in self._reaching or self._is_around_copies(cell)):
            return cell
        made: nn.Cell = _compat.shallow_copy(cell, follows=True)
        self._done[_key(cell, evaluates)] = made  # before its parts, which may hold the Cell
        self._originals[id(made)] = cell
        self._pairs.append(_Pair(cell, made, evaluates, not is_own(type(cell).__module__)))
        for child in _compat.children(cell).values():
            if child is not None:
                self._copy(child, evaluates)
        if evaluates:
            # No subclass: super() in a method would find the method itself, in a graph.
            vars(made)["add_flags"] = functools.partial(_add_flags, made)
            made.add_flags(training=False)
        return made

    def _is_around_copies(self, cell: nn.Cell) -> bool:
        """Return whether a layer of a Cell is copied: a script may put Cells around it later."""
        children = [one for one in _compat.children(cell).values() if one is not None]
        return any(self._copy(child, False) is not child for child in children)

    def _follow(self) -> None:
        for pair in self._pairs:  # a Cell that is new adds some, which the loop reaches
            copied = functools.partial(self._copy, within=pair.evaluates)
            pair.follow(copied, functools.partial(self._replaced, within=pair.evaluates))

    def _replaced(self, value: object, within: bool) -> object:
        """Return a Cell's copy, or a method of the copy; if there is none, the value itself."""
        if isinstance(value, nn.Cell):
            here, elsewhere = _key(value, within), (id(value), not within)
            return self._done.get(here, self._done.get(elsewhere, value))
        return _of_another(value, lambda cell: self._replaced(cell, within))

    def _original(self, value: object) -> object:
        """Return what :meth:`_replaced` has replaced."""
        if isinstance(value, nn.Cell):
            return self._originals.get(id(value), value)
        return _of_another(value, self._original)


def _reaching(network: nn.Cell, targets: Container[int]) -> set[int]:
    """Return the ids of the Cells that are, or hold, one of those with the ids ``targets``.

    They may hold it as a layer, in a list or dict, by a method of it, or by a Cell that does so.
    """
    cells = [cell for _, cell in network.cells_and_names()]
    held = {id(cell): {id(part) for part in _parts(cell)} for cell in cells}
    found = {id(cell) for cell in cells if id(cell) in targets}
    before = 0
    while before != len(found):
        before = len(found)
        # Layers come after the Cell that holds them: backwards, one round mostly finds all.
        for cell in reversed(cells):
            if not held[id(cell)].isdisjoint(found):
                found.add(id(cell))
    return found


def _parts(cell: nn.Cell) -> Iterator[nn.Cell]:
    for value in leaves(list(_held(cell).values())):
        owner = value.__self__ if isinstance(value, MethodType) else value
        if isinstance(owner, nn.Cell):
            yield owner


def _of_another(value: object, change: Callable[[Any], Any]) -> object:
    """Return a Cell's method as one of the Cell that ``change`` gives; else the value itself."""
    if not (isinstance(value, MethodType) and isinstance(value.__self__, nn.Cell)):
        return value
    owner = change(value.__self__)
    return value if owner is value.__self__ else MethodType(value.__func__, owner)


@dataclass
class _Pair:
    """A Cell and its copy: a script sets attributes of the Cell, and its code those of the copy."""

    original: nn.Cell
    copy: nn.Cell
    evaluates: bool
    has_code: bool  # of the script's, which may write attributes
    # By name what the original held when the copy got it, and what the copy got.
    seen: dict[str, tuple[object, object]] = field(default_factory=dict)
    flags: dict[str, object] = field(default_factory=dict)

    def follow(self, copied: Callable[[Any], Any], replaced: Callable[[Any], object]) -> None:
        now, children = _held(self.original), _compat.children(self.original)
        self._forget(now, self.copy)
        for name, value in now.items():
            if self.seen.get(name, _UNSEEN)[0] is not value:
                is_child = name in children
                copies = is_child and value is not None
                made = copied(value) if copies else exchanged(value, replaced)
                _put(self.copy, name, made, is_child)
                self.seen[name] = (value, made)
        vars(self.copy).update(_compat.hooks(self.original))
        flags = {name: on for name, on in self.original.get_flags().items() if name != "training"}
        if flags != self.flags:
            self.flags = flags
            self.copy.add_flags(**flags)

    def give_back(self, original: Callable[[Any], object]) -> None:
        now, children = _held(self.copy), _compat.children(self.copy)
        self._forget(now, self.original)
        for name, value in now.items():
            if self.seen.get(name, _UNSEEN)[1] is not value:
                made = exchanged(value, original)
                _put(self.original, name, made, name in children)
                self.seen[name] = (made, value)

    def _forget(self, now: Container[str], other: nn.Cell) -> None:
        """Delete from the other Cell what has gone from one."""
        for name in [name for name in self.seen if name not in now]:
            del self.seen[name]
            vars(other).pop(name, None)
            _compat.children(other).pop(name, None)


def _held(cell: nn.Cell) -> dict[str, Any]:
    # Children first: lists may hold them, too, and then hold the copies.
    held = {**_compat.children(cell), **_compat.own_attributes(cell)}
    held.pop("add_flags", None)  # a copy has its own
    return held


def _put(cell: nn.Cell, name: str, value: object, is_child: bool) -> None:
    places = [vars(cell), _compat.children(cell)]
    places[not is_child].pop(name, None)
    places[is_child][name] = value


def _key(cell: nn.Cell, within: bool) -> tuple[int, bool]:
    own = is_own(type(cell).__module__)
    return id(cell), within and own and not any(True for _ in cell.get_parameters())


def _add_flags(cell: nn.Cell, **flags: object) -> nn.Cell:
    """Add flags to a Cell that never trains."""
    if "training" in flags:
        flags["training"] = False
    return type(cell).add_flags(cell, **flags)
