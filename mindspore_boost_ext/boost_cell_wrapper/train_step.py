"""The training step: forward and backward pass, reduction over ranks, window, clipping, update.

Each algorithm plugs into one place. Freezing chooses the weights of the step; accumulation stands
between the backward pass and the reduction; clipping in front of the optimizer. With nothing
switched on the step is MindSpore's own, operator for operator: weights are bit-identical to
``nn.TrainOneStepCell`` and there is nothing to pay for.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import Any

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank

from mindspore_boost_ext import _compat
from mindspore_boost_ext.adasum.cell import AdaSum, obstacle, server_reducer, uneven
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.dim_reduce.setup import make_dim_reduce
from mindspore_boost_ext.grad_accumulation.window import DROP_WINDOW, GradientAccumulation
from mindspore_boost_ext.grad_freeze.freezing import FreezeOpt, ScheduledSteps, frozen_cells
from mindspore_boost_ext.report import APPLIED, SKIPPED, Report, Row, warn
from mindspore_boost_ext.runtime.eval_copy import resting_copy
from mindspore_boost_ext.runtime.threads import ONE_AT_A_TIME
from mindspore_boost_ext.runtime.watch import watch_ranks
from mindspore_boost_ext.stages.gradients import check_dense, clipped, filled_like
from mindspore_boost_ext.thor.optimizer import thor_of
from mindspore_boost_ext.thor.step import Turns


class BoostTrainOneStepCell(nn.TrainOneStepCell):
    r"""One training step of a network with the accelerators of its configuration.

    Subclasses may override ``construct``; the parts of the step are there under the names that
    ``mindspore.boost`` gave them (``grad``, ``weights``, ``grad_reducer``, ``sens`` and so on).

    Args:
        network (Cell): the network with its loss; one output, a loss of any shape; or, without
            ``sens``, a tuple of Tensors, which train by their sum (but one for a search of
            ``dim_reduce``).
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
        ValueError: if ``sens`` is 0.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

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

    steps_of_groups_at_once = True

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, sens: numbers.Number | None = None
    ) -> None:
        """Build the step for the configuration in force."""
        if sens is not None and (isinstance(sens, bool) or not isinstance(sens, numbers.Number)):
            raise TypeError(f"sens must be a number or None, got {shown(sens)}")
        super().__init__(network, optimizer, sens)
        if self.reducer_flag:
            watch_ranks()
        self.auto_boost = AutoBoost.current(optimizer)
        self.clip_norm = self.auto_boost.config.gradients.clip_norm
        self._use_adasum()
        self._use_dim_reduce()
        self._use_accumulation()
        if self.use_grad_accumulation:
            check_dense(network, "grad_accumulation")
        if self.clip_norm is not None:
            check_dense(network, "gradients.clip_norm")
        self.freeze = isinstance(optimizer, FreezeOpt)
        self.freeze_nets: tuple[BoostTrainOneStepCell, ...] = ()
        self.scheduled: Any = None
        self._flushes: dict[int, _Flush] = {}
        self.thor: Any = thor_of(optimizer)
        self.capturing = False
        self.turns: Any = None
        self._add_rows()
        self._tell_unequal_scales()
        if self.steps_of_groups_at_once:
            self._make_steps_of_groups()

    def construct(self, *inputs: Tensor) -> Any:
        """Train one step and return the loss."""
        if self.freeze:
            return self.gradient_freeze_process(*inputs)
        if self.turns is not None:
            return self.turns(*inputs)
        special = self.use_grad_accumulation or self.capturing or self.enable_adasum
        special = special or self.enable_dim_reduce or self.clip_norm is not None
        if not special:
            return super().construct(*inputs)
        loss = self.network(*inputs)
        sens = filled_like(loss, self.sens)
        if self.capturing:
            gradients = self.grad(self.network, self.weights_and_factors)(*inputs, sens)
            notes = self.thor.curvature.prepared(gradients[len(self.weights) :], self.sens)
            gradients = gradients[: len(self.weights)]
            loss = ops.depend(loss, self.thor.refresh(notes))
        else:
            gradients = self.grad(self.network, self.weights)(*inputs, sens)
        gradients = self.grad_reducer(gradients)
        if self.use_grad_accumulation:
            return self.gradient_accumulation_process(loss, gradients, sens, *inputs)
        return self.update(loss, gradients, *inputs)

    def update(self, loss: Tensor, gradients: tuple[Any, ...], *inputs: Tensor) -> Tensor:
        """Clip reduced gradients, update the weights, and return the loss.

        Args:
            loss (Tensor): the loss; it is returned when the update is done.
            gradients (tuple(Tensor)): gradients in the order of ``weights``, times ``sens``.
            inputs (tuple(Tensor)): the inputs of ``loss``, for the trials of ``dim_reduce``.
        """
        if self.clip_norm is not None:
            gradients = clipped(gradients, self.clip_norm * self.sens)
        if self.enable_adasum:
            return self.adasum_process(loss, gradients)
        if self.enable_dim_reduce:
            clone = self.weights_clone
            return self.dim_reduce(loss, gradients, self.sens, self.weights, clone, *inputs)
        return ops.depend(loss, self.optimizer(gradients))

    def gradient_accumulation_process(
        self, loss: Tensor, grads: tuple[Any, ...], sens: Tensor, *inputs: Tensor
    ) -> Tensor:
        """Add a micro-batch to the window; when the window is full reduce, update and clear.

        Args:
            loss (Tensor): the loss of the micro-batch, returned when all is done.
            grads (tuple(Tensor)): its gradients, of this rank alone.
            sens (Tensor): the factor that they carry; not used.
            inputs (tuple(Tensor)): the inputs; the first axis of the first counts the samples.
        """
        return self._accumulate(loss, grads, self._samples(*inputs), *inputs)

    def _samples(self, *inputs: Tensor) -> float:
        """Return the weight of a micro-batch in its window."""
        if self.use_grad_accumulation and self.accumulation.by_samples:
            return float(inputs[0].shape[0])
        return 1.0

    def _accumulate(
        self, loss: Tensor, gradients: tuple[Any, ...], weight: float, *inputs: Tensor
    ) -> Tensor:
        loss = ops.depend(loss, self.accumulation.accumulate(gradients, weight))
        if self.accumulation.is_full():
            loss = self.close_window(loss, *inputs)
        return loss

    def close_window(self, loss: Tensor, *inputs: Tensor) -> Tensor:
        """Update with what the window holds, and empty it; return ``loss`` when that is done."""
        gradients = self.window_reducer(self.accumulation.window_gradients())
        loss = self.update(loss, gradients, *inputs)
        return ops.depend(loss, self.accumulation.clear())

    def gradient_freeze_process(self, *inputs: Tensor) -> Any:
        """Run the step of the group whose turn it is, chosen in the graph."""
        return self.scheduled(*inputs)

    def adasum_process(self, loss: Tensor, grads: tuple[Any, ...]) -> Tensor:
        """Take this rank's own step, and combine it with those of the other servers.

        Args:
            loss (Tensor): the loss; it is returned when the weights are written.
            grads (tuple(Tensor)): gradients of this server, in the order of ``weights``.
        """
        old = self.adasum.snapshot_compiled()
        loss = ops.depend(loss, self.optimizer(ops.depend(grads, old)))
        return ops.depend(loss, self.adasum.update_since_compiled(ops.depend(old, loss)))

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a step, while no step of another thread runs."""
        with ONE_AT_A_TIME:
            return self._run(*inputs, **kwargs)

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a step.

        With freezing, the group is chosen here on the host, so that only groups whose turn has come
        are ever compiled. Inside another Cell's graph, and in a subclass with a ``construct`` of
        its own, ``gradient_freeze_process`` chooses in the graph.
        """
        if self.enable_dim_reduce:
            self._last_inputs[:] = inputs
            self._check_subspace()
        chooses = self.freeze or self.turns is not None
        if not chooses or type(self).construct is not self._library_class().construct:
            return super().__call__(*inputs, **kwargs)
        group = self.optimizer.next_group() if self.freeze else 0
        step = self.freeze_nets[group] if self.freeze else self
        turns = step.turns
        if turns is not None:
            step = turns.now()
        if id(step) not in self._prepared:
            _compat.share_compile_settings(self, step)
            self._prepared.add(id(step))
        if step.training != self.training:
            step.set_train(self.training)
        with turns.running(step) if turns else contextlib.nullcontext():
            outputs = step(*inputs, **kwargs)
        if turns is not None and step is turns.capturing:
            self.thor.tell_troubles()
        return outputs

    def expect_training(self, epochs: int, steps: int) -> None:
        """Warn about settings that so many epochs of so many steps leave without effect."""
        window = 1
        if self.use_grad_accumulation:
            self.accumulation.expect_epoch(steps)
            window = self.max_accumulation_step
        if self.freeze and epochs > 0:
            self.optimizer.expect_updates(epochs * steps // window)

    def flush_accumulation(self) -> bool:
        """Update with a window that is not full yet; return whether there was anything in it."""
        with ONE_AT_A_TIME:
            if not self.use_grad_accumulation or self.accumulation.micro_steps() == 0:
                return False
            step = self.freeze_nets[self.optimizer.next_group()] if self.freeze else self
            if id(step) not in self._flushes:
                self._flushes[id(step)] = _Flush(step)
            self._flushes[id(step)](*self._last_inputs)
            return True

    def _use_adasum(self) -> None:
        """Set up AdaSum; gradients are then reduced inside this rank's server only."""
        self.adasum: Any = None
        self.enable_adasum = False
        if not self.auto_boost.boost_config["adasum"]:
            return
        devices, report = self.auto_boost.device_number, self.auto_boost.report()
        asked_by, reason = report["adasum"].asked_by, obstacle(devices)
        if self.reducer_flag and uneven(devices):
            raise ValueError(reason)
        if reason:
            report.put(Row("adasum", asked_by, SKIPPED, reason))
            return
        self.enable_adasum = True
        self.grad_reducer = server_reducer(self.weights, get_rank(), devices)
        self.adasum = self._adasum_over(self.weights)
        report.put(Row("adasum", asked_by, APPLIED, self.adasum.describe(), self.adasum.counts()))

    def _adasum_over(self, weights: Any) -> AdaSum:
        devices = self.auto_boost.device_number
        servers = get_group_size() // devices
        return AdaSum(get_rank(), devices, servers, weights, equal_in_server=True)

    def _use_dim_reduce(self) -> None:
        """Set up training in a subspace, if its basis has come with the optimizer."""
        self.enable_dim_reduce = False
        self._last_inputs: list[Any] = []  # the batch on which a flush would search
        self.dim_reduce: Any = None
        if self.auto_boost.boost_config["dim_reduce"]:
            settings = self.auto_boost.config.dim_reduce
            mean = self.mean if self.reducer_flag else True
            self.dim_reduce = make_dim_reduce(self.network, self.optimizer, settings, mean)
            self.enable_dim_reduce = self.dim_reduce is not None
        # Between two steps a clone of the weights is equal to the weights.
        self.weights_clone = self.weights if self.enable_dim_reduce else None
        self._subspace_checked = not self.enable_dim_reduce

    def _check_subspace(self) -> None:
        """Before the first step, compare a state that was loaded with the basis at hand."""
        if not self._subspace_checked:
            self.dim_reduce.check_state()
            self._subspace_checked = True

    def _use_accumulation(self) -> None:
        """Set up the window; gradients are then reduced over ranks once for each window."""
        self.max_accumulation_step = self.auto_boost.grad_accumulation_step
        wanted = self.auto_boost.boost_config["grad_accumulation"]
        self.use_grad_accumulation = wanted and self.max_accumulation_step > 1
        self.accumulation: Any = None
        self.window_reducer = self.grad_reducer
        if not self.use_grad_accumulation:
            return
        settings = self.auto_boost.config.grad_accumulation
        self.drop_window = settings.on_overflow == DROP_WINDOW
        self.accumulation = GradientAccumulation(
            self.max_accumulation_step, self.optimizer, weighting=settings.weighting
        )
        # Subclasses call grad_reducer on every micro-batch, as upstream does.
        self.grad_reducer = nn.Identity()

    def _make_steps_of_groups(self) -> None:
        """Make the step of each group; equal groups share one. Each compiles when it first runs."""
        self._prepared: set[int] = set()
        if not self.freeze:
            self._add_turns(self)
            return
        steps: dict[int, BoostTrainOneStepCell] = {}
        turns = [self.optimizer.turn(k) for k in range(len(self.optimizer.group_positions))]
        for turn, positions in zip(turns, self.optimizer.group_positions):
            if id(turn) not in steps:
                steps[id(turn)] = self._for_group(turn, positions)
        for step in steps.values():  # all copies are made: now layers may carry taps
            self._add_turns(step)
        self.freeze_nets = tuple(steps[id(turn)] for turn in turns)
        self.scheduled = ScheduledSteps(self.freeze_nets, self.optimizer)

    def _add_turns(self, step: BoostTrainOneStepCell) -> None:
        """Let a step with THOR take turns between its ordinary and its capturing variant."""
        if self.thor is None or not self.thor.factors:
            return
        if type(self).construct is not self._library_class().construct:
            raise ValueError(
                f"{type(self).__name__} has a construct of its own, so THOR cannot see activations "
                "and output gradients: override update(loss, gradients) instead"
            )
        if self.reducer_flag:
            self.thor.curvature.use_ranks(int(self.degree), self.thor.split_indices)
        everything = tuple(range(len(step.weights)))
        ordinary = step._for_group(step.optimizer, everything)
        capturing = step._for_group(step.optimizer, everything)
        capturing._capture()
        window = (None, 0)
        if self.use_grad_accumulation:
            window = self.accumulation._accumulation_step, self.max_accumulation_step - 1
        step.turns = Turns(self.thor, ordinary, capturing, *window)
        self.thor.taps.attach()

    def _capture(self) -> None:
        """Differentiate by the factors of THOR as well."""
        self.capturing = True
        self.weights_and_factors = ParameterTuple((*self.weights, *self.thor.factors))

    def _library_class(self) -> Any:
        """Return the class of this package that the object is of, not the user's subclass."""
        own = __name__.partition(".")[0]
        return next(kind for kind in type(self).__mro__ if kind.__module__.startswith(own))

    def _for_group(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        """Return this step for some of the parameters: the same Cells and state, fewer weights.

        It is the library's step, as in upstream: what a subclass does around the step, over all
        ``weights``, stays in the subclass.

        Args:
            optimizer (Cell): the optimizer of the group.
            positions (tuple(int)): where its parameters stand in ``weights``.
        """
        step: BoostTrainOneStepCell = _compat.shallow_copy(self, self._library_class())
        step.freeze = False
        step.weights = optimizer.parameters
        step._cells["optimizer"] = optimizer
        if self.freeze and self.auto_boost.config.grad_freeze.eval_frozen:
            frozen = frozen_cells(self.network, step.weights)
            # A copy would carry no tap; these layers act alike in training and evaluation.
            tapped = [] if self.thor is None else [one.layer for one in self.thor.curvature.plans]
            step._cells["network"] = resting_copy(self.network, frozen, tapped).set_grad()
        if self.reducer_flag:
            reducer = self._reducer(step.weights)
            step._cells["window_reducer"] = reducer
            if not self.use_grad_accumulation:
                step._cells["grad_reducer"] = reducer
        if self.enable_adasum:
            step._cells["adasum"] = self._adasum_over(step.weights)
        if self.use_grad_accumulation:
            step._cells["accumulation"] = self.accumulation.restricted(optimizer, positions)
        return step

    def _reducer(self, weights: Any) -> nn.Cell:
        """Return the reduction over ranks for the gradients of some weights."""
        if self.enable_adasum:
            return server_reducer(weights, get_rank(), self.auto_boost.device_number)
        return nn.DistributedGradReducer(list(weights), self.mean, self.degree)

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self.auto_boost.report()

    def observations(self) -> dict[str, Any]:
        """Return what the active algorithms tell of the last step: name -> number or bool."""
        observed = {} if self.thor is None else self.thor.observations()
        if self.enable_dim_reduce:
            observed.update(self.dim_reduce.observations())
        return observed

    def _add_rows(self) -> None:
        """Complete the report with what only the step knows."""
        report = self.auto_boost.report()
        if self.clip_norm is not None:
            asked_by = f"gradients.clip_norm={self.clip_norm:g}"
            report.put(Row("gradient clipping", asked_by, APPLIED, "by the global norm"))
        if self.thor is not None:
            asked_by, reason = "the optimizer is THOR", ""
            if report["thor"].status == APPLIED:
                asked_by, reason = report["thor"].asked_by, report["thor"].reason
            report.put(Row("thor", asked_by, APPLIED, reason, self.thor.counts()))
            for row in self.thor.rows():
                report.put(row)
        if not self.freeze:
            return
        asked_by = report["grad_freeze"].asked_by
        asked_by = "FreezeOpt" if asked_by == "-" else asked_by
        counts = self.optimizer.counts()
        frozen = counts["steps_training_everything_percent"] < 100
        reason = "" if frozen else "every step of the schedule trains everything"
        status = APPLIED if frozen else SKIPPED
        report.put(Row("grad_freeze", asked_by, status, reason, counts))

    def _tell_unequal_scales(self) -> None:
        """Tell when the optimizer will not divide out the factor put into the gradients."""
        own = getattr(self.optimizer, "loss_scale", None)
        if self.enable_dim_reduce and self.dim_reduce.divides_loss_scale:
            return
        if own is not None and float(own) != float(self.sens):
            warn(
                f"the backward pass multiplies gradients by sens={self.sens}, but the optimizer "
                f"divides them by its loss_scale={own}: give the optimizer "
                f"loss_scale={float(self.sens)}, or use drop_overflow_update=True"
            )


class _Flush(nn.Cell):
    """Closes the window of a step before it is full."""

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, *inputs: Tensor) -> Tensor:
        loss = Tensor(0.0)
        if self.step.enable_dim_reduce:
            loss = self.step.dim_reduce.loss_of(*inputs)
        return self.step.close_window(loss, *inputs)


__all__ = ["BoostTrainOneStepCell"]
