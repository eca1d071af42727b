"""What rank 0 sends to all ranks if ``parameter_broadcast`` is set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.ranks import differences_between_ranks

# On CPU, MindSpore sends float32.
_HELD_BY_FLOAT32 = (ms.float32, ms.float16, ms.bfloat16, ms.bool_, ms.int8, ms.uint8)


def broadcasts_weights() -> bool:
    """Return whether MindSpore sends the start of rank 0 to all ranks (only in GRAPH_MODE)."""
    compiles = ms.get_context("mode") == ms.GRAPH_MODE
    return compiles and bool(ms.get_auto_parallel_context("parameter_broadcast"))


def hand_out(parameters: Iterable[Parameter]) -> None:
    """Send the values of rank 0 to all; what float32 cannot hold goes in pieces of 16 bits."""
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
    """Sends what all ranks have in common, but no state that belongs to one rank.

    MindSpore broadcasts whenever it compiles a Cell. Variants of the step, new shapes and flushes
    compile during a training, when windows and, under AdaSum, moments differ by rank.
    """

    was_restored = False  # from a file of this rank's own
    restored_settings: Mapping[str, str] = MappingProxyType({})  # of that file

    def begin_together(self) -> bool:
        """Send the start of rank 0 to all ranks, once; return whether this call did so.

        It runs before an algorithm reads the values. If all ranks were restored from their files,
        nothing is sent: their BatchNorm statistics differ.
        """
        if self._has_begun or not (self.reducer_flag and broadcasts_weights()):
            return False
        restored = {"restored from a file": str(self.was_restored)}
        # All ranks ask, even those that know the answer: the others wait for them.
        differs = differences_between_ranks(restored, "the start")
        hands_out = bool(differs) or not self.was_restored
        if hands_out:
            hand_out(self.parameters_broadcast_dict().values())
        self._has_begun.append(True)
        return hands_out

    def parameters_broadcast_dict(self, recurse: bool = True) -> dict[str, Parameter]:
        """Return what to send: shared state as a training begins or resumes, later its weights."""
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
