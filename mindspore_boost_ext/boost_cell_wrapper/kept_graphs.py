"""Guards a step against earlier graphs: of other settings, and of the other mode."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import warn


def warn_of_kept_graphs(boost: AutoBoost) -> None:
    """Warn if MindSpore may load the graph of a run with other settings from its cache.

    MindSpore finds a graph by the text of the script, which settings from outside do not change.
    """
    if boost.level != "O0" and _compat.keeps_graphs():
        warn(
            "MindSpore's compile cache is on (MS_COMPILER_CACHE_ENABLE, or enable_compile_cache): "
            "it reuses the graph of an earlier run of the same script, even if the settings of "
            "mindspore_boost_ext were different. After a change of settings delete the cache, or "
            "switch it off"
        )


def follow_mode(step: nn.Cell) -> None:
    """Make a step that has run in the other mode compile as if it had not."""
    mode = ms.get_context("mode")
    if step._ran_in != mode:
        step._ran_in = mode
        _compat.parse_by_construct(cell for _, cell in step.cells_and_names())
