"""Gradient freezing: in most steps only the later layers are trained."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Sequence

from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.arguments import check_optimizer
from mindspore_boost_ext.base.mapping import call, gradients_of
from mindspore_boost_ext.base.sums import filled
from mindspore_boost_ext.config.rules import check_all, integer, one_of, real, shown
from mindspore_boost_ext.config.sections import GradFreezeConfig
from mindspore_boost_ext.grad_accumulation.window import GradientAccumulation
from mindspore_boost_ext.grad_freeze.adaptive import AdaptiveFreezeOpt
from mindspore_boost_ext.grad_freeze.chooser import GroupChooser
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt
from mindspore_boost_ext.grad_freeze.schedule import (
    ADAPTIVE,
    CONTINUOUS,
    INTERVAL,
    FreezeSchedule,
    OwnSchedule,
    Strategy,
    prefix_length,
    prefix_schedule,
    tabulate,
)
from mindspore_boost_ext.grad_freeze.sequences import (
    AT_ONCE,
    DrawnGroups,
    GroupSequence,
    RepeatedGroups,
)
from mindspore_boost_ext.grad_freeze.uses import in_order_of_last_use
from mindspore_boost_ext.report import LOGGER, NoEffectWarning, warn
from mindspore_boost_ext.stages.choice import StepChoice
from mindspore_boost_ext.stages.update import Update

_MARGIN = 1.01  # entries of a sequence for each step asked for
_CHUNK = 3  # parameters in a chunk before it may close
# Names that stay with the one before: biases, BatchNorms, the one scale of a normalised head. "bn"
# inside a word, such as subnet, does not count.
_STAYS = re.compile("bias|(?<![a-z])bn|bn(?![a-z])|(?<![a-z])multiplier$")


def split_chunks(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Cut parameters into the smallest parts that are frozen together.

    A chunk of three parameters or more ends before a parameter whose name does not hold ``bn`` or
    ``bias`` and does not end with ``multiplier``. So a convolution keeps its bias, and a BatchNorm
    with such a name. Other BatchNorms may be cut off, or in two.
    """
    chunks: list[list[Parameter]] = []
    for parameter in parameters:
        opens = not _STAYS.search(parameter.name)
        if not chunks or (opens and len(chunks[-1]) >= _CHUNK):
            chunks.append([])
        chunks[-1].append(parameter)
    return chunks


