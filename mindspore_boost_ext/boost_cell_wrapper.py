"""The training step: forward and backward pass, reduction over ranks, update.

With nothing switched on the step is MindSpore's own, operator for operator: weights are
bit-identical to ``nn.TrainOneStepCell`` and there is nothing to pay for.
"""

from __future__ import annotations

import numbers
from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext._rules import shown
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import Report, warn


class BoostTrainOneStepCell(nn.TrainOneStepCell):
    r"""One training step of a network with the accelerators of its configuration.

    Subclasses may override ``construct``; the parts of the step are there under the names that
    ``mindspore.boost`` gave them (``grad``, ``weights``, ``grad_reducer``, ``sens`` and so on).

    Args:
        network (Cell): the network with its loss; one output, a loss of any shape.
        optimizer (Cell): the optimizer over the parameters to train.
        sens (numbers.Number, optional): factor on the gradients, put into the backward pass. The
            optimizer divides it out again when its own ``loss_scale`` is the same number.
            Default: None, which means 1.0.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        Tensor, the loss as ``network`` returns it (not multiplied by ``sens``).

    Raises:
        TypeError: if ``sens`` is not a number.
        ValueError: if ``sens`` is 0.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import BoostTrainOneStepCell
        >>> net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> step = BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        >>> inputs, labels = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
        >>> float(step(Tensor(inputs), Tensor(labels)).asnumpy())
        16.0
    """

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, sens: numbers.Number | None = None
    ) -> None:
        """Build the step for the configuration in force."""
        if sens is not None and (isinstance(sens, bool) or not isinstance(sens, numbers.Number)):
            raise TypeError(f"sens must be a number or None, got {shown(sens)}")
        super().__init__(network, optimizer, sens)
        self.auto_boost = AutoBoost.current(optimizer)
        self.freeze = False
        self.use_grad_accumulation = False
        self.enable_dim_reduce = False
        self.enable_adasum = False
        self.dim_reduce = None
        self.weights_clone = None
        self._tell_unequal_scales()

    def construct(self, *inputs: Tensor) -> Any:
        """Train one step and return the loss."""
        return super().construct(*inputs)

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self.auto_boost.report()

    def observations(self) -> dict[str, Any]:
        """Return what the active algorithms tell of the last step: name -> number or bool."""
        return {}

    def _tell_unequal_scales(self) -> None:
        """Tell the user when the optimizer will not divide out the factor put into the gradients."""
        own = getattr(self.optimizer, "loss_scale", None)
        if own is not None and float(own) != float(self.sens):
            warn(
                f"the backward pass multiplies gradients by sens={self.sens}, but the optimizer "
                f"divides them by its loss_scale={own}: give the optimizer "
                f"loss_scale={float(self.sens)}, or use drop_overflow_update=True",
                stacklevel=3,
            )


__all__ = ["BoostTrainOneStepCell"]
