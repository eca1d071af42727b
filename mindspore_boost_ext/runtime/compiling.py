"""Whether Python runs a function, or MindSpore makes a graph of it, and knows a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.report import warn

if TYPE_CHECKING:
    from mindspore_boost_ext.boost import AutoBoost


def warn_of_kept_graphs(boost: AutoBoost) -> None:
    """Warn where MindSpore may load the graph of a run with other settings from its cache.

    It finds a graph by the text of the script, which settings from outside do not change.
    """
    if boost.level != "O0" and _compat.keeps_graphs():
        warn(
            "MindSpore's compile cache is on (MS_COMPILER_CACHE_ENABLE, or enable_compile_cache): "
            "it takes the graph of an earlier run with the same script, whatever settings of "
            "mindspore_boost_ext that had. After a change of settings delete the cache, or leave "
            "it off"
        )


@ops.constexpr(check=False)
def _is_no_value(thing: object) -> bool:
    return thing is None or _compat.is_tracing()


@ops.constexpr(check=False)
def _is_value_of_pynative(thing: object) -> bool:
    return not _is_no_value(thing) and ms.get_context("mode") == ms.PYNATIVE_MODE


def is_eager() -> bool:
    """Return whether PYNATIVE_MODE runs what asks, operator by operator.

    In GRAPH_MODE Python may run a function, too: to compute what is constant in a graph that is
    being made, or beside it in a thread of a dataset's. A Cell would be compiled there.
    """
    return _is_value_of_pynative(is_eager)


def is_compiling() -> bool:
    """Return whether a graph is being made, in which a function is no value, and is None here."""
    return _is_no_value(is_compiling)


@ops.constexpr(check=False)  # a shape that a graph does not know is None here, or has -1 within
def is_known(shape: tuple[int, ...] | None) -> bool:
    """Return whether all sizes of a shape are known, and none is 0."""
    return shape is not None and all((size or 0) > 0 for size in shape)
