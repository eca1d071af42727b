"""The pair rule of AdaSum on blocks of tensors, and the tree of servers; no communication here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


@dataclass(frozen=True)
class Level:
    """What one server does at one level of the tree."""

    partner: int | None  # the server it works with; None if it has nothing to do
    halves: bool  # whether each of the two works on a half; else both have the whole piece
    members: tuple[int, int]  # first server, and last plus 1, whose sums make up the pair's


def tree(server: int, servers: int) -> tuple[Level, ...]:
    """Return the levels for one server: a fold unless there are 2^k servers, then adjacent pairs.

    The fold combines server P + i with server i, P the largest power of two up to ``servers``. If
    all steps are equal, the result is a mean in which these two count half.

    Examples:
        >>> [level.partner for level in tree(2, 4)]
        [3, 0]
        >>> [level.partner for level in tree(2, 3)]
        [0, None]
    """
    power = 1 << (servers.bit_length() - 1)
    levels = []
    if servers > power:
        levels.append(_fold(server, servers, power))
    for distance in (1 << bit for bit in range(power.bit_length() - 1)):
        if server < power:
            start = server // (2 * distance) * 2 * distance
            levels.append(Level(server ^ distance, True, (start, start + 2 * distance)))
        else:
            levels.append(Level(None, True, (0, 1)))
    return tuple(levels)


def _fold(server: int, servers: int, power: int) -> Level:
    if server >= power:
        return Level(server - power, False, (server - power, server - power + 1))
    if server + power < servers:
        return Level(server + power, False, (server, server + 1))
    return Level(None, False, (0, 1))


def owners_of_slices(devices: int, servers: int) -> tuple[int, ...]:
    """Return the rank that holds each slice of the buffer at the end, in the order of the slices.

    Device c of a server begins with the c-th of ``devices`` parts. At each level the server with
    the lower number keeps the left half. So the bits of its number, lowest first, give its slice.

    Examples:
        >>> owners_of_slices(1, 4)
        (0, 2, 1, 3)
    """
    bits = servers.bit_length() - 1
    reverse = [int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return tuple(server * devices + c for c in range(devices) for server in reverse)


class PairRule(nn.Cell):
    """The pair rule for one range of blocks.

    Args:
        owners (numpy.ndarray): int32 [blocks], the tensor to which each block belongs.
        count (int): number of tensors, padding included.
        wide (bool): True for float64 throughout, False for float32 with every tensor scaled.
    """

    def __init__(self, owners: np.ndarray, count: int, wide: bool) -> None:
        super().__init__(auto_prefix=False)
        self.owners = Tensor(owners, ms.int32)
        self.owners_column = Tensor(owners[:, None], ms.int32)  # gathers rows as [blocks, 1, ...]
        self.count = count
        self.wide = wide
        self.dtype = ms.float64 if wide else ms.float32
        tiny = np.finfo(np.float64 if wide else np.float32).tiny
        self.guard = Tensor(np.sqrt(tiny), self.dtype)  # a Python float would be cut to float32
        self.columns = 8 if wide else 6
        self.product = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()

    def construct(self, pair: Tensor) -> Tensor:
        """Return the AdaSum [blocks, width] of pairs of tensors, float32 [blocks, 2, width]."""
        pair = ops.cast(pair, self.dtype)
        if self.wide:
            ones = ops.ones((self.count, 2), self.dtype)
            return self.combined(pair, self._products(pair), ones)
        products, scales = self.joined(self.sums(pair))
        return self.combined(pair, products, scales)

    def pair(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return [blocks, 2, width]: both pieces side by side, in the dtype of the sums."""
        both = (ops.expand_dims(lower, 1), ops.expand_dims(upper, 1))
        return ops.cast(ops.concat(both, 1), self.dtype)

    def sums(self, pair: Tensor) -> Tensor:
        """Return float32 [count * columns]: |a|^2, <a, b>, |b|^2 of this range, and their scales.

        Collectives carry no float64, so each is sent as two float32 and a power of two.
        """
        if self.wide:
            return ops.reshape(_split(self._products(pair)), (-1,))
        largest = ops.unsorted_segment_max(
            ops.ReduceMax()(ops.abs(pair), -1), self.owners, self.count
        )
        largest = ops.maximum(largest, 0.0)  # 0 if a tensor has no block in the range
        products = self._products(self._scaled(pair, _divisors(largest)))
        return ops.reshape(ops.concat((products, largest), 1), (-1,))

    def joined(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return products [count, 4] and scales [count, 2] of whole tensors from those of ranges.

        ``rows``, [ranges, count * columns], has what :meth:`sums` returned for each range.
        """
        parts = ops.reshape(rows, (-1, self.count, self.columns))
        if self.wide:
            return ops.ReduceSum()(_whole(parts), 0), ops.ones((self.count, 2), self.dtype)
        scales = _divisors(ops.ReduceMax()(parts[:, :, 4:], 0))
        products = parts[:, :, :4] * _products_of(parts[:, :, 4:] / scales)
        return ops.ReduceSum()(products, 0), scales

    def combined(self, pair: Tensor, products: Tensor, scales: Tensor) -> Tensor:
        """Return the AdaSum of pairs, float32 [blocks, width]."""
        own = ops.concat((products[:, :1], products[:, 3:]), 1)
        # Not own > guard: a NaN has to reach the coefficient.
        share = ops.select(own < self.guard, ops.zeros_like(own), products[:, 1:3] / (2 * own))
        other = ops.concat((scales[:, 1:], scales[:, :1]), 1)
        coefficients = ops.gather(scales - share * other, self.owners_column, 0)
        pair = pair if self.wide else self._scaled(pair, scales)
        return ops.cast(self.mix(coefficients, pair)[:, 0], ms.float32)

    def _products(self, pair: Tensor) -> Tensor:
        products = ops.unsorted_segment_sum(self.product(pair, pair), self.owners, self.count)
        return ops.concat((products[:, 0], products[:, 1]), 1)

    def _scaled(self, pair: Tensor, scales: Tensor) -> Tensor:
        return pair / ops.expand_dims(ops.gather(scales, self.owners, 0), 2)


class WholeTree(nn.Cell):
    """The whole tree on one rank, which has the steps of all servers: one batch of pairs a level.

    ``servers`` is at least 2; the other arguments are those of :class:`PairRule`.
    """

    def __init__(self, owners: np.ndarray, count: int, servers: int, wide: bool) -> None:
        super().__init__(auto_prefix=False)
        blocks, power = len(owners), 1 << (servers.bit_length() - 1)
        extra = servers - power
        self.first, self.last = extra * blocks, power * blocks

        def rule(pairs: int) -> PairRule:
            many = np.concatenate([owners + number * count for number in range(pairs)])
            return PairRule(many, pairs * count, wide)

        levels = [power >> bit for bit in range(1, power.bit_length())]
        self.levels = nn.CellList([rule(pairs) for pairs in levels], auto_prefix=False)
        # Which two rows make each pair of blocks.
        numbers = np.arange(self.last).reshape(-1, 2, blocks).transpose(0, 2, 1).reshape(-1, 2)
        self.neighbours = Tensor(numbers, ms.int32)
        if extra:
            self.fold = rule(extra)
            folded = [(row, self.last + row) for row in range(self.first)]
            self.folded = Tensor(folded, ms.int32)

    def construct(self, rows: Tensor) -> Tensor:
        """Return the AdaSum, float32 [blocks, width], of steps [servers, blocks, width]."""
        return self._combined(ops.reshape(rows, (-1, rows.shape[2])))

    @ms.jit  # dozens of small operators are slow one by one; no views, as in dim_reduce.projection
    def _combined(self, rows: Tensor) -> Tensor:
        if self.first > 0:
            folded = self.fold(ops.gather(rows, self.folded, 0))
            rows = ops.concat((folded, rows[self.first : self.last]))
        for rule in self.levels:
            rows = rule(ops.gather(rows, self.neighbours[: len(rule.owners)], 0))
        return rows


def _divisors(largest: Tensor) -> Tensor:
    """Return the largest values of tensors, with 1 in place of 0."""
    return ops.select(largest > 0, largest, ops.ones_like(largest))


def _products_of(factors: Tensor) -> Tensor:
    """Return [..., 4]: the factors of |a|^2, <a, b>, <b, a>, |b|^2 from those of a and b."""
    first, second = ops.split(factors, 1, -1)
    return ops.concat((first * first, first * second, first * second, second * second), -1)


def _split(products: Tensor) -> Tensor:
    """Return float64 [count, 4] as float32 [count, 8]: high and low parts, and exponents."""
    own = ops.concat((products[:, :1], products[:, 3:]), 1)
    positive = own > 0
    halves = ops.log(ops.select(positive, own, ops.ones_like(own))) * (0.5 / math.log(2.0))
    exponents = ops.floor(halves)
    normal = products * _products_of(ops.pow(Tensor(2.0, ms.float64), -exponents))
    normal = ops.concat((normal[:, :2], normal[:, 3:]), 1)
    high = ops.cast(normal, ms.float32)
    low = ops.cast(normal - ops.cast(high, ms.float64), ms.float32)
    return ops.concat((high, low, ops.cast(exponents, ms.float32)), 1)


def _whole(parts: Tensor) -> Tensor:
    """Return float64 [ranges, count, 4] from what :func:`_split` made of each range."""
    parts = ops.cast(parts, ms.float64)
    normal = parts[:, :, 0:3] + parts[:, :, 3:6]
    factors = ops.pow(Tensor(2.0, ms.float64), parts[:, :, 6:])
    four = ops.concat((normal[:, :, :2], normal[:, :, 1:]), 2)
    return four * _products_of(factors)
