"""Gradient freezing: in most steps only the later layers are trained.

What it does: the trainable parameters are cut into groups along the network; group 0 is
everything, group k leaves out the first k parts. A schedule names the group of each step. The
backward pass stops at the first trained layer, and the update leaves frozen parameters and their
moments untouched.

Update rule: at the step where the schedule says group k, the plain optimizer's update of the
parameters of group k with the gradients of the whole network; the global step grows by one. All
groups share one set of moments (see :mod:`mindspore_boost_ext.optimizer_view`), one global step and
one learning-rate schedule; what depends on the step alone (Adam's bias correction) goes on for
frozen parameters too.

Schedules (G groups):

* type 0, continuous: 0 … 0, 1, 2, … G−1, repeated;
* type 1, interval: 0 and a drawn group take turns; early groups are likelier, P(k) ∝ G−k;
* prefix: a growing part of the network is frozen for good (:func:`prefix_schedule`);
* your own list, or a function of the step.

In types 0 and 1 ``freeze_p`` is, in spite of its name, **the share of steps that train
everything**: 0.7 trains everything in 70 % of the steps. Smaller values freeze more.

When it helps: deep networks whose first layers converge early, fine-tuning. When it hurts: at the
default settings little backward work is saved; a prefix frozen too early costs accuracy. BatchNorm
statistics and dropout of frozen layers go on as in training.
Measured effect: not measured yet.
Cost: one compiled step for each distinct group; no optimizer state beyond the plain optimizer's,
and one int32 for the position in the schedule.
Devices and modes: run on CPU in GRAPH_MODE and PYNATIVE_MODE; written, not run, for GPU and Ascend.
How it combines: with every optimizer of ``mindspore.nn`` but THOR, LARS over any, and fixed loss
scale.
Reference: Brock et al., FreezeOut, 2017 (prefix schedules).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext._rules import Rule, integer, one_of, real, shown
from mindspore_boost_ext.optimizer_view import optimizer_view, parameter_positions
from mindspore_boost_ext.report import LOGGER, NoEffectWarning, warn

CONTINUOUS, INTERVAL = 0, 1
WRAP, HOLD = "wrap", "hold"
POSITION_NAME = "boost.grad_freeze.position"
_CHUNK = 3  # parameters in a chunk before it may close
_MARGIN = 1.01  # entries of a sequence for each step asked for


@dataclass(frozen=True)
class FreezeSchedule:
    """Which group trains at which step.

    Attributes:
        groups: the group of each step, ints >= 0.
        at_end: what follows the last entry: ``"wrap"`` starts again, ``"hold"`` keeps the last one.
    """

    groups: tuple[int, ...]
    at_end: str = WRAP

    def __post_init__(self) -> None:
        """Check the entries; NumPy integers become ints."""
        for group in self.groups:
            _check("train_strategy", group, integer(0), "give ints, the group of each step")
        _check("at_end", self.at_end, one_of((WRAP, HOLD)))
        if not self.groups:
            raise ValueError("train_strategy must have at least one entry: give None for none")
        object.__setattr__(self, "groups", tuple(int(group) for group in self.groups))

    def at(self, position: int) -> int:
        """Return the group of the step that comes after ``position`` steps."""
        last = len(self.groups) - 1
        return self.groups[min(position, last) if self.at_end == HOLD else position % (last + 1)]


Strategy = Union[FreezeSchedule, Sequence[int], Tensor, None]
OwnSchedule = Union[FreezeSchedule, Sequence[int], Callable[[int], int], str, None]


def continuous_sequence(groups: int, freeze_p: float, total_steps: int) -> list[int]:
    """Return freeze type 0: a run of zeros, then each group once, over and over.

    Args:
        groups: number of groups, >= 1.
        freeze_p: share of zeros, in [0, 1).
        total_steps: steps of the training; the list is at least 1 % longer.
    """
    length = int(total_steps * _MARGIN)
    if groups <= 1:
        return [0] * length
    zeros = int(freeze_p * (groups - 1) // (1 - freeze_p) + 0.5)
    pattern = [0] * zeros + list(range(1, groups))
    return pattern * math.ceil(length / len(pattern))


def interval_sequence(groups: int, freeze_p: float, total_steps: int, seed: int) -> list[int]:
    """Return freeze type 1: zeros and drawn groups take turns so that ``freeze_p`` are zeros.

    Args:
        groups: number of groups, >= 1.
        freeze_p: share of zeros, in [0, 1). The running share is never off by more than one step.
        total_steps: steps of the training; the list is 1 % longer, rounded down.
        seed: seed of the draws, which take k from 1 … groups−1 with probability ∝ groups−k.
    """
    length = int(total_steps * _MARGIN)
    if groups <= 1:
        return [0] * length
    weights = np.arange(groups - 1, 0, -1)
    draws = np.random.default_rng(seed).choice(
        np.arange(1, groups), size=length, p=weights / weights.sum()
    )
    sequence, frozen = [0], 0
    while len(sequence) < length:
        if frozen / len(sequence) < 1 - freeze_p:
            sequence.append(int(draws[frozen]))
            frozen += 1
        else:
            sequence.append(0)
    return sequence


def prefix_schedule(
    groups: int,
    total_steps: int,
    kind: str = "linear",
    *,
    fraction: float = 1.0,
    start: float = 0.5,
) -> FreezeSchedule:
    r"""Return a schedule that freezes a growing prefix of the network for good.

    With :math:`K = \lfloor fraction\cdot(G-1)\rfloor`, prefix k of 1 … K is frozen from the share
    :math:`t_k` of the steps on: linear :math:`t_k = s + (1-s)(k-1)/K`; cubic
    :math:`t_k = (\sqrt[3]s + (1-\sqrt[3]s)(k-1)/K)^3`, which freezes the first parts sooner after
    each other; step :math:`t_k = s`, all at once.

    Args:
        groups: number of groups G, an int >= 1. Group 0 trains everything.
        total_steps: steps of the training, an int >= 1. After them the last group stays.
        kind: ``"linear"``, ``"cubic"`` or ``"step"``.
        fraction: how much of the network is frozen in the end, in [0, 1]. The last part never is.
        start: the share s of the steps before the first freezing, in [0, 1].

    Raises:
        ValueError: if an argument is out of its range.

    Examples:
        >>> from mindspore_boost_ext.grad_freeze import prefix_schedule
        >>> prefix_schedule(3, 8, start=0.5).groups
        (0, 0, 0, 0, 1, 1, 2, 2)
    """
    _check("groups", groups, integer(1))
    _check("total_steps", total_steps, integer(1))
    _check("kind", kind, one_of(("linear", "cubic", "step")))
    _check("fraction", fraction, real("[0, 1]"))
    _check("start", start, real("[0, 1]"))
    frozen = math.floor(fraction * (groups - 1) + 1e-9)
    ramp = np.arange(frozen) / max(frozen, 1)
    power = {"linear": 1, "cubic": 3, "step": 1}[kind]
    root = start ** (1 / power)
    shares = np.full(frozen, start) if kind == "step" else (root + (1 - root) * ramp) ** power
    # Rounded so that 0.5 of 8 steps is 4 whatever the arithmetic says in the sixteenth digit.
    first_steps = np.ceil(np.round(shares * total_steps, 6))
    sequence = np.searchsorted(first_steps, np.arange(total_steps), side="right")
    return FreezeSchedule(tuple(int(group) for group in sequence), HOLD)


def tabulate(schedule: Callable[[int], int], total_steps: int) -> FreezeSchedule:
    """Return the schedule of a function of the step: step 0, 1, … -> group.

    Args:
        schedule: called once for each step, here and now; it must return ints >= 0.
        total_steps: number of steps, an int >= 1. After them the schedule starts again.
    """
    _check("total_steps", total_steps, integer(1))
    return FreezeSchedule(tuple(schedule(step) for step in range(int(total_steps))))


def split_chunks(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Cut parameters into the smallest parts that are frozen together.

    A chunk closes when it has three parameters or more, before a parameter whose name holds neither
    ``bn`` nor ``bias``: a convolution keeps its BatchNorm and its bias.
    """
    chunks: list[list[Parameter]] = []
    for parameter in parameters:
        opens = not any(part in parameter.name for part in ("bn", "bias"))
        if not chunks or (opens and len(chunks[-1]) >= _CHUNK):
            chunks.append([])
        chunks[-1].append(parameter)
    return chunks


