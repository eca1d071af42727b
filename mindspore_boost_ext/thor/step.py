"""What THOR adds to a training step: which variant of the step runs, plain or capturing.

An ordinary step differentiates by the weights alone and costs what it costs. A capturing step
differentiates by weights and factors, and hands the factors to THOR before the update. The host
chooses, so that each variant is compiled when it first runs; inside another Cell's graph (in sink
mode) :class:`Turns` chooses in the graph. In PYNATIVE_MODE ordinary steps run without taps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.thor.optimizer import THOR


class Turns(nn.Cell):
    r"""Runs the capturing step when a refresh is due, else the ordinary one; chosen in the graph.

    Args:
        thor (THOR): tells when a refresh is due.
        ordinary (Cell): the ordinary step.
        capturing (Cell): the capturing step, with the same outputs.
        micro_steps (Parameter, optional): int32 [], micro-batches that the window holds.
        last (int): with accumulation, the number of micro-batches that leaves one to fill the
            window.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of the network.

    Outputs:
        Whatever the steps return.
    """

    def __init__(
        self,
        thor: THOR,
        ordinary: nn.Cell,
        capturing: nn.Cell,
        micro_steps: Parameter | None = None,
        last: int = 0,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.thor, self.ordinary, self.capturing = thor, ordinary, capturing
        self.micro_steps, self.last = micro_steps, last

    def construct(self, *inputs: Tensor) -> Any:
        """Run the step whose turn it is."""
        due = self.thor.is_due().all()
        if self.micro_steps is not None:
            due = ops.logical_and(due, self.micro_steps >= self.last)
        if due:  # noqa: SIM108  (a ternary would run both)
            result = self.capturing(*inputs)
        else:
            result = self.ordinary(*inputs)
        return result

    def now(self) -> nn.Cell:
        """Return the step whose turn it is, chosen on the host."""
        due = self.thor.is_due_now()
        if due and self.micro_steps is not None:
            due = int(self.micro_steps.asnumpy()) >= self.last
        return self.capturing if due else self.ordinary

    @contextlib.contextmanager
    def running(self, step: nn.Cell) -> Iterator[None]:
        """Attach the taps for a step that captures, and do without them where they cost time."""
        if step is self.capturing:
            self.thor.taps.attach()
            yield
            return
        eager = ms.get_context("mode") == ms.PYNATIVE_MODE
        if eager:
            self.thor.taps.detach()
        try:
            yield
        finally:
            if eager:
                self.thor.taps.attach()


__all__ = ["Turns"]
