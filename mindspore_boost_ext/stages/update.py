"""The part of a step that updates the weights: the default one, and parts around another one."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.arguments import innermost
from mindspore_boost_ext.base.cells import check_cells
from mindspore_boost_ext.base.learning_rate import take_in_rates
from mindspore_boost_ext.base.mapping import call, each
from mindspore_boost_ext.base.order import is_of_libraries, methods_of
from mindspore_boost_ext.base.state import list_hidden_parameters
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import NoEffectWarning, warn
from mindspore_boost_ext.stages.gradients import multiplied

_BESIDE = {"__init__", "restricted", "before_step", "follow_script", "loss_of"}
_RUN_INNER = {"inner", "super", "UpdateAround"}  # names in a construct that runs what is within


class Update(nn.Cell):
    r"""Runs the optimizer; parts that do more derive from it.

    Args:
        optimizer (Cell): the optimizer of the step's weights.

    Inputs:
        - **loss** (Tensor) - the loss; it is returned when the weights are written.
        - **gradients** (tuple(Tensor)) - one for each weight, reduced over ranks, without the
          loss scale.
        - **\*inputs** (tuple(Tensor)) - the batch; empty when a window that is not full is flushed,
          unless ``takes_inputs``.

    Outputs:
        Tensor, ``loss``.
    """

    # Whether the part runs the network again, and so needs the batch.
    takes_inputs = False
    # Whether it divides the step's ``sens`` out of the gradients itself.
    divides_sens = False
    factor = 1.0  # on the gradients that the optimizer gets
    # Whether a construct of its own multiplies by it, which is what ``times_factor`` does.
    takes_factor = False

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Update the weights."""
        return ops.depend(loss, self.optimizer(self.times_factor(gradients)))

    def times_factor(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return gradients times ``factor``."""
        if self.factor == 1.0:
            return gradients
        return each(ops.partial(multiplied, self.factor), gradients)

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> Update:
        """Return this part for some of the weights: a copy with the same attributes and state.

        Args:
            optimizer (Cell): the optimizer of these weights.
            positions (tuple(int)): their positions among all weights.
        """
        part: Update = _compat.shallow_copy(self)
        part.optimizer = optimizer
        return part

    def before_step(self, *inputs: Tensor) -> None:
        """Look at the batch on the host, before a step runs, and at what the script has set."""
        self.follow_script()

    def follow_script(self) -> None:
        """Take over what the script has set since the last run, such as rates."""
        take_in_rates(innermost(self.optimizer))

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the loss of the batch ``inputs``, shape (); 0 if the part runs no network."""
        return Tensor(0.0)


class UpdateAround(Update):
    r"""Does something before or after another part; ``construct`` calls :attr:`inner`.

    In a step that trains some of the weights, a copy of this part runs around a restricted
    :attr:`inner`. The copy has the same attributes and state.

    Args:
        inner (Update): the part that was in this place before.
    """

    def __init__(self, inner: Update) -> None:
        super().__init__(inner.optimizer)
        self.inner = inner
        self.takes_inputs = type(self).takes_inputs or inner.takes_inputs
        self.divides_sens = type(self).divides_sens or inner.divides_sens

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Run :attr:`inner`."""
        return call(self.inner, (loss, gradients, *inputs))

    def restricted(self, optimizer: nn.Cell, positions: tuple[int, ...]) -> UpdateAround:
        """Return this part for some of the weights; arguments are those of :class:`Update`."""
        part: Any = super().restricted(optimizer, positions)
        part.inner = self.inner.restricted(optimizer, positions)
        return part

    def before_step(self, *inputs: Tensor) -> None:
        """Let :attr:`inner` look at the batch, too."""
        self.inner.before_step(*inputs)

    def follow_script(self) -> None:
        """Let :attr:`inner` take it over."""
        self.inner.follow_script()

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the loss that :attr:`inner` returns."""
        return call(self.inner.loss_of, inputs)


class HidesSens(UpdateAround):
    """Divides gradients by ``sens`` for the user's parts in it."""

    def __init__(self, inner: Update, sens: float) -> None:
        super().__init__(inner)
        self.inverse = 1.0 / sens

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Divide, and run :attr:`inner`."""
        divided = each(ops.partial(multiplied, self.inverse), gradients)
        return call(self.inner, (loss, divided, *inputs))


def parts_within(part: Update) -> list[Update]:
    """Return a part, then the one that it runs, and so on; the last one runs the optimizer."""
    return [part, *(parts_within(part.inner) if isinstance(part, UpdateAround) else ())]


def hiding_sens(part: Update, sens: float) -> Update:
    """Return parts for gradients times ``sens``, of which the user's see nothing.

    The innermost part gets it back: it, or the optimizer by its ``loss_scale``, divides by it.
    """
    parts = parts_within(part)
    last = parts[-1]
    own = [type(within) for within in parts if not is_of_libraries(type(within).__module__)]
    before = list(itertools.takewhile(lambda kind: not kind.divides_sens, own))
    if sens == 1 or not before:
        return part
    if len(before) < len(own):
        first, divides = before[0].__name__, own[len(before)].__name__
        raise ValueError(
            f"{divides} divides by the loss scale itself (divides_sens), but {first} runs before "
            f"it, on gradients times the scale, {sens:g}: give the algorithm of {divides} after "
            f"that of {first}, so that it runs first"
        )
    if not (type(last) is Update or last.takes_factor):
        raise ValueError(
            f"{type(last).__name__} gets gradients times the loss scale, {sens:g}, which the "
            "optimizer divides out: derive it from UpdateAround, which gets them without; or set "
            "the class attribute divides_sens = True, if it divides by the scale itself"
        )
    for within in parts[:-1]:
        _check_runs_inner(within, f"multiplies by the loss scale, {sens:g}, for the optimizer")
    last.factor = float(sens)
    return HidesSens(part, last.factor)


def check_own_part(switch: str, part: object, before: Update) -> None:
    """Refuse a part of the user's that leaves another one out, or runs it by itself.

    A variant of the step restricts it only as :attr:`UpdateAround.inner`.
    """
    if not isinstance(part, Update):
        raise TypeError(f"{switch}: update_part must be an Update, got {shown(part)}")
    _check_takes_batch(switch, part)
    if before in parts_within(part):
        if type(before) is not Update:
            _check_runs_inner(part, "would do nothing")
        return
    if type(before) is not Update or any(cell is before for _, cell in part.cells_and_names()):
        kind = type(part).__name__
        raise ValueError(
            f"{switch}: {kind} must derive from UpdateAround, be made with the update_part that "
            f"was in its place, {type(before).__name__}, and run it as self.inner"
        )


def _check_runs_inner(part: UpdateAround, what: str) -> None:
    """Refuse a part of the user's whose construct only runs the optimizer itself."""
    kinds = [kind for kind in type(part).mro() if not is_of_libraries(kind.__module__)]
    methods = {name: one for kind in reversed(kinds) for name, one in methods_of(kind).items()}
    nodes = [node for name in methods.keys() - _BESIDE for node in ast.walk(methods[name])]
    called = {getattr(node.func, "attr", "") for node in nodes if isinstance(node, ast.Call)}
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
    if "construct" in methods and "optimizer" in called and names.isdisjoint(_RUN_INNER):
        raise ValueError(
            f"construct of {type(part).__name__} runs self.optimizer, but not self.inner "
            f"({type(part.inner).__name__}), which {what}: run self.inner instead"
        )


def _check_takes_batch(switch: str, part: Update) -> None:
    """Refuse a construct without room for the batch."""
    taken = inspect.signature(part.construct).parameters.values()
    if len(taken) <= 2 and not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in taken):
        raise ValueError(
            f"{switch}: construct of {type(part).__name__} must take (loss, gradients, *inputs), "
            "where inputs are the batch"
        )


