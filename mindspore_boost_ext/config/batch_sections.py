"""The sections of what changes the batches of a training, or how many there are.

They are read as those in ``sections.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspore_boost_ext.config.rules import integer, one_of, optional, phases, real
from mindspore_boost_ext.config.section import Section, setting

_MOST_NOT_FULL = 0.7  # share of the steps; at test time inputs have their full size


@dataclass(frozen=True)
class _WholeTraining(Section):
    """A schedule over all updates of the training."""

    left_out_of_all = "it has to know the updates of the training: ask for it by its section"
    given_means_on = True

    total_steps: int | None = setting(
        None, optional(integer(1)), "updates of the whole training; has to be given"
    )

    def missing(self) -> str:
        """The shares are shares of something."""
        if self.total_steps is not None:
            return ""
        return f"{self.path} needs {self.path}.total_steps, the updates of the training, got none"


@dataclass(frozen=True)
class _GrowingInputs(_WholeTraining):
    """Inputs that are small in the first phases; the updates that are left train at full size."""

    multiple: int = setting(1, integer(1), "what every size is a multiple of")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "a network that fixes the size: an error, or training at full size",
    )


@dataclass(frozen=True)
class ProgressiveResizingConfig(_GrowingInputs):
    """Section ``progressive_resizing``: images start small; giving it switches that on."""

    path = "progressive_resizing"

    phases: Any = setting(
        ((0.6, 0.75),),
        phases(_MOST_NOT_FULL),
        "pairs: share of the updates, scale of height and width",
    )


@dataclass(frozen=True)
class SeqLengthWarmupConfig(_GrowingInputs):
    """Section ``seq_length_warmup``: sequences start short; giving it switches that on."""

    path = "seq_length_warmup"

    phases: Any = setting(
        ((0.3, 0.25), (0.3, 0.5)),
        phases(_MOST_NOT_FULL),
        "pairs: share of the updates, scale of the length",
    )
    method: str = setting(
        "truncate",
        one_of(("truncate", "reshape")),
        "cut the end off, or make several short sequences of each",
    )


@dataclass(frozen=True)
class ShortScheduleConfig(_WholeTraining):
    """Section ``short_schedule``: a shorter training; giving it switches that on."""

    path = "short_schedule"

    total_steps: int | None = setting(
        None, optional(integer(1, 2**30)), "updates of the whole training; has to be given"
    )  # added up as int32
    share: float = setting(0.5, real("(0, 1)"), "of the updates that are made")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "a constant rate: an error, or the whole training, as then for labels of each place, too",
    )

    def updates(self) -> int:
        """Return how many updates are made, at least one."""
        return max(round(self.share * (self.total_steps or 0)), 1)

    def nothing_to_do(self) -> str:
        """A share may be rounded to all of few updates."""
        whole = self.total_steps is not None and self.updates() >= self.total_steps
        return "short_schedule.share leaves all updates" if whole else ""


@dataclass(frozen=True)
class LabelSmoothingConfig(Section):
    """Section ``label_smoothing``: the gradient of smoothed labels; giving it switches that on."""

    path = "label_smoothing"
    left_out_of_all = "it trains on other labels: ask for it by a section 'label_smoothing'"
    given_means_on = True

    smoothing: float = setting(0.1, real("(0, 1)"), "of each label, shared by all classes")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "an unknown loss, or labels that are not one class a sample: an error, or plain labels",
    )


@dataclass(frozen=True)
class RandomShiftConfig(Section):
    """Section ``random_shift``: images that are moved a little; giving it switches that on."""

    path = "random_shift"
    left_out_of_all = "it trains on other images: ask for it by a section 'random_shift'"
    given_means_on = True

    share: float = setting(
        0.07, real("(0, 0.25]"), "of height and width, by which an image moves at most"
    )
    seed: int = setting(0, integer(0, 2**32 - 1), "of the moves; every rank draws its own")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "no images, or labels that are not one class a sample: an error, or plain training",
    )


__all__ = [
    "LabelSmoothingConfig",
    "ProgressiveResizingConfig",
    "RandomShiftConfig",
    "SeqLengthWarmupConfig",
    "ShortScheduleConfig",
]
