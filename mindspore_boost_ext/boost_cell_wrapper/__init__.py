"""The training steps."""

from mindspore_boost_ext.boost_cell_wrapper.loss_scaled_step import (
    BoostTrainOneStepWithLossScaleCell,
)
from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell

__all__ = ["BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell"]
