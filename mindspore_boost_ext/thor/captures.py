"""What THOR adds to a training step: factors to differentiate by, and when to do so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.report import Report
from mindspore_boost_ext.stages.choice import Chooser
from mindspore_boost_ext.thor.optimizer import THOR

ORDINARY, CAPTURING = 0, 1  # the variants of the step


class FactorCaptures(nn.Cell):
    """The factors of THOR's layers, which a capturing step differentiates by.

    Args:
        thor (THOR): takes the new factors.
    """

    def __init__(self, thor: THOR) -> None:
        super().__init__(auto_prefix=False)
        self.thor = thor

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What is differentiated by besides the weights."""
        return self.thor.factors

    @property
    def layers(self) -> list[nn.Cell]:
        """The layers that capture."""
        return self.thor.taps.layers

    @property
    def weights(self) -> list[Parameter]:
        """The weight of each layer that captures."""
        return [plan.weight for plan in self.thor.curvature.plans]

    def prepared(
        self, captured: tuple[Tensor, ...], scales: Tensor | tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return captured factors without the loss scale, averaged over ranks.

        Args:
            captured (tuple(Tensor)): gradients of :attr:`parameters`.
            scales (Union[Tensor, float, tuple(Tensor)]): the loss scale, or one for each layer.
        """
        return self.thor.curvature.prepared(captured, scales)

    def use(self, captured: tuple[Tensor, ...]) -> Tensor:
        """Take in factors that :meth:`prepared` returned."""
        return self.thor.refresh(captured)


class RefreshChooser(Chooser):
    """Lets the step capture when a refresh is due; of a window, in its last micro-batch.

    Ordinary steps do without taps, which cost time in PYNATIVE_MODE and compilation in GRAPH_MODE.

    Args:
        thor (THOR): knows when a refresh is due.
        report (Report): gets a row for each parameter anew when a refresh is done.
        window (GradientAccumulation, optional): the window of the step. Default: None.
    """

    def __init__(self, thor: THOR, report: Report, window: nn.Cell | None = None) -> None:
        super().__init__()
        self.thor, self.report, self.window = thor, report, window

    def index(self) -> Tensor:
        """Return the variant's number in the graph."""
        due = self.thor.is_due().all()
        if self.window is not None:
            due = ops.logical_and(due, self.window.lacks_one())
        return ops.cast(due, ms.int32)

    def now(self) -> int:
        """Return the variant's number on the host."""
        due = self.thor.is_due_now()
        if due and self.window is not None:
            due = bool(self.window.lacks_one().asnumpy())
        return CAPTURING if due else ORDINARY

    @contextlib.contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Attach the taps for a step that captures; an ordinary one neither runs nor compiles them.

        They are there again afterwards, for a graph of the user's in which this step is called.
        """
        if index == CAPTURING:
            self.thor.taps.attach()
            yield
            self.thor.warn_of_troubles()
            for row in self.thor.rows():
                self.report.put(row)
            return
        self.thor.taps.detach()
        try:
            yield
        finally:
            self.thor.taps.attach()
