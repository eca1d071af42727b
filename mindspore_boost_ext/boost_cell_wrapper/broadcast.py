"""What rank 0 hands to all ranks where ``parameter_broadcast`` is set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn

from mindspore_boost_ext import _compat


def broadcasts_weights() -> bool:
    """Return whether MindSpore gives all ranks what rank 0 begins with: in GRAPH_MODE alone."""
    compiles = ms.get_context("mode") == ms.GRAPH_MODE
    return compiles and bool(ms.get_auto_parallel_context("parameter_broadcast"))


def begin_together(step: nn.Cell) -> None:
    """Give all ranks the weights that rank 0 begins with, before an algorithm looks at them."""
    if step.reducer_flag and broadcasts_weights():
        _compat.broadcast_parameters(step.network)


class BroadcastsWeights:
    """Hands out what all ranks have in common, and no state of a rank's own.

    MindSpore broadcasts whenever a Cell is compiled. A variant of the step, a new shape and a flush
    compile in the middle of a training, where windows and, under AdaSum, moments differ by rank.
    """

    weights: Any
    network: Any
    window_part: Any
    enable_adasum: bool
    get_parameters: Callable[[], Iterable[Parameter]]
    _first_runs: list[str]

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return what begins a training, also from a checkpoint; later the weights it trains."""
        handed_out = self.weights
        if not self._first_runs:
            begins = self.network if self.enable_adasum else self
            handed_out = begins.get_parameters()
        own = () if self.window_part is None else self.window_part.state()
        kept = {id(one) for one in own}
        return {
            one.name: one
            for one in handed_out
            if not one.layerwise_parallel and id(one) not in kept
        }
