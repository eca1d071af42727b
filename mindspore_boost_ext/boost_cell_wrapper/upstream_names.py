"""Names that subclasses written for ``mindspore.boost`` read on the step cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops


class StepNames:
    """What upstream's step has and this one keeps elsewhere."""

    optimizer: Any
    window_part: Any
    enable_adasum: bool
    enable_dim_reduce: bool

    @property
    def accumulation(self) -> Any:
        """The window, or None."""
        return self.window_part

    @property
    def accumulation_step(self) -> Tensor:
        """Micro-batches in the window: int32, shape ()."""
        window = self.window_part
        return Tensor(0, ms.int32) if window is None else window.counter

    @property
    def step(self) -> Tensor:
        """Updates along the schedule of freezing: int32, shape ()."""
        position = getattr(self.optimizer, "position", None)
        return Tensor(0, ms.int32) if position is None else position

    @property
    def train_strategy(self) -> Sequence[int] | None:
        """The group of each step, as the optimizer has it; None without freezing."""
        return getattr(self.optimizer, "train_strategy", None)

    def check_adasum_enable(self) -> bool:
        """Return whether the step combines the ranks by AdaSum."""
        return self.enable_adasum

    def check_dim_reduce_enable(self) -> bool:
        """Return whether the step trains in a subspace."""
        return self.enable_dim_reduce


class OverflowNames:
    """Parts of a loss-scaled step under MindSpore's names, for a ``construct`` of the user's."""

    detector: Any
    scale_part: Any

    def start_overflow_check(self, pre_cond: Tensor, compute_input: Any) -> tuple[Tensor, Any]:
        """Begin to look for overflow behind ``pre_cond``; return a status, and the input."""
        return self.detector.start(compute_input, pre_cond)

    def get_overflow_status(self, status: Tensor, compute_output: tuple[Tensor, ...]) -> Tensor:
        """Return bool, shape (): whether a value of any rank is not finite."""
        return self.detector(status, compute_output)

    def process_loss_scale(self, overflow: Tensor) -> Tensor:
        """Let the Cell that updates the scale set the next one; return the overflow."""
        return self.scale_part.update(overflow)

    _start_overflow_check, _get_overflow_status = start_overflow_check, get_overflow_status
    _process_loss_scale = process_loss_scale


def add_overflow_names(step: nn.Cell, distributed: bool) -> None:
    """Give a loss-scaled step the operators and constants with which overflow is looked for."""
    step.base, step.base0 = Tensor(1, ms.float32), Tensor(0, ms.int32)
    step.reduce_sum = ops.ReduceSum(keep_dims=False)
    step.reduce_all = ops.ReduceAll(keep_dims=False)
    step.less_equal, step.equal = ops.LessEqual(), ops.Equal()
    step.logic_not = ops.LogicalNot()
    step.is_distributed = distributed
    step.gpu_target = ms.get_context("device_target") == "GPU"


def tensor_grad_scale(scale: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient divided by a scale, in the dtype of the gradient."""
    return grad * ops.cast(ops.reciprocal(scale), grad.dtype)
