"""The curvature that THOR keeps: factors, their inverses, and when it inverts again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.base.mapping import Tensors, each, size
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.base.sums import DIVIDE, chosen
from mindspore_boost_ext.thor.inverse import inverse_for_device
from mindspore_boost_ext.thor.layers import EMBEDDING, LayerPlan, padded_rows

_TINY = 1e-30
# Operators for calls that each layer makes: for each call of a method of Tensor, a function of ops
# or a sign such as +, MindSpore compiles one to four graphs and keeps them.
_SUM, _ANY, _ALL = ops.ReduceSum(), ops.ReduceAny(), ops.ReduceAll()
_NOT_EQUAL, _IS_FINITE = ops.NotEqual(), ops.IsFinite()
_EYE, _MUL, _MATMUL, _RESHAPE = ops.Eye(), ops.Mul(), ops.MatMul(), ops.Reshape()
_CAST, _ASSIGN, _AND, _CONCAT = ops.Cast(), ops.Assign(), ops.LogicalAnd(), ops.Concat()


def _identity(shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.broadcast_to(np.eye(shape[-1], dtype=np.float32), shape).copy()


def _trace(factor: Tensor) -> Tensor:
    """Return the trace of a factor in any of its forms: float32 []."""
    if factor.ndim == 1:
        return _SUM(factor)
    return _SUM(_MUL(factor, _EYE(factor.shape[-1], factor.shape[-1], ms.float32)))


def _is_anything(factor: Tensor) -> Tensor:
    return _ANY(_NOT_EQUAL(factor, 0.0))


def _is_finite(factor: Tensor) -> Tensor:
    return _ALL(_IS_FINITE(factor))


def _mean(old: float, first: Tensor, kept: Tensor, new: Tensor) -> Tensor:
    """Return the moving average of one factor; at the first refresh, the new factor itself."""
    share = ops.where(first, 0.0, old)
    return kept * share + new * (1.0 - share)


def _renewed(layer: nn.Cell, *inputs: Tensor) -> Tensor:
    return layer.renew(*inputs)


class LayerFactors(nn.Cell):
    """Factors and inverses of one layer; before the first refresh the inverses are the identity."""

    def __init__(self, plan: LayerPlan, inverts_always: bool, keeps_all: bool) -> None:
        super().__init__(auto_prefix=False)
        # Whether every refresh inverts, and whether moving averages take in every usable factor.
        self.inverts_always, self.keeps_all = inverts_always, keeps_all
        self.sizes, self.block = (plan.a_size, plan.g_size), plan.block
        self.diagonal = plan.kind == EMBEDDING
        self.inverse = inverse_for_device()
        name, a, g = f"thor.{plan.weight.name}", plan.a_shape, plan.g_shape
        # Gradients with respect to these two bring the factors out of the backward pass.
        self.a = state(f"{name}.a", np.zeros(a), requires_grad=True)
        self.g = state(f"{name}.g", np.zeros(g), requires_grad=True)
        self.a_inverse = state(f"{name}.a_inverse", _identity(a))
        self.g_inverse = state(f"{name}.g_inverse", _identity(g))

    def renew(
        self, a: Tensor, g: Tensor, for_a: Tensor, for_g: Tensor, usable: Tensor, wanted: Tensor
    ) -> Tensor:
        """Take in the factors A and G if they are usable, and invert them if that is wanted.

        ``for_a`` and ``for_g``, float32 [], are added to their diagonals; the last two are bool [].
        Returns float32 [3]: what was really added, and 1 if both new inverses are stored, else 0.
        """
        if self.inverts_always or wanted:
            used_a, used_g, good = self.invert(a, g, for_a, for_g, wanted)
        else:
            used_a, used_g = _RESHAPE(for_a, (1,)), _RESHAPE(for_g, (1,))
            good = _RESHAPE(wanted, (1,))
        # If the inverses stay, moving averages still take in the new factors; without them F stays.
        taken = usable if self.keeps_all else good
        _ASSIGN(self.a, chosen(taken, a, self.a))
        _ASSIGN(self.g, chosen(taken, g, self.g))
        return _CONCAT((used_a, used_g, _CAST(good, ms.float32)))

    def invert(self, a: Tensor, g: Tensor, for_a: Tensor, for_g: Tensor, wanted: Tensor) -> Tensors:
        """Invert both damped factors, and store the inverses if they are wanted and good.

        Returns the dampings used for A and for G, and whether the inverses are stored: all [1].
        """
        a_inverse, used_a, good_a = self._inverse_of_a(a, for_a)
        g_inverse, used_g, good_g = self.inverse(g, for_g)
        good = _AND(wanted, _AND(good_a, good_g))
        _ASSIGN(self.a_inverse, chosen(good, a_inverse, self.a_inverse))
        _ASSIGN(self.g_inverse, chosen(good, g_inverse, self.g_inverse))
        return used_a, used_g, good

    def _inverse_of_a(self, a: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.diagonal:
            return self.inverse(a, damping)
        used = ops.maximum(damping, a.max() * 1e-6)
        return 1.0 / (a + used), _RESHAPE(used, (1,)), _RESHAPE(_is_finite(a), (1,))

    def precondition(self, gradient: Tensor) -> Tensor:
        """Return (G+√λI)⁻¹·∂W·(A+√λI)⁻¹ in the shape of ``gradient``, in float32."""
        gradient = _CAST(gradient, ms.float32)
        if self.diagonal:  # the table is [vocabulary, size]: A stands on the left
            rows = gradient * ops.expand_dims(self.a_inverse, 1)
            return self._times(rows, self.g_inverse)
        matrix = _RESHAPE(gradient, (self.sizes[1], self.sizes[0]))
        matrix = self._times(self._left(self.g_inverse, matrix), self.a_inverse)
        return _RESHAPE(matrix, gradient.shape)

    def _left(self, inverse: Tensor, matrix: Tensor) -> Tensor:
        """Return inverse · matrix, where the inverse may be in blocks."""
        if inverse.ndim == 2:
            return _MATMUL(inverse, matrix)
        rows, columns = matrix.shape
        blocks = ops.reshape(padded_rows(matrix, self.block), (-1, self.block, columns))
        return ops.reshape(ops.bmm(inverse, blocks), (-1, columns))[:rows]

    def _times(self, matrix: Tensor, inverse: Tensor) -> Tensor:
        """Return matrix · inverse, where the (symmetric) inverse may be in blocks."""
        if inverse.ndim == 2:
            return _MATMUL(matrix, inverse)
        return ops.transpose(self._left(inverse, ops.transpose(matrix, (1, 0))), (1, 0))


class Curvature(nn.Cell):
    """The factors of all layers, and counters of refreshes, inversions and troubles.

    ``factors`` are A and G of each layer, in turn. The settings are those of ``THOR``.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        trace_rule: tuple[float, float] | None,
        pi_damping: bool,
        moving_average: float,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.plans, self.trace_rule = tuple(plans), trace_rule
        self.pi_damping, self.moving_average = pi_damping, moving_average
        layers = [LayerFactors(plan, trace_rule is None, moving_average > 0.0) for plan in plans]
        self.layers = nn.CellList(layers, auto_prefix=False)
        self.pairs = tuple((layer.a, layer.g) for layer in self.layers)
        self.factors = tuple(factor for pair in self.pairs for factor in pair)
        self.a_sizes = Tensor([float(plan.a_size) for plan in plans], ms.float32)
        self.g_sizes = Tensor([float(plan.g_size) for plan in plans], ms.float32)
        self.places = tuple(range(2 * len(plans)))  # of the factors
        count = max(len(plans), 1)
        self.kept_trace = state("thor.kept_trace", np.zeros(count))
        self.change = state("thor.change", np.zeros(count))
        self.stopped = state("thor.stopped", np.zeros(count), np.bool_)
        # Rows: refreshes, inversions, raised dampings, refreshes in which the old inverses had to
        # stay, refreshes in which all factors were zero.
        self.counters = state("thor.tally", np.zeros((5, count)), np.int32)
        self.reducer: Any = None

    def use_ranks(self, degree: int, split_indices: Iterable[int] | None) -> None:
        """From now on, average the factors over ``degree`` ranks."""
        self.reducer = MeanOverRanks(degree, split_indices, len(self.plans))

    def prepared(self, factor_gradients: Tensors, scales: Tensor | Tensors) -> Tensors:
        """Divide the loss scale out of new factors and average them over the ranks.

        Args:
            factor_gradients: A and G of each layer in turn, from the backward pass.
            scales: the loss scale, or a tuple with one for each layer. Only G carries it, squared.
        """
        divide = ops.partial(self._without_scale, scales)
        result: Tensors = each(divide, self.places, factor_gradients)
        return result if self.reducer is None else self.reducer(result)

    def _without_scale(self, scales: Tensor | Tensors, place: int, factor: Tensor) -> Tensor:
        if place % 2 == 0:
            return factor  # an A
        scale = scales[place // 2] if isinstance(scales, tuple) else scales
        return DIVIDE(DIVIDE(factor, scale), scale)

    def refresh(self, factor_gradients: Tensors, damping: Tensor) -> tuple[Tensor, Tensor]:
        """Take in new factors, as :meth:`prepared` returns them, with the damping λ, float32 [].

        Returns the counters, when all is done, and bool [layers]: which the trace rule has stopped.
        """
        first = self.kept_trace <= 0.0
        a, g = factor_gradients[::2], factor_gradients[1::2]
        # If both are zero, the layer's own construct has not run: it keeps its inverses.
        reached = ops.logical_or(ops.stack(each(_is_anything, a)), ops.stack(each(_is_anything, g)))
        if self.moving_average > 0.0:
            a, g = self._averaged(first, a, g)
        traces_a, traces_g = ops.stack(each(_trace, a)), ops.stack(each(_trace, g))
        traces = traces_a * traces_g + damping * self.a_sizes * self.g_sizes
        finite = ops.logical_and(ops.stack(each(_is_finite, a)), ops.stack(each(_is_finite, g)))
        usable = ops.logical_and(finite, reached)
        change = ops.abs(traces - self.kept_trace) / ops.maximum(self.kept_trace, _TINY)
        has_none = ops.logical_or(first, ops.logical_not(usable))
        change = ops.where(has_none, ops.zeros_like(change), change)
        wanted, stopped = self._wanted(first, change, usable)
        for_a, for_g = self._dampings(traces_a, traces_g, damping)
        vectors = (for_a, for_g, usable, wanted)
        done = ops.stack(each(_renewed, self.layers, a, g, *each(ops.unstack, vectors)), 1)
        used_a, used_g, good = ops.unstack(done)
        good = good > 0.0
        raised = ops.logical_or(used_a > for_a * 1.0001, used_g > for_g * 1.0001)
        raised = ops.logical_and(raised, good)
        bad = ops.logical_or(ops.logical_not(finite), _NOT_EQUAL(wanted, good))
        ones, passed_by = ops.ones_like(good), ops.logical_not(reached)
        more = ops.cast(ops.stack((ones, good, raised, bad, passed_by)), ms.int32)
        ops.assign(self.kept_trace, ops.where(good, traces, self.kept_trace))
        ops.assign(self.change, change)
        ops.assign(self.stopped, stopped)
        return ops.assign_add(self.counters, more), stopped

    def _averaged(self, first: Tensor, a: Tensors, g: Tensors) -> tuple[Tensors, Tensors]:
        """Return the moving averages with new factors in them."""
        mean, since = ops.partial(_mean, self.moving_average), ops.unstack(first)
        return each(mean, since, self.factors[::2], a), each(mean, since, self.factors[1::2], g)

    def _wanted(self, first: Tensor, change: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """Return which layers to invert now, and which never again: bool [layers]."""
        if self.trace_rule is None:
            return usable, self.stopped
        above, below = self.trace_rule
        going_on = ops.logical_and(change > above, ops.logical_not(self.stopped))
        ended = ops.logical_and(ops.logical_not(first), change < below)
        stopped = ops.logical_or(self.stopped, ops.logical_and(usable, ended))
        return ops.logical_and(usable, ops.logical_or(first, going_on)), stopped

    def _dampings(self, a: Tensor, g: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to the diagonals of A and of G, from their traces: [layers]."""
        root = ops.sqrt(damping) * ops.ones_like(a)
        if not self.pi_damping:
            return root, root
        ratio = (a / self.a_sizes) / ops.maximum(g / self.g_sizes, _TINY)
        pi = ops.sqrt(ops.clamp(ratio, 1e-6, 1e6))
        return root * pi, root / pi


class MeanOverRanks(nn.Cell):
    """Averages the two tensors of each layer over all ranks, with one AllReduce for each group.

    ``split_indices`` are the numbers of the layers that end a group; None: all are one group.
    """

    def __init__(self, degree: int, split_indices: Iterable[int] | None, layers: int) -> None:
        super().__init__(auto_prefix=False)
        ends = [index + 1 for index in split_indices or () if index + 1 < layers]
        self.bounds = tuple(zip([0, *ends], [*ends, layers]))
        self.degree = float(degree)
        self.all_reduce = ops.AllReduce()

    def construct(self, tensors: Tensors) -> Tensors:
        """Return the means, in the order and shapes of ``tensors``."""
        result: tuple[Any, ...] = ()
        for first, last in self.bounds:
            group = tensors[2 * first : 2 * last]
            mean = self.all_reduce(ops.concat(each(_flat, group))) / self.degree
            result += each(_reshaped, ops.split(mean, each(size, group)), group)
        return result


def _flat(value: Tensor) -> Tensor:
    return ops.reshape(value, (-1,))


def _reshaped(flat: Tensor, like: Tensor) -> Tensor:
    return ops.reshape(flat, like.shape)
