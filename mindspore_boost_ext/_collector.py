"""While the package is imported, Python's garbage collector skips the objects there before."""

from __future__ import annotations

import gc

# MindSpore has half a million objects: one look at all of them takes as long as the whole import.
# More are frozen if other code did it, for reasons of its own. Python 3.12 always counts some 400.
_HOLDS = gc.get_freeze_count() < 1000
if _HOLDS:
    gc.freeze()


def release() -> None:
    """Let the collector look at all objects again."""
    if _HOLDS:
        gc.unfreeze()
