"""AdaSum: adds the steps of servers if they differ, and averages them if they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.adasum.collectives import RowsOfRanks, SumOverGroup, group_of, make_swap
from mindspore_boost_ext.adasum.packing import Packing
from mindspore_boost_ext.adasum.rule import Level, PairRule, WholeTree, owners_of_slices, tree
from mindspore_boost_ext.base.mapping import Tensors, each
from mindspore_boost_ext.base.sums import DIVIDE
from mindspore_boost_ext.config.rules import check_all, integer
from mindspore_boost_ext.runtime.ranks import rank_and_count, rank_count

GATHERED_BYTES = 1 << 20  # all ranks' buffers together; up to this, every rank gathers all
_WIDE_DEVICES = ("CPU",)  # those that compute in float64


class AdaSum(nn.Cell):
    r"""Combines the steps of all ranks and writes the new weights.

    Args:
        rank (int): this rank, from 0; ranks ``[s * device_number, (s + 1) * device_number)`` are
            server s.
        device_number (int): devices in a server, at least 1.
        group_number (int): servers, at least 1; with 1 there is no communication across servers.
        parameter_tuple (tuple(Parameter)): the parameters, of which shapes and dtypes are read.
        equal_in_server (bool, optional): whether all devices of a server give the same
            ``delta_weights``, as after a reduction of their gradients; if not, one more collective
            averages them first. Default: False.

    Inputs:
        - **delta_weights** (tuple(Tensor)) - the step of this rank, old minus new weights.
        - **parameters** (tuple(Parameter)) - the parameters to write.
        - **old_parameters** (tuple(Tensor)) - their values before the step, the same on all ranks.

    Outputs:
        tuple(Tensor), ``parameters`` after the update, bitwise the same on all ranks.

    Raises:
        ValueError: if an argument breaks its rule, ``rank`` does not lie in the servers, or there
            are not ``device_number * group_number`` ranks.

    Source: Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021.

    Examples:
        >>> from mindspore import Parameter, Tensor
        >>> from mindspore_boost_ext import AdaSum
        >>> weight = Parameter(Tensor([1.0, 2.0]), name="weight")
        >>> old = Tensor([3.0, 3.0])
        >>> adasum = AdaSum(0, 1, 1, (weight,))  # one server: nothing to combine
        >>> adasum((old - weight,), (weight,), (old,))[0].asnumpy().tolist()
        [1.0, 2.0]
    """

    def __init__(
        self,
        rank: int,
        device_number: int,
        group_number: int,
        parameter_tuple: Any,
        *,
        equal_in_server: bool = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        stored = _checked(rank, device_number, group_number, parameter_tuple)
        self.rank, self.device_number, self.group_number = stored
        self.server, self.device = divmod(self.rank, self.device_number)
        slices = owners_of_slices(self.device_number, self.group_number)
        self.parameter_tuple = ParameterTuple(parameter_tuple)
        self.packing = Packing(parameter_tuple, len(slices))
        self.averages = self.device_number > 1 and not equal_in_server
        if self.averages:
            first = self.server * self.device_number
            self.server_sum = SumOverGroup(first, self.device_number)
        self.part = self.packing.blocks // self.device_number
        self.gather_rows = RowsOfRanks()
        self.slices = Tensor(slices, ms.int32)
        self.levels = nn.CellList(auto_prefix=False)
        ranks = self.device_number * self.group_number
        size = 4 * self.packing.blocks * self.packing.width
        small = ranks * size <= GATHERED_BYTES or not _compat.reduces_in_groups()
        self.gathers = self.group_number > 1 and small
        if self.gathers:
            wide = ms.get_context("device_target") in _WIDE_DEVICES
            owners, count = self.packing.owners, self.packing.count + 1
            self.whole_tree = WholeTree(owners, count, self.group_number, wide)
        elif self.group_number > 1:
            self._make_levels(tree(self.server, self.group_number))

    def construct(
        self, delta_weights: Tensors, parameters: tuple[Parameter, ...], old_parameters: Tensors
    ) -> Tensors:
        """Combine the steps, and write old minus combined step."""
        steps, old = self.packing.pack(delta_weights), self.packing.pack(old_parameters)
        return self.packing.write(old - self.combine(steps), parameters)

    @property
    def calc_times(self) -> int:
        """Number of rounds in which pairs of servers combine; upstream's name."""
        return len(tree(self.server, self.group_number))

    def snapshot(self) -> Tensor:
        """Return a packed copy of the present values of ``parameter_tuple``."""
        return self.packing.pack(self.parameter_tuple)

    def update_since(self, old: Tensor) -> Tensors:
        """Combine the changes of all ranks since ``old``, equal on all ranks; write the result."""
        combined = self.combine(old - self.packing.pack(self.parameter_tuple))
        return self.packing.write(old - combined, self.parameter_tuple)

    def combine(self, steps: Tensor) -> Tensor:
        """Return the AdaSum over servers of this rank's steps; both packed."""
        if self.averages:
            steps = DIVIDE(self.server_sum(steps), self.device_number)
        if self.group_number == 1:
            return steps
        if self.gathers:
            rows = self.gather_rows(ops.reshape(steps, (-1,)))
            if self.device_number > 1:  # one row a server: that of its first device
                rows = ops.reshape(rows, (self.group_number, self.device_number, -1))[:, 0]
            shape = (self.group_number, self.packing.blocks, self.packing.width)
            return self.whole_tree(ops.reshape(rows, shape))
        return self._halved(steps)

    @ms.jit  # in PYNATIVE_MODE collectives and dozens of small operators one by one are slow
    def _halved(self, steps: Tensor) -> Tensor:
        piece = steps[self.device * self.part : (self.device + 1) * self.part]
        for level in self.levels:
            piece = level(piece)
        rows = self.gather_rows(ops.reshape(piece, (-1,)))
        return ops.reshape(ops.gather(rows, self.slices, 0), steps.shape)

    def _make_levels(self, levels: tuple[Level, ...]) -> None:
        """Make a Cell for each level, with the blocks that this rank holds after it."""
        first, count = self.device * self.part, self.part
        for number, level in enumerate(levels):
            keeps_right = level.partner is not None and level.partner < self.server
            kept = count // 2 if level.halves else count
            first += kept if level.halves and keeps_right else 0
            owners = self.packing.owners[first : first + kept]
            self.levels.append(_LevelCell(self, level, number, owners, keeps_right))
            count = kept

    def describe(self) -> str:
        """Return how the ranks are divided, for a report."""
        inside = "" if self.device_number == 1 else ", gradients averaged inside each"
        fold = "" if self.group_number & (self.group_number - 1) == 0 else ", the last ones folded"
        return f"{self.group_number} servers of {self.device_number}{inside}{fold}"

    def counts(self) -> dict[str, int]:
        """Return figures for a report: servers, their devices, and what a step costs."""
        return {
            "servers": self.group_number,
            "device_number": self.device_number,
            "collectives_a_step": self.collectives(),
            "bytes_sent_a_step": sum(self.bytes_sent().values()),
        }

    def collectives(self) -> int:
        """Return how many collectives one call runs, whatever the number of parameters."""
        pairs = sum(level.works for level in self.levels)
        return int(self.averages + pairs + len(self.levels) + (self.group_number > 1))

    def bytes_sent(self) -> dict[str, int]:
        """Return what this rank sends in one call, in bytes, by kind of collective.

        All ranks are assumed to send as in a ring: :math:`2 (k-1)/k` of the buffer for an
        AllReduce over k ranks, :math:`k-1` times the piece for an AllGather.
        """
        ranks, block = self.device_number * self.group_number, 4 * self.packing.width
        swaps = sum(level.values_sent for level in self.levels) * block
        sums = sum((ranks - 1) * level.rule.count * level.rule.columns for level in self.levels)
        own = self.packing.blocks // (1 if self.gathers else len(self.slices))
        average = 2 * (self.device_number - 1) * self.packing.blocks * block // self.device_number
        return {
            "mean in the server": average if self.averages else 0,
            "swaps": swaps,
            "inner products": sums * 4,
            "gather": (ranks - 1) * own * block if self.group_number > 1 else 0,
        }


