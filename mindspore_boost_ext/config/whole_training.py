"""The sections of algorithms that follow a schedule over all updates of the training.

Imports no MindSpore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspore_boost_ext.config.rules import integer, one_of, optional, phases, real
from mindspore_boost_ext.config.section import Section, setting

_MOST_NOT_FULL = 0.7  # share of the updates; in evaluation, inputs have their full size


@dataclass(frozen=True)
class _WholeTraining(Section):
    """A schedule over all updates of the training."""

    left_out_of_all = "it needs the number of updates: give its section to use it"
    given_means_on = True

    total_steps: int | None = setting(
        None, optional(integer(1, 2**30)), "number of updates of the whole training; must be given"
    )  # counted and added up as int32

    def missing(self) -> str:
        """Shares need the number of updates that they are shares of."""
        if self.total_steps is not None:
            return ""
        return f"{self.path} needs {self.path}.total_steps, the updates of the training, got none"


@dataclass(frozen=True)
class _GrowingInputs(_WholeTraining):
    """Inputs are small in the first phases; the remaining updates train at full size."""

    multiple: int = setting(1, integer(1), "every size is rounded to a multiple of this")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "if the network needs a fixed size: an error, or full size",
    )


@dataclass(frozen=True)
class ProgressiveResizingConfig(_GrowingInputs):
    """Section ``progressive_resizing``: images start small; the section switches it on."""

    phases: Any = setting(
        ((0.6, 0.75),),
        phases(_MOST_NOT_FULL),
        "pairs: share of the updates, scale of height and width",
    )


@dataclass(frozen=True)
class SeqLengthWarmupConfig(_GrowingInputs):
    """Section ``seq_length_warmup``: sequences start short; the section switches it on."""

    phases: Any = setting(
        ((0.3, 0.25), (0.3, 0.5)),
        phases(_MOST_NOT_FULL),
        "pairs: share of the updates, scale of the length",
    )
    method: str = setting(
        "truncate",
        one_of(("truncate", "reshape")),
        "cut off the end, or cut each sequence into several short ones",
    )


@dataclass(frozen=True)
class ShortScheduleConfig(_WholeTraining):
    """Section ``short_schedule``: a shorter training; the section switches it on."""

    share: float = setting(0.5, real("(0, 1)"), "share of the training that is done")
    parts: int = setting(
        1, integer(1, 1024), "number of parts of each batch; each part makes an update"
    )
    whole_share: float | None = setting(
        None, optional(real("(0, 1)")), "replaces `share` if batches stay whole; null: `share`"
    )
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip", "skip_rate")),
        "without a schedule to shorten: an error, or all updates; skip: also without class labels",
    )

    def batches(self, parts: int) -> int:
        """Return how many batches are trained on (at least one) if each is cut into ``parts``."""
        share = self.share if parts > 1 or self.whole_share is None else self.whole_share
        return max(round(share * (self.total_steps or 0)), 1)

    def nothing_to_do(self) -> str:
        """With few updates, rounding may make the share all of them."""
        whole = self.total_steps is not None and self.batches(self.parts) >= self.total_steps
        name = "share" if self.parts > 1 or self.whole_share is None else "whole_share"
        return f"short_schedule.{name} is rounded to all updates" if whole else ""

    def idle_settings(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """If batches stay whole, ``whole_share`` replaces ``share``."""
        if self.parts == 1 and self.whole_share is not None:
            yield ("share",), "short_schedule.whole_share replaces it, as parts is 1"
