"""The part of a step that chooses which of its variants runs now."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext.base.mapping import call


class Chooser(nn.Cell):
    """Says which of several variants of a step runs now: the first, unless a subclass knows."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def index(self) -> Tensor:
        """Return the variant's number in the graph: int32, shape ()."""
        raise NotImplementedError

    def now(self) -> int:
        """Return the variant's number on the host."""
        return 0

    def running(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context around the run of a variant that the host has chosen."""
        return contextlib.nullcontext()


class StepChoice(nn.Cell):
    """Runs the variant of the step whose turn it is; the choice is made in the graph.

    Where it can, the host chooses instead, by :attr:`chooser`: a variant is then compiled when it
    first runs. Inside another Cell's graph, as in sink mode, it cannot. The variants have the same
    inputs and outputs. The report calls them by ``names``.
    """

    def __init__(self, variants: Sequence[nn.Cell], chooser: Chooser, names: Sequence[str]) -> None:
        super().__init__(auto_prefix=False)
        self.names = tuple(names)
        self.steps = nn.CellList(list(variants), auto_prefix=False)
        self.variants = tuple(variants)  # a CellList takes no Tensor as its index in PYNATIVE_MODE
        self.only: Any = variants[0] if len(variants) == 1 else None
        self.chooser = chooser
        self.takes_last = False  # whether a graph takes the last one, whatever the chooser says

    def construct(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the variant whose turn it is."""
        if self.only is not None:
            return call(self.only, inputs)
        if self.takes_last:
            return call(self.variants[-1], inputs)
        return call(self.variants[self.chooser.index()], inputs)

    def run(self, variant: nn.Cell, *inputs: Tensor, **kwargs: object) -> Any:
        """Run the variant that the host has chosen."""
        return variant(*inputs, **kwargs)
