"""What was done: one row for each algorithm, and the warnings of the package. Imports no MindSpore.

A report answers, for every algorithm, who asked for it, whether it was applied, and why (not).
Nothing in the package is skipped without a row here.
"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LOGGER = logging.getLogger("mindspore_boost_ext")

APPLIED, SKIPPED, INACTIVE = "applied", "skipped", "inactive"
_REASON_WIDTH = 60


class BoostWarning(UserWarning):
    """Something the user should know about a configuration or a run that still works."""


class NoEffectWarning(BoostWarning):
    """Something that was asked for changes nothing."""


class HeldWarning:
    """A warning that waits until the first batch has shown what is true."""

    def __init__(self) -> None:
        self._message: Callable[[], str] = str
        self._waits = True

    def give(self, message: Callable[[], str]) -> None:
        """Keep what returns a warning, or an empty text, until :meth:`release`, or issue it now."""
        self._message = message
        if not self._waits:
            self.release()

    def release(self) -> None:
        """Issue the kept warning; from now on none is kept."""
        message, self._message, self._waits = self._message(), str, False
        if message:
            warn(message, NoEffectWarning)


def is_main_process() -> bool:
    """Return whether this process speaks for the job: rank 0, or the only one."""
    return os.environ.get("RANK_ID", "0") in ("", "0")


def warn(
    message: str, category: type[BoostWarning] = BoostWarning, *, every_rank: bool = False
) -> None:
    """Issue a warning, from rank 0 unless ``every_rank``, at the line of the user's own code.

    Python's own filter shows the same message once for each line.
    """
    if every_rank or is_main_process():
        warnings.warn(message, category, stacklevel=_levels_to_user_code())


def _levels_to_user_code() -> int:
    """Return how many frames above ``warn`` the first one outside this package and MindSpore is."""
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    theirs = getattr(sys.modules.get("mindspore"), "__file__", None) or own
    machinery = (own, "<", os.path.dirname(theirs) + os.sep)
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(machinery):
        frame, level = frame.f_back, level + 1
    return level


@dataclass(frozen=True)
class Row:
    """One line of a report.

    Attributes:
        algorithm: name of the switch, for example ``"less_bn"``.
        asked_by: what switched it on, for example ``"level O1"``; ``"-"`` when nothing did.
        status: of an algorithm ``"applied"``, ``"skipped"`` (asked for, not done) or ``"inactive"``
            (not asked); of a layer or parameter what was done to it, such as ``"removed"``.
        reason: why the status is what it is, in one sentence.
        counts: whole numbers worth knowing, for example ``{"batch_norms_removed": 11}``.
    """

    algorithm: str
    asked_by: str
    status: str
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, one string a column."""
        counts = ", ".join(f"{name}={count}" for name, count in self.counts.items())
        return (self.algorithm, self.asked_by, self.status, self.reason or "-", counts or "-")


class Report:
    """What was done: ``print(report)``, ``report["less_bn"].status``, ``report.to_dict()``.

    A later row of an algorithm replaces the earlier one.

    Args:
        title (str): the first line.

    Attributes:
        rows (tuple(Row)): one for each algorithm, in the order in which they came up, with the
            strings ``algorithm``, ``asked_by``, ``status`` ("applied"; "skipped": asked for, not
            done; "inactive": not asked for) and ``reason``, and ``counts`` (name -> int).

    Raises:
        KeyError: by ``report[name]``, if there is no such row.
    """

    HEADINGS = ("algorithm", "asked by", "status", "reason", "counts")

    def __init__(self, title: str) -> None:
        self.title = title
        self._rows: dict[str, Row] = {}

    def put(self, *rows: Row) -> None:
        """Add rows, or replace those of the same algorithms."""
        self._rows.update({row.algorithm: row for row in rows})

    def update(
        self, name: str, status: str, reason: str = "", counts: Mapping[str, int] | None = None
    ) -> None:
        """Put another status into the row of an algorithm; who asked for it stays."""
        self.put(Row(name, self[name].asked_by, status, reason, counts or {}))

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in the order in which their algorithms came up."""
        return tuple(self._rows.values())

    def __iter__(self) -> Iterator[Row]:
        """Go through the rows."""
        return iter(self.rows)

    def __getitem__(self, algorithm: str) -> Row:
        """Return the row of one algorithm; ``KeyError`` if there is none."""
        return self._rows[algorithm]

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data, ready for ``json.dumps``."""
        rows = [
            {**dict(zip(self.HEADINGS, row.cells())), "counts": dict(row.counts)}
            for row in self.rows
        ]
        return {"title": self.title, "rows": rows}

    def __repr__(self) -> str:
        """Return a table of plain text: long reasons take several lines, rows of a group one."""
        rows = _grouped(self.rows)
        table = [self.HEADINGS, *(line for row in rows for line in _lines(row.cells()))]
        widths = [max(len(line[column]) for line in table) for column in range(len(self.HEADINGS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *(line.rstrip() for line in lines)])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _grouped(rows: Iterable[Row]) -> list[Row]:
    """Return rows of which what the import did, called ``group: name``, is joined.

    So many rows would hide the algorithms. Those that it left out are joined if they share why.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        group, _, name = row.algorithm.partition(": ")
        reason = "" if row.status == APPLIED else row.reason
        joins = name and row.asked_by == "import"
        key = (group, row.status, reason) if joins else (row.algorithm,)
        groups.setdefault(key, []).append(row)
    return [_summary(key[0], those) for key, those in groups.items()]


def _summary(group: str, rows: Sequence[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first
    names = ", ".join(row.algorithm.partition(": ")[2] for row in rows)
    applied = first.status == APPLIED
    why = "python -m mindspore_boost_ext --env says why" if applied else first.reason
    return Row(group, first.asked_by, first.status, f"{names} ({why})")


def _lines(cells: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return a row as lines of a table, in which no reason is wider than its column."""
    reasons = textwrap.wrap(cells[3], _REASON_WIDTH) or [""]
    first = (*cells[:3], reasons[0], *cells[4:])
    return [first, *(("", "", "", more, "") for more in reasons[1:])]
