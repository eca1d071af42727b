"""One update from several micro-batches."""

from mindspore_boost_ext.grad_accumulation.window import (
    GradientAccumulation,
    gradient_accumulation_op,
    gradient_clear_op,
)

__all__ = ["GradientAccumulation", "gradient_accumulation_op", "gradient_clear_op"]
