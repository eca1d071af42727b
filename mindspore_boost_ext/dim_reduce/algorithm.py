"""The switch ``dim_reduce``: training in the few main directions of an earlier training."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext.algorithm import Algorithm, Build, StepCell
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.dim_reduce.setup import make_dim_reduce, prepare
from mindspore_boost_ext.report import APPLIED
from mindspore_boost_ext.stages.update import Update, parts_within


class SubspaceUpdate(Update):
    """Hands the gradients, times ``sens``, to ``DimReduce`` or ``ProjectedGradient``."""

    takes_inputs = takes_factor = True

    def __init__(self, optimizer: nn.Cell, dim_reduce: nn.Cell, sens: float) -> None:
        super().__init__(optimizer)
        self.dim_reduce, self.sens = dim_reduce, sens
        self.divides_sens = dim_reduce.divides_loss_scale
        self.weights = optimizer.parameters

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Step in the subspace; the weights serve as their clone, as the step saves them itself."""
        weights, gradients = self.weights, self.times_factor(gradients)
        return call(self.dim_reduce, (loss, gradients, self.sens, weights, weights, *inputs))

    def follow_script(self) -> None:
        """Take over what the script has set: a graph is compiled with it."""
        super().follow_script()
        self.dim_reduce.follow_script()

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> SubspaceUpdate:
        """Return the part itself: every variant of the step trains all weights."""
        return self

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the loss of a batch at the present weights."""
        return call(self.dim_reduce.loss_of, inputs)


class DimReduceAlgorithm(Algorithm):
    """P-BFGS, P-SGD and TWA."""

    switch = "dim_reduce"

    def build(self, build: Build) -> None:
        """Read or make the basis, and attach it to the optimizer."""
        prepared = prepare(build.network, build.optimizer, build.config.dim_reduce)
        build.optimizer, reason, counts = prepared
        self.remember_built(build)
        build.report.update(self.switch, APPLIED, reason, counts)

    def join(self, step: StepCell) -> None:
        """Let the step search in the subspace, if the optimizer has a basis."""
        if not self.is_on(step):
            return
        mean = step.mean if step.reducer_flag else True
        settings = step.auto_boost.config.dim_reduce
        found = make_dim_reduce(step.network, step.optimizer, settings, mean)
        if found is None:
            self.report_replaced(step)
        if found is not None:
            step.update_part = SubspaceUpdate(step.optimizer, found, step.sens)
            step.dim_reduce, step.enable_dim_reduce = found, True
            if step.declines("check_dim_reduce_enable"):
                raise ValueError(
                    f"check_dim_reduce_enable of {type(step).__name__} returned False, but the "
                    "optimizer is already made for the search: set boost.dim_reduce to False"
                )
            step.weights_clone = step.weights

    def check_state(self, step: StepCell, *inputs: object) -> None:
        """Refuse a loaded state of another basis, and a subclass that updates by itself."""
        if not step.enable_dim_reduce:
            return
        search = _search(step)
        if search is None:
            self.report_replaced(step)
            return
        search.check_state()
        if step.updates_past("dim_reduce"):  # its optimizer works only in the subspace
            raise ValueError(
                f"dim_reduce cannot train: {step.why_left_out()}: call it, or leave dim_reduce out"
            )

    def observations(self, step: StepCell) -> dict[str, Any]:
        """Return what the search counts."""
        search = _search(step) if step.enable_dim_reduce else None
        return {} if search is None else search.observations()


def _search(step: StepCell) -> nn.Cell | None:
    """Return what the step really runs, whatever a script has put under ``dim_reduce``."""
    return getattr(parts_within(step.update_part)[-1], "dim_reduce", None)
