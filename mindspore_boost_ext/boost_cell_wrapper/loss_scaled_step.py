"""The loss-scaled training step; and, under upstream's module name, both step cells.

For a scale S::

    loss, gradients of S * loss   ->   gradients / S   ->   mean over ranks
    overflow = any gradient of any rank is inf or nan
    S = update(S, overflow)
    unless overflow: accumulate or clip, update weights

A skipped step leaves weights, moments and step counters bit-identical. S is a power of two as a
rule, so that scaling and unscaling cost no bit in float32.

When it helps: in float16, where small gradients become zero. When it hurts: in float32 and bfloat16
it only costs. Measured effect (``examples/benchmarks/loss_scaling.py --effect``): four float16
layers with gradients over ten decades: without a scale all gradients of the lowest are zero, with a
dynamic one 1.2 %. It did not help LeNet, whose gradients fit into float16 (digits, 20 epochs, mean
accuracy of seeds 0 to 2): float32 0.9843, float16 0.9852, with a dynamic scale 0.9833.
Cost: one pass over the gradients that both unscales and checks them. ``--speed``, float32, GRAPH:
0.649 of a plain step of LeNet (0.61 to 1.25 in other runs), 1.051 of one of the small ResNet.
Devices and modes: run on CPU in GRAPH_MODE and PYNATIVE_MODE; written, not run, for GPU and Ascend.
How it combines: with every algorithm; each sees the unscaled gradients of steps that count.
Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.report import Row, warn
from mindspore_boost_ext.stages.gradients import unscaled, unscaled_all
from mindspore_boost_ext.stages.overflow import FiniteDetector, choose_detector

# Growth of a scale stops here: one doubling more would leave float32.
_LARGEST_SCALE = 2.0**127
# Steps between two looks at the scale from the host. Only CPU has the value at hand at no cost.
_LOOK_EVERY = {"CPU": 1}
# Whose optimizers are known to compile; in PYNATIVE_MODE one of the user's own need not.
_COMPILE = ("mindspore", __name__.partition(".")[0])


class BoostTrainOneStepWithLossScaleCell(BoostTrainOneStepCell):
    r"""One training step with a loss scale, on every device.

    Args:
        network (Cell): the network with its loss; one output, a loss of any shape.
        optimizer (Cell): the optimizer over the parameters to train, its own ``loss_scale`` at 1.0.
        scale_sense (Union[Tensor, Cell]): the scale as a Tensor of shape :math:`()` or
            :math:`(1,)`, which :meth:`set_sense_scale` changes; or a Cell that updates it, such as
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
        TypeError: for a ``scale_sense`` of any other type.
        ValueError: for a Tensor of another shape; for a group manager whose groups do not hold
            every trained parameter exactly once.

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

    steps_of_groups_at_once = False  # they need what is set up here

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, scale_sense: Tensor | nn.Cell) -> None:
        """Build the step for the configuration in force."""
        super().__init__(network, optimizer, sens=None)
        self.detector = choose_detector(self.reducer_flag)
        self.loss_scaling_manager: Any = scale_sense if isinstance(scale_sense, nn.Cell) else None
        self.grouped = isinstance(scale_sense, GroupLossScaleManager)
        self.group_of_layer: tuple[int, ...] = ()
        self.weights_and_probe: Any = None
        self.markers_complete: Any = None
        if self.grouped:
            self._use_groups(scale_sense)
        else:
            self.scale_sense = _scale_parameter(scale_sense)
        self.skipped_steps = Parameter(
            Tensor(0, ms.int32), name="boost.loss_scale.skipped_steps", requires_grad=False
        )
        self._look_every = _LOOK_EVERY.get(ms.get_context("device_target"), 100)
        self._steps_run = 0
        ours = type(self) is self._library_class() and _compiles(optimizer)
        self.compiles_end = ours and _compat.COMPILES_END_OF_STEP
        # The trials of dim_reduce run the network, which need not compile.
        self.compiles_end = self.compiles_end and not self.enable_dim_reduce
        self.auto_boost.report().put(
            Row(
                "overflow detection",
                "loss scale",
                "applied",
                f"{self.detector.name}: {self.detector.why}",
            )
        )
        self._make_steps_of_groups()

    def construct(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Train one step, or skip it, and return the loss, the overflow and the scale used."""
        if self.freeze:
            return self.gradient_freeze_process(*inputs)  # type: ignore[no-any-return]
        if self.turns is not None:
            return self.turns(*inputs)  # type: ignore[no-any-return]
        if self.grouped:
            return self._grouped_step(*inputs)
        loss = self.network(*inputs)
        scale = self.scale_sense + 0.0  # a value of its own: the Parameter changes below
        sens = ops.ones_like(loss) * ops.cast(scale, loss.dtype)
        status, sens = self.detector.start(sens, loss)
        wanted = self.weights_and_factors if self.capturing else self.weights
        gradients = self.grad(self.network, wanted)(*inputs, sens)
        finish = self._finish_compiled if self.compiles_end else self._finish
        batch = inputs if self.enable_dim_reduce else ()
        # One flat list: a compiled function is compiled anew for each tuple that it is given.
        rest = (*gradients, *batch)
        loss, overflow = finish(status, loss, scale, self._samples(*inputs), *rest)
        return loss, overflow, scale

    def _finish(
        self, status: Tensor, loss: Tensor, scale: Tensor, samples: float, *gradients: Any
    ) -> tuple[Tensor, Tensor]:
        """Do all that follows the backward pass; return the loss and the overflow.

        Behind the gradients come the factors for THOR and the batch for DimReduce, if any.
        """
        count = len(self.weights_and_factors) if self.capturing else len(self.weights)
        gradients, batch = gradients[:count], gradients[count:]
        notes = self._notes(gradients[len(self.weights) :], scale)
        gradients = self.grad_reducer(unscaled_all(gradients[: len(self.weights)], scale))
        overflow = self.detector(status, gradients)
        overflow = ops.depend(overflow, self._update_scale(overflow))
        return self._update_unless(overflow, loss, gradients, samples, notes, *batch), overflow

    def _notes(self, notes: tuple[Tensor, ...], scales: Any) -> tuple[Tensor, ...]:
        """Return the factors that the backward pass brought for THOR, without the loss scale."""
        return self.thor.curvature.prepared(notes, scales) if self.capturing else notes

    def _grouped_step(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weights_and_probe)(*inputs, ops.ones_like(loss))
        finish = self._finish_groups_compiled if self.compiles_end else self._finish_groups
        rest = (*gradients, *self.loss_scaling_manager.records)
        return finish(loss, self._samples(*inputs), *rest)

    def _finish_groups(
        self, loss: Tensor, samples: float, *gradients: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do all that follows the backward pass; return what the step returns.

        Behind the gradients come the factors for THOR, the probe's gradient, and in PYNATIVE_MODE
        what the markers have recorded.
        """
        place = len(self.weights_and_probe) - 1
        scales = self.scale_sense[1:-1] + 0.0  # values of their own: the Parameter changes below
        factors = self._notes(gradients[len(self.weights) : place], self._scales_of_layers(scales))
        notes = gradients[place] + self.loss_scaling_manager.noted(gradients[place + 1 :])
        gradients = self.grad_reducer(gradients[: len(self.weights)])
        blamed = self.loss_scaling_manager.blamed(notes, self._own_overflows(gradients))
        blamed = self.detector.agree(blamed)
        entered = notes[1:-1, 3] > 0
        # Without its marker a group's gradients do not carry its scale: nothing may be divided.
        complete = ops.logical_or(entered, ops.logical_not(self.has_weights)).all()
        result = ()
        for gradient, group in zip(gradients, self.group_of_weight):
            result += (unscaled(gradient, scales[group]),)  # type: ignore[assignment]
        skip = ops.logical_or(blamed.any(), ops.logical_not(complete))
        skip = ops.depend(skip, self.loss_scaling_manager.update(blamed, entered))
        skip = ops.depend(skip, ops.assign(self.markers_complete, complete))
        return self._update_unless(skip, loss, result, samples, factors), skip, scales

    def _own_overflows(self, gradients: tuple[Any, ...]) -> Tensor:
        """Return bool [n]: whether a gradient of the group's own weights is not finite."""
        found = ()
        for places in self.places_of_group:
            own = ()
            for place in places:
                own += (gradients[place],)  # type: ignore[assignment]
            found += (ops.reshape(self.detector.any_non_finite(own), ()),)  # type: ignore[assignment]
        return ops.stack(found)

    def _scales_of_layers(self, scales: Tensor) -> tuple[Tensor, ...]:
        """Return, for each layer of THOR, the scale that its output gradients carry."""
        result = ()
        for group in self.group_of_layer:
            result += (scales[group],)  # type: ignore[assignment]
        return result

    # In PYNATIVE_MODE dozens of small operators one by one cost more than the backward pass.
    _finish_compiled = ms.jit(_finish)
    _finish_groups_compiled = ms.jit(_finish_groups)

    def _update_unless(
        self,
        overflow: Tensor,
        loss: Tensor,
        gradients: tuple[Any, ...],
        samples: float,
        notes: tuple[Tensor, ...] = (),
        *inputs: Tensor,
    ) -> Tensor:
        loss = ops.depend(loss, ops.assign_add(self.skipped_steps, ops.cast(overflow, ms.int32)))
        if overflow:
            if self.use_grad_accumulation and self.drop_window:
                loss = ops.depend(loss, self.accumulation.clear())
        else:
            if self.capturing:
                loss = ops.depend(loss, self.thor.refresh(notes))
            if self.use_grad_accumulation:
                loss = self._accumulate(loss, gradients, samples, *inputs)
            else:
                loss = self.update(loss, gradients, *inputs)
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
        hooks = self.grouped and ms.get_context("mode") == ms.PYNATIVE_MODE
        with self.loss_scaling_manager.recording() if hooks else contextlib.nullcontext():
            outputs = super().__call__(*inputs, **kwargs)
        self._steps_run += 1
        if self.grouped and self._steps_run == 1:
            self._refuse_missing_markers()
        due = self._look_every and self._steps_run % self._look_every == 0
        if due and isinstance(outputs, tuple) and len(outputs) == 3:  # a subclass may return less
            self._tell_minimum(outputs[1], outputs[2])
        return outputs

    def _for_group(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        step: BoostTrainOneStepWithLossScaleCell = super()._for_group(optimizer, positions)
        step._look_every = 0  # the step of which this is a part looks
        if self.grouped:
            step._divide_by_groups([self.group_of_weight[place] for place in positions])
        return step

    def _capture(self) -> None:
        super()._capture()
        if self.grouped:
            wanted = (*self.weights_and_factors, self.loss_scaling_manager.probe)
            self.weights_and_probe = ParameterTuple(wanted)

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
                "loss scales by groups need a device that keeps inf and nan, but overflow is read "
                f"from a register here ({self.detector.why}): use one dynamic loss scale"
            )
        groups = manager.use(self.weights)
        self.scale_sense = manager.scales
        name = "boost.loss_scale_group.markers_complete"
        self.markers_complete = Parameter(Tensor(True), name=name, requires_grad=False)
        self._divide_by_groups(groups)
        if self.thor is not None:
            group_of = {id(one): group for one, group in zip(self.weights, groups)}
            self.group_of_layer = tuple(
                group_of[id(plan.weight)] for plan in self.thor.curvature.plans
            )

    def _divide_by_groups(self, groups: list[int]) -> None:
        """Note the group of each weight, counted from 0."""
        manager = self.loss_scaling_manager
        self.group_of_weight = tuple(groups)
        count = len(manager.loss_scale_groups)
        self.places_of_group = tuple(
            tuple(place for place, group in enumerate(groups) if group == one)
            for one in range(count)
        )
        self.has_weights = Tensor([len(places) > 0 for places in self.places_of_group])
        self.weights_and_probe = ParameterTuple((*self.weights, manager.probe))

    def _refuse_missing_markers(self) -> None:
        count = self.loss_scaling_manager.count
        if not bool(self.markers_complete.asnumpy()):
            raise ValueError(
                "GroupLossScaleManager: no marker leads into some group, so the gradients do not "
                "carry its scale (no weight was changed): call manager(x, i, i + 1) wherever the "
                f"network passes from group i to i + 1, for i = 0 to {count}"
            )

    def _tell_minimum(self, overflow: Tensor, scale: Tensor) -> None:
        if self.loss_scaling_manager is None or not bool(overflow.asnumpy()):
            return
        minimum = getattr(self.loss_scaling_manager, "minimum", 1.0)
        if float(scale.asnumpy().min()) <= minimum:
            self._look_every = 0  # told once
            warn(
                f"a step overflowed at the smallest loss scale ({minimum:g}) and was skipped: the "
                "network itself makes inf or nan; look at learning rate, inputs and loss"
            )


def _compiles(optimizer: nn.Cell) -> bool:
    """Tell whether an optimizer is MindSpore's or this package's, and so known to compile."""
    while type(optimizer) in (FreezeOpt, nn.LARS):
        optimizer = optimizer.opt
    return type(optimizer).__module__.partition(".")[0] in _COMPILE


def _scale_parameter(scale_sense: Tensor | nn.Cell) -> Parameter:
    if isinstance(scale_sense, nn.Cell):
        scale_sense = Tensor(float(scale_sense.get_loss_scale()), ms.float32)
    if not isinstance(scale_sense, Tensor):
        raise TypeError(f"scale_sense must be a Cell or a Tensor, got {shown(scale_sense)}")
    if scale_sense.shape not in ((), (1,)):
        raise ValueError(f"scale_sense must have shape () or (1,), got {scale_sense.shape}")
    return Parameter(
        scale_sense.astype(ms.float32), name="boost.loss_scale.scale", requires_grad=False
    )


__all__ = ["BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell"]
