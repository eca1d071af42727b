"""Rules for single settings: what a value must be, in words and as a check. No MindSpore here."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_SHOWN = 80
LARGEST_INTEGER = 2**31 - 1  # counters of steps are int32
_SMALLEST = float(np.finfo(np.float32).tiny)


def shown(value: object) -> str:
    """Return ``repr(value)`` with its type, cut to a length that fits an error line."""
    try:
        text = repr(value)
    except Exception:  # repr runs foreign code, and refuses integers of thousands of digits
        text = "a value that cannot be shown"
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    return f"{text} ({type(value).__name__})"


@dataclass(frozen=True)
class Rule:
    """What one setting accepts.

    Attributes:
        text: the rule as it reads after "must be", for example ``"True or False"``.
        accepts: returns whether a value obeys the rule. Never raises.
        convert: brings an accepted value into its stored form.
    """

    text: str
    accepts: Callable[[object], bool]
    convert: Callable[[object], object] = lambda value: value


def _is_bool(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not _is_bool(value)


def boolean() -> Rule:
    """Accept True and False only: no strings, no numbers."""
    return Rule("True or False", _is_bool, lambda value: bool(value))


def integer(low: int, high: int = LARGEST_INTEGER) -> Rule:
    """Accept whole numbers from ``low`` to ``high``; bool is not a number here."""
    return Rule(
        f"an int from {low} to {high}",
        lambda value: _is_integer(value) and low <= int(value) <= high,  # type: ignore[call-overload]
        lambda value: int(value),  # type: ignore[call-overload]
    )


def real(interval: str) -> Rule:
    """Accept numbers in an interval written the usual way, such as ``"[0, 1)"``.

    Steps compute in float32: a number that is outside after rounding to that, 1 for the interval
    above, infinity or a zero that was none, is refused as well.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    closed_low, closed_high = interval[0] == "[", interval[-1] == "]"

    def accepts(value: object) -> bool:
        if _is_bool(value) or not isinstance(value, numbers.Real):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        with np.errstate(over="ignore"):
            rounded = float(np.float32(number))
        above = min(number, rounded) > low or (closed_low and number >= low)
        below = max(number, rounded) < high or (closed_high and number <= high)
        usable = math.isfinite(rounded) and (number == 0) == (abs(rounded) < _SMALLEST)
        return above and below and usable

    return Rule(f"a number in {interval}", accepts, lambda value: float(value))  # type: ignore[arg-type]


def one_of(choices: Sequence[object]) -> Rule:
    """Accept exactly the given values (``True`` is not 1)."""
    text = ", ".join(repr(choice) for choice in choices)

    def accepts(value: object) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)

    return Rule(f"one of {text}", accepts)


def optional(rule: Rule) -> Rule:
    """Accept None, or what ``rule`` accepts."""
    return Rule(
        f"None or {rule.text}",
        lambda value: value is None or rule.accepts(value),
        lambda value: None if value is None else rule.convert(value),
    )


def optional_path() -> Rule:
    """Accept None, or a path as a non-empty str or ``os.PathLike``."""

    def accepts(value: object) -> bool:
        if value is None:
            return True
        if not isinstance(value, (str, os.PathLike)):
            return False
        text = os.fspath(value)
        return isinstance(text, str) and bool(text) and "\0" not in text

    return Rule(
        "None or a path (a non-empty str or os.PathLike)",
        accepts,
        lambda value: None if value is None else os.fspath(value),  # type: ignore[call-overload]
    )


def increasing_integers(low: int = 1) -> Rule:
    """Accept an int >= low, or a list or tuple of such ints that grow; stored as a tuple."""
    single = integer(low)

    def accepts(value: object) -> bool:
        if not isinstance(value, (list, tuple)):
            return single.accepts(value)
        grows = all(single.accepts(item) for item in value)
        return bool(value) and grows and all(a < b for a, b in zip(value, value[1:]))

    def convert(value: object) -> tuple[int, ...]:
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(int(item) for item in items)

    text = f"{single.text}, or a list or tuple of such ints in rising order"
    return Rule(text, accepts, convert)


def name_patterns() -> Rule:
    """Accept a list or tuple of non-empty strings, shell patterns of names; stored as a tuple."""

    def accepts(value: object) -> bool:
        if not isinstance(value, (list, tuple)):
            return False
        return all(isinstance(one, str) and one for one in value)

    return Rule("a list of patterns such as 'layer1.*'", accepts, lambda value: tuple(value))  # type: ignore[arg-type]


def reals(interval: str, count: int | None = None) -> Rule:
    """Accept a non-empty list or tuple of numbers in an interval; stored as a tuple of floats.

    With ``count``, exactly so many of them, none above the one before it.
    """
    single = real(interval)

    def accepts(value: object) -> bool:
        if not isinstance(value, (list, tuple)) or not value:
            return False
        good = all(single.accepts(item) for item in value)
        if count is None or not good:
            return good
        return len(value) == count and all(one >= two for one, two in zip(value, value[1:]))

    text = f"a list of numbers in {interval}"
    if count is not None:
        text = f"{count} numbers in {interval}, none above the one before it"
    return Rule(text, accepts, lambda value: tuple(float(item) for item in value))  # type: ignore


def either(first: Rule, second: Rule) -> Rule:
    """Accept what one of two rules accepts."""
    return Rule(
        f"{first.text}, or {second.text}",
        lambda value: first.accepts(value) or second.accepts(value),
        lambda value: (first if first.accepts(value) else second).convert(value),
    )


def freeze_schedule() -> Rule:
    """Accept None, the name of a prefix schedule, a list of groups (ints >= 0), or a function."""
    names, group = ("linear", "cubic", "step"), integer(0)

    def accepts(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return bool(value) and all(group.accepts(one) for one in value)
        if isinstance(value, str):
            return value in names
        return value is None or callable(value)

    return Rule(
        "None, 'linear', 'cubic', 'step', a list of ints >= 0, or a function of the step",
        accepts,
        lambda value: (
            tuple(int(one) for one in value) if isinstance(value, (list, tuple)) else value
        ),
    )


def check(name: str, value: object, rule: Rule, remedy: str = "") -> None:
    """Raise ``ValueError`` with name, rule, value and remedy unless the value obeys the rule."""
    if not rule.accepts(value):
        raise ValueError(_problem(name, value, rule) + (f": {remedy}" if remedy else ""))


def check_all(prefix: str, **settings: tuple[object, Rule]) -> None:
    """Raise one ``ValueError`` that names every setting that breaks its rule."""
    problems = [
        _problem(f"{prefix}.{name}", value, rule)
        for name, (value, rule) in settings.items()
        if not rule.accepts(value)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _problem(name: str, value: object, rule: Rule) -> str:
    return f"{name} must be {rule.text}, got {shown(value)}"
