"""The training step: a batch, the choice of a variant, gradients, window, clipping, update.

With nothing switched on, it runs the same operators as MindSpore's own step: weights are
bit-identical to ``nn.TrainOneStepCell``.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import deciding
from mindspore_boost_ext.base.mapping import call, gradients_of
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper.agreement import (
    check_first_run_on_ranks,
    watch_or_report,
)
from mindspore_boost_ext.boost_cell_wrapper.broadcast import BroadcastsWeights
from mindspore_boost_ext.boost_cell_wrapper.flush import Flush, batch_for, keep_batch
from mindspore_boost_ext.boost_cell_wrapper.graceful_exit import asking
from mindspore_boost_ext.boost_cell_wrapper.overrides import Overridable
from mindspore_boost_ext.boost_cell_wrapper.runs import (
    FIRST_RUN,
    explaining_failures,
    follow_mode,
    in_graph_mode,
    prepare_parts,
    refusing_what_is_forgotten,
    timing_the_first,
    warn_of_mode,
)
from mindspore_boost_ext.boost_cell_wrapper.set_later import follow_parts, remember_parts
from mindspore_boost_ext.boost_cell_wrapper.upstream_names import StepNames
from mindspore_boost_ext.report import APPLIED, Report, Row
from mindspore_boost_ext.runtime.processes import PROGRESS
from mindspore_boost_ext.runtime.threads import ONE_AT_A_TIME
from mindspore_boost_ext.stages.choice import StepChoice
from mindspore_boost_ext.stages.gradients import check_dense, clipped, filled_like
from mindspore_boost_ext.stages.loss_scale import (
    check_sens,
    note_idle_section,
    warn_of_unequal_scales,
)
from mindspore_boost_ext.stages.parts import joined_losses
from mindspore_boost_ext.stages.state import HostWrites, connected, state_of
from mindspore_boost_ext.stages.update import Update, hiding_sens, look_at_optimizer

MakeChoice = Callable[["BoostTrainOneStepCell"], StepChoice]

_AT_FIRST: Mapping[str, Any] = {
    # Places end in "_part": weights are attributes, too, and may be called "scale" or "batch".
    **dict.fromkeys(("batch_part", "choice_part", "captures_part", "window_part", "graph_part")),
    "surrounding_part": contextlib.nullcontext,
    "capturing": False,
    "reducer_of": None,  # or a function from weights to a Cell
    "updates_per_batch": 1,
    **StepNames.at_first,
}


class BoostTrainOneStepCell(Overridable, StepNames, BroadcastsWeights, nn.TrainOneStepCell):
    r"""One training step of a network with the accelerators of its configuration.

    Subclasses may override ``construct``; the parts of the step have the names that they have in
    ``mindspore.boost`` (``grad``, ``weights``, ``grad_reducer``, ``sens`` and so on). When
    algorithms join the step, they put their parts into its places:

    * ``batch_part`` (Cell) changes the inputs before the network sees them;
    * ``choice_part`` (StepChoice) runs one of several variants of the step;
    * ``captures_part`` (FactorCaptures) holds what a capturing variant also differentiates by;
    * ``window_part`` (GradientAccumulation) gathers gradients of several batches;
    * ``graph_part`` (StepGraph) runs the step as one graph in PYNATIVE_MODE;
    * ``surrounding_part`` (Callable) gives the context in which the step runs;
    * ``clip_norm`` (float) bounds the global norm; ``update_part`` (Update) writes the weights.

    Args:
        network (Cell): the network with its loss. The output is a loss of any shape; or, without
            ``sens``, a tuple of Tensors, whose sum is minimised (for a search of ``dim_reduce``
            only one output).
        optimizer (Cell): the optimizer over the parameters to train.
        sens (numbers.Number, optional): factor on the gradients, put into the backward pass. The
            optimizer divides it out again when its own ``loss_scale`` is the same number.
            Default: None, which means 1.0.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        What ``network`` returns, not multiplied by ``sens``.

    Raises:
        TypeError: if ``sens`` is not a number.
        ValueError: if ``sens`` is 0, or not finite, or a weight has a name that the step uses.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import BoostTrainOneStepCell
        >>> net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> step = BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        >>> inputs, labels = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
        >>> float(step(Tensor(inputs), Tensor(labels)).asnumpy())
        16.0
    """

    # Those of objects, not of the class, that no weight may have.
    own_names = StepNames.own_names.union(_AT_FIRST, ("update_part", "clip_norm", "auto_boost"))
    is_complete_at_once = True
    compiles_end = False  # whether what follows the backward pass is one graph in PYNATIVE_MODE
    grad_reducer: nn.Cell
    update_part: Any

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, sens: numbers.Number | None = None
    ) -> None:
        check_sens(sens)
        look_at_optimizer(optimizer, network, type(self))
        super().__init__(network, optimizer, sens)
        self.auto_boost = AutoBoost.current(optimizer)
        watch_or_report(self)
        note_idle_section(self.auto_boost, self.scales_loss)
        self._empty_places()
        self._use_clipping()
        self.auto_boost.look_for_unavailable(own_only=True)
        self._own_updates = self.auto_boost.join(self)
        if self._own_updates:
            self.update_part = hiding_sens(self.update_part, self.sens)
        if self.reducer_of is not None:
            self.grad_reducer = self.reducer_of(self.weights)
        self._use_reducer(self.grad_reducer)
        self._differentiate()
        if not self.update_part.divides_sens:
            warn_of_unequal_scales(self.sens, self.optimizer)
        if self.is_complete_at_once:
            self._complete()

    def _empty_places(self) -> None:
        """Begin without parts, and set the names of ``mindspore.boost``."""
        self.update_part = Update(self.optimizer)
        for name, value in _AT_FIRST.items():
            setattr(self, name, value)
        self._extra: tuple[Any, ...] = ()
        self._make_choices: list[MakeChoice] = []
        self._prepared: set[int] = set()
        self._flushes: dict[int, Flush] = {}
        self.__dict__["_last_batch"] = None
        self._state: tuple[Any, ...] = ()
        self._has_run = self._was_looked_at = self._asks_for_less = False
        self._variant, self._ran_in = "the step", None  # a mode
        self._first_runs: list[str] = []
        self._has_begun: list[bool] = []
        self._host_writes = HostWrites(())  # a variant has none: the step that runs it follows
        self.hyper_map = ops.HyperMap()

    def construct(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Train one step and return the loss."""
        if self.choice_part is not None:
            return call(self.gradient_freeze_process, inputs)
        return call(self._trained if self.sense_flag else self._no_sens_impl, inputs)

    def _trained(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.batch_part is not None:
            inputs = call(self.batch_part, inputs)
        loss = call(self.network, inputs)
        if not (self._special or self.clip_norm is not None or self.window_part is not None):
            gradients = gradients_of(self.grad_no_sens, self.network, self.weights, inputs)
            return ops.depend(loss, self.optimizer(self.grad_reducer(gradients)))
        sens = filled_like(loss, self.sens)
        batch = (*inputs, sens)
        gradients = gradients_of(self.grad, self.network, self._differentiated, batch)
        if self.capturing:
            captured = self.captures_part.prepared(gradients[len(self.weights) :], self.sens)
            gradients = gradients[: len(self.weights)]
            loss = ops.depend(loss, self.captures_part.use(captured))
        gradients = self.grad_reducer(gradients)
        if self.window_part is not None:
            return call(self.gradient_accumulation_process, (loss, gradients, sens, *inputs))
        return call(self.update, (connected(loss, self._state), gradients, *inputs))

    def update(self, loss: Tensor, gradients: tuple[Any, ...], *inputs: Tensor) -> Tensor:
        """Clip reduced gradients, update the weights, and return the loss.

        Args:
            loss (Tensor): the loss; it is returned when the update is done.
            gradients (tuple(Tensor)): gradients in the order of ``weights``, times ``sens``.
            inputs (tuple(Tensor)): the inputs of ``loss``, for parts that run the network again.
        """
        if self.clip_norm is not None:
            gradients = clipped(gradients, self.clip_norm * abs(self.sens))
        if self._calls_adasum_process:
            return self.adasum_process(loss, gradients)
        return call(self.update_part, (loss, gradients, *inputs))

    def gradient_accumulation_process(
        self, loss: Tensor, grads: tuple[Any, ...], sens: Tensor, *inputs: Tensor
    ) -> Tensor:
        """Add a micro-batch to the window; when the window is full reduce, update and clear.

        Args:
            loss (Tensor): the loss of the micro-batch, returned when all is done.
            grads (tuple(Tensor)): its gradients, of this rank alone.
            sens (Tensor): the factor that they carry; not used.
            inputs (tuple(Tensor)): the batch, whose samples or labels the window may count.
        """
        weight = call(self.window_part.weight_of, inputs)
        return call(self._accumulate, (loss, grads, weight, *inputs))

    def _accumulate(
        self, loss: Tensor, gradients: tuple[Any, ...], weight: float, *inputs: Tensor
    ) -> Tensor:
        loss = connected(self.window_part.looked_at(loss), self._state)
        loss = ops.depend(loss, self.window_part.accumulate(gradients, weight))
        if self.window_part.is_full():
            loss = call(self.close_window, (loss, *inputs))
        return loss

    def close_window(self, loss: Tensor, *inputs: Tensor) -> Tensor:
        """Update with what the window holds, and empty it; return ``loss`` when that is done."""
        gradients = self.window_reducer(self.window_part.window_gradients())
        loss = call(self.update, (loss, gradients, *inputs))
        return ops.depend(loss, self.window_part.clear())

    def gradient_freeze_process(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the variant whose turn it is, chosen in the graph."""
        if len(inputs) > 0:
            inputs = (connected(inputs[0], self._state), *inputs[1:])
        return call(self.choice_part, inputs)

    def adasum_process(self, loss: Tensor, grads: tuple[Any, ...]) -> Tensor:
        """Take this rank's own step, and combine it with those of the other servers.

        Args:
            loss (Tensor): the loss; it is returned when the weights are written.
            grads (tuple(Tensor)): gradients of this server, in the order of ``weights``.
        """
        return self.update_part(loss, grads)

    def __call__(self, *inputs: Tensor, **kwargs: object) -> Tensor:
        """Run a step, while no step of another thread runs."""
        with ONE_AT_A_TIME:
            return self._run(*inputs, **kwargs)

    def _run(self, *inputs: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """Run a step on the state that the host has set."""
        if not self._has_run:
            self.look_before_first(*inputs)
            self._has_run = True
        follow_mode(self)
        prepare_parts(self, *inputs)
        # The variant that is chosen enters it, which may have more of it.
        around = contextlib.nullcontext if self.host_chooses() else self.surrounding_part
        with self._host_writes.followed(), _compat.forgetting_failures(), around():
            outputs = self._run_chosen(*inputs, **kwargs)
        keep_batch(self, inputs, outputs)
        return outputs

    def look_before_first(self, *inputs: Tensor) -> None:
        """Make the checks before the first step, on its batch; in sink mode there is none."""
        follow_parts(self)
        self._settle()
        check_first_run_on_ranks(self)
        self.warn_of_own_reducer(self._our_reducer)
        self.check_update(inputs)
        with deciding(self):
            for algorithm in self.auto_boost.algorithms:
                algorithm.check_state(self, *inputs)
        warn_of_mode(self)
        for function in FIRST_RUN:
            function(self)

    def look_at_outputs(self, outputs: object, steps: int = 1) -> None:
        """Look at the outputs of the last of ``steps`` steps; sink mode runs several."""

    def _run_chosen(self, *inputs: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """Run a step, or the variant of it whose turn it is.

        The host chooses here, so that only variants whose turn comes are compiled. Inside another
        Cell's graph, and in a subclass that overrides the way to the choice, the graph chooses.
        """
        if not self.host_chooses():
            if self.reducer_flag:
                self._count_batch()
            with refusing_what_is_forgotten(self), timing_the_first(self), explaining_failures():
                compiled = self.graph_part is not None and not in_graph_mode()
                run = self.graph_part if compiled else super().__call__
                return run(*inputs, **kwargs)
        index = self.choice_part.chooser.now()
        variant = self.choice_part.variants[index]
        if id(variant) not in self._prepared:
            _compat.share_compile_settings(self, variant)
            self._prepared.add(id(variant))
        with self.choice_part.chooser.running(index):
            return self.choice_part.run(variant, *inputs, **kwargs)

    def _count_batch(self) -> None:
        """Show the other ranks if this batch is followed by a reduction, in which all take part."""
        # The window is asked each time: flushes, overflows and restored files change its count.
        if not self._reduces_at_end or self.window_part.micro_steps() + 1 >= self.window():
            PROGRESS.begin_update()

    def window(self) -> int:
        """Return how many batches are in an update."""
        return 1 if self.window_part is None else self.max_accumulation_step

    def updates_in(self, batches: int) -> int:
        """Return how many updates are made from ``batches`` batches."""
        return batches * self.updates_per_batch // self.window()

    def joined(self, outputs: tuple[Any, ...], samples: int) -> Any:
        """Return the outputs for a batch from those for its parts."""
        return joined_losses(outputs, samples)

    def expect_training(self, epochs: int, steps: int) -> None:
        """Warn about settings without effect in ``epochs`` epochs of ``steps`` steps."""
        for algorithm in self.auto_boost.algorithms:
            algorithm.check_length(self, epochs, steps)

    def flush_accumulation(self) -> bool:
        """Update with the gradients of a window that is not full; return whether it did."""
        with ONE_AT_A_TIME:
            if self.window_part is None or self.window_part.micro_steps() == 0:
                return False
            if (batch := batch_for(self.update_part, self._last_batch)) is None:
                return False
            step: Any = self
            while step.choice_part is not None:
                step = step.choice_part.variants[step.choice_part.chooser.now()]
            PROGRESS.begin_update()
            follow_mode(self)
            self.update_part.follow_script()  # a schedule does not count this as a run
            if id(step) not in self._flushes:
                self._flushes[id(step)] = Flush(step)
            with self._host_writes.followed(), self.surrounding_part():
                self._flushes[id(step)](*batch)
            return True

    def choose_first(self, make: MakeChoice) -> None:
        """Put a choice before all others: its variants train some of the weights."""
        self._make_choices.insert(0, make)

    def choose_last(self, make: MakeChoice) -> None:
        """Put a choice after all others: each of their variants gets its own."""
        self._make_choices.append(make)

    def _complete(self) -> None:
        """Make the variants of the step. Each compiles when it first runs."""
        steps: list[Any] = [self]
        every = list(steps)
        for make in self._make_choices:
            for step in steps:
                step.choice_part = make(step)
                for variant, name in zip(step.choice_part.variants, step.choice_part.names):
                    variant._variant = name if step is self else f"{step._variant}, {name}"
            steps = [variant for step in steps for variant in step.choice_part.variants]
            every += steps
        most = max(len(step._differentiated) for step in every)
        for step in every:
            step._settle()
            step._asks_for_less = len(step._differentiated) < most
            step._is_whole = step is self
            if not (step._is_whole or self.host_chooses()):
                step.surrounding_part = contextlib.nullcontext  # the step itself enters all
            step._has_run = step is not self  # this step checks the state of all, once
            step._host_writes = HostWrites(self._state if step is self else ())
        remember_parts(self)
        self.warn_of_what_does_not_run()
        if self.clip_norm is not None and not self.calls_update(clips=True):
            self.leave_out("gradient clipping", "gradients.clip_norm")
        for switch in () if self.calls_update() else self._own_updates:
            self.leave_out(switch, switch)

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        """Return this step for some of the parameters: the same Cells and state, fewer weights.

        It is the library's step, as in ``mindspore.boost``: what a subclass does around the step
        is for all ``weights``, and stays in the subclass.

        Args:
            optimizer (Cell): the optimizer of these parameters.
            positions (tuple(int)): where they stand in ``weights``.
        """
        step: Any = _compat.shallow_copy(self, self._library_class())
        step.choice_part, step._prepared = None, set()
        step.weights, step.optimizer = optimizer.parameters, optimizer
        step.update_part = self.update_part.restricted(optimizer, positions)
        if self.window_part is not None:
            step.window_part = self.window_part.restricted(optimizer, positions)
        step.graph_part = None if self.graph_part is None else type(self.graph_part)(step)
        if self.reducer_of is not None:
            step._use_reducer(self.reducer_of(step.weights))
        elif self.reducer_flag:
            step._use_reducer(nn.DistributedGradReducer(list(step.weights), self.mean, self.degree))
        step._differentiate()
        return step

    def capture(self) -> None:
        """Become a variant that differentiates by what is captured as well."""
        self.capturing = True
        self._differentiate()

    def _settle(self) -> None:
        """Compile what stands in the places now; without special parts less has to be compiled."""
        own_update = type(self.update_part) is not Update or bool(self.overridden("update"))
        self._special = self.sense_flag or self.capturing or own_update
        self._calls_adasum_process = self.enable_adasum and bool(self.overridden("adasum_process"))
        self.__dict__["_state"] = state_of(self)  # not as an attribute: names stay in their order

    def _differentiate(self) -> None:
        """Set what the backward pass differentiates by: weights, captures, what the scale wants."""
        captured = self.captures_part.parameters if self.capturing else ()
        self._captured = len(captured)
        more = (*captured, *self._extra)
        self._differentiated = ParameterTuple((*self.weights, *more)) if more else self.weights

    def runs_eagerly(self) -> bool:
        """Return whether Python runs the step, operator by operator."""
        return self.graph_part is None and not in_graph_mode()

    def _use_reducer(self, reducer: nn.Cell) -> None:
        """Set the reductions over ranks: of each batch, or of a window when it is full."""
        # A subclass that reduces by itself does so in every batch, as in mindspore.boost.
        self._reduces_at_end = self.window_part is not None and not self.reduces_each_batch()
        none = nn.Identity()
        of_batch, of_window = (none, reducer) if self._reduces_at_end else (reducer, none)
        self.grad_reducer, self.window_reducer = asking(self, of_batch), of_window
        self.__dict__["_our_reducer"] = self.grad_reducer  # not as a second child

    def _use_clipping(self) -> None:
        self.clip_norm = self.auto_boost.config.gradients.clip_norm
        if self.clip_norm is not None:
            check_dense(self.network, "gradients.clip_norm")
            asked_by = f"gradients.clip_norm={self.clip_norm:g}"
            self.report().put(Row("gradient clipping", asked_by, APPLIED, "by the global norm"))

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self.auto_boost.report()

    def observations(self) -> dict[str, Any]:
        """Return what the active algorithms report of the last step: name -> number or bool."""
        observed = (algorithm.observations(self) for algorithm in self.auto_boost.algorithms)
        return {name: value for found in observed for name, value in found.items()}
