"""Level and settings from outside a script, and a record of the Models that it builds."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.config.files import no_duplicates
from mindspore_boost_ext.config.parse import ALGORITHMS, LEVELS, BoostConfig
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import APPLIED, INACTIVE, NoEffectWarning, Report, Row, warn
from mindspore_boost_ext.runtime.machine import tuning

LEVEL_VARIABLE = "MINDSPORE_BOOST_EXT_LEVEL"
CONFIG_VARIABLE = "MINDSPORE_BOOST_EXT_CONFIG"
_LEVELS = {"boost_level", "acc_level"}


def keep_path() -> None:
    """Make the path in the environment absolute: a script may change the working folder."""
    config = os.environ.get(CONFIG_VARIABLE, "")
    if config and not _is_text(config):
        with contextlib.suppress(OSError):  # the folder may be gone
            os.environ[CONFIG_VARIABLE] = os.path.abspath(config)


def _is_text(config: str) -> bool:
    """Return whether it is JSON text, as for a recipe, which then needs no file."""
    return config.lstrip().startswith("{") and not os.path.exists(config)


def settings_from_outside() -> dict[str, Any]:
    """Return level and settings of ``ms.Model`` from the environment; empty if it has neither.

    The settings are the path of a file, or JSON text. Without a level they mean level O1.

    Raises:
        ValueError: naming the variable, if it cannot be used.
    """
    level, config = os.environ.get(LEVEL_VARIABLE, ""), os.environ.get(CONFIG_VARIABLE, "")
    if not level and not config:
        return {}
    level = level or "O1"
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {shown(level)}")
    try:
        source = settings_in(config)
        BoostConfig.parse(level, source)
    except ValueError as error:
        raise ValueError(f"--config or {CONFIG_VARIABLE}={config}: {error}") from error
    return {"boost_level": level, "boost_config_dict": source}


def settings_in(config: str) -> dict[str, Any] | str:
    """Return the settings in JSON text; anything else is a path, and stays as it is."""
    if not _is_text(config):
        return config
    try:
        found: dict[str, Any] = json.loads(config, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    return found


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

    def add(self, network: nn.Cell, step: nn.Cell, has_optimizer: bool, level: str) -> None:
        """Record, once, the step that was built for a network at a level."""
        if step is self.last or self._knows(step):
            return
        name, self.last = type(network).__name__, step
        if isinstance(step, BoostTrainOneStepCell):
            self.boosted.append((name, step.report()))
        elif has_optimizer:
            (self.plain if level == "O0" else self.other_steps).append(name)
        elif isinstance(network, nn.TrainOneStepCell):
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


def own_step(names: str) -> str:
    """Return why networks in the script's own step cells are not boosted, and the remedy."""
    return (
        f"the script makes its own step cell, {names}: give ms.Model the network, the loss and "
        "the optimizer instead, or use mindspore_boost_ext.make_train_step"
    )


BUILT: list[Built] = []  # holds one item if the launcher wants a summary


def with_report(plain: nn.Cell, brought: bool = False) -> nn.Cell:
    """Give MindSpore's own step an empty report, so that scripts which read it run at O0, too.

    If the script made the step (``brought``), the report says so. Other Cells stay as they are.
    """
    if isinstance(plain, nn.TrainOneStepCell) and not hasattr(plain, "report"):
        boost = AutoBoost()
        if brought:
            boost.report().put(Row("step", "-", INACTIVE, own_step(type(plain).__name__)))
        plain.report = boost.report
    return plain


def construct_model(
    construct: Callable[..., None], model: ms.Model, *args: object, **kwargs: object
) -> None:
    """Construct a Model as ``construct`` does; without a level, it gets the one from outside.

    It keeps its own settings if there are none outside.
    """
    signature = inspect.signature(construct)
    given = signature.bind_partial(model, *args, **kwargs).arguments
    trains = given.get("optimizer") is not None
    own = bool(_LEVELS & {*given, *given.get("kwargs", ())})
    if trains and not own:
        kwargs.update({name: value for name, value in settings_from_outside().items() if value})
    construct(model, *args, **kwargs)
    parts = _compat.ModelUnderConstruction(model)
    level, unused = parts.boost_level or "O0", parts.boost
    if unused is not None and not isinstance(model.train_network, BoostTrainOneStepCell):
        parts.boost = None
        _construct_at_o0(unused, construct, signature.bind_partial(model, *args, **kwargs), model)
    network = given["network"]
    if not (BUILT or own):  # else the launcher's summary says it, or the Model's own level counts
        _warn_of_own_step(network)
    for built in BUILT:
        built.add(network, model.train_network, trains, level)
        if trains and own and isinstance(model.train_network, BoostTrainOneStepCell):
            built.own_levels.append(type(network).__name__)


def _warn_of_own_step(network: nn.Cell) -> None:
    """Warn if level and settings from the environment reach a step cell of the script's own."""
    brought = isinstance(network, nn.TrainOneStepCell) and not hasattr(network, "auto_boost")
    if brought and settings_from_outside().get("boost_level", "O0") != "O0":
        words = "level and settings from the environment have no effect on this Model: "
        warn(words + own_step(type(network).__name__), NoEffectWarning)


def _construct_at_o0(
    boost: AutoBoost, construct: Callable[..., None], plain: inspect.BoundArguments, model: ms.Model
) -> None:
    """Construct a Model again, at level O0: its class builds the training step itself.

    The changes to its network are undone, because they are for a step of this package.
    """
    boost.undo()
    warn(
        f"boost_level {boost.level} has no effect on this {type(model).__name__}, whose class "
        "builds the training step itself: give network, loss and optimizer to ms.Model",
        NoEffectWarning,
    )
    for held in (plain.arguments, plain.arguments.get("kwargs", {})):
        for name in _LEVELS & held.keys():
            held[name] = "O0"
        held.pop("boost_config_dict", None)  # at O0 it would be warned of once more
    construct(*plain.args, **plain.kwargs)
    with_report(model.train_network, True)


def record_step(network: nn.Cell, step: nn.Cell, level: str) -> nn.Cell:
    """Record a step that was built without a Model, and return it."""
    for built in BUILT:
        built.add(network, step, True, level)
    return step


def level_and_settings(level: str | None, config: Any) -> tuple[str, Any]:
    """Return level and settings of a call; those from outside if it gives no level."""
    outside = settings_from_outside() if level is None else {}
    default = "O0" if level is None else level
    return outside.get("boost_level", default), outside.get("boost_config_dict") or config
