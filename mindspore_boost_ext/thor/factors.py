"""The curvature that THOR keeps: factors, their inverses, and when these are made anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.thor.inverse import inverse_for_device
from mindspore_boost_ext.thor.layers import EMBEDDING, LayerPlan, padded_rows

_TINY = 1e-30


@dataclass(frozen=True)
class CurvatureSettings:
    """When and how factors become inverses; see README.md.

    Attributes:
        trace_rule: (ω1, ω2), or None to invert in every refresh.
        pi_damping: whether the damping is shared out between A and G by their traces.
        moving_average: ρ in [0, 1): the share of the old factors.
    """

    trace_rule: tuple[float, float] | None = None
    pi_damping: bool = False
    moving_average: float = 0.0


def _state(name: str, values: Any, requires_grad: bool = False) -> Parameter:
    return Parameter(Tensor(values), name=f"boost.thor.{name}", requires_grad=requires_grad)


def _identity(shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.broadcast_to(np.eye(shape[-1], dtype=np.float32), shape).copy()


class LayerFactors(nn.Cell):
    """Factors and inverses of one layer; before the first refresh the inverses are the identity.

    Args:
        plan (LayerPlan): the layer.
        settings (CurvatureSettings): the rules.
    """

    def __init__(self, plan: LayerPlan, settings: CurvatureSettings) -> None:
        super().__init__(auto_prefix=False)
        self.sizes, self.block = (plan.a_size, plan.g_size), plan.block
        self.diagonal = plan.kind == EMBEDDING
        self.settings, self.inverse = settings, inverse_for_device()
        name, a, g = plan.weight.name, plan.a_shape, plan.g_shape
        # Gradients with respect to these two bring the factors out of the backward pass.
        self.a = _state(f"{name}.a", np.zeros(a, np.float32), requires_grad=True)
        self.g = _state(f"{name}.g", np.zeros(g, np.float32), requires_grad=True)
        self.a_inverse = _state(f"{name}.a_inverse", _identity(a))
        self.g_inverse = _state(f"{name}.g_inverse", _identity(g))

    def averaged(self, a: Tensor, g: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moving averages that include a new pair of factors."""
        rho = self.settings.moving_average
        if rho == 0.0:
            return a, g
        kept = ops.where(first, ops.zeros_like(first * 1.0), ops.ones_like(first * 1.0) * rho)
        return self.a * kept + a * (1.0 - kept), self.g * kept + g * (1.0 - kept)

    def trace(self, factor: Tensor) -> Tensor:
        """Return the trace of a factor in any of its forms: float32 []."""
        if factor.ndim == 1:
            return factor.sum()
        return (factor * ops.eye(factor.shape[-1], factor.shape[-1], ms.float32)).sum()

    def dampings(self, trace_a: Tensor, trace_g: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to the diagonals of A and of G."""
        root = ops.sqrt(damping)
        if not self.settings.pi_damping:
            return root, root
        ratio = (trace_a / self.sizes[0]) / ops.maximum(trace_g / self.sizes[1], _TINY)
        pi = ops.sqrt(ops.clamp(ratio, 1e-6, 1e6))
        return root * pi, root / pi

    def invert(
        self, a: Tensor, g: Tensor, damping: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Invert both factors, and keep the inverses if they are wanted and good.

        Returns:
            Tensors of bool []: whether the damping was raised, and whether the result is good.
        """
        for_a, for_g = self.dampings(self.trace(a), self.trace(g), damping)
        a_inverse, used_a, good_a = self._inverse_of_a(a, for_a)
        g_inverse, used_g, good_g = self.inverse(g, for_g)
        good = ops.logical_and(wanted, ops.logical_and(good_a, good_g))
        ops.assign(self.a_inverse, ops.where(good, a_inverse, self.a_inverse))
        ops.assign(self.g_inverse, ops.where(good, g_inverse, self.g_inverse))
        raised = ops.logical_or(used_a > for_a * 1.0001, used_g > for_g * 1.0001)
        return raised, good

    def _inverse_of_a(self, a: Tensor, damping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.diagonal:
            return self.inverse(a, damping)  # type: ignore[no-any-return]
        used = ops.maximum(damping, a.max() * 1e-6)
        return 1.0 / (a + used), used, ops.isfinite(a).all()

    def precondition(self, gradient: Tensor) -> Tensor:
        """Return (G+√λI)⁻¹·∂W·(A+√λI)⁻¹ in the shape of ``gradient``, in float32."""
        gradient = ops.cast(gradient, ms.float32)
        if self.diagonal:  # the table is [vocabulary, size]: A stands on the left
            rows = gradient * ops.expand_dims(self.a_inverse, 1)
            return self._times(rows, self.g_inverse)
        matrix = ops.reshape(gradient, (self.sizes[1], self.sizes[0]))
        matrix = self._times(self._left(self.g_inverse, matrix), self.a_inverse)
        return ops.reshape(matrix, gradient.shape)

    def _left(self, inverse: Tensor, matrix: Tensor) -> Tensor:
        """Return inverse · matrix, where the inverse may be in blocks."""
        if inverse.ndim == 2:
            return ops.matmul(inverse, matrix)
        rows, columns = matrix.shape
        blocks = ops.reshape(padded_rows(matrix, self.block), (-1, self.block, columns))
        return ops.reshape(ops.bmm(inverse, blocks), (-1, columns))[:rows]

    def _times(self, matrix: Tensor, inverse: Tensor) -> Tensor:
        """Return matrix · inverse, where the (symmetric) inverse may be in blocks."""
        if inverse.ndim == 2:
            return ops.matmul(matrix, inverse)
        return ops.transpose(self._left(inverse, ops.transpose(matrix, (1, 0))), (1, 0))


class Curvature(nn.Cell):
    """The factors of all layers, and the count of what was done to them.

    Args:
        plans (Sequence[LayerPlan]): the layers.
        settings (CurvatureSettings): the rules.

    Attributes:
        factors (tuple(Parameter)): A and G of each layer, in turn.
    """

    def __init__(self, plans: Sequence[LayerPlan], settings: CurvatureSettings) -> None:
        super().__init__(auto_prefix=False)
        self.plans, self.settings = tuple(plans), settings
        self.layers = nn.CellList(
            [LayerFactors(plan, settings) for plan in plans], auto_prefix=False
        )
        self.pairs = tuple((layer.a, layer.g) for layer in self.layers)
        self.factors = tuple(factor for pair in self.pairs for factor in pair)
        self.sizes = tuple(float(plan.a_size * plan.g_size) for plan in plans)
        count = max(len(self.plans), 1)
        self.kept_trace = _state("kept_trace", np.zeros(count, np.float32))
        self.change = _state("change", np.zeros(count, np.float32))
        self.stopped = _state("stopped", np.zeros(count, np.bool_))
        # Rows: refreshes seen, inversions made, dampings raised, refreshes that kept the old ones,
        # refreshes in which the layer's own construct had not run.
        self.counters = _state("tally", np.zeros((5, count), np.int32))
        self.reducer: Any = None

    def use_ranks(self, degree: int, split_indices: Iterable[int] | None) -> None:
        """Let factors be averaged over ranks from now on.

        Args:
            degree: number of ranks.
            split_indices: numbers of the layers that end a group; the factors of a group are
                reduced together. None for one group of all.
        """
        self.reducer = MeanOverRanks(degree, split_indices, len(self.plans))

    def prepared(self, factor_gradients: tuple[Tensor, ...], scales: Any) -> tuple[Tensor, ...]:
        """Divide the loss scale out of new factors and average them over the ranks.

        Args:
            factor_gradients: what the backward pass brought: A and G of each layer in turn.
            scales: the loss scale, or a tuple with one for each layer. Only G carries it, squared.
        """
        result: tuple[Any, ...] = ()
        for index in range(len(self.plans)):
            scale = scales[index] if isinstance(scales, tuple) else scales
            g = factor_gradients[2 * index + 1] / scale / scale
            result += (factor_gradients[2 * index], g)
        return result if self.reducer is None else self.reducer(result)

    def refresh(
        self, factor_gradients: tuple[Tensor, ...], damping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take in new factors, as :meth:`prepared` returns them.

        Args:
            factor_gradients: A and G of each layer in turn.
            damping: λ, float32 [].

        Returns:
            Tensors: the counters, when all is done; bool [layers], those that the rule has stopped.
        """
        traces: tuple[Any, ...] = ()
        changes: tuple[Any, ...] = ()
        stopped: tuple[Any, ...] = ()
        columns: tuple[Any, ...] = ()
        for index in range(len(self.plans)):
            trace, change, stop, column = self._refresh_layer(
                index, factor_gradients[2 * index], factor_gradients[2 * index + 1], damping
            )
            traces += (trace,)
            changes += (change,)
            stopped += (stop,)
            columns += (column,)
        ops.assign(self.kept_trace, ops.stack(traces))
        ops.assign(self.change, ops.stack(changes))
        now_stopped = ops.stack(stopped)
        ops.assign(self.stopped, now_stopped)
        return ops.assign_add(self.counters, ops.stack(columns, 1)), now_stopped

    def _refresh_layer(
        self, index: int, a: Tensor, g: Tensor, damping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Refresh one layer; return kept trace, change, whether it stopped, and its counters."""
        layer, kept = self.layers[index], self.kept_trace[index]
        first = kept <= 0.0
        # No row at all: the weight was used past its layer, which keeps the inverses that it has.
        reached = ops.logical_or(ops.not_equal(a, 0.0).any(), ops.not_equal(g, 0.0).any())
        a, g = layer.averaged(a, g, first)
        trace = layer.trace(a) * layer.trace(g) + damping * self.sizes[index]
        finite = ops.logical_and(ops.isfinite(a).all(), ops.isfinite(g).all())
        usable = ops.logical_and(finite, reached)
        change = ops.abs(trace - kept) / ops.maximum(kept, _TINY)
        change = ops.where(ops.logical_or(first, ops.logical_not(usable)), 0.0 * kept, change)
        stop = self.stopped[index]
        wanted = usable
        if self.settings.trace_rule is not None:
            above, below = self.settings.trace_rule
            fresh = ops.logical_or(first, ops.logical_and(change > above, ops.logical_not(stop)))
            wanted = ops.logical_and(usable, fresh)
            ended = ops.logical_and(ops.logical_not(first), change < below)
            stop = ops.logical_or(stop, ops.logical_and(usable, ended))
            raised, good = self._invert_if(wanted, layer, a, g, damping)
        else:
            raised, good = layer.invert(a, g, damping, wanted)
        good = ops.logical_and(good, wanted)
        # Averages go on where the trace rule keeps the inverses; without averages F stays F_old.
        taken = good if self.settings.moving_average == 0.0 else usable
        ops.assign(layer.a, ops.where(taken, a, layer.a))
        ops.assign(layer.g, ops.where(taken, g, layer.g))
        bad = ops.logical_or(ops.logical_not(finite), ops.logical_xor(wanted, good))
        raised = ops.logical_and(raised, good)
        passed_by = ops.logical_not(reached)
        counters = ops.stack((ops.ones_like(good), good, raised, bad, passed_by)).astype(ms.int32)
        return ops.where(good, trace, kept), change, stop, counters

    def _invert_if(
        self, wanted: Tensor, layer: LayerFactors, a: Tensor, g: Tensor, damping: Tensor
    ) -> tuple[Tensor, Tensor]:
        if wanted:
            raised, good = layer.invert(a, g, damping, wanted)
        else:
            raised, good = ops.logical_and(wanted, False), ops.logical_and(wanted, False)
        return raised, good

    def memory_bytes(self) -> int:
        """Return the bytes of factors, inverses and counters, which the step holds all the time."""
        return sum(int(one.nbytes) for one in self.get_parameters())


class MeanOverRanks(nn.Cell):
    """Averages tensors over all ranks, one AllReduce for each group of layers.

    Args:
        degree (int): number of ranks.
        split_indices (Iterable[int], optional): numbers of the layers that end a group.
        layers (int): number of layers, each with two tensors.
    """

    def __init__(self, degree: int, split_indices: Iterable[int] | None, layers: int) -> None:
        super().__init__(auto_prefix=False)
        ends = [index + 1 for index in split_indices or () if index + 1 < layers]
        self.bounds = tuple(zip([0, *ends], [*ends, layers]))
        self.degree = float(degree)
        self.all_reduce = ops.AllReduce()

    def construct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the means, in the order and shapes of ``tensors``."""
        result: tuple[Any, ...] = ()
        for first, last in self.bounds:
            group = tensors[2 * first : 2 * last]
            flat: tuple[Any, ...] = ()
            for one in group:
                flat += (ops.reshape(one, (-1,)),)
            mean = self.all_reduce(ops.concat(flat)) / self.degree
            start = 0
            for one in group:
                result += (ops.reshape(mean[start : start + one.size], one.shape),)
                start += one.size
        return result


__all__ = ["Curvature", "CurvatureSettings", "LayerFactors"]
