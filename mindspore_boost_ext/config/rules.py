"""Rules for single settings: what a value must be, in words and as a check. No MindSpore here."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SHOWN = 80
LARGEST_INTEGER = 2**31 - 1  # counters of steps are int32
_SMALLEST = float(np.finfo(np.float32).tiny)
_ROUNDING = 1e-9  # rounding error of a sum of shares such as 0.1 + 0.2


def shown(value: object) -> str:
    """Return ``repr(value)`` with its type, cut to a length that fits an error line."""
    try:
        text = printable(str.__str__(repr(value))[: _SHOWN + 1])
    except Exception:  # repr runs foreign code, and refuses integers of thousands of digits
        text = "a value that cannot be shown"
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    return f"{text} ({printable(type(value).__name__[:_SHOWN])})"


def printable(text: str) -> str:
    """Return a text in which escapes replace characters that a terminal obeys or does not show.

    These are control characters, line ends, marks of writing direction and zero-width characters.
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def switched_off(variable: str) -> bool:
    """Return whether a variable of the environment is 0, false, no or off."""
    return os.environ.get(variable, "").lower() in ("0", "false", "no", "off")


def launched_processes() -> int:
    """Return how many processes msrun has started, including this one; 1 without msrun."""
    text = os.environ.get("MS_WORKER_NUM", "")
    return max(int(text), 1) if text.isdecimal() else 1


def described(error: Exception, most: int = _SHOWN) -> str:
    """Return the type and the message of an exception that foreign code raised.

    MindSpore's call stacks, which follow a line of dashes, are left out.
    """
    try:
        text = str.__str__(str(error)).partition("\n\n---")[0][:most]
    except Exception:
        text = "an error that cannot be shown"
    return printable(f"{type(error).__name__[:_SHOWN]}: {text}")


def plain(value: object) -> object:
    """Turn a str or int of any class, such as NumPy's or an enum's, into Python's own."""
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if _is_integer(value) else value  # type: ignore[call-overload]


@dataclass(frozen=True)
class Rule:
    """What one setting accepts."""

    text: str  # the rule as it reads after "must be", for example "True or False"
    accepts: Callable[[object], bool]  # raises only what the value itself raises
    convert: Callable[[object], object] = lambda value: value  # makes the stored form
    why: Callable[[object], str] = lambda value: ""  # adds what the text does not say

    def read(self, name: str, value: object, remedy: str = "") -> object:
        """Return a value in its stored form.

        Raises:
            ValueError: with name, rule, value and remedy, if the value breaks the rule. If the
                value's own code raises an exception, that is the cause.
        """
        cause, raised = None, ""
        try:
            if self.accepts(value):
                return self.convert(value)
        except Exception as error:  # the user's class may raise anything
            cause, raised = error, f", which raises {described(error)}"
        problem = f"{name} must be {self.text}, got {shown(value)}{raised or self.why(value)}"
        raise ValueError(f"{problem}: {remedy}" if remedy else problem) from cause


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

    Steps compute in float32. A number is also refused if float32 rounds it to an excluded end
    (0.999999999 to 1) or to infinity, or if it is too small for float32's normal numbers.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    closed_low, closed_high = interval[0] == "[", interval[-1] == "]"

    def inside(number: float, rounded: float) -> bool:
        above = min(number, rounded) > low or (closed_low and number >= low)
        return above and (max(number, rounded) < high or (closed_high and number <= high))

    def accepts(value: object) -> bool:
        number, rounded = _in_float32(value)
        usable = math.isfinite(rounded) and (number == 0) == (abs(rounded) < _SMALLEST)
        return usable and inside(number, rounded)

    def why(value: object) -> str:
        number, rounded = _in_float32(value)
        kept = rounded if abs(rounded) >= _SMALLEST else 0.0
        return f", which is {kept:g} in float32" if inside(number, number) else ""

    return Rule(f"a number in {interval}", accepts, lambda value: float(value), why)  # type: ignore[arg-type]


def _in_float32(value: object) -> tuple[float, float]:
    """Return a number as a float, and rounded to float32; both are nan if it is no number."""
    if _is_bool(value) or not isinstance(value, numbers.Real):
        return math.nan, math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan, math.nan
    with np.errstate(over="ignore"):
        return number, float(np.float32(number))


def one_of(choices: Sequence[object]) -> Rule:
    """Accept exactly the given values (``True`` is not 1); a str or int may be of any class."""
    text = ", ".join(repr(choice) for choice in choices)

    def accepts(value: object) -> bool:
        own = plain(value)
        return any(type(own) is type(choice) and own == choice for choice in choices)

    return Rule(f"one of {text}", accepts, plain)


