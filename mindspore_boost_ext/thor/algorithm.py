"""The switch ``thor``: THOR replaces the optimizer, and the step computes its factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.algorithm import Algorithm, Build, StepCell
from mindspore_boost_ext.base.cells import declared_shapes, is_open
from mindspore_boost_ext.base.mapping import Tensors
from mindspore_boost_ext.report import APPLIED, Report, Row
from mindspore_boost_ext.stages.choice import Chooser, StepChoice
from mindspore_boost_ext.thor.optimizer import NO_LAYER, THOR, thor_of
from mindspore_boost_ext.thor.switch import thor_in_place_of

ORDINARY, CAPTURING = 0, 1  # the variants of the step


class FactorCaptures(nn.Cell):
    """The factors of THOR's layers; a step that captures also differentiates by them."""

    def __init__(self, thor: THOR) -> None:
        super().__init__(auto_prefix=False)
        self.thor = thor

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The Parameters by which the step differentiates, besides the weights."""
        return self.thor.factors

    @property
    def layers(self) -> list[nn.Cell]:
        """The layers that capture."""
        return self.thor.taps.layers

    @property
    def weights(self) -> list[Parameter]:
        """The weight of each layer that captures."""
        return [plan.weight for plan in self.thor.curvature.plans]

    def prepared(self, captured: Tensors, scales: Tensor | Tensors) -> Tensors:
        """Return gradients of :attr:`parameters` in the form that :meth:`use` takes."""
        return self.thor.curvature.prepared(captured, scales)

    def use(self, captured: Tensors) -> Tensor:
        """Take in new factors."""
        return self.thor.refresh(captured)


class RefreshChooser(Chooser):
    """Lets the step capture when a refresh is due; with a window, in its last micro-batch.

    If that window was closed before it was full, the next micro-batch makes up for it.
    Ordinary steps have no taps, which cost time in PYNATIVE_MODE and compilation in GRAPH_MODE.
    After a refresh, the row of each parameter in ``report`` is renewed.
    """

    def __init__(self, thor: THOR, report: Report, window: nn.Cell | None) -> None:
        super().__init__()
        self.thor, self.report, self.window = thor, report, window

    def index(self) -> Tensor:
        """Return the variant's number in the graph."""
        due = self.thor.is_due().all()
        if self.window is not None:
            at_once = ops.logical_or(self.window.lacks_one(), self.thor.is_overdue().all())
            due = ops.logical_and(due, at_once)
        return ops.cast(due, ms.int32)

    def now(self) -> int:
        """Return the variant's number on the host."""
        due = self.thor.is_due_now()
        if due and self.window is not None:
            overdue = self.thor.is_overdue().asnumpy().all()
            due = bool(overdue or self.window.lacks_one().asnumpy())
        return CAPTURING if due else ORDINARY

    @contextlib.contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Attach the taps for a step that captures; detach them while an ordinary one runs.

        Afterwards they are attached again, for a graph of the user's that calls this step.
        """
        if index == CAPTURING:
            self.thor.taps.attach()
            yield
            self.thor.warn_of_troubles()
            self.report.put(*self.thor.rows())
            return
        self.thor.taps.detach()
        try:
            yield
        finally:
            self.thor.taps.attach()


class ThorAlgorithm(Algorithm):
    """THOR, by its switch or as the user's own optimizer."""

    switch = "thor"

    def build(self, build: Build) -> None:
        """Put THOR in the place of the optimizer."""
        found = thor_in_place_of(build.optimizer, build.network, build.config.thor)
        build.optimizer, reason = found
        self.remember_built(build)
        build.report.update(self.switch, APPLIED, reason)

    def join(self, step: StepCell) -> None:
        """Let the step capture factors when a refresh is due."""
        thor, report = thor_of(step.optimizer), step.report()
        if thor is None:
            self.report_replaced(step)
            return
        row = report[self.switch]
        applied = row.status == APPLIED
        asked_by, reason = (row.asked_by, row.reason) if applied else ("the optimizer is THOR", "")
        if not thor.factors:
            reason = "; ".join(filter(None, (reason, NO_LAYER)))
        report.put(Row(self.switch, asked_by, APPLIED, reason, thor.counts()), *thor.rows())
        if thor.factors:
            if not step.runs_our_construct():
                raise ValueError(
                    f"{type(step).__name__} overrides construct, so THOR cannot see activations "
                    "and output gradients: change the update by an Algorithm (algorithms=[...]) "
                    "instead"
                )
            thor.taps.follow(step.network)
            step.captures_part = FactorCaptures(thor)
            step.choose_last(self._choice)

    @staticmethod
    def _choice(step: StepCell) -> StepChoice:
        """Return an ordinary step and one that captures."""
        thor = step.captures_part.thor
        if step.reducer_flag:
            thor.curvature.use_ranks(int(step.degree), thor.split_indices)
        everything = tuple(range(len(step.weights)))
        ordinary, capturing = (step.restricted(step.optimizer, everything) for _ in range(2))
        capturing.capture()
        thor.taps.attach()
        chooser = RefreshChooser(thor, step.report(), step.window_part)
        return StepChoice((ordinary, capturing), chooser, ("ordinary", "refresh of THOR"))

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse a first input whose number of samples ``set_inputs`` leaves open in a graph."""
        shapes = [] if step.runs_eagerly() else declared_shapes(step)
        if step.captures_part is not None and shapes and is_open(shapes[0], slice(1)):
            raise ValueError(
                "THOR needs the number of samples, the first axis of the first input, but "
                f"set_inputs leaves it open ({shapes[0]}): give it, or use another optimizer"
            )

    def observations(self, step: StepCell) -> dict[str, Any]:
        """Return what THOR counts."""
        thor = thor_of(step.optimizer)
        return {} if thor is None else thor.observations()
