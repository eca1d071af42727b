"""Where MindSpore holds what this package takes the place of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mindspore.boost  # noqa: F401  (its modules are looked up by name)
from mindspore import nn

UPSTREAM_MODULES = (
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

_THOR_MODULE = "mindspore.nn.optim.thor"
_BUILD_FUNCTION_HOLDERS = ("mindspore", "mindspore.amp", "mindspore.train", "mindspore.train.amp")
_CONVERSIONS = (
    *("mindspore", "mindspore.train", "mindspore.train.train_thor"),
    "mindspore.train.train_thor.convert_utils",
)


def upstream_names() -> Iterator[tuple[str, str, list[Any]]]:
    """List the public names of ``mindspore.boost``, and those around its THOR.

    Yields:
        tuple: the module of this package that has it, the name, and MindSpore's holders of it.
    """
    package = sys.modules["mindspore.boost"]
    for short in UPSTREAM_MODULES:
        module = sys.modules[f"mindspore.boost.{short}"]
        for name in module.__all__:
            holders: list[Any] = [module]
            if name in package.__all__:
                holders.append(package)
            if name == "AutoBoost":
                holders.append(sys.modules["mindspore.train.model"])
            yield short, name, holders
    optimizers, made_by = sys.modules["mindspore.nn.optim"], sys.modules[_THOR_MODULE]
    yield "thor", "THOR", [optimizers]  # its name until MindSpore 1.2, and in the article on it
    yield "thor", "thor", [nn, optimizers, made_by]
    yield "integration.convert", "ConvertModelUtils", [sys.modules[one] for one in _CONVERSIONS]


def build_function_holders() -> list[ModuleType]:
    """Return the four modules in which ``build_train_network`` is visible."""
    return [sys.modules[name] for name in _BUILD_FUNCTION_HOLDERS]
