"""The sign ``/`` in graphs by another operator, if the divisor is one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.composite.multitype_ops import div as SIGN

_REAL_DIV = ops.RealDiv()
BY_NUMBER, BY_TENSOR = ("Tensor", "Number"), ("Tensor", "Tensor")

# The classes of types, by the names under which rules are registered. MindNLP changes their texts.
_CLASSES = {"Tensor": "TensorType", "Number": "Number"}


def rule_in_force(types: tuple[str, str]) -> Callable[..., Tensor]:
    """Return the function that graphs call for ``/`` between operands of two types."""
    classes = [_CLASSES[one] for one in types]
    fitting = [rule for of, rule in SIGN.entries if [type(one).__name__ for one in of] == classes]
    return fitting[-1]  # the latest one counts


_PLAIN_BY_NUMBER, _PLAIN_BY_TENSOR = rule_in_force(BY_NUMBER), rule_in_force(BY_TENSOR)


@ops.constexpr(check=False)  # a number that a graph does not know is None here
def _is_zero(number: float | None) -> bool:
    return number == 0


def by_number(x: Tensor, y: float) -> Tensor:
    """Return ``x / y``, bit for bit as MindSpore does.

    On CPU, MindSpore's operator keeps buffers of several times its result for good, where the
    operands have different shapes, and so does its gradient.
    """
    # A graph takes 0.0 and -0.0 for one constant, and the gradient would have the other's sign.
    if x.dtype != mstype.float32 or _is_zero(y):
        return _PLAIN_BY_NUMBER(x, y)
    return _REAL_DIV(x, y)


def by_tensor(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x / y``; the same for a divisor of shape (), whose own gradient may round apart."""
    if x.dtype != mstype.float32 or y.dtype != mstype.float32 or y.shape != ():
        return _PLAIN_BY_TENSOR(x, y)
    return _REAL_DIV(x, y)


_Rules = Mapping[tuple[str, str], Callable[..., Tensor]]
OWN: _Rules = {BY_NUMBER: by_number, BY_TENSOR: by_tensor}
PLAIN: _Rules = {BY_NUMBER: _PLAIN_BY_NUMBER, BY_TENSOR: _PLAIN_BY_TENSOR}


def is_in_place() -> bool | None:
    """Return whether our rules are in force; None if there are third ones."""
    found = {types: rule_in_force(types) for types in OWN}
    return found == OWN if found in (OWN, PLAIN) else None


def put_in_place(ours: bool) -> None:
    """Let our rules or MindSpore's be in force, except where a third one is."""
    for types, rule in (OWN if ours else PLAIN).items():
        known = (OWN[types], PLAIN[types])
        if rule_in_force(types) in known:
            SIGN.entries[:] = [entry for entry in SIGN.entries if entry[1] not in known]
            SIGN.register(*types)(rule)
