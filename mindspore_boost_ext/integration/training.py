"""Around a call of ``Model.train`` or ``Model.fit``: checks, and the end that an algorithm sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.dataset import Dataset
from mindspore.train import Callback, RunContext

from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.boost_cell_wrapper.agreement import (
    check_first_run_on_ranks,
    check_same_step_on_ranks,
    check_same_training_on_ranks,
)
from mindspore_boost_ext.boost_cell_wrapper.runs import follow_mode
from mindspore_boost_ext.report import NoEffectWarning, warn
from mindspore_boost_ext.runtime.threads import is_starting, start_of_training


def compare_on_ranks(step: object) -> None:
    """Compare a step that is about to train, of any level, with those of the other ranks."""
    if isinstance(step, BoostTrainOneStepCell):  # its start is compared when it runs
        check_same_step_on_ranks(step)
    elif isinstance(step, nn.TrainOneStepCell) and hasattr(step, "report"):
        check_first_run_on_ranks(step)


def expect_training(step: BoostTrainOneStepCell, epochs: int, batches: int | None) -> None:
    """Check that a training is equally long on all ranks, and that its length fits the settings.

    ``batches`` is the number of batches in an epoch; None if it is unknown.

    Raises:
        ValueError: if ranks differ.
    """
    known = "an unknown number" if batches is None else str(batches)
    check_same_training_on_ranks(step, epochs, known)
    if batches is not None:
        step.expect_training(epochs, batches)


class EndOfTraining(Callback):
    """Ends the training of a step when an algorithm says so."""

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__()
        found = {one.switch: one.end_of_training(step) for one in step.auto_boost.algorithms}
        self.ends = {name: end for name, end in found.items() if end is not None}

    def was_before(self) -> bool:
        """Return whether the training was over before it began; warn if it was."""
        if self.is_now():
            warn(
                "nothing was trained: the schedule of this training is over; for another "
                "training make a new optimizer and a new Model",
                NoEffectWarning,
            )
        return self.is_now()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Check after each step; in sink mode, after each sink call."""
        over = [name for name, end in self.ends.items() if end()]
        if over:
            run_context.original_args()["ended_by"] = over[0]  # for BoostMonitor
            run_context.request_stop()

    def is_now(self) -> bool:
        """Return whether the training is over."""
        return any(end() for end in self.ends.values())


class StepStops(Callback):
    """As the last callback, says whether a step is the end: then its epoch may be broken off."""

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Leave a note for BoostCheckpoint, which also sees stops at the end of an epoch."""
        run_context.original_args()["stopped_in_step"] = run_context.get_stop_requested()


class SinkMode(Callback):
    """Makes, around sink calls, the checks that a step makes itself if the host runs it.

    In GRAPH_MODE a graph of MindSpore's runs it; in PYNATIVE_MODE the host does, even in sink mode.
    """

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__()
        self.step, self.done = step, 0

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Check before the first sink call."""
        if not self._is_unseen(run_context):
            return
        follow_mode(self.step)
        if not (self.step._has_run or self.step._was_looked_at):
            self.step.look_before_first()
            self.step._was_looked_at = True

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Check the outputs of the last step of a sink call."""
        params = run_context.original_args()
        steps, self.done = params.cur_step_num - self.done, params.cur_step_num
        if self._is_unseen(run_context):
            self.step.look_at_outputs(params.net_outputs, steps)

    def _is_unseen(self, run_context: RunContext) -> bool:
        """Return whether a graph of MindSpore's, and not the host, runs the step."""
        is_inside = run_context.original_args().train_network is not self.step
        return is_inside and bool(ms.get_context("mode") == ms.GRAPH_MODE)


# What follows the dataset in the calls of ms.Model. Code that has put its own function in the place
# of such a method, as a tracker does, need not name these.
_OF_TRAIN = ("callbacks", "dataset_sink_mode", "sink_size", "initial_epoch")
_OF_FIT = (
    *("valid_dataset", "valid_frequency", "callbacks", "dataset_sink_mode"),
    *("valid_dataset_sink_mode", "sink_size", "initial_epoch"),
)


def train_model(
    plain: Callable[..., Any],
    model: ms.Model,
    epoch: int,
    train_dataset: Dataset,
    *args: object,
    **kwargs: object,
) -> object:
    """Train as ``plain`` does, after checks of the ranks and of the training's length."""
    return _train(plain, model, epoch, train_dataset, _named(_OF_TRAIN, args, kwargs))


def fit_model(
    plain: Callable[..., Any],
    model: ms.Model,
    epoch: int,
    train_dataset: Dataset,
    *args: object,
    **kwargs: object,
) -> object:
    """Train and validate as ``plain`` does, with the same checks."""
    return _train(plain, model, epoch, train_dataset, _named(_OF_FIT, args, kwargs))


def _named(names: Sequence[str], args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    given = dict(zip(names, args))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        raise TypeError(f"after the dataset come {', '.join(names)}, each once")
    return {**given, **kwargs}


def _train(
    plain: Callable[..., Any], model: ms.Model, epoch: int, data: Dataset, given: dict[str, Any]
) -> object:
    step, size = model.train_network, getattr(data, "get_dataset_size", None)
    compare_on_ranks(step)
    if is_starting():  # called by BoostModel.train
        return plain(model, epoch, data, **given)
    if not isinstance(step, BoostTrainOneStepCell):
        return plain(model, epoch, data, **_with_callbacks(given, [StepStops()]))
    with start_of_training():
        if isinstance(epoch, int):
            first = given.get("initial_epoch") or 0
            if first == epoch > 0:  # MindSpore raises, though a finished job may be started again
                warn(f"nothing was trained: all of the {epoch} epochs are done", NoEffectWarning)
                return None
            expect_training(step, epoch - int(first), size() if callable(size) else None)
        end = EndOfTraining(step)
        if end.was_before():
            return None
        frequency = given.get("valid_frequency")
        if end.ends and isinstance(frequency, (int, list)):
            given = {**given, "valid_frequency": _AlsoAtTheEnd(epoch, frequency, end)}
        sinks = [SinkMode(step)] if given.get("dataset_sink_mode") else []
        return plain(model, epoch, data, **_with_callbacks(given, [*sinks, end, StepStops()]))


class _AlsoAtTheEnd(list):
    """The epochs after which to validate, and the one in which an algorithm ends the training."""

    def __init__(self, epochs: int, frequency: int | list[int], end: EndOfTraining) -> None:
        if not isinstance(frequency, list):
            frequency = list(range(frequency, epochs + 1, frequency))
        super().__init__(frequency)
        self.end = end

    def __contains__(self, epoch: object) -> bool:
        return super().__contains__(epoch) or self.end.is_now()


def _with_callbacks(given: dict[str, Any], more: list[Callback]) -> dict[str, Any]:
    """Return the arguments of a call with callbacks behind its own."""
    callbacks = given.get("callbacks") or []
    several = isinstance(callbacks, Iterable)
    # MindSpore checks the methods of callbacks in a list, and not those in a tuple.
    kind = tuple if isinstance(callbacks, tuple) else list
    return {**given, "callbacks": kind([*(callbacks if several else [callbacks]), *more])}