def list_state_of_own_parts(step: nn.TrainOneStepCell) -> None:
    """Let the user's parts of a step list Parameters in lists: else no checkpoint has them."""
    parts = (step.batch_part, step.captures_part, step.window_part)
    names: dict[str, Parameter] = {}
    for part in (*parts, *parts_within(step.update_part)):
        if isinstance(part, nn.Cell) and not is_of_libraries(type(part).__module__):
            list_hidden_parameters(part, step.network)
            for state in _compat.own_parameters(part).values():
                if names.setdefault(state.name, state) is not state:
                    raise ValueError(
                        f"two parts have state named {state.name!r}: name that of "
                        f"{type(part).__name__} boost.<switch>.<name>, by a switch for each part"
                    )


def look_at_optimizer(optimizer: nn.Cell, network: nn.Cell, step_class: type) -> None:
    """Let an optimizer list all its state, and warn if it seems to train nothing of a network.

    It raises a ``TypeError`` for anything that is not an optimizer, or no network, and a
    ``ValueError`` for a weight that has the name of something in the step.
    """
    check_cells(network=network)
    if not hasattr(optimizer, "parameters"):
        raise TypeError(f"optimizer must be a MindSpore optimizer, got {shown(optimizer)}")
    # Weights become attributes of the step, by their names.
    taken = set(dir(step_class)).difference(dir(nn.TrainOneStepCell))
    taken |= getattr(step_class, "own_names", frozenset())
    if found := sorted(taken.intersection(parameter.name for parameter in optimizer.parameters)):
        raise ValueError(
            f"the Parameter {found[0]!r} has a name that the training step uses itself: give it "
            "another name, or hold it in a layer"
        )
    for one in (optimizer, innermost(optimizer)):
        list_hidden_parameters(one, network)
    own = {id(parameter) for parameter in network.get_parameters()}
    if not any(id(parameter) in own for parameter in optimizer.parameters):
        warn(
            "the network has none of the optimizer's Parameters, so it is not trained, unless it "
            "holds Cells in Python lists: give the optimizer the trainable_params() of this same "
            "network",
            NoEffectWarning,
        )
    _warn_of_second_optimizer(optimizer, network)


def _warn_of_second_optimizer(optimizer: nn.Cell, network: nn.Cell) -> None:
    """Warn of a network that is a training step itself."""
    trained = {id(parameter) for parameter in optimizer.parameters}
    for name, cell in network.cells_and_names():
        trains = isinstance(cell, nn.Optimizer) or hasattr(cell, "param_groups")
        held = getattr(cell, "parameters", ()) if trains else ()
        if isinstance(held, (tuple, list)) and not trained.isdisjoint(map(id, held)):
            warn(
                f"the network holds an optimizer, {name!r}, over weights that this step trains: if "
                "it is a training step, each batch updates them twice; give the network with its "
                "loss instead"
            )
            return


def warn_of_idle_optimizer(optimizer: nn.Cell) -> None:
    """Warn of an optimizer that changes no weight on CPU if its operators run one by one."""
    kind = type(innermost(optimizer))
    if kind.__module__.startswith("mindspore.mint") and ms.get_context("device_target") == "CPU":
        warn(
            f"mindspore.mint.optim.{kind.__name__} trains nothing on CPU in PYNATIVE_MODE "
            "(MindSpore documents it for Ascend only): use an optimizer of mindspore.nn or of "
            "mindspore.experimental.optim",
            NoEffectWarning,
        )
