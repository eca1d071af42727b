"""The loss-scaled training step."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import call, gradients_of
from mindspore_boost_ext.base.order import is_of_libraries
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.boost_cell_wrapper.overrides import OWN_RULE
from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell
from mindspore_boost_ext.boost_cell_wrapper.upstream_names import OverflowNames, add_overflow_names
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import APPLIED, NoEffectWarning, Row, warn
from mindspore_boost_ext.stages.gradients import filled_like
from mindspore_boost_ext.stages.loss_scale import (
    LARGEST_SCALE,
    LARGEST_WITH_FACTORS,
    OneScale,
    check_scale,
)
from mindspore_boost_ext.stages.overflow import choose_detector
from mindspore_boost_ext.stages.parts import joined_losses
from mindspore_boost_ext.stages.state import connected

# Steps between two reads of the scale by the host. Only on CPU does reading cost nothing.
_LOOK_EVERY = {"CPU": 1}
_MANY = 10  # skipped steps, seen in a row, before a warning about a fixed scale
# Its optimizers hold settings as Python numbers, whose changes a graph would never see. So do those
# of mint, but on CPU in PYNATIVE_MODE these train nothing unless they are compiled.
_CHANGE = "mindspore.experimental"


class BoostTrainOneStepWithLossScaleCell(OverflowNames, BoostTrainOneStepCell):
    r"""One training step with a loss scale, on every device.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018.

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
        ValueError: for a Tensor of another shape, or that is not finite and above 0; for a manager
            whose groups do not hold every trained parameter exactly once.

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

    scales_loss = True
    own_names = BoostTrainOneStepCell.own_names.union(
        ("base", "base0", "scale_part", "scale_sense", "detector")
    )
    is_complete_at_once = False  # the variants need what is set up here

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, scale_sense: Tensor | nn.Cell) -> None:
        super().__init__(network, optimizer, sens=None)
        # Ranks must also agree if MindSpore slices weights and no gradients are reduced here.
        distributed = self.parallel_mode != "stand_alone"
        self.detector = choose_detector(distributed)
        add_overflow_names(self, distributed)
        self.loss_scaling_manager: Any = scale_sense if isinstance(scale_sense, nn.Cell) else None
        self.scale_part: Any = self._scale(scale_sense)
        self.scale_sense = self.scale_part.scale_sense
        self.skipped_steps = state("loss_scale.skipped_steps", 0, np.int32)
        self._look_every = _LOOK_EVERY.get(ms.get_context("device_target"), 100)
        self._steps_run = self._overflows_in_a_row = 0
        ours = type(self) is self._library_class() and self.graph_part is None
        ours = ours and all(map(_compiles, (optimizer, self.update_part, scale_sense)))
        # An update that runs the network again is not compiled: not every network compiles.
        again = self.update_part.takes_inputs
        self.compiles_end = ours and _compat.COMPILES_END_OF_STEP and not again
        self._gives_batch = again or not ours  # what is the user's may read it
        own_window = self.overridden("gradient_accumulation_process")
        self._has_own_window = self.window_part is not None and bool(own_window)
        own_rule = self.overridden(*OWN_RULE)
        self._has_own_rule = bool(own_rule) and self.scale_part.can_be_set
        # Subclasses may override MindSpore's name of a method, or that of mindspore.boost.
        names = ("get_overflow_status", "process_loss_scale")
        self._public = tuple([name in own_rule and f"_{name}" not in own_rule for name in names])
        lost = self.overridden("start_overflow_check", "_start_overflow_check")
        self.warn_of_lost(lost if self._has_own_rule else lost + own_rule)
        self._extra = self.scale_part.extra
        self._differentiate()
        reason = f"{self.detector.name}: {self.detector.why}"
        self.report().put(Row("overflow detection", "loss scale", APPLIED, reason))
        self._complete()

    def _scale(self, scale_sense: Tensor | nn.Cell) -> OneScale:
        """Return the part for a scale; a manager with a rule of its own makes the part."""
        make = getattr(scale_sense, "scale_of_step", None)
        layers = () if self.captures_part is None else self.captures_part.weights
        if make is not None:
            return make(self.detector, self.weights, layers)
        largest = LARGEST_WITH_FACTORS if layers else LARGEST_SCALE
        return OneScale(scale_sense, self.detector, largest)

    def warn_of_lost(self, methods: list[str]) -> None:
        """Warn of methods of a subclass that nothing calls."""
        if methods and self.runs_our_construct():
            warn(
                f"{type(self).__name__} overrides methods that are not called, "
                f"{', '.join(methods)}: call them in a construct of its own",
                NoEffectWarning,
            )

    def construct(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Train one step, or skip it, and return the loss, the overflow and the scale used."""
        if self.choice_part is not None:
            return call(self.gradient_freeze_process, inputs)
        if self.batch_part is not None:
            inputs = call(self.batch_part, inputs)
        loss = call(self.network, inputs)
        status, sens, scale = self.scale_part.start(loss)
        batch = (*inputs, sens)
        gradients = gradients_of(self.grad, self.network, self._differentiated, batch)
        given = inputs if self._gives_batch else ()
        weight = 1.0 if self.window_part is None else call(self.window_part.weight_of, inputs)
        finish = self._finish_compiled if self.compiles_end else self._finish
        # One flat list: a compiled function is compiled anew for each tuple that it is given.
        loss, overflow = finish(status, loss, scale, weight, *gradients, *given)
        return loss, overflow, scale

    def _finish(
        self, status: Tensor, loss: Tensor, scale: Tensor, weight: float, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Do all that follows the backward pass; return the loss and the overflow.

        ``weight`` is that of the batch in its window; ``rest`` is what :meth:`_parts` takes apart.
        """
        gradients, captured, extra, batch = self._parts(rest)
        if self.capturing:
            captured = self.captures_part.prepared(captured, self.scale_part.of_layers(scale))
            status = ops.depend(status, captured)  # a register is read after these products, too
        gradients = self.grad_reducer(self.scale_part.divided(gradients, scale))
        if self._has_own_rule:  # of a subclass, under the names of mindspore.boost
            check, scaled = self._get_overflow_status, self._process_loss_scale
            overflow = (self.get_overflow_status if self._public[0] else check)(status, gradients)
            skips = (self.process_loss_scale if self._public[1] else scaled)(overflow)
        else:
            gradients, overflow = self.scale_part.finish(status, scale, gradients, extra)
            skips = overflow
        loss = call(self._update_unless, (skips, loss, gradients, weight, captured, *batch))
        return loss, overflow

    # In PYNATIVE_MODE, dozens of small operators cost more one by one than the backward pass.
    _finish_compiled = ms.jit(_finish)

    def _parts(self, rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
        """Split a flat list into gradients, captures, what the scale needs, and inputs."""
        weights = len(self.weights)
        captures = weights + self._captured
        batch = captures + len(self._extra)  # where each of them ends, and the batch begins
        return rest[:weights], rest[weights:captures], rest[captures:batch], rest[batch:]

    def _update_unless(
        self,
        overflow: Tensor,
        loss: Tensor,
        gradients: tuple[Any, ...],
        weight: float,
        captured: tuple[Tensor, ...],
        *inputs: Tensor,
    ) -> Tensor:
        loss = connected(loss, self._state)
        if overflow:
            loss = ops.depend(loss, ops.assign_add(self.skipped_steps, 1))
            if self.window_part is not None and self.window_part.drops_on_overflow:
                loss = ops.depend(loss, self.window_part.clear())
        else:
            if self.capturing:
                loss = ops.depend(loss, self.captures_part.use(captured))
            if self._has_own_window:
                carried = filled_like(loss, 1.0)  # the scale is divided out
                loss = call(self.gradient_accumulation_process, (loss, gradients, carried, *inputs))
            elif self.window_part is not None:
                loss = call(self._accumulate, (loss, gradients, weight, *inputs))
            else:
                loss = call(self.update, (loss, gradients, *inputs))
        return loss

    def joined(self, outputs: tuple[Any, ...], samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, whether a part was skipped, and the scale of the last one."""
        skipped = outputs[0][1]
        for output in outputs[1:]:
            skipped = ops.logical_or(skipped, output[1])
        return joined_losses(tuple([one[0] for one in outputs]), samples), skipped, outputs[-1][2]

    def __call__(self, *inputs: Tensor, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step."""
        outputs: tuple[Tensor, Tensor, Tensor] = super().__call__(*inputs, **kwargs)
        self.look_at_outputs(outputs)
        return outputs

    def look_at_outputs(self, outputs: object, steps: int = 1) -> None:
        """From time to time, check whether steps are skipped and the scale cannot fall."""
        before, self._steps_run = self._steps_run, self._steps_run + steps
        if before == 0:
            self.scale_part.after_first_step()
        every = self._look_every
        due = every and self._steps_run // every > before // every
        if due and isinstance(outputs, tuple) and len(outputs) == 3:  # a subclass may return less
            self._warn_of_overflows(outputs[1], outputs[2])

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> BoostTrainOneStepCell:
        """Return this step for some of the parameters."""
        step: Any = super().restricted(optimizer, positions)
        step._has_own_rule = step._has_own_window = False
        step._look_every = 0  # the whole step looks
        step.scale_part = self.scale_part.restricted(positions)
        return step

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the scale; a Cell that updates it goes on from there.

        Args:
            sens (Tensor): the new scale, of the shape and dtype of the first.

        Raises:
            TypeError: if ``sens`` is not a Tensor.
            ValueError: if its shape differs, it is not finite and above 0, or a group manager has
                the scales.
        """
        if not isinstance(sens, Tensor):
            raise TypeError(f"sens must be a Tensor, got {shown(sens)}")
        if not self.scale_part.can_be_set:
            raise ValueError("sens cannot be set: use set_loss_scale_status of the manager")
        if sens.shape != self.scale_sense.shape:
            raise ValueError(f"sens must have shape {self.scale_sense.shape}, got {sens.shape}")
        # Not set_data: in PYNATIVE_MODE that cuts a Parameter off from operators that have run.
        ops.assign(self.scale_sense, check_scale(sens, "sens"))

    _set_sense_scale = set_sense_scale

    def observations(self) -> dict[str, Any]:
        """Return the next loss scale (or one for each group) and how many steps were skipped."""
        observed = {**super().observations(), **self.scale_part.observations()}
        observed["skipped_steps"] = int(self.skipped_steps.asnumpy())
        return observed

    def _warn_of_overflows(self, overflow: Tensor, scale: Tensor) -> None:
        """Warn, once, if steps are skipped and the scale cannot fall."""
        if not bool(overflow.asnumpy()):
            self._overflows_in_a_row = 0
            return
        self._overflows_in_a_row += 1
        reason = self._cannot_fall(scale.asnumpy())
        if reason:
            self._look_every = 0  # warned once
            warn(reason)

    def _cannot_fall(self, scale: np.ndarray) -> str:
        """Return a warning if a scale overflowed and cannot fall; else an empty text."""
        manager, largest = self.loss_scaling_manager, float(scale.max())
        if largest != 1 and (manager is None or isinstance(manager, nn.FixedLossScaleUpdateCell)):
            if self._overflows_in_a_row < _MANY:
                return ""
            return (
                f"the last {_MANY} steps that were checked overflowed at the fixed loss scale "
                f"{largest:g} and were skipped: use a smaller or a dynamic loss scale, or check "
                "the learning rate, inputs and loss"
            )
        minimum = getattr(manager, "minimum", 1.0)
        if float(scale.min()) > minimum:
            return ""
        return (
            f"a step overflowed at the smallest loss scale ({minimum:g}) and was skipped: the "
            "network itself makes inf or nan; check the learning rate, inputs and loss"
        )


def _compiles(part: object) -> bool:
    """Return whether a part and those in it are MindSpore's or ours, and so known to compile.

    In PYNATIVE_MODE, a Cell of the user's own need not.
    """
    module = type(part).__module__
    known = is_of_libraries(module) and not module.startswith(_CHANGE)
    # So LARS and FreezeOpt hold an optimizer, and parts of the step another part.
    held = (getattr(part, name, None) for name in ("opt", "inner"))
    return known and all(_compiles(one) for one in held if isinstance(one, nn.Cell))
