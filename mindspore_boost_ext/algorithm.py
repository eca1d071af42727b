"""What an algorithm is: where it changes a network, an optimizer and the training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mindspore import nn

from mindspore_boost_ext.config.parse import BoostConfig
from mindspore_boost_ext.report import SKIPPED, NoEffectWarning, Report, warn

if TYPE_CHECKING:
    from typing import TypeAlias

    from mindspore_boost_ext.boost import AutoBoost
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell

# For annotations: the class is made of parts that import this file.
StepCell: TypeAlias = "BoostTrainOneStepCell"


@dataclass
class Build:
    """A Model under construction, as algorithms see and change it.

    Attributes:
        network (Cell): the network, without or with its loss; may be replaced.
        optimizer (Cell): the optimizer; may be replaced.
        config (BoostConfig): the checked settings.
        switches: which switches are on, by name.
        report (Report): takes a row for what is done.
        loss_fn (Cell, optional): the loss, if it is not part of ``network``.
        undoable: functions that restore the networks if the construction fails.
        regroupings: functions from lists of parameters to those that the network has now.
    """

    network: nn.Cell
    optimizer: nn.Cell
    config: BoostConfig
    switches: Mapping[str, bool]
    report: Report
    loss_fn: nn.Cell | None = None
    undoable: list[Callable[[], None]] = field(default_factory=list)
    regroupings: list[Callable[[Any], Any]] = field(default_factory=list)

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Let ``undo`` run if the construction fails."""
        self.undoable.append(undo)


class Algorithm:
    """One accelerator. Its methods are the places where it acts.

    Give an algorithm of your own by ``BoostModel(..., algorithms=[Mine(...)])`` or
    ``AutoBoost(..., algorithms=[Mine(...)])``; it is always on. Its constructor takes and checks
    its settings. Its state belongs in Parameters named ``boost.<switch>.<name>``, in Cells that
    ``join`` puts into the step: then checkpoints of ``model.train_network`` hold it.

    Attributes:
        switch (str): the name of its switch, section, card and row in the report.

    Examples:
        >>> from mindspore_boost_ext import Algorithm, AutoBoost
        >>> class Watching(Algorithm):
        ...     switch = "watching"
        >>> AutoBoost("O1", algorithms=[Watching()]).report()["watching"].status
        'applied'
    """

    switch: ClassVar[str] = ""
    needs_nn_optimizer: ClassVar[bool] = False  # whether it refuses other Cells
    _built_for: frozenset[int] = frozenset()  # weights whose optimizers ``build`` has made, by id

    def unavailable(self, config: BoostConfig) -> str:
        """Return why it cannot act in this process, with the remedy; empty if it can."""
        return ""

    def check_loss_scale(self, manager: object, boost: AutoBoost) -> None:
        """Raise a ``ValueError`` if a loss-scale manager and the settings do not fit.

        Args:
            manager (LossScaleManager, optional): that of the Model, or None.
            boost (AutoBoost): the settings.
        """

    def build(self, build: Build) -> None:
        """Change ``build.network`` or ``build.optimizer``. Called only where the switch is on."""

    def evaluate(self, network: nn.Cell, build: Build) -> None:
        """Change a network for evaluation as the trained one was changed."""

    def join(self, step: StepCell) -> None:
        """Put parts into the places of a step.

        The places are ``batch_part`` (changes a batch), ``captures_part`` (what to differentiate by
        beside the weights), ``window_part`` (accumulation), ``update_part`` (writes the weights)
        and :meth:`BoostTrainOneStepCell.choose_last` (which variant of the step runs).

        Called for every step, whether the switch is on (``self.is_on(step)``) or not: the user's
        own optimizer may bring the algorithm with it. If a place is taken, the new part must also
        run the part that is there.
        """

    def compared_settings(self) -> dict[str, object]:
        """Return settings that decide on the training: name -> number, str, bool or tuple.

        Ranks compare them before they train, and ``restore`` with those of the file.
        """
        return {}

    def remember_built(self, build: Build) -> None:
        """Remember, for :meth:`report_replaced`, that ``build`` has made this optimizer."""
        weights = getattr(build.optimizer, "parameters", ())
        self._built_for |= {id(weight) for weight in weights}

    def report_replaced(self, step: StepCell) -> None:
        """Report, and warn, that a step lacks the optimizer that ``build`` made for its weights."""
        if self._built_for.isdisjoint(id(weight) for weight in step.optimizer.parameters):
            return
        reason = (
            "the optimizer of the step is not the one that it made: something has replaced it, or "
            "holds it under another name than opt"
        )
        step.report().update(self.switch, SKIPPED, reason)
        warn(f"{self.switch} has no effect: {reason}", NoEffectWarning)

    def is_on(self, step: StepCell) -> bool:
        """Return whether the switch is on for a step."""
        return bool(step.auto_boost.boost_config[self.switch])

    def observations(self, step: StepCell) -> dict[str, Any]:
        """Return what BoostMonitor shows of the last step: name -> number or bool."""
        return {}

    def updates_made(self, step: StepCell) -> int | None:
        """Return after how many updates it ends the training; None if it does not end it.

        Called when the step is built, and again on the first batch, which may change the answer.
        """
        return None

    def end_of_training(self, step: StepCell) -> Callable[[], bool] | None:
        """Return a function that says after each step whether the training is over, or None."""
        return None

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Raise a ``ValueError`` if loaded state does not fit the settings.

        Called before the first step.

        Args:
            step (BoostTrainOneStepCell): the step.
            inputs (tuple(Tensor)): its first batch; empty in sink mode, which shows none.
        """

    def check_length(self, step: StepCell, epochs: int, steps: int) -> None:
        """Warn about settings that have no effect in a training of this length.

        Args:
            step (BoostTrainOneStepCell): the step.
            epochs (int): number of epochs; below 1 if it is not known.
            steps (int): batches of an epoch.
        """


def seen_in_first_batch(step: nn.Cell) -> dict[str, Any]:
    """Return what algorithms have found in the first batch of a step: switch -> result.

    Checkpoints hold it, because later batches or trained weights may give another result.
    """
    seen: dict[str, Any] = vars(step).setdefault("seen_in_first_batch", {})
    return seen


@contextlib.contextmanager
def deciding(step: nn.Cell) -> Iterator[None]:
    """If the first batch raises an error, forget what it has shown: another may come."""
    seen = seen_in_first_batch(step)
    before = dict(seen)
    try:
        yield
    except Exception:
        seen.clear()
        seen.update(before)
        raise


def fewest_updates(step: StepCell) -> int | None:
    """Return the fewest updates after which an algorithm ends the training; None if none does."""
    found = [algorithm.updates_made(step) for algorithm in step.auto_boost.algorithms]
    return min((one for one in found if one is not None), default=None)
