"""Tells whether Python or a graph runs a function, and whether a shape is known."""

from __future__ import annotations

import mindspore as ms
from mindspore import ops

from mindspore_boost_ext import _compat


@ops.constexpr(check=False)
def _is_no_value(thing: object) -> bool:
    return thing is None or _compat.is_tracing()


@ops.constexpr(check=False)
def _is_value_of_pynative(thing: object) -> bool:
    return not _is_no_value(thing) and ms.get_context("mode") == ms.PYNATIVE_MODE


def is_eager() -> bool:
    """Return whether PYNATIVE_MODE runs the caller, operator by operator.

    In GRAPH_MODE Python may run a function, too: to compute a constant while a graph is made, or in
    a thread of a dataset. A Cell would be compiled there.
    """
    return _is_value_of_pynative(is_eager)


def is_compiling() -> bool:
    """Return whether a graph is being made: there a function is not a value, and becomes None."""
    return _is_no_value(is_compiling)


@ops.constexpr(check=False)  # a shape that a graph does not know is None here, or has -1 within
def is_known(shape: tuple[int, ...] | None) -> bool:
    """Return whether all sizes of a shape are known, and none is 0."""
    return shape is not None and all((size or 0) > 0 for size in shape)