def optional(rule: Rule) -> Rule:
    """Accept None, or what ``rule`` accepts."""
    return Rule(
        f"None or {rule.text}",
        lambda value: value is None or rule.accepts(value),
        lambda value: None if value is None else rule.convert(value),
        rule.why,
    )


def optional_path() -> Rule:
    """Accept None, or a path as a non-empty str or ``os.PathLike``."""

    def accepts(value: object) -> bool:
        text = plain(os.fspath(value)) if isinstance(value, (str, os.PathLike)) else None
        return isinstance(text, str) and bool(text) and "\0" not in text

    text = "a path (a non-empty str or os.PathLike)"
    return optional(Rule(text, accepts, lambda value: plain(os.fspath(value))))  # type: ignore


def _list_of(text: str, item: Rule, fits: Callable[[Any], bool] = lambda items: True) -> Rule:
    """Accept a list or tuple whose items obey ``item`` and pass ``fits``; stored as a tuple."""

    def accepts(value: object) -> bool:
        return isinstance(value, (list, tuple)) and all(map(item.accepts, value)) and fits(value)

    return Rule(text, accepts, lambda value: tuple(map(item.convert, value)))  # type: ignore


def _rises(items: Sequence[Any]) -> bool:
    return all(one < two for one, two in zip(items, items[1:]))


def increasing_integers(low: int = 1) -> Rule:
    """Accept an int >= low, or a rising list or tuple of such ints; stored as a tuple."""
    item = integer(low)
    single = Rule(item.text, item.accepts, lambda value: (item.convert(value),))
    text = "a list or tuple of such ints in rising order"
    return either(single, _list_of(text, item, lambda items: bool(items) and _rises(items)))


def name_patterns() -> Rule:
    """Accept a list or tuple of non-empty strings, shell patterns of names; stored as a tuple."""
    pattern = Rule("a pattern", lambda one: isinstance(one, str) and plain(one) != "", plain)
    return _list_of("a list of patterns such as 'layer1.*'", pattern)


def reals(interval: str, count: int | None = None) -> Rule:
    """Accept a non-empty list or tuple of numbers in an interval; stored as a tuple of floats.

    With ``count``, exactly that many numbers, none larger than the one before it.
    """
    if count is None:
        return _list_of(f"a list of numbers in {interval}", real(interval), bool)

    def fits(items: Sequence[Any]) -> bool:
        return len(items) == count and all(one >= two for one, two in zip(items, items[1:]))

    text = f"{count} numbers in {interval}, none above the one before it"
    return _list_of(text, real(interval), fits)


def either(first: Rule, second: Rule) -> Rule:
    """Accept what one of two rules accepts."""
    return Rule(
        f"{first.text}, or {second.text}",
        lambda value: first.accepts(value) or second.accepts(value),
        lambda value: (first if first.accepts(value) else second).convert(value),
    )


def phases(most: float) -> Rule:
    """Accept pairs [share of the steps, scale]; stored as a tuple of pairs of floats.

    Scales are in (0, 1) and rise; the shares are above 0, and together at most ``most``.
    """

    def fits(pairs: Sequence[Any]) -> bool:
        if not pairs or any(len(pair) != 2 for pair in pairs):
            return False
        shares, scales = zip(*pairs)
        return (
            _rises([float(scale) for scale in scales])
            and math.fsum(map(float, shares)) <= most + _ROUNDING
        )

    text = (
        "a list of pairs [share of the updates, scale], the scales in (0, 1) and rising, the "
        f"shares above 0 and together at most {most:g}"
    )
    return _list_of(text, reals("(0, 1)"), fits)


def freeze_schedule() -> Rule:
    """Accept None, the name of a prefix schedule, a list of groups (ints >= 0), or a function."""
    names = ("linear", "cubic", "step", "adaptive")
    groups = _list_of("a list of ints >= 0", integer(0), bool)

    def accepts(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return groups.accepts(value)
        if isinstance(value, str):
            return plain(value) in names
        return value is None or (callable(value) and not isinstance(value, type))

    def convert(value: object) -> object:
        return groups.convert(value) if isinstance(value, (list, tuple)) else plain(value)

    text = f"None, {', '.join(map(repr, names))}, {groups.text}, or a function of the update"
    return Rule(text, accepts, convert)


def check_all(prefix: str, **settings: tuple[object, Rule]) -> dict[str, Any]:
    """Return the stored forms; one ``ValueError`` names every setting that breaks its rule."""
    problems: list[str] = []
    stored: dict[str, Any] = {}
    cause = None
    for name, (value, rule) in settings.items():
        try:
            stored[name] = rule.read(f"{prefix}.{name}", value)
        except ValueError as error:
            problems.append(str(error))
            cause = cause or error.__cause__
    if problems:
        raise ValueError("; ".join(problems)) from cause
    return stored
