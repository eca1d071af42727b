"""The switch ``gradient_centralization``: rebuilds the optimizer with centralized gradients."""

from __future__ import annotations

from mindspore_boost_ext.algorithm import Algorithm, Build, StepCell
from mindspore_boost_ext.base.arguments import check_optimizer
from mindspore_boost_ext.base.centralization import Centralization, output_axes
from mindspore_boost_ext.grad_freeze.optimizer import rebuilt_with_groups
from mindspore_boost_ext.report import APPLIED, SKIPPED, Row
from mindspore_boost_ext.thor.optimizer import thor_of


class GradientCentralizationAlgorithm(Algorithm):
    """Gradient centralization alone, without ``less_bn``."""

    switch = "gradient_centralization"

    def build(self, build: Build) -> None:
        """Rebuild the optimizer."""
        check_optimizer(build.optimizer, self.switch)
        found = centralized_weights(build, self.switch, build.report[self.switch].asked_by)
        if found:
            self.remember_built(build)
            build.optimizer = rebuilt_with_groups(build.optimizer, centralize=found)

    def join(self, step: StepCell) -> None:
        """Look whether the step has that optimizer."""
        within = [cell for _, cell in step.optimizer.cells_and_names()]
        held = [thing for cell in within for thing in vars(cell).values()]
        if not any(isinstance(thing, Centralization) for thing in held):
            self.report_replaced(step)


def centralized_weights(build: Build, row: str, asked_by: str) -> dict[str, int]:
    """Return whose gradients to centralize, with output axes, and put a row into the report."""
    names = {parameter.name for parameter in getattr(build.optimizer, "parameters", ())}
    found = {name: axis for name, axis in output_axes(build.network).items() if name in names}
    reason = "" if found else "no weight that is trained has more than one input per output"
    if build.switches["thor"] or thor_of(build.optimizer) is not None:
        found, reason = {}, "THOR has its own rule for each weight"
    status = SKIPPED if reason else APPLIED
    build.report.put(Row(row, asked_by, status, reason, {"weights": len(found)}))
    return found
