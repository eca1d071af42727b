"""Replaces functions of ``mindspore.ops`` in the graphs that are made while a step runs.

It also replaces a class of operators with a slow gradient, which networks make in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindspore_boost_ext import _compat
from mindspore_boost_ext.cheaper_operators.activations import (
    CheaperElu,
    CheaperGelu,
    CheaperSelu,
    is_gentle,
    leaky_relu,
)
from mindspore_boost_ext.cheaper_operators.cell import is_ranked
from mindspore_boost_ext.cheaper_operators.cross_entropy import loss_of
from mindspore_boost_ext.cheaper_operators.rows import CheaperLogSoftmax, CheaperSoftmax, sums_along
from mindspore_boost_ext.runtime import cross_entropy as by_import

# MindSpore's, for what is not replaced. In a dict: under names, graphs would have ours again.
_PLAIN: Mapping[str, Any] = {
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "gelu": ops.gelu,
    "selu": ops.selu,
    "leaky_relu": ops.leaky_relu,
    "elu": ops.elu,
    "l2_normalize": ops.L2Normalize,
    "cross_entropy": by_import.ORIGINAL,
}
_SOFTMAX, _LOG_SOFTMAX = CheaperSoftmax(ops.Softmax(-1)), CheaperLogSoftmax(ops.LogSoftmax(-1))
_GELU, _SELU, _ELU = CheaperGelu(ops.GeLU()), CheaperSelu(ops.SeLU()), CheaperElu(ops.Elu())
_CALLED: set[str] = set()  # functions called by graphs that were made since a step began


@ops.constexpr(check=False)
def _note(name: str) -> bool:
    """Remember that a graph calls a function."""
    _CALLED.add(name)
    return True


@ops.constexpr(check=False)
def _type_of(thing: object) -> str:
    return type(thing).__name__


@ops.constexpr(check=False)
def _is_legal(axis: object, epsilon: object, shape: tuple[int, ...] | None) -> bool:
    """Return whether L2Normalize accepts its settings."""
    if type(axis) is not int or type(epsilon) is not float or not is_ranked(shape):
        return False
    return epsilon > 0 and -len(shape or ()) <= axis < len(shape or ())


def _is_ours(x: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dtype == mstype.float32


def _is_last(axis: int, x: Tensor) -> bool:
    return _type_of(axis) == "int" and axis in (-1, x.ndim - 1)


def _softmax(input: Tensor, axis: int = -1, *, dtype: mstype.Type | None = None) -> Tensor:
    same_dtype = dtype is None or dtype == mstype.float32
    ours = _is_ours(input) and same_dtype and _is_last(axis, input)
    if ours and not _SOFTMAX.is_small(input) and _note("softmax"):
        return _SOFTMAX(input)
    return _PLAIN["softmax"](input, axis, dtype=dtype)


def _log_softmax(logits: Tensor, axis: int = -1) -> Tensor:
    ours = _is_ours(logits) and _is_last(axis, logits)
    if ours and not _LOG_SOFTMAX.is_small(logits) and _note("log_softmax"):
        return _LOG_SOFTMAX(logits)
    return _PLAIN["log_softmax"](logits, axis)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if _is_ours(input) and approximate == "tanh" and _note("gelu"):
        return _GELU(input)
    return _PLAIN["gelu"](input, approximate)


def _selu(input_x: Tensor) -> Tensor:
    if _is_ours(input_x) and _note("selu"):
        return _SELU(input_x)
    return _PLAIN["selu"](input_x)


def _leaky_relu(input: Tensor, alpha: float = 0.2) -> Tensor:
    if _is_ours(input) and _type_of(alpha) == "float" and is_gentle(alpha) and _note("leaky_relu"):
        return leaky_relu(input, alpha)
    return _PLAIN["leaky_relu"](input, alpha)


def _elu(input_x: Tensor, alpha: float = 1.0) -> Tensor:
    ours = _is_ours(input_x) and _type_of(alpha) == "float" and alpha == 1
    if ours and not _ELU.is_small(input_x) and _note("elu"):
        return _ELU(input_x)
    return _PLAIN["elu"](input_x, alpha)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    ours = _is_ours(input) and is_ranked(input.shape) and by_import.fits(input, target)
    ours = ours and weight is None and reduction in ("mean", "sum")
    ours = ours and _type_of(ignore_index) == "int"
    ours = ours and isinstance(label_smoothing, float) and 0 <= label_smoothing <= 1
    if ours and _note("cross_entropy"):
        return loss_of(*by_import.in_rows(input, target), ignore_index, reduction, label_smoothing)
    plain = _PLAIN["cross_entropy"]
    return plain(input, target, weight, ignore_index, reduction, label_smoothing)


def _l2_normalize(axis: int = 0, epsilon: float = 1e-4) -> Any:
    """Replace the class: a network may make the operator where it calls it."""
    return ops.partial(_of_length_1, axis, epsilon)


def _of_length_1(axis: int, epsilon: float, x: Tensor) -> Tensor:
    if not (_is_ours(x) and _is_legal(axis, epsilon, x.shape) and _note("l2_normalize")):
        return _PLAIN["l2_normalize"](axis, epsilon)(x)
    return x * ops.rsqrt(ops.maximum(sums_along(x * x, axis), epsilon))


# The keys are what a script may call.
_OWN: Mapping[Callable[..., Any], Callable[..., Any]] = {
    ops.softmax: _softmax,
    ops.log_softmax: _log_softmax,
    ops.gelu: _gelu,
    ops.selu: _selu,
    ops.leaky_relu: _leaky_relu,
    ops.elu: _elu,
    ops.L2Normalize: _l2_normalize,
    by_import.ORIGINAL: _cross_entropy,
    by_import.cross_entropy: _cross_entropy,
}
for _plain, _own in _OWN.items():
    _own.__name__ = _plain.__name__  # a network may read the name of a function that it holds


class CalledFunctions:
    """Puts functions in place while a step runs, and knows which ones the step's graphs call.

    Args:
        report (Callable): gets the names of all functions called so far, after the first step and
            after each step whose new graphs call more of them.
    """

    def __init__(self, report: Callable[[set[str]], None]) -> None:
        self.report = report
        self.names: set[str] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let graphs have this package's functions where the code has MindSpore's."""
        _CALLED.clear()
        added = {plain: own for plain, own in _OWN.items() if plain not in _compat.IN_GRAPHS}
        _compat.IN_GRAPHS.update(added)
        try:
            yield
        finally:
            for plain in added:
                del _compat.IN_GRAPHS[plain]
        if self.names is None or _CALLED - self.names:
            self.names = _CALLED.union(self.names or ())
            self.report(self.names)
