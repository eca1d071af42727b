"""The functions and signs of MindSpore that the import replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from mindspore import mint, ops
from mindspore.ops import composite, function, functional, tensor_method
from mindspore.ops.function import clip_func, nn_func

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime import (
    clipping,
    cross_entropy,
    masks,
    max_pool,
    padding,
    products,
    projections,
)
from mindspore_boost_ext.runtime.cure import Cure

# Where scripts find the functions of mindspore.ops.
_NAMESPACES: tuple[Any, ...] = (
    *(ops, function, functional, composite),
    *(nn_func, clip_func, mint, tensor_method),
)


class FunctionCure(Cure):
    """Replaces a function of MindSpore by our own of the same name."""

    def __init__(
        self, own: Callable[..., object], why: str, name: str = "", home: ModuleType = ops
    ) -> None:
        super().__init__(name or f"ops.{own.__name__}", self._is_ours, self._put, why)
        self.own, self._name, self._home = _compat.not_rewritten(own), own.__name__, home
        self._plain: Callable[..., object] = getattr(home, self._name)

    def _is_ours(self) -> bool | None:
        """Return whether our function has the name at home; None if a third one has it."""
        found = getattr(self._home, self._name)
        return found is self.own if found in (self._plain, self.own) else None

    def _put(self, ours: bool) -> None:
        """Give the name to our function or MindSpore's, except where a third one has it."""
        for namespace in _NAMESPACES:
            if getattr(namespace, self._name, None) in (self._plain, self.own):
                setattr(namespace, self._name, self.own if ours else self._plain)
        for operator, found in _compat.IN_GRAPHS.items():  # such as @
            if found in (self._plain, self.own):
                _compat.IN_GRAPHS[operator] = self.own if ours else self._plain


FUNCTIONS = (
    FunctionCure(
        max_pool.max_pool2d,
        "uses an operator whose gradient takes linear time, not quadratic",
        name="gradient of ops.max_pool2d",
    ),
    FunctionCure(
        cross_entropy.cross_entropy,
        "in PYNATIVE_MODE its gradient is one operator, and unused label smoothing is skipped",
    ),
    FunctionCure(
        padding.pad,
        "its gradient is wrong in graphs from the second step on: padding is joined there",
    ),
    FunctionCure(
        clipping.clip_by_global_norm,
        "one factor from sums along rows, where MindSpore's divides number by number",
    ),
    FunctionCure(
        products.matmul,
        "in graphs one product of all rows with a matrix, which MindSpore copies for each sample",
    ),
    FunctionCure(
        masks.masked_fill,
        "a smaller mask is repeated first; MindSpore would look up each value",
    ),
    FunctionCure(
        masks.where, "a number or a mask of another shape is repeated first, as in ops.masked_fill"
    ),
    FunctionCure(
        projections.linear,
        "by the operators of nn.Dense: the bias of each row, and no transposed matrix",
        name="projections of attention",
        home=nn_func,
    ),
)


def is_replacement(thing: object) -> bool:
    """Return whether an object is a function that replaces one of MindSpore's."""
    return any(thing is one.own for one in FUNCTIONS)
