"""Warns of MindSpore's compile cache, which takes the graphs of other settings."""

from __future__ import annotations

from mindspore_boost_ext import _compat
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import warn


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
