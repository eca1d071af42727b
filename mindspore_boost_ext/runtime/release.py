"""Frees what MindSpore compiled for a Model once the Model is dropped."""

from __future__ import annotations

import weakref

from mindspore import nn

from mindspore_boost_ext import _compat

_DROPPED: list[nn.Cell] = []


def release_with(owner: object, step: nn.Cell) -> None:
    """Let :func:`release_dropped` free what was compiled for a step once its Model is dropped.

    MindSpore frees what it compiled for a Cell when the Cell goes. It never frees what it compiled
    for functions of ``ms.jit``, nor a Cell of a network that passes its own ``*inputs`` on (see
    :func:`~mindspore_boost_ext.base.mapping.call`). A step that runs on after its Model was dropped
    compiles anew. Its variants are Cells in it.
    """
    # Only listed here: a Model may be collected in any thread, while another one compiles.
    weakref.finalize(owner, _DROPPED.append, step).atexit = False


def release_dropped() -> None:
    """Free what was compiled for dropped Models; call this while no step runs."""
    while _DROPPED:
        release(_DROPPED.pop())


def release(step: nn.Cell) -> None:
    """Free what has been compiled for a step and for the Cells in it."""
    cells = [cell for _, cell in step.cells_and_names()]
    # Cells that close a window early are no children: a step would list their Parameters twice.
    closing = [one for cell in cells for one in vars(cell).get("_flushes", {}).values()]
    graphs = [vars(cell).get("graph_part") for cell in cells]
    whole = [one for part in graphs if part is not None for one in part.cells]
    _compat.free_compiled([*cells, *closing, *whole])
