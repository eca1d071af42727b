"""Names that subclasses written for ``mindspore.boost`` read on the step cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.report import NoEffectWarning, warn


def _buffers(step: StepNames) -> None:
    raise AttributeError(
        f"{type(step).__name__} has no grad_accumulation: the window keeps, counts and clears the "
        "sums; call super().gradient_accumulation_process(loss, grads, sens, *inputs)"
    )


# Kept elsewhere: the window, or None; the number of micro-batches in it (int32, shape ()); the
# position in the freezing schedule (the same); the group of each of its steps, or None.
_ELSEWHERE: dict[str, Callable[[StepNames], Any]] = {
    "accumulation": lambda step: step.window_part,
    "accumulation_step": lambda step: getattr(step.window_part, "counter", Tensor(0, ms.int32)),
    "step": lambda step: getattr(step.optimizer, "position", Tensor(0, ms.int32)),
    "train_strategy": lambda step: getattr(step.optimizer, "train_strategy", None),
    "grad_accumulation": _buffers,
}

# What is read when a step is made -> what to do instead.
_FIXED = {
    "max_accumulation_step": "give grad_accumulation.grad_accumulation_step before",
    "use_grad_accumulation": "give boost.grad_accumulation before",
    "train_strategy": "give grad_freeze.schedule, or a FreezeOpt with that train_strategy, before",
    "freeze": "give boost.grad_freeze before",
    "freeze_nets": "give the optimizer as a FreezeOpt",
    "step": "give the position by step.step.set_data(...)",
    "enable_adasum": "give boost.adasum before",
    "adasum": "override adasum_process",
    "enable_dim_reduce": "give boost.dim_reduce before",
    "dim_reduce": "put another update in its place by an Algorithm",
}

_PROCESSES = ("gradient_accumulation_process", "gradient_freeze_process", "adasum_process")


class StepNames(nn.Cell):
    """What mindspore.boost's step has and this one keeps elsewhere, unless a subclass sets it."""

    # The names under which subclasses look for algorithms, and what they find without one.
    at_first: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("freeze", "use_grad_accumulation"), False),
        **dict.fromkeys(("enable_adasum", "enable_dim_reduce"), False),
        **dict.fromkeys(("adasum", "dim_reduce", "weights_clone")),
        "freeze_nets": (),
        "max_accumulation_step": 1,
    }
    own_names = frozenset((*_ELSEWHERE, *at_first))
    freeze_nets: tuple[nn.Cell, ...]

    def __getattr__(self, name: str) -> Any:
        """Read what is kept elsewhere."""
        if name in _ELSEWHERE and name not in vars(self).get("_set_here", ()):
            return _ELSEWHERE[name](self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        """Record names that a subclass sets itself: MindSpore asks whether a name is taken."""
        if name in _FIXED and self.__dict__.get("_state"):
            self._warn_if_idle(name, value)
        if name in _ELSEWHERE:
            self.__dict__.setdefault("_set_here", set()).add(name)
        super().__setattr__(name, value)
        if name == "update_part" and self.__dict__.get("_state"):
            self._settle()  # another Cell's graph may call the step

    def _warn_if_idle(self, name: str, value: object) -> None:
        """Warn if a setting changes that was read when the step was made."""
        now = getattr(self, name, None)
        same = now is value or (isinstance(now, (bool, int)) and now == value)
        same = same or (_is_nothing(now) and _is_nothing(value))
        moves_nothing = name == "step" and not self.freeze
        if not (same or moves_nothing or name in self.names_of_own()):
            warn(
                f"setting {name} has no effect after the step is made: {_FIXED[name]}",
                NoEffectWarning,
            )

    def check_sums(self, method: str) -> None:
        """Raise if a method of a subclass reads sums of the window: a graph would not say why."""
        reads = self.touches(method, "grad_accumulation", "LOAD_ATTR")
        if reads and "_set_here" not in self.__dict__:
            _buffers(self)

    def _no_sens_impl(self, *inputs: Tensor) -> object:
        """Train one step and return the loss: what ``construct`` does without a ``sens``."""
        if self.choice_part is not None:
            return call(self.gradient_freeze_process, inputs)
        return call(self._trained, inputs)

    def check_adasum_enable(self) -> bool:
        """Return whether the step combines the ranks by AdaSum."""
        return self.enable_adasum

    def check_dim_reduce_enable(self) -> bool:
        """Return whether the step trains in a subspace."""
        return self.enable_dim_reduce


class OverflowNames(nn.Cell):
    """Parts of a loss-scaled step under MindSpore's names, for a ``construct`` of the user's."""

    def start_overflow_check(self, pre_cond: Tensor, compute_input: Any) -> tuple[Tensor, Any]:
        """Begin to look for overflow after ``pre_cond``; return a status, and the input."""
        return self.detector.start(compute_input, pre_cond)

    def get_overflow_status(self, status: Tensor, compute_output: tuple[Tensor, ...]) -> Tensor:
        """Return bool, shape (): whether a value of any rank is not finite."""
        return self.detector(status, compute_output)

    def process_loss_scale(self, overflow: Tensor) -> Tensor:
        """Let the Cell that updates the scale set the next one; return the overflow."""
        return self.scale_part.update(overflow)

    _start_overflow_check, _get_overflow_status = start_overflow_check, get_overflow_status
    _process_loss_scale = process_loss_scale


def _is_nothing(value: object) -> bool:
    """Return whether a value says, in one way or another, that there is no such thing."""
    return value is None or (isinstance(value, (bool, tuple, list, nn.CellList)) and not value)


def add_overflow_names(step: nn.Cell, distributed: bool) -> None:
    """Give a loss-scaled step the operators and constants with which overflow is looked for."""
    step.base, step.base0 = Tensor(1, ms.float32), Tensor(0, ms.int32)
    step.reduce_sum = ops.ReduceSum(keep_dims=False)
    step.reduce_all = ops.ReduceAll(keep_dims=False)
    step.less_equal, step.equal = ops.LessEqual(), ops.Equal()
    step.logic_not = ops.LogicalNot()
    step.is_distributed = distributed
    if distributed:
        step.allreduce = ops.AllReduce()
    step.gpu_target = ms.get_context("device_target") == "GPU"


def tensor_grad_scale(scale: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient divided by a scale, in the dtype of the gradient."""
    return grad * ops.cast(ops.reciprocal(scale), grad.dtype)
