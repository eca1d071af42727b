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
    """A function of ``mindspore.ops``, and this package's own under the same name."""

    def __init__(self, name: str, own: Callable[..., object]) -> None:
        self.name, self.own = name, own
        self.plain: Callable[..., object] = getattr(nn_func, name)
        _compat.not_rewritten(own)
        _OWN.append(own)

    def is_in_place(self) -> bool | None:
        """Return whether a script finds this package's under the name; None if it is another's."""
        found = getattr(ops, self.name)
        return found is self.own if found in (self.plain, self.own) else None

    def put_in_place(self, own: bool) -> None:
        """Let the name be this package's, or MindSpore's, wherever it is not another's."""
        for namespace in _NAMESPACES:
            if getattr(namespace, self.name) in (self.plain, self.own):
                setattr(namespace, self.name, self.own if own else self.plain)
