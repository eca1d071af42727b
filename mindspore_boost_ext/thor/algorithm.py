"""The switch ``thor``: THOR in place of the optimizer, and its factors in the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore_boost_ext.algorithm import Algorithm, Build
from mindspore_boost_ext.report import APPLIED, Row
from mindspore_boost_ext.runtime.cells import declared_shapes, is_open
from mindspore_boost_ext.stages.choice import StepChoice
from mindspore_boost_ext.thor.captures import FactorCaptures, RefreshChooser
from mindspore_boost_ext.thor.optimizer import thor_of
from mindspore_boost_ext.thor.switch import thor_in_place_of

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


class ThorAlgorithm(Algorithm):
    """THOR, by its switch or as the user's own optimizer."""

    switch = "thor"

    def build(self, build: Build) -> None:
        """Put THOR in the place of the optimizer."""
        found = thor_in_place_of(build.optimizer, build.network, build.config.thor)
        build.optimizer, reason = found
        build.applied(self.switch, reason)

    def join(self, step: BoostTrainOneStepCell) -> None:
        """Let the step capture factors when a refresh is due."""
        thor, report = thor_of(step.optimizer), step.report()
        if thor is None:
            return
        asked_by, reason = "the optimizer is THOR", ""
        if report[self.switch].status == APPLIED:
            asked_by, reason = report[self.switch].asked_by, report[self.switch].reason
        report.put(Row(self.switch, asked_by, APPLIED, reason, thor.counts()))
        for row in thor.rows():
            report.put(row)
        if thor.factors:
            self._check_construct(step)
            thor.taps.follow(step.network)
            step.captures_part = FactorCaptures(thor)
            step.choose_last(self._choice)

    @staticmethod
    def _check_construct(step: BoostTrainOneStepCell) -> None:
        """Refuse a subclass that differentiates by itself, whatever variants it has."""
        if not step.runs_our_construct():
            raise ValueError(
                f"{type(step).__name__} has a construct of its own, so THOR cannot see activations "
                "and output gradients: change the update by an Algorithm (algorithms=[...]) instead"
            )

    @staticmethod
    def _choice(step: BoostTrainOneStepCell) -> StepChoice:
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

    def check_state(self, step: BoostTrainOneStepCell, *inputs: object) -> None:
        """Refuse a batch whose number of samples a graph does not know."""
        shapes = [] if step.runs_eagerly() else declared_shapes(step)
        if step.captures_part is not None and shapes and is_open(shapes[0], slice(1)):
            raise ValueError(
                "THOR takes the number of samples from the shape of the first input, in which "
                f"set_inputs leaves it open ({shapes[0]}): give it, or take another optimizer"
            )

    def observations(self, step: BoostTrainOneStepCell) -> dict[str, Any]:
        """Return what THOR counts."""
        thor = thor_of(step.optimizer)
        return {} if thor is None else thor.observations()
