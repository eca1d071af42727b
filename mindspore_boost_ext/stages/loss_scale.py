"""The part of a step that scales the loss, with one scale, fixed or dynamic."""

from __future__ import annotations

import inspect
import math
import numbers
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.arguments import innermost
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import SKIPPED, NoEffectWarning, Row, warn
from mindspore_boost_ext.stages.gradients import filled_like, unscaled_all
from mindspore_boost_ext.stages.overflow import OverflowDetector

if TYPE_CHECKING:
    from mindspore_boost_ext.boost import AutoBoost

SECTION = "loss_scale"
# Growth of a scale stops here: doubled once more, it would be inf in float32.
LARGEST_SCALE = 2.0**127
# The largest factor of a loss: one over a larger one is no normal float32, and 0 on CPU.
_LARGEST_FACTOR = 2.0**126
# The factors of THOR carry the square of the scale, so one much larger makes them inf in float32,
# though no gradient is.
LARGEST_WITH_FACTORS = 2.0**40


class OneScale(nn.Cell):
    """One loss scale for all gradients, given as a Tensor or as the Cell that updates it.

    A step calls :meth:`start`, differentiates, calls :meth:`divided`, reduces over ranks, and calls
    :meth:`finish`. Parts with another rule derive from this one.
    """

    can_be_set = True

    def __init__(
        self,
        scale_sense: Tensor | nn.Cell,
        detector: OverflowDetector,
        largest: float = LARGEST_SCALE,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.detector, self.largest = detector, largest
        self.largest_factor = min(largest, _LARGEST_FACTOR)
        self.manager: Any = scale_sense if isinstance(scale_sense, nn.Cell) else None
        self.scale_sense = self._parameter(scale_sense)
        # Parameters to differentiate by, besides weights and captures.
        self.extra: tuple[Parameter, ...] = ()

    def _parameter(self, scale_sense: Tensor | nn.Cell) -> Parameter:
        """Return the Parameter that holds the scale, float32."""
        if isinstance(scale_sense, nn.Cell) and hasattr(scale_sense, "get_loss_scale"):
            scale_sense = Tensor(float(scale_sense.get_loss_scale()), ms.float32)
        if not isinstance(scale_sense, Tensor):
            remedy = ": give its get_update_cell()" * hasattr(scale_sense, "get_update_cell")
            raise TypeError(
                "scale_sense must be a Tensor or a Cell with get_loss_scale, got "
                f"{shown(scale_sense)}{remedy}"
            )
        if scale_sense.shape not in ((), (1,)):
            raise ValueError(f"scale_sense must have shape () or (1,), got {scale_sense.shape}")
        scale = check_scale(scale_sense, "scale_sense")
        return Parameter(scale, name="boost.loss_scale.scale", requires_grad=False)

    def start(self, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the detector's status, the gradient of the loss, and the scale of this step."""
        if isinstance(loss, (tuple, list, dict)):
            raise TypeError(
                "the loss scale needs a network with one output, the loss, but this one "
                f"returns several: return the loss alone, or remove section {SECTION!r}, or the "
                "script's loss-scale manager"
            )
        # A copy of the value: the Parameter changes in `finish`.
        scale = ops.minimum(self.scale_sense, self.largest_factor)
        sens = filled_like(ops.cast(loss, ms.float32), 1.0) * scale
        status, sens = self.detector.start(ops.cast(sens, loss.dtype), loss)
        return status, sens, scale

    def divided(self, gradients: tuple[Any, ...], scale: Tensor) -> tuple[Any, ...]:
        """Return gradients as they go into the reduction over ranks."""
        return unscaled_all(gradients, scale)

    def of_layers(self, scale: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the scale of each layer that captures, or one for all."""
        return scale

    def finish(
        self, status: Tensor, scale: Tensor, gradients: tuple[Any, ...], extra: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Tensor]:
        """Set the next scale; return unscaled gradients, and whether the step must be skipped.

        Status and scale are from :meth:`start`; only ``gradients`` are reduced over ranks.
        """
        overflow = self.detector(status, gradients)
        return gradients, ops.depend(overflow, self.update(overflow))

    def update(self, overflow: Tensor) -> Tensor:
        """Let the manager set the next scale, and keep it within float32."""
        if self.manager is None:
            return overflow
        updated = self.manager(self.scale_sense, overflow)
        # clamp: the Minimum of 2.10 returns inf for inf and a finite number in GRAPH_MODE.
        bounded = ops.clamp(ops.depend(self.scale_sense, updated), None, self.largest)
        return ops.depend(updated, ops.assign(self.scale_sense, bounded))

    def restricted(self, positions: tuple[int, ...]) -> OneScale:
        """Return this part for the weights at some positions."""
        return self

    def after_first_step(self) -> None:
        """Raise an error if the first step has shown that the scale cannot work."""

    def observations(self) -> dict[str, float]:
        """Return the next scale."""
        return {"loss_scale": float(self.scale_sense.asnumpy().reshape(()))}


def warn_of_unequal_scales(sens: float, optimizer: nn.Cell) -> None:
    """Warn when an optimizer will not divide out the factor that is put into the gradients."""
    inner = innermost(optimizer)
    own = getattr(optimizer, "loss_scale", getattr(inner, "loss_scale", 1.0))
    own = 1.0 if own is None else float(own)
    if own == float(sens):
        return
    # In some optimizers the base class has a loss_scale, but the constructor takes none.
    arguments = getattr(inner, "init_args", None) or inspect.signature(inner.__init__).parameters
    takes_one = f"give the optimizer loss_scale={float(sens)}" if "loss_scale" in arguments else ""
    drops = "use drop_overflow_update=True" if float(sens) != 1.0 else ""
    remedies = [one for one in (takes_one, drops) if one] or [f"give the step sens={own}"]
    warn(
        f"the backward pass multiplies gradients by sens={sens}, but the optimizer divides them "
        f"by its loss_scale={own}: {', or '.join(remedies)}"
    )


def note_idle_section(boost: AutoBoost, scales_loss: bool) -> None:
    """Report that section ``loss_scale`` has no effect if the script makes the step cell itself.

    It warns, too, if that cell scales no loss.
    """
    if SECTION not in boost.config.given or boost.level == "O0":
        return
    if all(row.algorithm != SECTION for row in boost.report()):
        reason = "the script makes its own step cell, which takes the scale as an argument"
        boost.report().put(Row(SECTION, f"section {SECTION}", SKIPPED, reason))
        if not scales_loss:
            warn(
                f"{SECTION} has no effect: {reason}. Make the step by make_train_step, or use a "
                "BoostTrainOneStepWithLossScaleCell with an nn.DynamicLossScaleUpdateCell",
                NoEffectWarning,
            )


def check_sens(sens: object) -> None:
    """Raise an error unless the factor of a step is None or a finite number."""
    if sens is None:
        return
    if isinstance(sens, bool) or not isinstance(sens, numbers.Real):
        raise TypeError(f"sens must be a number or None, got {shown(sens)}")
    if not math.isfinite(sens) or sens == 0:
        raise ValueError(f"sens must be finite and not 0, got {sens}: None is for no scale")


def check_scale(scale: Tensor, name: str) -> Tensor:
    """Return a loss scale as float32; raise an error unless it is finite and above 0."""
    value = scale.asnumpy().astype(np.float32)
    if not (np.isfinite(value) & (value > 0)).all():
        raise ValueError(f"{name} must be finite and above 0, got {value.reshape(-1)[0]}")
    return scale.astype(ms.float32)
