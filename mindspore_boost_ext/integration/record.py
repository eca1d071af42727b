"""A record of the Models and steps that a script builds, for the summary of the launcher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mindspore import nn

from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.config.parse import ALGORITHMS
from mindspore_boost_ext.integration.outside import settings_from_outside
from mindspore_boost_ext.report import APPLIED, Report
from mindspore_boost_ext.runtime.machine import tuning


@dataclass
class Built:
    """The Models and steps of this process, by names, for the summary of the launcher."""

    boosted: list[tuple[str, Report]] = field(default_factory=list)  # networks, and their reports
    # Networks that MindSpore's own step trains, and those of Models that build another step.
    plain: list[str] = field(default_factory=list)
    other_steps: list[str] = field(default_factory=list)
    own_steps: list[str] = field(default_factory=list)  # step cells of the script's own
    # Boosted networks whose Model has a level from the script.
    own_levels: list[str] = field(default_factory=list)
    last: Any = None

    def add(self, network: nn.Cell, step: nn.Cell, is_trained: bool, level: str) -> None:
        """Record, once, the step that was built for a network at a level.

        If the Model does not train it (``is_trained``), it may hold a step of its own.
        """
        if step is self.last or self._knows(step):
            return
        name, self.last = type(network).__name__, step
        if isinstance(step, BoostTrainOneStepCell):
            self.boosted.append((name, step.report()))
        elif is_trained:
            (self.plain if level == "O0" else self.other_steps).append(name)
        elif is_own_step(network):
            self.own_steps.append(name)

    def has_run(self, step: BoostTrainOneStepCell) -> None:
        """Record a step that runs, unless it is known: the script may have made it itself."""
        if self._knows(step):
            return
        self.last = step
        acts = any(one.status == APPLIED for one in step.report() if one.algorithm in ALGORITHMS)
        if step.auto_boost.level == "O0" and not acts:
            self.own_steps.append(type(step).__name__)
        else:
            self.boosted.append((type(step.network).__name__, step.report()))

    def _knows(self, step: nn.Cell) -> bool:
        """Return whether a step is recorded as boosted."""
        report = step.report() if isinstance(step, BoostTrainOneStepCell) else None
        return any(report is known for _, known in self.boosted)

    def summary(self) -> str:
        """Return what was applied to which network, and why others were not boosted."""
        reports = [f"{name}: {report}" for name, report in self.boosted]
        if reports:
            others = [f"not boosted: {one}" for one in self._left_out()]
            return "\n\n".join((*reports, *others, *self._unused()))
        reason = "; ".join(self._left_out()) or (
            "the script built no ms.Model with an optimizer; if it has its own training loop, use "
            "mindspore_boost_ext.make_train_step"
        )
        report = Report(f"nothing was boosted: {reason}")
        report.put(*tuning())
        return str(report)

    def _unused(self) -> list[str]:
        """Return a sentence if the script's own settings replace those from outside."""
        if not self.own_levels or not settings_from_outside():
            return []
        return [
            f"the Model of {_names(self.own_levels)} ignores the level and settings from outside, "
            "as the script sets its own: remove these from the script"
        ]

    def _left_out(self) -> list[str]:
        """Return why networks were not boosted."""
        found = [self._why_plain()] if self.plain else []
        if self.other_steps:
            found.append(
                f"the Model of {_names(self.other_steps)} trains with a step that its class, or "
                "MindSpore for pipeline stages, has built"
            )
        return found + ([own_step(_names(self.own_steps))] if self.own_steps else [])

    def _why_plain(self) -> str:
        names, outside = _names(self.plain), settings_from_outside()
        if outside.get("boost_level") == "O0":
            return f"the given level O0 switches nothing on for the Model of {names}: give O1"
        if outside:
            return (
                f"the script itself, or the class of its Model, sets boost_level='O0' for the "
                f"Model of {names}: leave it out, or give level and settings there"
            )
        return f"the Model of {names} has no boost_level: put --level O1 before the script"


def _names(several: list[str]) -> str:
    return ", ".join(dict.fromkeys(several))


def is_own_step(network: nn.Cell) -> bool:
    """Return whether a network holds a step cell or an optimizer, and no step of this package."""
    within = [cell for _, cell in network.cells_and_names()]
    if any(isinstance(cell, BoostTrainOneStepCell) for cell in within):
        return False
    return any(isinstance(cell, (nn.TrainOneStepCell, nn.Optimizer)) for cell in within)


def own_step(names: str) -> str:
    """Return why networks in the script's own step cells are not boosted, and the remedy."""
    return (
        f"the script makes its own step cell, {names}: give ms.Model the network, the loss and "
        "the optimizer instead, or use mindspore_boost_ext.make_train_step"
    )


BUILT: list[Built] = []  # holds one item if the launcher wants a summary


def record_step(network: nn.Cell, step: nn.Cell, level: str) -> nn.Cell:
    """Record a step that was built without a Model, and return it."""
    for built in BUILT:
        built.add(network, step, True, level)
    return step
