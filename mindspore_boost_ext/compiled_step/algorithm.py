"""The switch ``compiled_step``: in PYNATIVE_MODE the whole training step is one graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.config.rules import described
from mindspore_boost_ext.report import APPLIED, INACTIVE

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


class CompiledStepAlgorithm(Algorithm):
    """A compiled step."""

    switch = "compiled_step"

    def join(self, step: BoostTrainOneStepCell) -> None:
        """Let the step, and every variant of it, run as a graph."""
        if not self.is_on(step):
            return
        step.graph_part = StepGraph(step)
        status, reason = APPLIED, "the whole step is one graph; the script stays in PYNATIVE_MODE"
        if ms.get_context("mode") == ms.GRAPH_MODE:
            status, reason = INACTIVE, "in GRAPH_MODE every step is one graph"
        step.report().update(self.switch, status, reason)


_SHOWN = 1000  # characters of MindSpore's reason, without its list of calls


class StepGraph:
    """A step, without a choice of variants, as a compiled function.

    MindSpore compiles for each shape of the inputs. It does not notice that a layer has changed
    between training and evaluation; so each such pattern has a function of its own.
    """

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        self.step = step
        self.cells: list[nn.Cell] = []
        self._functions: dict[tuple[bool, ...], Any] = {}

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the step; where it cannot be compiled, raise a ``ValueError``, and train nothing."""
        for place, one in enumerate(inputs):
            if not isinstance(one, Tensor):
                raise ValueError(
                    f"compiled_step takes only Tensors, but input {place + 1} is a "
                    f"{type(one).__name__}: in a graph MindSpore would run the network twice, and "
                    "BatchNorm would count each batch twice; give Tensors, or leave compiled_step "
                    "out"
                )
        training = tuple(one.training for _, one in self.step.network.cells_and_names())
        function = self._functions.get(training)
        if function is not None:
            return function(*inputs)
        self._check_hooks()
        cell = _WholeStep(self.step)
        function = ms.jit(cell.construct)
        try:
            outputs = function(*inputs)
        except Exception as error:  # whatever the network may do
            raise ValueError(
                "compiled_step cannot run this step as a graph: leave compiled_step out, or write "
                f"the network so that GRAPH_MODE can compile it. {described(error, _SHOWN)}"
            ) from error
        self.cells.append(cell)
        self._functions[training] = function
        return outputs

    def _check_hooks(self) -> None:
        """Raise a ``ValueError`` for a network with a hook, which MindSpore's graphs leave out."""
        for name, cell in self.step.network.cells_and_names():
            held = _compat.primitives(cell).values()
            if _compat.has_hooks(cell) or any(isinstance(one, ops.HookBackward) for one in held):
                raise ValueError(
                    f"{name or 'the network'} has a hook, which the graph of compiled_step would "
                    "not call: remove it, or leave compiled_step out"
                )


class _WholeStep(nn.Cell):
    """Calls a step, and has a branch in its graph.

    MindSpore's CPU backend runs a graph without branches in the thread that calls it, and there
    PYNATIVE_MODE's own threads, which spin while they wait, take that thread's core away. A graph
    with branches runs in a thread of the backend.
    """

    def __init__(self, step: BoostTrainOneStepCell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step
        self.branches = ms.get_context("device_target") == "CPU"

    def construct(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = call(self.step.construct, inputs)
        if not self.branches:
            return outputs
        if isinstance(outputs, tuple):
            return (_behind_a_branch(outputs[0]), *outputs[1:])
        return _behind_a_branch(outputs)


def _behind_a_branch(value: Tensor) -> Tensor:
    """Return ``value``, whatever it is; there is a branch in front, which changes nothing."""
    total = value.sum()
    if total != total:
        total = total + 1
    return ops.depend(value, total)
