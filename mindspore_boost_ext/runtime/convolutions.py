"""Tells whether a process uses convolutions: by its script, and by the first one that is made."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspore import nn, ops

_OPERATORS = (ops.Conv2D, ops.Conv2DBackpropInput, ops.Conv2DTranspose, ops.Conv3D)
# A graph from a file may hold some, too.
_KINDS: tuple[Any, ...] = (*_OPERATORS, ops.Conv3DTranspose, nn.GraphCell)
_PLAIN = {kind: kind.__init__ for kind in _KINDS}
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (os.path.dirname(os.__file__), str(_PACKAGE))
_INSTALLED = re.compile("|".join(["site-packages", "dist-packages", *map(re.escape, _LIBRARIES)]))
_WATCHED: dict[Any, Callable[..., None]] = {}
# Better too many scripts than too few match; "converted" does not.
_WORDS = re.compile(
    r"conv(?!e)|cnn|image|vision|mindcv|(?:res|le|dense|mobile|u)net", re.IGNORECASE
)


@functools.cache
def are_expected() -> bool:
    """Return whether the script mentions convolutions, or there is no script.

    There is none in a notebook or in tests: operators may run before a convolution is made.
    """
    script = ""
    with contextlib.suppress(OSError, ValueError):  # there is no script, or none to be read
        script = Path(_script()).read_text("utf-8", "replace")
    return not script or "pytest" in sys.modules or bool(_WORDS.search(script))


def are_made() -> bool:
    """Return whether there is a convolution already. This takes 0.01 to 0.02 seconds."""
    return any(type(referrer) in _KINDS for referrer in gc.get_referrers(*_KINDS))


def _script() -> str:
    """Return the path of the script that runs, by itself or through this package's commands.

    It is empty if there is no script, such as when a command runs a module.
    """
    words = getattr(sys, "orig_argv", [])
    at = words.index("-m") if "-m" in words[:-1] else None
    if at is not None and words[at + 1].split(".")[0] == _PACKAGE.name:
        return next((word for word in words[at + 2 :] if word.endswith(".py")), "")
    first = os.path.abspath(sys.argv[0]) if sys.argv else ""
    return first if first.endswith(".py") and not _INSTALLED.search(first) else ""


def watch(notice: Callable[[bool], object]) -> None:
    """Call a function before the first convolution is made, as a layer or an operator.

    Its argument says whether that is only a graph from a file, which may hold some.
    """
    for kind, plain in _PLAIN.items():
        if kind.__init__ is plain:  # nobody else watches
            kind.__init__ = _WATCHED[kind] = _noticed(plain, notice)


def unwatch() -> None:
    """Watch no longer: convolutions are made as before."""
    for kind, noticed in _WATCHED.items():
        if kind.__init__ is noticed:
            kind.__init__ = _PLAIN[kind]
    _WATCHED.clear()


def _noticed(plain: Callable[..., None], notice: Callable[[bool], object]) -> Callable[..., None]:
    @functools.wraps(plain)
    def made(self: object, *args: object, **kwargs: object) -> None:
        unwatch()
        notice(isinstance(self, nn.GraphCell))
        plain(self, *args, **kwargs)

    return made
