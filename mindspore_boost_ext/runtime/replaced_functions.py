"""Functions of ``mindspore.ops`` that others take the place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops
from mindspore.ops import function, functional
from mindspore.ops.function import nn_func

from mindspore_boost_ext import _compat

_NAMESPACES: tuple[Any, ...] = (ops, function, functional, nn_func)
_OWN: list[object] = []


def is_replacement(thing: object) -> bool:
    """Return whether something stands for a function of MindSpore's."""
    return any(thing is own for own in _OWN)


class ReplacedFunction:
    """A function of MindSpore's, and this package's under the same name.

    Args:
        name (str): its name in ``mindspore.ops``.
        own: what takes its place.
    """

    def __init__(self, name: str, own: Callable[..., object]) -> None:
        self.name, self.own = name, own
        self.plain: Callable[..., object] = getattr(nn_func, name)
        _compat.not_rewritten(own)
        _OWN.append(own)

    def current(self) -> Callable[..., object]:
        """Return what a script finds under the name."""
        found: Callable[..., object] = getattr(ops, self.name)
        return found

    def put(self, one: Callable[..., object]) -> None:
        """Let the name be that of ``one`` wherever it is MindSpore's or this package's."""
        for namespace in _NAMESPACES:
            if getattr(namespace, self.name) in (self.plain, self.own):
                setattr(namespace, self.name, one)
