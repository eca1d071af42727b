"""The training step: forward and backward pass, unscaling, reduction over ranks, overflow, update.

With nothing switched on the step is MindSpore's own, operator for operator: weights are
bit-identical to ``nn.TrainOneStepCell`` and there is nothing to pay for.

The loss-scaled step, for a scale S::

    loss, gradients of S * loss   ->   gradients / S   ->   mean over ranks
    overflow = any gradient of any rank is inf or nan
    S = update(S, overflow)
    unless overflow: clip, update weights

A skipped step leaves weights, moments and step counters bit-identical. S is a power of two as a rule,
so that scaling and unscaling cost no bit in float32. Reference: Micikevicius et al., Mixed Precision
Training, ICLR 2018.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext._rules import shown
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.grad_accumulation import DROP_WINDOW, GradientAccumulation
from mindspore_boost_ext.grad_freeze import FreezeOpt, ScheduledSteps, frozen_cells
from mindspore_boost_ext.gradients import clipped, scaled, scaled_all
from mindspore_boost_ext.group_loss_scale_manager import GroupLossScaleManager
from mindspore_boost_ext.overflow import FiniteDetector, choose_detector
from mindspore_boost_ext.report import Report, Row, warn

# Growth of a scale stops here: one doubling more would leave float32.
_LARGEST_SCALE = 2.0**127
# Steps between two looks at the scale from the host. Only CPU has the value at hand at no cost.
_LOOK_EVERY = {"CPU": 1}


class BoostTrainOneStepCell(nn.TrainOneStepCell):
    r"""One training step of a network with the accelerators of its configuration.

    Subclasses may override ``construct``; the parts of the step are there under the names that
    ``mindspore.boost`` gave them (``grad``, ``weights``, ``grad_reducer``, ``sens`` and so on).

    Args:
        network (Cell): the network with its loss; one output, a loss of any shape.
        optimizer (Cell): the optimizer over the parameters to train.
        sens (numbers.Number, optional): factor on the gradients, put into the backward pass. The
            optimizer divides it out again when its own ``loss_scale`` is the same number.
            Default: None, which means 1.0.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        Tensor, the loss as ``network`` returns it (not multiplied by ``sens``).

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

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, sens: numbers.Number | None = None
    ) -> None:
        """Build the step for the configuration in force."""
        if sens is not None and (isinstance(sens, bool) or not isinstance(sens, numbers.Number)):
            raise TypeError(f"sens must be a number or None, got {shown(sens)}")
        super().__init__(network, optimizer, sens)
        self.auto_boost = AutoBoost.current(optimizer)
        self.clip_norm = self.auto_boost.config.gradients.clip_norm
        self.enable_dim_reduce = False
        self.enable_adasum = False
        self.dim_reduce = None
        self.weights_clone = None
        self._use_accumulation()
        self.freeze = isinstance(optimizer, FreezeOpt)
        self.scheduled = None
        self._steps_of_groups: tuple[BoostTrainOneStepCell, ...] = ()
        self._tell_unequal_scales()

    def construct(self, *inputs: Tensor) -> Any:
        """Train one step and return the loss."""
        if self.freeze:
            return self.gradient_freeze_process(*inputs)
        if self.clip_norm is None and not self.use_grad_accumulation:
            return super().construct(*inputs)
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        gradients = self.grad_reducer(gradients)
        if self.use_grad_accumulation:
            return self.gradient_accumulation_process(loss, gradients, sens, *inputs)
        return self.update(loss, gradients)

    def update(self, loss: Tensor, gradients: tuple[Any, ...]) -> Tensor:
        """Clip reduced gradients, update the weights, and return the loss.

        Args:
            loss (Tensor): the loss; it is returned when the update is done.
            gradients (tuple(Tensor)): gradients in the order of ``weights``, times ``sens``.
        """
        if self.clip_norm is not None:
            gradients = clipped(gradients, self.clip_norm * self.sens)
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
        window = self.accumulation
        weight = inputs[0].shape[0] if window.by_samples else 1.0
        loss = ops.depend(loss, window.accumulate(grads, weight))
        if window.is_full():
            loss = self.close_window(loss)
        return loss

    def close_window(self, loss: Tensor) -> Tensor:
        """Update with what the window holds, and empty it; return ``loss`` when that is done."""
        gradients = self.window_reducer(self.accumulation.window_gradients())
        loss = self.update(loss, gradients)
        return ops.depend(loss, self.accumulation.clear())

    def gradient_freeze_process(self, *inputs: Tensor) -> Any:
        """Run the step of the group whose turn it is, chosen in the graph."""
        return self.scheduled(*inputs)

    @property
    def freeze_nets(self) -> tuple[BoostTrainOneStepCell, ...]:
        """The step of each group; equal groups share one. Each is compiled when it first runs."""
        if self.freeze and not self._steps_of_groups:
            self._make_steps_of_groups()
        return self._steps_of_groups

    def set_train(self, mode: bool = True) -> BoostTrainOneStepCell:
        """Set the training mode; with freezing, also build what chooses the group in a graph.

        ``ms.Model`` calls it before training. A graph of another Cell around this one needs the call.
        """
        if self.freeze and self.scheduled is None:
            self.scheduled = ScheduledSteps(self.freeze_nets, self.optimizer)
        super().set_train(mode)
        return self

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a step.

        With freezing, the group is chosen here on the host, so that only groups whose turn has come
        are ever compiled. Inside another Cell's graph the choice is made by ``construct``.
        """
        if not self.freeze:
            return super().__call__(*inputs, **kwargs)
        group = self.optimizer.next_group()
        step = self.freeze_nets[group]
        if step.training != self.training:
            step.set_train(self.training)
        with _in_eval_mode(self._resting[group]):
            return step(*inputs, **kwargs)

    def flush_accumulation(self) -> bool:
        """Update with a window that is not full yet; return whether there was anything in it."""
        if not self.use_grad_accumulation or self.accumulation.micro_steps() == 0:
            return False
        step = self.freeze_nets[self.optimizer.next_group()] if self.freeze else self
        _Flush(step)()
        return True

    def _use_accumulation(self) -> None:
        """Set up the window; gradients are then reduced over ranks once for each window."""
        self.max_accumulation_step = self.auto_boost.grad_accumulation_step
        wanted = self.auto_boost.boost_config["grad_accumulation"]
        self.use_grad_accumulation = wanted and self.max_accumulation_step > 1
        self.accumulation = None
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
        steps: dict[int, BoostTrainOneStepCell] = {}
        turns = [self.optimizer.turn(k) for k in range(len(self.optimizer.group_positions))]
        for turn, positions in zip(turns, self.optimizer.group_positions):
            if id(turn) not in steps:
                steps[id(turn)] = self._for_group(turn, positions)
        self._steps_of_groups = tuple(steps[id(turn)] for turn in turns)
        eval_frozen = self.auto_boost.config.grad_freeze.eval_frozen
        self._resting = tuple(
            tuple(frozen_cells(self.network, step.weights)) if eval_frozen else ()
            for step in self._steps_of_groups
        )

    def _for_group(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        """Return this step for some of the parameters: the same Cells and state, fewer weights.

        Args:
            optimizer (Cell): the optimizer of the group.
            positions (tuple(int)): where its parameters stand in ``weights``.
        """
        step: BoostTrainOneStepCell = _compat.shallow_copy(self)
        step.freeze = False
        step.weights = optimizer.parameters
        step._cells["optimizer"] = optimizer
        if self.reducer_flag:
            reducer = nn.DistributedGradReducer(list(step.weights), self.mean, self.degree)
            step._cells["window_reducer"] = reducer
            if not self.use_grad_accumulation:
                step._cells["grad_reducer"] = reducer
        if self.use_grad_accumulation:
            step._cells["accumulation"] = self.accumulation.restricted(optimizer, positions)
        if self.get_inputs():
            step.set_inputs(*self.get_inputs())
        return step

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self.auto_boost.report()

    def observations(self) -> dict[str, Any]:
        """Return what the active algorithms tell of the last step: name -> number or bool."""
        return {}

    def _tell_unequal_scales(self) -> None:
        """Tell the user when the optimizer will not divide out the factor put into the gradients."""
        own = getattr(self.optimizer, "loss_scale", None)
        if own is not None and float(own) != float(self.sens):
            warn(
                f"the backward pass multiplies gradients by sens={self.sens}, but the optimizer "
                f"divides them by its loss_scale={own}: give the optimizer "
                f"loss_scale={float(self.sens)}, or use drop_overflow_update=True",
                stacklevel=3,
            )


class BoostTrainOneStepWithLossScaleCell(BoostTrainOneStepCell):
    r"""One training step with a loss scale, on every device.

    Args:
        network (Cell): the network with its loss; one output, a loss of any shape.
        optimizer (Cell): the optimizer over the parameters to train, its own ``loss_scale`` at 1.0.
        scale_sense (Union[Tensor, Cell]): the scale as a Tensor of shape :math:`()` or :math:`(1,)`,
            which :meth:`set_sense_scale` changes; or a Cell that updates it, such as
            ``nn.DynamicLossScaleUpdateCell``; or a :class:`GroupLossScaleManager`.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        tuple of 3 Tensors:

        - **loss** - the loss as ``network`` returns it, not multiplied by the scale.
        - **overflow** - bool, shape :math:`()`: whether the step was skipped.
        - **loss scale** - float32, the scale used in this step: the shape of ``scale_sense``, or
          :math:`(n,)` for n groups.

    Raises:
        TypeError: if ``scale_sense`` is neither Cell nor Tensor.
        ValueError: if the shape of ``scale_sense`` is neither :math:`(1,)` nor :math:`()`; or if a
            group manager's groups do not hold every trained parameter exactly once.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import BoostTrainOneStepWithLossScaleCell
        >>> net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> scale = nn.DynamicLossScaleUpdateCell(1024, scale_factor=2, scale_window=1000)
        >>> loss_net = nn.WithLossCell(net, nn.MSELoss())
        >>> step = BoostTrainOneStepWithLossScaleCell(loss_net, optimizer, scale)
        >>> inputs, labels = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
        >>> loss, overflow, scale = step(Tensor(inputs), Tensor(labels))
        >>> float(loss.asnumpy()), bool(overflow.asnumpy()), float(scale.asnumpy())
        (16.0, False, 1024.0)
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, scale_sense: Tensor | nn.Cell) -> None:
        """Build the step for the configuration in force."""
        super().__init__(network, optimizer, sens=None)
        self.detector = choose_detector(self.reducer_flag)
        self.loss_scaling_manager = scale_sense if isinstance(scale_sense, nn.Cell) else None
        self.grouped = isinstance(scale_sense, GroupLossScaleManager)
        self.weights_and_probe = None
        if self.grouped:
            self._use_groups(scale_sense)
        else:
            self.scale_sense = _scale_parameter(scale_sense)
        self.skipped_steps = Parameter(Tensor(0, ms.int32), name="boost.loss_scale.skipped_steps")
        self._look_every = _LOOK_EVERY.get(ms.get_context("device_target"), 100)
        self._steps_run = 0
        self.auto_boost.report().put(
            Row(
                "overflow detection",
                "loss scale",
                "applied",
                f"{self.detector.name}: {self.detector.why}",
            )
        )

    def construct(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Train one step, or skip it, and return the loss, the overflow and the scale used."""
        if self.freeze:
            return self.gradient_freeze_process(*inputs)
        if self.grouped:
            return self._grouped_step(*inputs)
        loss = self.network(*inputs)
        scale = self.scale_sense + 0.0  # a value of its own: the Parameter changes below
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        status, sens = self.detector.start(sens, loss)
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        gradients = self.grad_reducer(scaled_all(gradients, ops.reciprocal(scale)))
        overflow = self.detector(status, gradients)
        overflow = ops.depend(overflow, self._update_scale(overflow))
        return self._update_unless(overflow, loss, gradients, inputs), overflow, scale

    def _grouped_step(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.network(*inputs)
        scales = self.scale_sense[1:-1] + 0.0
        gradients = self.grad(self.network, self.weights_and_probe)(*inputs, ops.ones_like(loss))
        notes, gradients = gradients[-1], gradients[:-1]
        own = ops.matmul(self.membership, self.detector.non_finite(gradients).astype(ms.float32))
        blamed = self.detector.agree(self.loss_scaling_manager.blamed(notes, own))
        inverse = ops.reciprocal(scales)
        unscaled = ()
        for gradient, group in zip(gradients, self.group_of_weight):
            unscaled += (scaled(gradient, inverse[group]),)
        unscaled = self.grad_reducer(unscaled)
        overflow = blamed.any()
        overflow = ops.depend(overflow, self.loss_scaling_manager.update(blamed))
        return self._update_unless(overflow, loss, unscaled, inputs), overflow, scales

    def _update_unless(
        self, overflow: Tensor, loss: Tensor, gradients: tuple[Any, ...], inputs: tuple[Tensor, ...]
    ) -> Tensor:
        loss = ops.depend(loss, ops.assign_add(self.skipped_steps, ops.cast(overflow, ms.int32)))
        if overflow:
            if self.use_grad_accumulation and self.drop_window:
                loss = ops.depend(loss, self.accumulation.clear())
        elif self.use_grad_accumulation:
            loss = self.gradient_accumulation_process(loss, gradients, loss, *inputs)
        else:
            loss = self.update(loss, gradients)
        return loss

    def _update_scale(self, overflow: Tensor) -> Tensor:
        """Let the manager set the next scale, and keep it within float32."""
        if self.loss_scaling_manager is None:
            return overflow
        updated = self.loss_scaling_manager(self.scale_sense, overflow)
        # clamp: the Minimum of 2.10 returns inf for inf and a finite number in GRAPH_MODE.
        bounded = ops.clamp(ops.depend(self.scale_sense, updated), None, _LARGEST_SCALE)
        return ops.depend(updated, ops.assign(self.scale_sense, bounded))

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a step; from time to time look whether the scale sits at its minimum."""
        outputs = super().__call__(*inputs, **kwargs)
        self._steps_run += 1
        if self._look_every and self._steps_run % self._look_every == 0:
            self._tell_minimum(*outputs[1:])
        return outputs

    def _for_group(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        step: BoostTrainOneStepWithLossScaleCell = super()._for_group(optimizer, positions)
        step._look_every = 0  # the step of which this is a part looks
        if self.grouped:
            step._divide_by_groups([self.group_of_weight[place] for place in positions])
        return step

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the scale that was given as a Tensor.

        Args:
            sens (Tensor): the new scale, of the shape and dtype of the first.

        Raises:
            TypeError: if ``sens`` is not a Tensor.
            ValueError: if its shape differs, or a manager sets the scale.
        """
        if not isinstance(sens, Tensor):
            raise TypeError(f"sens must be a Tensor, got {shown(sens)}")
        if self.loss_scaling_manager is not None:
            raise ValueError(
                "sens cannot be set: the scale is updated by the Cell given as scale_sense"
            )
        if sens.shape != self.scale_sense.shape:
            raise ValueError(f"sens must have shape {self.scale_sense.shape}, got {sens.shape}")
        # Not set_data: in PYNATIVE_MODE that cuts a Parameter off from operators that have run.
        ops.assign(self.scale_sense, sens.astype(ms.float32))

    def observations(self) -> dict[str, Any]:
        """Return the next loss scale (or one for each group) and how many steps were skipped."""
        observed = super().observations()
        if self.grouped:
            scales = self.loss_scaling_manager.group_scales()
            observed.update({f"loss_scale.{i}": scale for i, scale in enumerate(scales, 1)})
        else:
            observed["loss_scale"] = float(self.scale_sense.asnumpy().reshape(()))
        observed["skipped_steps"] = int(self.skipped_steps.asnumpy())
        return observed

    def _use_groups(self, manager: GroupLossScaleManager) -> None:
        if not isinstance(self.detector, FiniteDetector):
            raise NotImplementedError(
                "loss scales by groups need a device that keeps inf and nan, but overflow is read from "
                f"a register here ({self.detector.why}): use one dynamic loss scale"
            )
        self.scale_sense = manager.scales
        self._divide_by_groups([group - 1 for group in manager.group_of(self.weights)])

    def _divide_by_groups(self, groups: list[int]) -> None:
        """Note the group of each weight, counted from 0."""
        manager = self.loss_scaling_manager
        self.group_of_weight = tuple(groups)
        count = len(manager.loss_scale_groups)
        membership = [[float(group == one) for group in groups] for one in range(count)]
        self.membership = Tensor(membership, ms.float32)
        self.weights_and_probe = ParameterTuple((*self.weights, manager.probe))

    def _tell_minimum(self, overflow: Tensor, scale: Tensor) -> None:
        if self.loss_scaling_manager is None or not bool(overflow.asnumpy()):
            return
        minimum = getattr(self.loss_scaling_manager, "minimum", 1.0)
        if float(scale.asnumpy().min()) <= minimum:
            self._look_every = 0  # told once
            warn(
                f"a step overflowed at the smallest loss scale ({minimum:g}) and was skipped: the "
                "network itself makes inf or nan; look at the learning rate, the inputs and the loss",
                stacklevel=3,
            )


@contextlib.contextmanager
def _in_eval_mode(cells: tuple[nn.Cell, ...]) -> Iterator[None]:
    """Put Cells in evaluation mode, in which BatchNorm and dropout change nothing."""
    before = [cell.training for cell in cells]
    for cell in cells:
        cell.set_train(False)
    try:
        yield
    finally:
        for cell, training in zip(cells, before):
            cell.set_train(training)


class _Flush(nn.Cell):
    """Closes the window of a step before it is full."""

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self) -> Tensor:
        return self.step.close_window(Tensor(0.0))


def _scale_parameter(scale_sense: Tensor | nn.Cell) -> Parameter:
    if isinstance(scale_sense, nn.Cell):
        scale_sense = Tensor(scale_sense.get_loss_scale(), ms.float32)
    if not isinstance(scale_sense, Tensor):
        raise TypeError(f"scale_sense must be a Cell or a Tensor, got {shown(scale_sense)}")
    if scale_sense.shape not in ((), (1,)):
        raise ValueError(f"scale_sense must have shape () or (1,), got {scale_sense.shape}")
    return Parameter(
        scale_sense.astype(ms.float32), name="boost.loss_scale.scale", requires_grad=False
    )


__all__ = ["BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell"]
