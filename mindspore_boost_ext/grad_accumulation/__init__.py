"""One update from several micro-batches."""

from mindspore_boost_ext.grad_accumulation.window import (
    GradientAccumulation,
    clear_grad,
    cumulative_grad_process,
    gradient_accumulation_op,
    gradient_clear_op,
)

__all__ = [
    "GradientAccumulation",
    "clear_grad",
    "cumulative_grad_process",
    "gradient_accumulation_op",
    "gradient_clear_op",
]
