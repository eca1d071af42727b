"""A dynamic loss scale for each group of layers."""

from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager

__all__ = ["GroupLossScaleManager"]
