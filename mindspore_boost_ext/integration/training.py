"""Around a call of ``Model.train`` or ``Model.fit``: checks, and the end that an algorithm sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
from mindspore import nn
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


# The arguments of these methods of ms.Model.
_OF_TRAIN = (
    *("self", "epoch", "train_dataset", "callbacks", "dataset_sink_mode", "sink_size"),
    "initial_epoch",
)
_OF_FIT = (
    *("self", "epoch", "train_dataset", "valid_dataset", "valid_frequency", "callbacks"),
    *("dataset_sink_mode", "valid_dataset_sink_mode", "sink_size", "initial_epoch"),
)


def train_model(plain: Callable[..., Any], model: ms.Model, *args: Any, **kwargs: Any) -> object:
    """Train as ``plain`` does, after checks of the ranks and of the training's length."""
    return _train(_Call(plain, (model, *args), kwargs, _OF_TRAIN))


def fit_model(plain: Callable[..., Any], model: ms.Model, *args: Any, **kwargs: Any) -> object:
    """Train and validate as ``plain`` does, with the same checks."""
    return _train(_Call(plain, (model, *args), kwargs, _OF_FIT))


class _Call:
    """A call of a method, which may be somebody's own function; arguments stay where they are."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: tuple[str, ...],
    ) -> None:
        self.function, self.args, self.kwargs, self.names = function, args, dict(kwargs), names

    def get(self, name: str) -> Any:
        """Return an argument; None if it is not given."""
        return {**dict(zip(self.names, self.args)), **self.kwargs}.get(name)

    def put(self, name: str, value: object) -> None:
        """Give an argument another value, or a first one."""
        place = self.names.index(name)
        if place < len(self.args):
            self.args = (*self.args[:place], value, *self.args[place + 1 :])
        else:
            self.kwargs[name] = value

    def add_callbacks(self, more: list[Callback]) -> bool:
        """Add callbacks behind those of the script; return whether the function takes any."""
        given = inspect.signature(self.function).parameters
        takes = "callbacks" in given or any(one.kind is one.VAR_KEYWORD for one in given.values())
        if not takes and self.names.index("callbacks") >= len(self.args):
            return False
        callbacks = self.get("callbacks") or []
        several = isinstance(callbacks, Iterable)
        # MindSpore checks the methods of callbacks in a list, and not those in a tuple.
        kind = tuple if isinstance(callbacks, tuple) else list
        self.put("callbacks", kind([*(callbacks if several else [callbacks]), *more]))
        return True

    def run(self) -> object:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


def _train(call: _Call) -> object:
    step, epoch = call.get("self").train_network, call.get("epoch")
    compare_on_ranks(step)
    if is_starting():  # called by BoostModel.train
        return call.run()
    if not isinstance(step, BoostTrainOneStepCell):
        call.add_callbacks([StepStops()])
        return call.run()
    with start_of_training():
        if isinstance(epoch, int):
            first = call.get("initial_epoch")
            expect_training(step, epoch - int(first or 0), _batches_of_epoch(call))
        end = EndOfTraining(step)
        if end.was_before():
            return None
        frequency = call.get("valid_frequency")
        if end.ends and isinstance(epoch, int) and _is_frequency(frequency):
            call.put("valid_frequency", _AlsoAtTheEnd(epoch, frequency, end))
        sinks = [SinkMode(step)] if call.get("dataset_sink_mode") else []
        if not call.add_callbacks([*sinks, end, StepStops()]) and (sinks or end.ends):
            warn(
                f"what stands in the place of {type(call.get('self')).__name__}.train takes no "
                f"callbacks, so {', '.join(end.ends) or 'the end of a sink call'} has no effect: "
                "let it take **kwargs, and pass these on",
                NoEffectWarning,
            )
        return call.run()


def _batches_of_epoch(call: _Call) -> int | None:
    """Return how many batches an epoch has; None if that is unknown."""
    sunk = call.get("sink_size") if call.get("dataset_sink_mode") else None
    # A CPU sinks nothing, and reads the whole dataset.
    if isinstance(sunk, int) and sunk > 0 and ms.get_context("device_target") != "CPU":
        return sunk
    size = getattr(call.get("train_dataset"), "get_dataset_size", None)
    return size() if callable(size) else None


def _is_frequency(given: object) -> bool:
    """Return whether ``fit`` has been given epochs after which to validate."""
    return isinstance(given, list) or (isinstance(given, int) and given > 0)


class _AlsoAtTheEnd(list):
    """The epochs after which to validate, and the one in which an algorithm ends the training."""

    def __init__(self, epochs: int, frequency: int | list[int], end: EndOfTraining) -> None:
        if not isinstance(frequency, list):
            frequency = list(range(frequency, epochs + 1, frequency))
        super().__init__(frequency)
        self.end = end

    def __contains__(self, epoch: object) -> bool:
        return super().__contains__(epoch) or self.end.is_now()
