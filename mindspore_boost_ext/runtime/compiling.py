"""Whether Python runs a function, or MindSpore makes a graph of it."""

from __future__ import annotations

from mindspore import ops

from mindspore_boost_ext import _compat


@ops.constexpr(check=False)
def _is_no_value(thing: object) -> bool:
    return thing is None or _compat.is_tracing()


def is_compiling() -> bool:
    """Return whether a graph is being made, in which a function is no value, and is None here."""
    return _is_no_value(is_compiling)
