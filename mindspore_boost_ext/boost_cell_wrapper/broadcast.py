"""What rank 0 hands to all ranks where ``parameter_broadcast`` is set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.ranks import differences_between_ranks


def broadcasts_weights() -> bool:
    """Return whether MindSpore gives all ranks what rank 0 begins with: in GRAPH_MODE alone."""
    compiles = ms.get_context("mode") == ms.GRAPH_MODE
    return compiles and bool(ms.get_auto_parallel_context("parameter_broadcast"))


def hand_out(parameters: Iterable[Parameter]) -> None:
    """Give all ranks the values of rank 0; integers by 16 bits, as MindSpore sends float32."""
    kept = list(parameters)
    numbers = [one for one in kept if one.dtype in (ms.int32, ms.int64)]
    digits = {one.name: _digits(one) for one in numbers}
    sent = [one for one in kept if one.name not in digits]
    sent += [digit for several in digits.values() for digit in several]
    _compat.broadcast_parameters({one.name: one for one in sent})
    for one in numbers:
        several = [digit.asnumpy().astype(np.int64) for digit in digits[one.name]]
        whole = np.sum([digit << 16 * place for place, digit in enumerate(several)], 0)
        one.set_data(Tensor(np.array(whole, one.asnumpy().dtype)))


def _digits(parameter: Parameter) -> list[Parameter]:
    values = parameter.asnumpy()
    places = range(values.dtype.itemsize // 2)
    digits = [Tensor(np.asarray(values >> 16 * place & 0xFFFF), ms.int32) for place in places]
    return [
        Parameter(digit, name=f"{parameter.name}.{place}") for place, digit in enumerate(digits)
    ]


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
    reducer_flag: bool
    was_restored = False  # from a file of this rank's own
    _first_runs: list[str]
    _has_begun: list[bool]

    def begin_together(self) -> None:
        """Give all ranks what rank 0 begins with, once, before an algorithm looks at it.

        Ranks that go on from files of their own have each its own statistics of BatchNorm.
        """
        if self._has_begun or not (self.reducer_flag and broadcasts_weights()):
            return
        restored = {"restored from a file": str(self.was_restored)}
        # All ranks ask, also those that know the answer: the others wait for them.
        differs = differences_between_ranks(restored, "the start")
        if differs or not self.was_restored:
            hand_out(self.parameters_broadcast_dict().values())
        self._has_begun.append(True)

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