def growing_prefixes(chunks: Sequence[list[Parameter]], groups: int) -> list[list[Parameter]]:
    """Return the trained parameters of each group: group k is the chunks from k·stride on.

    There are never more groups than chunks: further ones would be the same as group 0.
    """
    groups = min(groups, len(chunks))
    stride = len(chunks) // max(groups, 1)
    return [
        [parameter for chunk in chunks[group * stride :] for parameter in chunk]
        for group in range(groups)
    ]


class FreezeOpt(nn.Optimizer):
    r"""An optimizer with groups of parameters to train, and a schedule of them.

    It owns nothing but its position in the schedule; moments, global step and learning rate are
    those of ``opt``, which stays usable. It reads as ``opt`` does (``learning_rate``,
    ``global_step``, ``loss_scale``, ``get_lr`` and so on); called with all gradients it updates
    everything, as ``opt`` does.

    Args:
        opt (nn.Optimizer): the plain optimizer, or ``nn.LARS`` over one.
        train_parameter_groups (Union[tuple, list], optional): for each group the parameters it
            trains: Parameters, or dicts with ``"params"`` as for an optimizer. Default: None, one
            group of all.
        train_strategy (Union[FreezeSchedule, tuple, list, Tensor], optional): the group of each
            step; a Tensor is int32 [steps]. It starts again at its end unless the schedule holds.
            Default: None, the groups in turn.

    Inputs:
        - **gradients** (tuple(Tensor)) - one gradient for each of ``parameters``.

    Outputs:
        The output of ``opt``.

    Attributes:
        opt (nn.Optimizer): the plain optimizer.
        train_parameter_groups (list): the Parameters of each group, in the order of ``parameters``.
        train_strategy (tuple): the group of each step, or None.
        schedule (FreezeSchedule): the same with what happens at its end; never None.
        position (Parameter): int32 [], steps taken so far, named ``boost.grad_freeze.position``.
        opts (tuple): the optimizer of each group; equal groups share one.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a group is empty or holds a parameter that ``opt`` does not train, or the
            strategy names a group that does not exist.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.grad_freeze import FreezeOpt
        >>> net = nn.Dense(2, 2)
        >>> weight, bias = net.trainable_params()
        >>> plain = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> optimizer = FreezeOpt(plain, [[weight, bias], [bias]], [0, 1, 1])
        >>> [parameter.name for parameter in optimizer.view(1).parameters]
        ['bias']
        >>> optimizer.view(0) is plain
        True
    """

    def __init__(
        self,
        opt: nn.Optimizer,
        train_parameter_groups: Sequence[Iterable[Any]] | None = None,
        train_strategy: Strategy = None,
    ) -> None:
        """Find the groups in the optimizer; their views are made when they are asked for."""
        if not isinstance(opt, nn.Optimizer):
            raise TypeError(f"opt must be an nn.Optimizer, got {shown(opt)}")
        if train_strategy is not None and train_parameter_groups is None:
            raise ValueError("train_strategy needs train_parameter_groups: give both or neither")
        # Optimizer.__init__ would build a second set of state.
        nn.Cell.__init__(self, auto_prefix=False)
        self.opt = opt
        self.group_positions = self._positions(train_parameter_groups)
        self.schedule = _as_schedule(train_strategy, len(self.group_positions))
        self.train_strategy = None if train_strategy is None else self.schedule.groups
        self.position = Parameter(Tensor(0, ms.int32), name=POSITION_NAME, requires_grad=False)
        self._views: dict[tuple[int, ...], nn.Optimizer] = {}
        prepare_first_step(self.base)

    def __getattr__(self, name: str) -> Any:
        """Read as the plain optimizer does whatever this object does not have itself."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            opt = self.__dict__.get("_cells", {}).get("opt")
            if opt is None or name.startswith("_"):
                raise
            return getattr(opt, name)

    @property
    def base(self) -> nn.Optimizer:
        """The optimizer that holds the moments: under LARS, the one it wraps."""
        return self.opt.opt if isinstance(self.opt, nn.LARS) else self.opt

    @property
    def parameters(self) -> ParameterTuple:
        """All parameters, as the plain optimizer lists them."""
        return self.opt.parameters

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the plain optimizer: a Parameter, a schedule, or one a parameter."""
        return self.base.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.base.learning_rate = value

    @property
    def train_parameter_groups(self) -> list[list[Parameter]]:
        """The trained parameters of each group, in the order of ``parameters``."""
        return [[self.parameters[place] for place in group] for group in self.group_positions]

    @property
    def opts(self) -> tuple[nn.Optimizer, ...]:
        """The optimizer of each group; equal groups share one."""
        return tuple(self.view(group) for group in range(len(self.group_positions)))

    def view(self, group: int) -> nn.Optimizer:
        """Return the optimizer of one group: ``opt`` itself if the group is everything.

        Args:
            group: from 0 to the number of groups less one.
        """
        positions = self.group_positions[group]
        if len(positions) == len(self.parameters):
            return self.opt
        if positions not in self._views:
            self._views[positions] = optimizer_view(self.opt, positions)
        return self._views[positions]

    def counts(self) -> dict[str, int]:
        """Return figures for a report: groups, distinct ones, and the share of full steps in %."""
        full = sum(
            len(self.group_positions[group]) == len(self.parameters)
            for group in self.schedule.groups
        )
        return {
            "groups": len(self.group_positions),
            "distinct_groups": len(set(self.group_positions)),
            "steps_training_everything_percent": round(100 * full / len(self.schedule.groups)),
        }

    def get_lr(self) -> Any:
        """Return the learning rate of this step, as the plain optimizer does."""
        return self.base.get_lr()

    def get_lr_parameter(self, param: Any) -> Any:
        """Return the learning rate that belongs to a parameter, or to each of a list."""
        return self.base.get_lr_parameter(param)

    def get_weight_decay(self) -> Any:
        """Return the weight decay of this step, as the plain optimizer does."""
        return self.opt.get_weight_decay()

    def construct(self, gradients: tuple[Tensor, ...]) -> Any:
        """Update all parameters, as the plain optimizer does."""
        return self.opt(gradients)

    def _positions(self, groups: Sequence[Iterable[Any]] | None) -> tuple[tuple[int, ...], ...]:
        if groups is None:
            return (tuple(range(len(self.parameters))),)
        if not isinstance(groups, (tuple, list)):
            raise TypeError(f"train_parameter_groups must be a tuple or list, got {shown(groups)}")
        if not groups:
            raise ValueError(
                "train_parameter_groups must have at least one group: give None for one"
            )
        found = tuple(parameter_positions(self.opt, _flat(group)) for group in groups)
        for number, positions in enumerate(found):
            if not positions:
                raise ValueError(
                    f"train_parameter_groups[{number}] must hold at least one parameter: "
                    "leave it out"
                )
        return found