class _LevelCell(nn.Cell):
    """One level of the tree on one rank: swap, share the sums, combine."""

    def __init__(
        self, adasum: AdaSum, level: Level, number: int, owners: Any, keeps_right: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        device, devices = ms.get_context("device_target"), adasum.device_number
        self.halves, self.keeps_right = level.halves, keeps_right
        self.works = level.partner is not None
        self.kept = len(owners)
        self.rule = PairRule(owners, adasum.packing.count + 1, device in _WIDE_DEVICES)
        self.first_member, self.last_member = (server * devices for server in level.members)
        self.gather_rows = adasum.gather_rows
        self.values_sent = 0
        if level.partner is not None:
            partner = level.partner * devices + adasum.device
            shape = (self.kept, adasum.packing.width)
            self.swap = make_swap(adasum.rank, partner, shape, number)
            self.values_sent = self.kept * (2 if device == "CPU" else 1)

    def construct(self, piece: Tensor) -> Tensor:
        if not self.works:
            return self._look_on(piece)
        kept, given = piece, piece
        if self.halves:
            left, right = piece[: self.kept], piece[self.kept :]
            kept, given = (right, left) if self.keeps_right else (left, right)
        received = self.swap(given)
        lower, upper = (received, kept) if self.keeps_right else (kept, received)
        pair = self.rule.pair(lower, upper)
        rows = self.gather_rows(self.rule.sums(pair))
        products, scales = self.rule.joined(rows[self.first_member : self.last_member])
        return self.rule.combined(pair, products, scales)

    def _look_on(self, piece: Tensor) -> Tensor:
        """Take part in the gather that all ranks run; return a piece of the right size."""
        size = self.rule.count * self.rule.columns
        rows = self.gather_rows(ops.zeros((size,), ms.float32))
        return ops.depend(piece[: self.kept], rows)


def unavailable_reason(device_number: int) -> str:
    """Return why AdaSum cannot work in this process, with the remedy; empty if it can."""
    ranks = rank_count()
    if ranks == 1:
        return "one process: start several with msrun, and call init() before the Model is built"
    if ms.get_auto_parallel_context("parallel_mode") not in ("data_parallel", "hybrid_parallel"):
        return (
            "the ranks train independently: call "
            "ms.set_auto_parallel_context(parallel_mode='data_parallel') before the Model is built"
        )
    if ranks <= device_number:
        return (
            f"{ranks} ranks are 1 server of common.device_number={device_number} devices: plain "
            f"data parallel; set common.device_number below {ranks} to have several servers"
        )
    if has_partial_server(device_number):
        return (
            f"common.device_number must divide the number of ranks ({ranks}), got {device_number}: "
            "AdaSum combines whole servers"
        )
    return ""


def has_partial_server(device_number: int) -> bool:
    """Return whether there is more than one server, but not all of them are complete."""
    ranks = rank_count()
    return ranks > device_number and ranks % device_number > 0


def server_reducer(weights: Sequence[Parameter], device_number: int) -> nn.Cell:
    """Return the Cell that averages gradients of weights over the devices of this rank's server."""
    if device_number == 1:
        return nn.Identity()
    rank, _ = rank_and_count()
    first = rank // device_number * device_number
    if not _compat.reduces_in_groups():
        return _MeanOfServer(first, device_number)
    group = group_of(tuple(range(first, first + device_number)))
    return nn.DistributedGradReducer(list(weights), True, device_number, group=group)


class _MeanOfServer(nn.Cell):
    """Averages dense gradients over a server if AllReduce works over all ranks only."""

    def __init__(self, first: int, device_number: int) -> None:
        super().__init__(auto_prefix=False)
        self.sum, self.device_number = SumOverGroup(first, device_number), device_number

    def construct(self, gradients: Tensors) -> Tensors:
        return each(self._mean, gradients)

    def _mean(self, gradient: Tensor) -> Tensor:
        return DIVIDE(self.sum(gradient), self.device_number)


def _checked(rank: int, device_number: int, group_number: int, parameters: Any) -> Iterable[int]:
    """Return the first three arguments of AdaSum as Python's integers."""
    stored = check_all(
        "AdaSum",
        rank=(rank, integer(0)),
        device_number=(device_number, integer(1)),
        group_number=(group_number, integer(1)),
    )
    if not parameters:
        raise ValueError("AdaSum.parameter_tuple must hold at least one parameter, got none")
    ranks = device_number * group_number
    if rank >= ranks:
        raise ValueError(
            f"AdaSum.rank must be below device_number * group_number = {ranks}, got {rank}"
        )
    if ranks > 1 and ranks != rank_count():
        raise ValueError(
            f"AdaSum.device_number * group_number must be the number of ranks ({rank_count()}), "
            f"got {device_number} * {group_number}: start the script with msrun, and call init()"
        )
    return stored.values()
