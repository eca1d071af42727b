"""The training steps."""

from mindspore_boost_ext.boost_cell_wrapper.loss_scaled_step import (
    BoostTrainOneStepWithLossScaleCell,
)
from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell
from mindspore_boost_ext.boost_cell_wrapper.upstream_names import tensor_grad_scale

__all__ = ["BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell", "tensor_grad_scale"]