class GradientFreeze:
    r"""Cuts a network into groups and gives its optimizer a schedule of them.

    Args:
        param_groups (int): number of groups, >= 1. A network with fewer parts gets fewer.
        freeze_type (int): 0 for the continuous, 1 for the interval sequence.
        freeze_p (float): share of steps that train everything, in [0, 1).
        total_steps (int): steps of the training, >= 1; the sequence starts again after 1 % more.
        seed (int): seed of freeze type 1, >= 0. Default: 0.
        schedule (Union[FreezeSchedule, list, tuple, Callable, str], optional): your own schedule
            instead of a freeze type: the group of each step as a list; a function step -> group; or
            the kind of a :func:`prefix_schedule`. Default: None.

    Raises:
        ValueError: for everything wrong with the arguments, all in one message.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.grad_freeze import GradientFreeze
        >>> net = nn.SequentialCell(*[nn.Dense(4, 4) for _ in range(6)])
        >>> plain = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> network, optimizer = GradientFreeze(3, 0, 0.5, 8).freeze_generate(net, plain)
        >>> optimizer.train_strategy
        (0, 0, 1, 2, 0, 0, 1, 2)
        >>> [len(group) for group in optimizer.train_parameter_groups]
        [12, 8, 4]
    """

    def __init__(
        self,
        param_groups: int,
        freeze_type: int,
        freeze_p: float,
        total_steps: int,
        *,
        seed: int = 0,
        schedule: OwnSchedule = None,
    ) -> None:
        """Check the arguments; no network is needed yet."""
        _check_settings(
            param_groups=(param_groups, integer(1)),
            freeze_type=(freeze_type, one_of((CONTINUOUS, INTERVAL))),
            freeze_p=(freeze_p, real("[0, 1)")),
            total_steps=(total_steps, integer(1)),
            seed=(seed, integer(0)),
        )
        self._param_groups = int(param_groups)
        self._freeze_type = freeze_type
        self._freeze_p = float(freeze_p)
        self._total_steps = int(total_steps)
        self._seed = int(seed)
        self._schedule = schedule
        self.grad_reducer = nn.Identity()

    def split_parameters_groups(
        self, net: nn.Cell, freeze_para_groups_number: int
    ) -> list[list[Parameter]]:
        """Return the trained parameters of each group of a network.

        Args:
            net (Cell): the network.
            freeze_para_groups_number (int): groups wanted; never more come back than the network
                has parts.

        Returns:
            list[list[Parameter]]; the first group is all trainable parameters, and each further one
            leaves out a longer part of its beginning.
        """
        _check("freeze_para_groups_number", freeze_para_groups_number, integer(1))
        return growing_prefixes(split_chunks(net.trainable_params()), freeze_para_groups_number)

    def generate_freeze_index_sequence(
        self,
        parameter_groups_number: int,
        freeze_strategy: int,
        freeze_p: float,
        total_steps: int,
    ) -> list[int]:
        """Return the group of each step.

        Args:
            parameter_groups_number (int): number of groups, >= 1.
            freeze_strategy (int): 0 for the continuous, 1 for the interval sequence.
            freeze_p (float): share of steps that train everything, in [0, 1).
            total_steps (int): steps of the training, >= 1.

        Raises:
            ValueError: for everything wrong with the arguments, all in one message.
        """
        _check_settings(
            parameter_groups_number=(parameter_groups_number, integer(1)),
            freeze_strategy=(freeze_strategy, one_of((CONTINUOUS, INTERVAL))),
            freeze_p=(freeze_p, real("[0, 1)")),
            total_steps=(total_steps, integer(1)),
        )
        if freeze_strategy == CONTINUOUS:
            return continuous_sequence(parameter_groups_number, freeze_p, total_steps)
        return interval_sequence(parameter_groups_number, freeze_p, total_steps, self._seed)

    def freeze_generate(
        self, network: nn.Cell, optimizer: nn.Optimizer
    ) -> tuple[nn.Cell, FreezeOpt]:
        """Return the network as it is, and the optimizer with groups and schedule.

        Parameters that the optimizer trains but the network does not have are never frozen.

        Args:
            network (Cell): the network, with or without its loss.
            optimizer (nn.Optimizer): the optimizer over its trainable parameters.

        Raises:
            TypeError: if ``optimizer`` is not an ``nn.Optimizer``.
        """
        if not isinstance(optimizer, nn.Optimizer):
            raise TypeError(f"optimizer must be an nn.Optimizer, got {shown(optimizer)}")
        trained = {id(parameter) for parameter in optimizer.parameters}
        owned = [one for one in network.trainable_params() if id(one) in trained]
        known = {id(parameter) for parameter in owned}
        always = [one for one in optimizer.parameters if id(one) not in known]
        groups = growing_prefixes(split_chunks(owned), self._param_groups) or [[]]
        self._tell_fewer(len(groups))
        groups = [group + always for group in groups]
        return network, FreezeOpt(optimizer, groups, self._own_schedule(len(groups)))

    def _own_schedule(self, groups: int) -> Strategy:
        """Return the schedule for the number of groups that the network really has."""
        if self._schedule is None:
            return self.generate_freeze_index_sequence(
                groups, self._freeze_type, self._freeze_p, self._total_steps
            )
        if isinstance(self._schedule, str):
            return prefix_schedule(groups, self._total_steps, self._schedule)
        if callable(self._schedule):
            return tabulate(self._schedule, self._total_steps)
        return self._schedule

    def _tell_fewer(self, groups: int) -> None:
        if groups == 1:
            warn(
                f"grad_freeze has no effect: param_groups={self._param_groups} and the network "
                "leave one group only, which trains everything",
                NoEffectWarning,
                stacklevel=3,
            )
        elif groups < self._param_groups:
            LOGGER.info(
                "grad_freeze: the network has %d parts to freeze, so %d groups instead of %d",
                groups,
                groups,
                self._param_groups,
            )


