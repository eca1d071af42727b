"""What rank 0 hands to all ranks where ``parameter_broadcast`` is set."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter


class BroadcastsWeights:
    """Hands out weights, and no state of a rank's own.

    MindSpore broadcasts whenever a Cell is compiled. A variant of the step, a new shape and a flush
    compile in the middle of a training, where buffers and, under AdaSum, moments differ by rank.
    """

    weights: Any
    network: Any
    _first_runs: list[str]

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return the network's Parameters before the first step, later the weights it trains."""
        handed_out = self.weights if self._first_runs else self.network.get_parameters()
        return {one.name: one for one in handed_out if not one.layerwise_parallel}


__all__ = ["BroadcastsWeights"]