def growing_prefixes(
    chunks: Sequence[list[Parameter]], groups: int, evenly: bool = False
) -> list[list[Parameter]]:
    """Return the trained parameters of each group: group k is the chunks from k·stride on.

    The stride of ``mindspore.boost`` is a whole number, so that all chunks left over stand in the
    last group; ``evenly`` shares them out. There are never more groups than chunks: further ones
    would be the same as group 0.
    """
    groups = min(groups, len(chunks))
    whole = groups * (len(chunks) // max(groups, 1))
    total = len(chunks) if evenly else whole
    firsts = [group * total // groups for group in range(groups)]
    return [[parameter for chunk in chunks[first:] for parameter in chunk] for first in firsts]


def frozen_cells(network: nn.Cell, trained: Iterable[Parameter]) -> list[nn.Cell]:
    """Return the largest Cells in ``network`` that have parameters, but none in ``trained``.

    In a ``SequentialCell``, also the Cells without parameters before the first trained one.
    """
    known = {id(parameter) for parameter in trained}

    def walk(cell: nn.Cell) -> list[nn.Cell]:
        owned = cell.trainable_params()
        if owned and known.isdisjoint(map(id, owned)):
            return [cell]
        found, before_trained = [], isinstance(cell, nn.SequentialCell)
        for inner in cell.cells():
            parts = inner.trainable_params()
            before_trained &= known.isdisjoint(map(id, parts))
            # Dropout has no parameters: its place is known in a sequence only.
            found += [inner] if before_trained and not parts else walk(inner)
        return found

    return walk(network)


class GradientFreeze:
    r"""Cuts a network into groups and gives its optimizer a schedule of them.

    Source: freeze types 0 and 1 are those of ``mindspore.boost``; the growing prefix is from Brock
    et al., FreezeOut, 2017.

    Args:
        param_groups (int): number of groups, >= 1. A network with fewer parts gets fewer.
        freeze_type (int): 0 for the continuous, 1 for the interval sequence.
        freeze_p (float): share of steps that train everything, in [0, 1).
        total_steps (int): steps of the training, >= 1; the sequence starts again after 1 % more.
        seed (int): seed of freeze type 1, >= 0. Default: 0.
        schedule (Union[FreezeSchedule, list, tuple, Callable, str], optional): your own schedule
            instead of a freeze type: the group of each step as a list; a function step -> group; or
            ``"linear"``, ``"cubic"``, ``"step"`` or ``"adaptive"``, which the card of grad_freeze
            describes. Default: None.
        prefix_fraction (float): with a prefix or adaptive schedule, the largest share of the parts
            that is frozen, in [0, 1]. Default: 1.0.
        prefix_start (float): with a prefix schedule, the share of the steps before the first
            freezing, in [0, 1]. Default: 0.5.
        adaptive_window (int): with the adaptive schedule, updates between two looks at the weights,
            >= 1. Default: 50.
        adaptive_tolerance (float): with the adaptive schedule, the share of its largest change at
            which a part has stopped, in (0, 1). Default: 0.3.

    Raises:
        ValueError: for everything wrong with the arguments, all in one message.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import GradientFreeze
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
        prefix_fraction: float = 1.0,
        prefix_start: float = 0.5,
        adaptive_window: int = 50,
        adaptive_tolerance: float = 0.3,
    ) -> None:
        own = None if isinstance(schedule, FreezeSchedule) else schedule
        GradFreezeConfig.check("grad_freeze", **dict(locals(), schedule=own))
        self._param_groups = int(param_groups)
        self._freeze_type = freeze_type
        self._freeze_p = float(freeze_p)
        self._total_steps = int(total_steps)
        self._seed = int(seed)
        self._schedule = schedule
        self._prefix = {"fraction": prefix_fraction, "start": prefix_start}
        self._adaptive = (int(adaptive_window), float(adaptive_tolerance))
        self.grad_reducer = nn.Identity()

    def split_parameters_groups(
        self, net: nn.Cell, freeze_para_groups_number: int
    ) -> list[list[Parameter]]:
        """Return the trained parameters of each group of a network.

        Args:
            net (Cell): the network.
            freeze_para_groups_number (int): groups wanted; a network with fewer parts gets fewer.

        Returns:
            list[list[Parameter]]; the first group is all trainable parameters, and each further one
            leaves out a longer prefix.
        """
        integer(1).read("freeze_para_groups_number", freeze_para_groups_number)
        chunks = split_chunks(in_order_of_last_use(net))
        return growing_prefixes(chunks, freeze_para_groups_number)

    def generate_freeze_index_sequence(
        self, parameter_groups_number: int, freeze_strategy: int, freeze_p: float, total_steps: int
    ) -> Sequence[int]:
        """Return the group of each step: a list, or above 2**20 steps a computed sequence.

        Args:
            parameter_groups_number (int): number of groups, >= 1.
            freeze_strategy (int): 0 for the continuous, 1 for the interval sequence.
            freeze_p (float): share of steps that train everything, in [0, 1).
            total_steps (int): steps of the training, >= 1.

        Raises:
            ValueError: for everything wrong with the arguments, all in one message.
        """
        check_all(
            "grad_freeze",
            parameter_groups_number=(parameter_groups_number, integer(1)),
            freeze_strategy=(freeze_strategy, one_of((CONTINUOUS, INTERVAL))),
            freeze_p=(freeze_p, real("[0, 1)")),
            total_steps=(total_steps, integer(1)),
        )
        groups, share = int(parameter_groups_number), float(freeze_p)
        length = int(int(total_steps) * _MARGIN)
        sequence: GroupSequence = RepeatedGroups(groups, share, length)
        if freeze_strategy == INTERVAL and groups > 1:
            sequence = DrawnGroups(groups, share, length, self._seed)
        return list(sequence) if len(sequence) <= AT_ONCE else sequence

    def freeze_generate(
        self, network: nn.Cell, optimizer: nn.Optimizer
    ) -> tuple[nn.Cell, FreezeOpt]:
        """Return the network unchanged, and the optimizer with groups and schedule.

        Parameters that the optimizer trains but the network does not have are never frozen.

        Args:
            network (Cell): the network, with or without its loss.
            optimizer (nn.Optimizer): the optimizer over its trainable parameters.

        Raises:
            TypeError: if ``optimizer`` is not an ``nn.Optimizer``.
        """
        check_optimizer(optimizer, "grad_freeze")
        trained = {id(parameter) for parameter in optimizer.parameters}
        owned = [one for one in in_order_of_last_use(network) if id(one) in trained]
        known = {id(parameter) for parameter in owned}
        always = [one for one in optimizer.parameters if id(one) not in known]
        # Any other schedule counts the groups of ``split_parameters_groups``.
        by_share = isinstance(self._schedule, str)
        groups = growing_prefixes(split_chunks(owned), self._param_groups, by_share) or [[]]
        if type(self).split_parameters_groups is not GradientFreeze.split_parameters_groups:
            own = self.split_parameters_groups(network, self._param_groups)
            kept = ([one for one in group if id(one) in trained] for group in own)
            groups = [group for group in kept if group] or [[]]
        self._warn_of_fewer(len(groups))
        groups = [group + always for group in groups]
        if self._schedule == ADAPTIVE:
            most = prefix_length(len(groups), self._prefix["fraction"])
            return network, AdaptiveFreezeOpt(optimizer, groups, most, *self._adaptive)
        freezing = FreezeOpt(optimizer, groups, self._own_schedule(len(groups)))
        wanted = self._schedule is None and self._freeze_p > 0
        if wanted and 0 not in freezing.schedule.tally():
            warn(
                f"grad_freeze: with freeze_type={self._freeze_type}, freeze_p={self._freeze_p:g} "
                f"and {len(groups)} groups no update trains everything, so the first part of the "
                "network is never trained: give a larger freeze_p"
            )
        return network, freezing

    def _own_schedule(self, groups: int) -> Strategy:
        """Return the schedule for the number of groups that the network really has."""
        if self._schedule is None:
            return self.generate_freeze_index_sequence(
                groups, self._freeze_type, self._freeze_p, self._total_steps
            )
        if isinstance(self._schedule, str):
            return prefix_schedule(groups, self._total_steps, self._schedule, **self._prefix)
        if callable(self._schedule):
            return tabulate(self._schedule, self._total_steps)
        return self._schedule

    def _warn_of_fewer(self, groups: int) -> None:
        if groups == 1:
            warn(
                f"grad_freeze has no effect: param_groups={self._param_groups} and this network "
                "give only one group, which trains everything",
                NoEffectWarning,
            )
        elif groups < self._param_groups:
            LOGGER.info(
                "grad_freeze: the network has %d parts to freeze, so %d groups instead of %d",
                groups,
                groups,
                self._param_groups,
            )


class GroupTrainStep(nn.Cell):
    """One training step of one group: MindSpore's own, with the group's weights and update.

    ``update`` is an :class:`Update` or a window; the rest is as in :func:`freeze_cell`.
    """

    def __init__(
        self, network: nn.Cell, update: nn.Cell, grad: ops.GradOperation, sens: numbers.Number
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.update, self.grad, self.sens = network, update, grad, sens
        self.network.set_grad()
        self.weights = update.optimizer.parameters

    def construct(self, *inputs: Tensor) -> Tensor:
        """Compute loss and gradients, and update; with a window, at its end."""
        loss = call(self.network, inputs)
        sens = filled(loss.dtype, loss.shape, self.sens)
        gradients = gradients_of(self.grad, self.network, self.weights, (*inputs, sens))
        return self.update(loss, gradients)


class ScheduledSteps(StepChoice):
    """Has a training step for each group, and runs the one that a ``FreezeOpt`` names."""

    def __init__(self, steps: Sequence[nn.Cell], optimizer: FreezeOpt) -> None:
        distinct = list({id(step): step for step in steps}.values())
        chooser = GroupChooser(optimizer, [distinct.index(one) for one in steps])
        super().__init__(distinct, chooser, [f"group {steps.index(one)}" for one in distinct])


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
        use_grad_accumulation (bool): whether gradients are accumulated. A group trains for a whole
            window.
        mean (bool, optional): with ``reducer_flag``, whether ranks are averaged. Default: None.
        degree (int, optional): with ``reducer_flag``, the number of ranks. Default: None.
        max_accumulation_step (int): micro-batches in a window, at least 1. Default: 1.

    Returns:
        tuple(Cell), inputs of the network -> loss, one for each of ``train_parameter_groups``.

    Raises:
        TypeError: if ``optimizer`` is not a ``FreezeOpt``.
        ValueError: if ``max_accumulation_step`` is below 1.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from mindspore_boost_ext import FreezeOpt, freeze_cell
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
    window = use_grad_accumulation and GradientAccumulation(max_accumulation_step, optimizer)

    def make(own: nn.Cell, positions: tuple[int, ...]) -> nn.Cell:
        if reducer_flag:
            own.reducer = nn.DistributedGradReducer(list(own.parameters), mean, degree)
        part = window.restricted(own, positions) if window else Update(own)
        return GroupTrainStep(network, part, grad, sens)

    return optimizer.steps_of_groups(make)
