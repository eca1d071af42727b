"""Plugging into MindSpore: ``install`` and ``uninstall``.

``install`` replaces, in MindSpore's modules, what leads to its own boost package and THOR: methods
of ``ms.Model``, ``build_train_network`` wherever it is visible, and public names. ``uninstall``
puts back what was there. If other code has put its own wrapper around ours meanwhile, its wrapper
stays, and ours only calls the original.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
import mindspore.boost
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.integration.convert import ConvertModelUtils
from mindspore_boost_ext.integration.model import (
    boosted_build_train_network,
    build_model,
    construct_model,
    open_data,
    prepare_model,
)
from mindspore_boost_ext.integration.outside import keep_path
from mindspore_boost_ext.integration.training import fit_model, train_model
from mindspore_boost_ext.runtime.machine import is_tuned, tune_machine

INSTALL_VARIABLE = "MINDSPORE_BOOST_EXT_INSTALL"
# The modules in which ``build_train_network`` is visible.
BUILD_FUNCTION_HOLDERS = [
    sys.modules[name]
    for name in ("mindspore", "mindspore.amp", "mindspore.train", "mindspore.train.amp")
]
_UPSTREAM_MODULES = (
    "boost",
    "base",
    "boost_cell_wrapper",
    "less_batch_normalization",
    "grad_freeze",
    "grad_accumulation",
    "adasum",
    "dim_reduce",
    "group_loss_scale_manager",
)
_CONVERSIONS = (
    *("mindspore", "mindspore.train", "mindspore.train.train_thor"),
    "mindspore.train.train_thor.convert_utils",
)
_NOTHING = object()


def upstream_names() -> Iterator[tuple[str, str, list[Any]]]:
    """List the public names of ``mindspore.boost``, and those around its THOR.

    Yields:
        tuple: this package's module with the name, the name, MindSpore's modules with the name.
    """
    package = sys.modules["mindspore.boost"]
    for short in _UPSTREAM_MODULES:
        module = sys.modules[f"mindspore.boost.{short}"]
        for name in module.__all__:
            holders: list[Any] = [module]
            if name in package.__all__:
                holders.append(package)
            if name == "AutoBoost":
                holders.append(sys.modules["mindspore.train.model"])
            yield short, name, holders
    optimizers = sys.modules["mindspore.nn.optim"]
    yield "thor", "THOR", [optimizers]  # its name until MindSpore 1.2, and in the article on it
    yield "thor", "thor", [nn, optimizers, sys.modules["mindspore.nn.optim.thor"]]
    yield "integration.convert", "ConvertModelUtils", [sys.modules[one] for one in _CONVERSIONS]


class _Session:
    """One installation: which attributes were replaced, by what, and what stood there before."""

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, holder: object, name: str, ours: object) -> None:
        """Set ``holder.name`` to ``ours``; remember what stood there, if anything."""
        self._replaced.append((holder, name, ours, vars(holder).get(name, _NOTHING)))
        setattr(holder, name, ours)

    def end(self) -> None:
        """Put back what stood there, except where other code has replaced ours meanwhile."""
        self.active = False
        for holder, name, ours, before in reversed(self._replaced):
            if vars(holder).get(name) is not ours:
                continue
            if before is _NOTHING:
                delattr(holder, name)
            else:
                setattr(holder, name, before)

    def wrap(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``ours`` with ``original`` as its first argument while the session is active."""

        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            if self.active:
                return ours(original, *args, **kwargs)
            return original(*args, **kwargs)

        return wrapper


_lock = threading.RLock()
_session: _Session | None = None
_untuned = False  # whether ``uninstall`` undid the tuning, so that ``install`` repeats it
_users = 0  # open ``installed()`` contexts, if the first of them has installed


def install() -> None:
    """Make ``ms.Model``, ``build_train_network`` and ``mindspore.boost`` use this package.

    It also replaces ``mindspore.nn.thor``, ``THOR`` and ``thor`` of ``mindspore.nn.optim``, and
    ``ConvertModelUtils``. A function that a script has imported before is not replaced.

    If ``uninstall`` has undone the tuning of the machine, it tunes again. Calling it again changes
    nothing. Safe to call from several threads.
    """
    global _untuned
    with _lock:
        _plug_in()
        if _untuned:
            tune_machine()
            _untuned = False


def _plug_in() -> None:
    global _session
    if _session is not None:
        return
    _session = _Session()
    keep_path()
    try:
        _replace_all(_session)
    except BaseException:
        _unplug()  # what has been replaced until then
        raise


def _replace_all(session: _Session) -> None:
    methods: dict[str, Callable[..., Any]] = {
        "__init__": construct_model,
        _compat.PREPARE_METHOD: lambda _, model, kwargs: prepare_model(model, kwargs),
        _compat.BUILD_METHOD: build_model,
        "train": train_model,
        "fit": fit_model,
        _compat.OPEN_METHOD: open_data,
    }
    for name, ours in methods.items():
        session.replace(ms.Model, name, session.wrap(vars(ms.Model)[name], ours))
    wrappers: dict[Any, Any] = {}
    for holder in BUILD_FUNCTION_HOLDERS:
        function = holder.build_train_network
        if function not in wrappers:
            wrappers[function] = session.wrap(function, boosted_build_train_network)
        session.replace(holder, "build_train_network", wrappers[function])
    for module, name, holders in upstream_names():
        named = getattr(importlib.import_module(f"mindspore_boost_ext.{module}"), name)
        for holder in holders:
            session.replace(holder, name, named)
    # For scripts that imported the class before this package.
    conversion = staticmethod(ConvertModelUtils.convert_to_thor_model)
    session.replace(_compat.BuiltInConversion, "convert_to_thor_model", conversion)


def uninstall() -> None:
    """Put back what ``install`` replaced, and undo the tuning of the machine as far as possible.

    Calling it again changes nothing. Thread-safe.
    """
    global _untuned
    with _lock:
        _unplug()
        _untuned = _untuned or is_tuned()
        tune_machine(False)


def _unplug() -> None:
    global _session
    if _session is not None:
        _session.end()
        _session = None


def is_installed() -> bool:
    """Return whether ``ms.Model`` uses this package."""
    return _session is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for the duration of a ``with`` block.

    Blocks in several threads may overlap: the last one that ends takes the package out again,
    unless it was installed before.

    Examples:
        >>> from mindspore_boost_ext import installed, is_installed
        >>> with installed():
        ...     is_installed()
        True
    """
    global _users
    with _lock:
        _users += 1 if _users or not is_installed() else 0
        _plug_in()
        counted = _users > 0
    try:
        yield
    finally:
        with _lock:
            _users -= counted
            if counted and not _users:
                _unplug()
            elif not counted:
                _plug_in()
