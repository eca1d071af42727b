"""The switch ``compiled_step``: in PYNATIVE_MODE the whole training step is one graph."""

from __future__ import annotations

import numbers
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, StepCell
from mindspore_boost_ext.base.arguments import innermost
from mindspore_boost_ext.base.cells import leaves
from mindspore_boost_ext.base.centralization import owned_parameters
from mindspore_boost_ext.base.mapping import call
from mindspore_boost_ext.compiled_step.draws import drawing_nothing
from mindspore_boost_ext.config.rules import described
from mindspore_boost_ext.report import APPLIED, INACTIVE


class CompiledStepAlgorithm(Algorithm):
    """A compiled step."""

    switch = "compiled_step"

    def join(self, step: StepCell) -> None:
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

    MindSpore compiles for each shape of the inputs. It does not notice if a layer changes between
    training and evaluation mode, or if a number changes in the ``param_groups`` of an optimizer. So
    each pattern of modes and numbers has a function of its own.
    """

    def __init__(self, step: StepCell) -> None:
        self.step = step
        self._graphs: dict[tuple[Any, ...], tuple[_WholeStep, Any]] = {}  # and their functions
        self._could_compile: set[tuple[Any, ...]] = set()

    @property
    def cells(self) -> list[nn.Cell]:
        """What has been compiled."""
        return [cell for cell, _ in self._graphs.values()]

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the step; where it cannot be compiled, raise a ``ValueError``, and train nothing."""
        if not all(isinstance(one, Tensor) for one in inputs):
            self._check_state(inputs)
        self._check_weights()
        modes = tuple(one.training for _, one in self.step.network.cells_and_names())
        groups = getattr(innermost(self.step.optimizer), "param_groups", ())
        state = modes, tuple(one for one in leaves(groups) if isinstance(one, numbers.Real))
        if state in self._graphs:
            cell, function = self._graphs[state]
            try:
                return function(*inputs)
            except Exception:  # of an operator: it breaks MindSpore's graph for good
                del self._graphs[state]
                _compat.free_compiled([cell])
                raise
        self._check_hooks()
        cell = _WholeStep(self.step)
        function = ms.jit(cell.construct)
        with drawing_nothing():
            try:
                outputs = function(*inputs)
            except Exception as error:  # the network may raise any
                _compat.free_compiled([cell])
                if state in self._could_compile:  # so that it is an operator's
                    raise
                raise ValueError(
                    "compiled_step cannot run this step as a graph: leave compiled_step out, or "
                    "give a network, a loss and an optimizer that GRAPH_MODE can compile. "
                    f"{described(error, _SHOWN)}"
                ) from error
        self._could_compile.add(state)
        self._graphs[state] = cell, function
        return outputs

    def _check_state(self, inputs: tuple[Any, ...]) -> None:
        """Raise a ``ValueError`` if state would move twice, as an input is no Tensor.

        MindSpore's graph then runs the network for the loss and again for the gradient.
        """
        other = next(type(one).__name__ for one in inputs if not isinstance(one, Tensor))
        state = [
            one.name
            for one, cell in owned_parameters(self.step.network)
            if not one.requires_grad and _may_move(cell)
        ]
        if state:
            raise ValueError(
                f"compiled_step: an input is a {other}, not a Tensor, so MindSpore's graph would "
                f"run the network twice in a step, and would move {state[0]} twice, as "
                "BatchNorm's statistics: give only Tensors, or leave compiled_step out"
            )

    def _check_weights(self) -> None:
        """Raise a ``ValueError`` for a frozen weight, which a graph of MindSpore would train."""
        frozen = [weight for weight in self.step.weights if not weight.requires_grad]
        if frozen:  # an optimizer of get_parameters() has statistics, too, which get no gradient
            statistics = _statistics(self.step.network)
            frozen = [one for one in frozen if id(one) not in statistics]
        if frozen:
            raise ValueError(
                f"compiled_step would train {frozen[0].name}, whose requires_grad is False, as "
                "graphs of MindSpore ignore that: make the optimizer of trainable_params() after "
                "you have set it, or leave compiled_step out"
            )

    def _check_hooks(self) -> None:
        """Raise a ``ValueError`` for a network with a hook, which MindSpore's graphs leave out."""
        for name, cell in self.step.network.cells_and_names():
            held = _compat.primitives(cell).values()
            if _compat.has_hooks(cell) or any(isinstance(one, ops.HookBackward) for one in held):
                raise ValueError(
                    f"{name or 'the network'} has a hook, which the graph of compiled_step would "
                    "not call: remove it, or leave compiled_step out"
                )


def _statistics(network: nn.Cell) -> set[int]:
    """Return the ids of the statistics of all BatchNorms."""
    names, cells = ("moving_mean", "moving_variance"), network.cells_and_names()
    return {id(getattr(cell, name, None)) for _, cell in cells for name in names}


def _may_move(cell: nn.Cell) -> bool:
    """Return whether a Cell may change a Parameter of its own that no gradient changes."""
    return hasattr(cell, "moving_mean") or not type(cell).__module__.startswith("mindspore.")


class _WholeStep(nn.Cell):
    """Calls a step; on CPU, its graph has a branch.

    MindSpore's CPU backend runs a graph without branches in the thread that calls it. There
    PYNATIVE_MODE's own threads, which spin while they wait, take the core from that thread. A graph
    with branches runs in a thread of the backend.
    """

    def __init__(self, step: StepCell) -> None:
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
    """Return ``value`` unchanged, after a branch in the graph that has no effect."""
    total = value.sum()
    if total != total:
        total = total + 1
    return ops.depend(value, total)
