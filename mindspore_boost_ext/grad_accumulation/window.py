"""Gradient accumulation: the update of a big batch from several small ones.

Gradients of ``max_accumulation_step`` micro-batches are added up, and the optimizer
runs once for each such window, as if the batch had been that much larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import each
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.base.sums import DIVIDE
from mindspore_boost_ext.config.rules import check_all, shown
from mindspore_boost_ext.config.sections import GradAccumulationConfig
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.stages.state import connected, state_of

EQUAL, SAMPLES, LABELS = "equal", "samples", "labels"


def gradient_accumulation_op(
    accumulation_step: int, cumulative: Parameter, gradient: Tensor
) -> Tensor:
    """Add ``gradient / accumulation_step`` to one buffer, for ``ops.HyperMap``; return it."""
    return ops.assign_add(cumulative, ops.cast(gradient / accumulation_step, cumulative.dtype))


def gradient_clear_op(cumulative: Parameter) -> Tensor:
    """Set one buffer to zero; return the buffer. Also for ``ops.HyperMap``."""
    return ops.assign(cumulative, ops.zeros_like(cumulative))


def warn_of_sum() -> bool:
    """Warn of several losses; return True, which a graph can hold."""
    warn(
        "the network returns several losses, whose sum is minimised. If there is one for each "
        "sample, gradients of micro-batches do not add up to those of the big batch: the window "
        "takes the mean over its micro-batches, with weighting 'samples' of sums times samples. "
        "Return the mean of such losses"
    )
    return True


class GradientAccumulation(nn.Cell):
    r"""Adds gradients up, and runs the optimizer when a window is full.

    Source: Ott et al., Scaling Neural Machine Translation, 2018.

    Args:
        max_accumulation_step (int): micro-batches in a window, at least 1.
        optimizer (Cell): the optimizer; it runs once for each window.
        weighting (str): ``"equal"``: every micro-batch counts alike; ``"samples"`` or
            ``"labels"``: by its ``weight``, the number of its samples, or of the labels that
            count. Default: ``"equal"``.

    Inputs:
        - **loss** (Tensor) - the loss of the micro-batch, returned when all is done.
        - **gradients** (tuple(Tensor)) - one for each of the optimizer's parameters.
        - **weight** (Union[float, Tensor]) - :math:`w_i`; not used with ``"equal"``. Default: 1.0.

    Outputs:
        Tensor, ``loss``.

    Raises:
        TypeError: if ``optimizer`` has no ``parameters``.
        ValueError: if another argument breaks its rule.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import GradientAccumulation
        >>> net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> accumulation = GradientAccumulation(2, nn.SGD(net.trainable_params(), 1.0))
        >>> for gradient in (1.0, 3.0):
        ...     loss = accumulation(Tensor(0.5), (Tensor([[gradient]]),))
        >>> net.weight.asnumpy().tolist()
        [[-2.0]]
    """

    def __init__(
        self, max_accumulation_step: int, optimizer: nn.Cell, *, weighting: str = EQUAL
    ) -> None:
        super().__init__(auto_prefix=False)
        if not hasattr(optimizer, "parameters"):
            raise TypeError(f"optimizer must be a MindSpore optimizer, got {shown(optimizer)}")
        rules = GradAccumulationConfig.rules()
        check_all(
            "GradientAccumulation",
            max_accumulation_step=(max_accumulation_step, rules["grad_accumulation_step"]),
            weighting=(weighting, rules["weighting"]),
        )
        self._max_accumulation_step = int(max_accumulation_step)
        self.weighting, self.is_weighted = weighting, weighting != EQUAL
        self.label_count: nn.Cell | None = None  # the step knows the loss
        # On CPU, a division takes twenty times as long as a product. For full windows of a power of
        # two it is exact. Others divide, to round as earlier runs did.
        self.divides = not self.is_weighted and max_accumulation_step & (max_accumulation_step - 1)
        self.drops_on_overflow = False
        self.warn_of_sum = ops.constexpr(warn_of_sum, reuse_result=False)
        self._warned_of_long_window = False
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.hyper_map = ops.HyperMap()
        zeros = ((weight.name, np.zeros(weight.shape, np.float32)) for weight in self.weights)
        buffers = [state(f"grad_accumulation.gradients.{name}", one) for name, one in zeros]
        self._grad_accumulation = ParameterTuple(buffers)
        self._accumulation_step = state("grad_accumulation.micro_steps", 0, np.int32)
        self._total_weight = state("grad_accumulation.total_weight", 0.0)
        self.__dict__["_state"] = state_of(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Let a subclass write ``self._accumulation_step = 0`` in PYNATIVE_MODE too."""
        if name == "_accumulation_step" and hasattr(self, name):
            if not isinstance(value, Parameter):
                ops.assign(self._accumulation_step, Tensor(value, ms.int32))
            return
        super().__setattr__(name, value)

    def construct(
        self, loss: Tensor, grads: tuple[Tensor, ...], weight: float | Tensor = 1.0
    ) -> Tensor:
        """Add one micro-batch; at the end of the window update and clear."""
        loss = connected(loss, self._state)
        loss = ops.depend(loss, self.accumulate(grads, weight))
        if self.is_full():
            loss = ops.depend(loss, self.optimizer(self.window_gradients()))
            loss = ops.depend(loss, self.clear())
        return loss

    def accumulate(self, gradients: tuple[Tensor, ...], weight: float | Tensor = 1.0) -> Tensor:
        """Add the gradients of one micro-batch, times ``weight``, to the buffers."""
        if self.is_weighted and weight == 0:  # gradients of a mean over nothing may be NaN
            return ops.assign_add(self._accumulation_step, 1)
        done = each(ops.partial(self._add, weight), self._grad_accumulation, gradients)
        ops.assign_add(
            self._total_weight, ops.cast(weight, ms.float32) if self.is_weighted else 1.0
        )
        return ops.depend(ops.assign_add(self._accumulation_step, 1), done)

    def _add(self, weight: float | Tensor, buffer: Parameter, gradient: Tensor) -> Tensor:
        gradient = ops.cast(gradient, ms.float32)
        return ops.assign_add(buffer, gradient * weight if self.is_weighted else gradient)

    def looked_at(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, after a warning if its gradient is no mean."""
        if isinstance(loss, Tensor) and loss.ndim > 0 and loss.shape[0] != 1:
            return ops.depend(loss, self.warn_of_sum())
        return loss

    def is_full(self) -> Tensor:
        """Return bool, shape (): whether the window has all its micro-batches."""
        return self._accumulation_step >= self._max_accumulation_step

    def lacks_one(self) -> Tensor:
        """Return bool, shape (): whether the next micro-batch fills the window."""
        return self._accumulation_step >= self._max_accumulation_step - 1

    def weight_of(self, *inputs: Tensor) -> float | Tensor:
        """Return the weight of a batch: labels come last, the first axis counts the samples."""
        if self.label_count is not None:
            return self.label_count(inputs[-1])
        return float(inputs[0].shape[0]) if self.is_weighted else 1.0

    def window_gradients(self) -> tuple[Tensor, ...]:
        """Return the mean over the micro-batches in the window, in the dtypes of the parameters."""
        total = self._total_weight
        if self.is_weighted:  # where nothing counts, the gradients are 0
            total = ops.select(total == 0, ops.ones_like(total), total)
        mean = ops.partial(self._mean, 1.0 / total)
        return each(mean, self._grad_accumulation, self.weights)

    def _mean(self, inverse: Tensor, buffer: Parameter, weight: Parameter) -> Tensor:
        mean = DIVIDE(buffer, self._total_weight) if self.divides else buffer * inverse
        return ops.cast(mean, weight.dtype)

    def clear(self) -> Tensor:
        """Empty the window."""
        done = each(gradient_clear_op, self._grad_accumulation)
        ops.assign(self._total_weight, ops.zeros_like(self._total_weight))
        step = ops.assign(self._accumulation_step, ops.zeros_like(self._accumulation_step))
        return ops.depend(step, done)

    def restricted(self, optimizer: nn.Cell, positions: Sequence[int]) -> GradientAccumulation:
        """Return this window for some of the parameters: same buffers, same counters.

        Args:
            optimizer (Cell): the optimizer of these parameters.
            positions (Sequence[int]): where they stand among all parameters.
        """
        view: GradientAccumulation = _compat.shallow_copy(self)
        view.__dict__["weights"] = optimizer.parameters
        _compat.set_child(view, "optimizer", optimizer)
        buffers = ParameterTuple([self._grad_accumulation[position] for position in positions])
        view.__dict__["_grad_accumulation"] = buffers
        return view

    @property
    def counter(self) -> Parameter:
        """How many micro-batches the window holds: int32, shape ()."""
        return self._accumulation_step

    def state(self) -> tuple[Parameter, ...]:
        """Return what differs by rank while the window is open: buffers and counters."""
        return (*self._grad_accumulation, self._accumulation_step, self._total_weight)

    def micro_steps(self) -> int:
        """Return how many micro-batches the window holds."""
        return int(self._accumulation_step.asnumpy())

    def check_weighting(self, weight: float, saved: str = "") -> None:
        """Refuse a window filled with another weighting.

        Args:
            weight (float): that of the next batch.
            saved (str): the weighting of the run that filled it. Default: "", unknown.

        Raises:
            ValueError: with the remedy.
        """
        held, total = self.micro_steps(), float(self._total_weight.asnumpy())
        was_other = bool(saved) and LABELS in (saved, self.weighting)
        if self.weighting != LABELS:  # with equal weights, each micro-batch counts 1
            looks_equal = total == held
            was_other |= looks_equal and weight != 1 if self.is_weighted else not looks_equal
        if held and was_other:
            raise ValueError(
                f"the window holds {held} micro-batches that were not weighted by "
                f"grad_accumulation.weighting={self.weighting!r}: keep "
                "the weighting of the saved run, or save when the window is empty"
            )

    def expect_training(self, epochs: int, steps: int) -> None:
        """Warn, once, if an epoch of ``steps`` steps ends before one window is full."""
        if steps < self._max_accumulation_step and not self._warned_of_long_window:
            self.__dict__["_warned_of_long_window"] = True
            is_filled = self.micro_steps() + epochs * steps >= self._max_accumulation_step
            idle = "" if is_filled else "this call makes no update, and "
            warn(
                f"grad_accumulation.grad_accumulation_step={self._max_accumulation_step} is more "
                f"than the {steps} steps of an epoch: {idle}the window carries over, unless "
                "FlushAccumulation closes it"
            )


# The functions behind the operators, under upstream's names.
cumulative_grad_process, clear_grad = gradient_accumulation_op, gradient_clear_op
