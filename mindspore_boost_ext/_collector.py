"""While the package is imported, Python's garbage collector skips the objects there before."""

from __future__ import annotations

import gc

# MindSpore has half a million objects: one look at all of them takes as long as the whole import.
_HOLDS = gc.get_freeze_count() == 0  # else other code has frozen them, for reasons of its own
if _HOLDS:
    gc.freeze()


def release() -> None:
    """Let the collector look at all objects again."""
    if _HOLDS:
        gc.unfreeze()
