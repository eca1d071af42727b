"""What rank 0 hands to all ranks where ``parameter_broadcast`` is set."""

from __future__ import annotations

from collections.abc import Iterable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.ranks import differences_between_ranks

# MindSpore sends float32, on CPU.
_HELD_BY_FLOAT32 = (ms.float32, ms.float16, ms.bfloat16, ms.bool_, ms.int8, ms.uint8)


def broadcasts_weights() -> bool:
    """Return whether MindSpore gives all ranks what rank 0 begins with: in GRAPH_MODE alone."""
    compiles = ms.get_context("mode") == ms.GRAPH_MODE
    return compiles and bool(ms.get_auto_parallel_context("parameter_broadcast"))


def hand_out(parameters: Iterable[Parameter]) -> None:
    """Give all ranks the values of rank 0; what float32 cannot hold goes in pieces of 16 bits."""
    kept = list(parameters)
    pieces = {one.name: _in_pieces(one) for one in kept if one.dtype not in _HELD_BY_FLOAT32}
    _compat.broadcast_parameters({one.name: pieces.get(one.name, one) for one in kept})
    for one in kept:
        if one.name in pieces:
            bits = pieces[one.name].asnumpy().astype(np.uint16).tobytes()
            values = np.frombuffer(bits, one.asnumpy().dtype).reshape(one.shape)
            one.set_data(Tensor(values.copy()))


def _in_pieces(parameter: Parameter) -> Parameter:
    bits = np.frombuffer(parameter.asnumpy().tobytes(), np.uint16)
    return Parameter(Tensor(bits.astype(np.int32)), name=parameter.name)


class BroadcastsWeights(nn.Cell):
    """Hands out what all ranks have in common, and no state of a rank's own.

    MindSpore broadcasts whenever a Cell is compiled. A variant of the step, a new shape and a flush
    compile in the middle of a training, where windows and, under AdaSum, moments differ by rank.
    """

    was_restored = False  # from a file of this rank's own

    def begin_together(self) -> bool:
        """Give all ranks what rank 0 begins with, once; return whether that was done now.

        It comes before an algorithm looks at it. Ranks that go on from files of their own have
        each its own statistics of BatchNorm.
        """
        if self._has_begun or not (self.reducer_flag and broadcasts_weights()):
            return False
        restored = {"restored from a file": str(self.was_restored)}
        # All ranks ask, also those that know the answer: the others wait for them.
        differs = differences_between_ranks(restored, "the start")
        hands_out = bool(differs) or not self.was_restored
        if hands_out:
            hand_out(self.parameters_broadcast_dict().values())
        self._has_begun.append(True)
        return hands_out

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return what begins a training, also from a checkpoint; later the weights it trains."""
        handed_out = self.weights
        if not (self._first_runs or self._has_begun):
            begins = self.network if self.enable_adasum else self
            handed_out = begins.get_parameters()
        own = () if self.window_part is None else self.window_part.state()
        kept = {id(one) for one in own}
        return {
            one.name: one
            for one in handed_out
            if not one.layerwise_parallel and id(one) not in kept
        }
