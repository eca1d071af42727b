"""What a cure of one deficit of MindSpore does: it is put in place, taken back, and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mindspore_boost_ext.report import APPLIED, INACTIVE


class Cure:
    """One deficit of MindSpore on some machines, and its cure: a setting, or a function.

    ``is_in_place`` returns whether the cure is in place, or None if another setting or function is.
    ``put_in_place`` puts the cure in place, or restores what was there, as far as possible.
    """

    # The reason if the cure is no longer in place.
    taken_back: ClassVar[str] = "the script has replaced it"

    def __init__(
        self,
        name: str,
        is_in_place: Callable[[], bool | None],
        put_in_place: Callable[[bool], None],
        why: str = "",
    ) -> None:
        self.name, self.why = name, why  # as reports show them
        self.is_in_place, self.put_in_place = is_in_place, put_in_place
        # SKIPPED if the cure is needed, but no longer possible.
        self.status, self.reason = INACTIVE, "not tried"
        self.set_back = ""

    def unneeded(self) -> str:
        """Return why this machine does not need the cure; empty if it does."""
        return self.taken_back if self.is_in_place() is None else ""

    def apply(self) -> tuple[str, str]:
        """Put the cure in place; return the status and the reason."""
        self.put_in_place(True)
        return APPLIED, self.why

    def update(self, off: str) -> None:
        """Apply or undo the cure; ``off`` says why nothing may be changed, or is empty."""
        if self.status == APPLIED and not self.is_in_place():
            self.set_back = self.taken_back
        reason = off or self.set_back
        if self.status == INACTIVE:
            reason = reason or self.unneeded()
            self.status, self.reason = (INACTIVE, reason) if reason else self.apply()
        elif reason:
            self.put_in_place(False)
            self.status, self.reason = INACTIVE, reason