class GroupTrainStep(nn.Cell):
    r"""One training step of one group: MindSpore's own, with the group's weights and optimizer.

    Args:
        network (Cell): the network with its loss.
        optimizer (nn.Optimizer): the optimizer of the group, as ``FreezeOpt.view`` gives it.
        grad (GradOperation): with ``get_by_list=True, sens_param=True``.
        sens (numbers.Number): factor on the gradients, put into the backward pass.
        grad_reducer (Cell): gradients -> gradients, reduced over ranks.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network``.

    Outputs:
        Tensor, the loss.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Optimizer,
        grad: ops.GradOperation,
        sens: numbers.Number,
        grad_reducer: nn.Cell,
    ) -> None:
        """Take the parts; nothing is renamed."""
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.grad = grad
        self.sens = sens
        self.grad_reducer = grad_reducer

    def construct(self, *inputs: Tensor) -> Tensor:
        """Compute loss and gradients, reduce, update."""
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        gradients = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        return ops.depend(loss, self.optimizer(gradients))


class ScheduledSteps(nn.Cell):
    r"""Runs the training step whose turn it is, and moves the position on; all of it in the graph.

    Args:
        steps (tuple(Cell)): one training step for each group, as :func:`freeze_cell` makes them.
        optimizer (FreezeOpt): whose schedule and position it follows.

    Inputs:
        - **\*inputs** (tuple(Tensor)) - the inputs of the network.

    Outputs:
        Tensor, the loss.
    """

    def __init__(self, steps: Sequence[nn.Cell], optimizer: FreezeOpt) -> None:
        """Number the distinct steps and write the schedule in those numbers."""
        super().__init__(auto_prefix=False)
        distinct = list({id(step): step for step in steps}.values())
        numbers_of = [distinct.index(step) for step in steps]
        schedule = optimizer.schedule
        self.steps = nn.CellList(distinct, auto_prefix=False)
        self.branches = tuple(distinct)  # a CellList takes no Tensor as its index in PYNATIVE_MODE
        self.only = distinct[0] if len(distinct) == 1 else None
        self.table = Tensor([numbers_of[group] for group in schedule.groups], ms.int32)
        self.length = len(schedule.groups)
        self.holds = schedule.at_end == HOLD
        self.position = optimizer.position

    def construct(self, *inputs: Tensor) -> Tensor:
        """Look up the step, run it, move on."""
        loss = self.only(*inputs) if self.only is not None else self.branches[self._turn()](*inputs)
        return ops.depend(loss, ops.assign_add(self.position, 1))

    def _turn(self) -> Tensor:
        if self.holds:
            return self.table[ops.minimum(self.position, self.length - 1)]
        return self.table[self.position % self.length]


def freeze_cell(
    reducer_flag: bool,
    network: nn.Cell,
    optimizer: FreezeOpt,
    sens: numbers.Number,
    grad: ops.GradOperation,
    use_grad_accumulation: bool,
    mean: bool | None = None,
    degree: int | None = None,
    max_accumulation_step: int = 1,
) -> tuple[nn.Cell, ...]:
    """Return a training step for each group of the optimizer; equal groups share one.

    Args:
        reducer_flag (bool): whether gradients are reduced over ranks.
        network (Cell): the network with its loss.
        optimizer (FreezeOpt): the optimizer with its groups.
        sens (numbers.Number): factor on the gradients, put into the backward pass.
        grad (GradOperation): ``ops.GradOperation(get_by_list=True, sens_param=True)``.
        use_grad_accumulation (bool): not available yet; must be False.
        mean (bool, optional): with ``reducer_flag``, whether ranks are averaged. Default: None.
        degree (int, optional): with ``reducer_flag``, the number of ranks. Default: None.
        max_accumulation_step (int): without effect as long as accumulation is not available.

    Returns:
        tuple(Cell), inputs of the network -> loss, one for each of ``train_parameter_groups``.

    Raises:
        TypeError: if ``optimizer`` is not a ``FreezeOpt``.
        NotImplementedError: if ``use_grad_accumulation`` is True.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from mindspore_boost_ext.grad_freeze import FreezeOpt, freeze_cell
        >>> net = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> weight, bias = net.trainable_params()
        >>> optimizer = FreezeOpt(nn.SGD([weight, bias], 0.5), [[weight, bias], [bias]], [1])
        >>> grad = ops.GradOperation(get_by_list=True, sens_param=True)
        >>> loss = nn.WithLossCell(net, nn.MSELoss())
        >>> steps = freeze_cell(False, loss, optimizer, 1.0, grad, False)
        >>> inputs, labels = np.ones((1, 2), np.float32), np.zeros((1, 1), np.float32)
        >>> float(steps[1](Tensor(inputs), Tensor(labels)).asnumpy())
        4.0
        >>> weight.asnumpy().tolist(), bias.asnumpy().tolist()
        ([[1.0, 1.0]], [-2.0])
    """
    if not isinstance(optimizer, FreezeOpt):
        raise TypeError(f"optimizer must be a FreezeOpt, got {shown(optimizer)}")
    if use_grad_accumulation:
        raise NotImplementedError(
            "gradient freezing together with gradient accumulation is not implemented yet: switch "
            "one of the two off"
        )
    steps: dict[int, nn.Cell] = {}
    for view in optimizer.opts:
        if id(view) not in steps:
            reducer: nn.Cell = nn.Identity()
            if reducer_flag:
                reducer = nn.DistributedGradReducer(list(view.parameters), mean, degree)
            steps[id(view)] = GroupTrainStep(network, view, grad, sens, reducer)
    return tuple(steps[id(view)] for view in optimizer.opts)


def prepare_first_step(optimizer: nn.Optimizer) -> None:
    """Write, before the first step, the state that some optimizers set up in it.

    Rprop's step sizes and ASGD's rates start as the learning rate, written at global step 1: a
    parameter frozen then would never get them. For parameters trained in that step nothing changes.

    Args:
        optimizer (nn.Optimizer): any; others, and those that have begun, are left alone.
    """
    state = {nn.Rprop: "step_size", nn.ASGD: "eta"}
    names = [name for kind, name in state.items() if isinstance(optimizer, kind)]
    if not names or int(optimizer.global_step.asnumpy()[0]) != 0:
        return
    for place, parameter in enumerate(getattr(optimizer, names[0])):
        rate = optimizer.learning_rate
        rate = rate[place] if optimizer.is_group_lr else rate
        if isinstance(rate, nn.Cell):
            rate = rate.construct(Tensor([0], ms.int32))
        first = np.full(parameter.shape, rate.asnumpy().reshape(()), np.float32)
        parameter.set_data(Tensor(first, parameter.dtype))


def _as_schedule(strategy: Strategy, groups: int) -> FreezeSchedule:
    """Return any form of strategy as a schedule that names existing groups only."""
    if strategy is None:
        return FreezeSchedule(tuple(range(groups)))
    if isinstance(strategy, (Tensor, np.ndarray)):
        if strategy.ndim != 1:
            raise ValueError(f"train_strategy must have one axis, got shape {strategy.shape}")
        strategy = (strategy.asnumpy() if isinstance(strategy, Tensor) else strategy).tolist()
    if isinstance(strategy, (list, tuple)):
        strategy = FreezeSchedule(tuple(strategy))
    if not isinstance(strategy, FreezeSchedule):
        raise TypeError(
            "train_strategy must be a list, tuple, int32 Tensor, FreezeSchedule or None, got "
            f"{shown(strategy)}: tabulate(function, total_steps) makes one of a function"
        )
    highest = max(strategy.groups)
    if highest >= groups:
        raise ValueError(
            f"train_strategy must name groups 0 to {groups - 1}, got {highest}: the network has "
            f"{groups} groups"
        )
    return strategy


def _flat(group: Iterable[Any]) -> list[Parameter]:
    """Return the Parameters of a group given as Parameters or as optimizer dicts."""
    if isinstance(group, (str, bytes, Parameter, dict)) or not isinstance(group, Iterable):
        raise TypeError(
            "every entry of train_parameter_groups must be a list of Parameters, got "
            f"{shown(group)}"
        )
    flat: list[Parameter] = []
    for one in group:
        flat.extend(one.get("params", ()) if isinstance(one, dict) else (one,))
    return flat


def _check(name: str, value: object, rule: Rule, remedy: str = "") -> None:
    if not rule.accepts(value):
        raise ValueError(_problem(name, value, rule) + (f": {remedy}" if remedy else ""))


def _check_settings(**settings: tuple[object, Rule]) -> None:
    """Raise one error that tells of every setting that breaks its rule."""
    problems = [
        _problem(f"grad_freeze.{name}", value, rule)
        for name, (value, rule) in settings.items()
        if not rule.accepts(value)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _problem(name: str, value: object, rule: Rule) -> str:
    return f"{name} must be {rule.text}, got {shown(value)}"


__all__ = [
    "FreezeOpt",
    "FreezeSchedule",
    "GradientFreeze",
    "ScheduledSteps",
    "freeze_cell",
    "prefix_schedule",
    "tabulate",
]
