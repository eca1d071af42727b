"""Exchange between ranks: half a buffer with a partner, small vectors with all."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.ranks import rank_count


def group_of(ranks: tuple[int, ...]) -> str:
    """Return the name of the communication group of these ranks, made when it is first asked for.

    The ranks are global and rising: any two, or several in a row. This rank must be one of them.
    """
    name = f"boost.{ranks[0]}-{ranks[-1]}.{len(ranks)}"  # short, however many ranks there are
    _compat.make_group(name, ranks)
    return name


class AllReduceSwap(nn.Cell):
    """Swaps a float32 [m, n] with a partner by one AllReduce over a zero-padded buffer."""

    def __init__(self, rank: int, partner: int) -> None:
        super().__init__(auto_prefix=False)
        self.lower = rank < partner
        self.all_reduce = ops.AllReduce(group=group_of((min(rank, partner), max(rank, partner))))

    def construct(self, piece: Tensor) -> Tensor:
        """Give ``piece`` to the partner, and return the partner's piece."""
        rows = piece.shape[0]
        zeros = ops.zeros_like(piece)
        if self.lower:
            return self.all_reduce(ops.concat((zeros, piece)))[:rows]
        return self.all_reduce(ops.concat((piece, zeros)))[rows:]


class SendReceiveSwap(nn.Cell):
    """Swaps a float32 Tensor of a fixed shape with a partner by Send and Receive."""

    def __init__(self, rank: int, partner: int, shape: tuple[int, ...], tag: int) -> None:
        super().__init__(auto_prefix=False)
        self.lower = rank < partner
        group = GlobalComm.WORLD_COMM_GROUP
        self.send = ops.Send(sr_tag=tag, dest_rank=partner, group=group)
        self.receive = ops.Receive(
            sr_tag=tag, src_rank=partner, shape=list(shape), dtype=ms.float32, group=group
        )

    def construct(self, piece: Tensor) -> Tensor:
        """Give ``piece`` to the partner, and return the partner's piece."""
        if self.lower:
            return self.receive(ops.depend(piece, self.send(piece)))
        received = self.receive(piece)
        return ops.depend(received, self.send(ops.depend(piece, received)))


def make_swap(rank: int, partner: int, shape: tuple[int, ...], tag: int) -> nn.Cell:
    """Return a Cell that swaps pieces of a shape with another rank, in a way that suits the device.

    The partner runs its own swap with the same ``tag``. The tag tells swaps of the two ranks apart.
    """
    if ms.get_context("device_target") == "CPU":
        return AllReduceSwap(rank, partner)
    return SendReceiveSwap(rank, partner, shape, tag)


class RowsOfRanks(nn.Cell):
    """Gathers one float32 vector [n] of each rank as the rows of a matrix [ranks, n].

    On CPU, AllGather of MindSpore casts float64 to float32.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.ranks = rank_count()
        self.all_gather: Any = ops.AllGather() if self.ranks > 1 else None

    def construct(self, vector: Tensor) -> Tensor:
        """Gather from the ranks."""
        gathered = vector if self.ranks == 1 else self.all_gather(vector)
        return ops.reshape(gathered, (self.ranks, -1))


class SumOverGroup(nn.Cell):
    """Sums a float32 Tensor over ``count`` ranks from ``first`` on; other groups sum their own.

    The sum is bitwise the same on the ranks of a group. If AllReduce works over all ranks only,
    every rank gathers from all and adds its group's rows.
    """

    def __init__(self, first: int, count: int) -> None:
        super().__init__(auto_prefix=False)
        self.first, self.last = first, first + count
        self.all_reduce: Any = None
        if _compat.reduces_in_groups():
            self.all_reduce = ops.AllReduce(group=group_of(tuple(range(first, first + count))))
        else:
            self.rows = RowsOfRanks()

    def construct(self, value: Tensor) -> Tensor:
        """Sum over the group."""
        if self.all_reduce is not None:
            return self.all_reduce(value)
        rows = self.rows(ops.reshape(value, (-1,)))[self.first : self.last]
        return ops.reshape(rows.sum(0), value.shape)
