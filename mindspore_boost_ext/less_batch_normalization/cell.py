"""LessBN as a Cell, and the warnings when a network is rewritten."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.less_batch_normalization.rewrite import (
    RemovedBatchNorm,
    Rewriting,
    less_bn,
)
from mindspore_boost_ext.report import LOGGER, NoEffectWarning, warn


class LessBN(nn.Cell):
    r"""Rewrites a network so that it has fewer BatchNorms, and runs it.

    It changes the given network itself; parameters keep their names. Make the optimizer afterwards.
    ``boost_level`` does all this for you. Source: the pass of the graph compiler behind the class
    of this name in ``mindspore.boost``.

    Args:
        network (Cell): the network, with or without its loss.
        fn_flag (bool): whether to normalise the classifier. Default: ``False``.
        **settings: ``keep_shortcut``, ``include``, ``exclude``, ``multiplier``, ``heads`` and
            ``head_alone``, as in the section ``less_bn`` of the configuration.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        The output of ``network``.

    Attributes:
        network (Cell): the rewritten network.
        rewriting (Rewriting): what was done, layer by layer.

    Raises:
        TypeError: if ``network`` is not a Cell.
        ValueError: for everything wrong with the settings, all in one message.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import LessBN
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 2))
        >>> network = LessBN(net, fn_flag=True)
        >>> print(network.rewriting.changes[0].name, network.rewriting.changes[0].done)
        2 normalised
        >>> [type(cell).__name__ for cell in net]
        ['Dense', 'ReLU', 'CommonHeadLastFN']
    """

    def __init__(self, network: nn.Cell, fn_flag: bool = False, **settings: Any) -> None:
        super().__init__(auto_prefix=False)
        rewriting = less_bn(network, fn_flag, **settings)
        self.network = network
        self.__dict__["rewriting"] = rewriting
        warn_of(rewriting)

    def construct(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the network."""
        return call(self.network, inputs)


def warn_of(rewriting: Rewriting, also: str = "") -> None:
    """Warn if a network has not changed (``also`` is added), or has lost what it had learnt."""
    if not rewriting.has_effect:
        reasons = sorted({change.reason for change in rewriting.changes})
        why = "; ".join(reasons) or "the network has no BatchNorm"
        warn(f"less_bn has no effect on this network: {why}{also}", NoEffectWarning)
    elif not rewriting.is_new:
        LOGGER.info("less_bn: the network was rewritten before, nothing is left to do")
    removed = [theirs for ours, theirs in rewriting.exchanged if isinstance(ours, RemovedBatchNorm)]
    trained = sum(map(_has_been_trained, removed))
    if trained:
        warn(
            f"less_bn has removed {trained} BatchNorms that were trained before: the outputs of "
            "the network change, and most of what it has learnt is lost. To continue from trained "
            "weights, leave less_bn out; with less_bn, start from new weights"
        )


def _has_been_trained(batch_norm: nn.Cell) -> bool:
    """Return whether the statistics differ from those of a new BatchNorm."""
    mean, variance = map(host_array, (batch_norm.moving_mean, batch_norm.moving_variance))
    return bool((mean != 0.0).any() or (variance != 1.0).any())
