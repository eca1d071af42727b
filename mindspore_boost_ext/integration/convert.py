"""ConvertModelUtils: makes a Model train with THOR, as MindSpore's scripts do it."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.amp import LossScaleManager

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.arguments import of_kind
from mindspore_boost_ext.boost_cell_wrapper.loss_scaled_step import BoostTrainOneStepCell
from mindspore_boost_ext.config.rules import integer, optional
from mindspore_boost_ext.integration.model import BoostModel
from mindspore_boost_ext.thor.optimizer import thor_of


class ConvertModelUtils:
    """Converts a Model to one that trains with THOR.

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import THOR
        >>> from mindspore_boost_ext import ConvertModelUtils
        >>> net, loss = nn.Dense(4, 2), nn.MSELoss()
        >>> opt = THOR(net, 0.1, damping=0.03, momentum=0.9)
        >>> model = ms.Model(net, loss, opt)
        >>> model = ConvertModelUtils().convert_to_thor_model(
        ...     model=model, network=net, loss_fn=loss, optimizer=opt, frequency=10)
        >>> opt.get_frequency()
        10
    """

    @staticmethod
    def convert_to_thor_model(
        model: ms.Model,
        network: nn.Cell,
        loss_fn: nn.Cell | None = None,
        optimizer: nn.Cell | None = None,
        metrics: object = None,
        amp_level: str = "O0",
        loss_scale_manager: LossScaleManager | None = None,
        keep_batchnorm_fp32: bool = False,
        frequency: int | None = None,
    ) -> ms.Model:
        """Return a Model that trains ``network`` with THOR.

        Args:
            model (Model): the Model to convert; its boost level, settings and algorithms stay in
                force. If ``optimizer`` is no THOR, it is returned as it is.
            network (Cell): the network, or an ``nn.TrainOneStepCell`` over network and optimizer.
            loss_fn (Cell, optional): the loss. Default: None, ``network`` returns it.
            optimizer (Cell, optional): a THOR. Default: None.
            metrics (Union[dict, set], optional): as for ``ms.Model``.
            amp_level (str): as for ``ms.Model``. Default: ``"O0"``.
            loss_scale_manager (LossScaleManager, optional): as for ``ms.Model``. Default: None.
            keep_batchnorm_fp32 (bool): as for ``ms.Model``. Default: False.
            frequency (int, optional): updates from one refresh to the next, at least 1. Default:
                None, that of the optimizer.

        Raises:
            ValueError: if ``frequency`` breaks its rule, ``optimizer`` is MindSpore's own
                ``thor``, or ``network`` is a training step with a ``construct`` of its own.
        """
        optional(integer(1)).read("frequency", frequency)
        is_step = isinstance(network, nn.TrainOneStepCell)
        given = network.optimizer if is_step and optimizer is None else optimizer
        found, built_in = thor_of(given), of_kind(given, *_compat.BUILT_IN_THORS)
        if built_in is not None:
            raise ValueError(
                "optimizer must be the THOR of this package, got MindSpore's own "
                f"{type(built_in).__name__}, which has also changed the layers of the network: "
                "put 'import mindspore_boost_ext' above the line that imports thor, or import "
                "THOR from mindspore_boost_ext, and make a new network and optimizer"
            )
        if found is None:
            return model
        if frequency is not None:
            found.frequency = int(frequency)
        if is_step:
            return BoostModel(_own_step(network))
        settings: dict[str, Any] = {}
        boost = getattr(model.train_network, "auto_boost", None)  # of a step of this package
        if boost is not None:
            settings = {"boost_level": boost.level, "boost_config_dict": boost.boost_config_dict}
            settings["algorithms"] = boost.own
        if loss_scale_manager is not None:
            settings["loss_scale_manager"] = loss_scale_manager
        if amp_level != "O0":
            settings["keep_batchnorm_fp32"] = keep_batchnorm_fp32
        return BoostModel(
            network, loss_fn, optimizer, metrics=metrics, amp_level=amp_level, **settings
        )


def _own_step(step: nn.TrainOneStepCell) -> nn.Cell:
    if isinstance(step, BoostTrainOneStepCell):
        return step
    if type(step).construct is not nn.TrainOneStepCell.construct:
        raise ValueError(
            f"network is a {type(step).__name__} that overrides construct, so THOR cannot see "
            "activations and output gradients: give the network with its loss and the optimizer, "
            "and change the update by an Algorithm (BoostModel(..., algorithms=[...]))"
        )
    return BoostTrainOneStepCell(step.network, step.optimizer, step.sens).set_train()
