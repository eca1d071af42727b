"""THOR, the second-order optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.arguments import of_kind
from mindspore_boost_ext.base.mapping import Tensors, call, each
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.base.sums import DIVIDE
from mindspore_boost_ext.config.rules import real, shown
from mindspore_boost_ext.config.sections import ThorConfig
from mindspore_boost_ext.report import Report, Row, warn
from mindspore_boost_ext.thor.factors import Curvature
from mindspore_boost_ext.thor.layers import CONV, LAYER_NORM, PLAIN, Taps, layer_plans

PRECONDITIONED = "preconditioned"
NO_LAYER = (
    "the network has no layer to precondition, so all gradients stay plain: it takes nn.Dense, "
    "nn.Conv2d and nn.Embedding"
)
_NEVER = 2**30  # later than any step; exact in float32, in which MindSpore 2.7 multiplies int32
_WHOLE = 2**30  # a block size that no factor exceeds
_GRADIENT_NORM = 1.0  # enable_clip_grad bounds each gradient by this
_LEAST_CURVATURE = 1e-30  # without damping, a gradient of 0 has curvature 0
_CAST = ops.Cast()
_REMEDY = "a larger damping avoids that"
_TROUBLES = (  # of layers, in the order in which the curvature counts them
    f"its damping was raised: a factor was not positive definite; {_REMEDY}",
    "it keeps its last inverse: a factor was not finite or not invertible; a larger damping avoids "
    "that, or a loss scale below 2 ** 40",
    "it keeps its last inverse, or its plain gradient if it has none: a factor was zero, because "
    "all inputs or gradients of the layer were zero, or because the network uses the weight "
    "without the layer's own construct (another Cell reads it, or the layer is recomputed)",
)


class THOR(nn.Optimizer):
    r"""Second-order optimizer with stale Kronecker factors.

    Every ``frequency`` steps, THOR computes two matrices, the Kronecker factors, for each Dense,
    Conv2d and Embedding layer: A from its inputs, G from the gradients of its outputs. It damps
    them by :math:`\lambda`, inverts them, and multiplies the gradient :math:`\nabla W` from both
    sides: :math:`u = (G + \sqrt\lambda I)^{-1} \nabla W (A + \sqrt\lambda I)^{-1} + w W`. Then
    comes momentum: :math:`m \leftarrow \mu m + u, W \leftarrow W - \eta m`. A tap is the part of a
    layer that captures the factors. ``python -m mindspore_boost_ext --explain thor`` prints the
    rest.

    Source: Chen et al., THOR, AAAI 2021; Martens and Grosse, K-FAC, ICML 2015.

    Args:
        net (Cell): the network. Its Dense, Conv2d and Embedding layers get taps (see
            ``thor.layers``); classes, names and outputs stay.
        learning_rate (Union[float, Tensor, Iterable, LearningRateSchedule]): as for any optimizer.
        damping (Union[float, Sequence[float], Tensor, LearningRateSchedule]): :math:`\lambda`, at
            least 0: a number, one for each step (the last one stays), or a schedule.
        momentum (float): :math:`\mu`, at least 0.
        weight_decay (Union[float, Cell]): :math:`w`, at least 0. Default: 0.0.
        loss_scale (float): divides gradients, above 0: the scale of a FixedLossScaleManager with
            ``drop_overflow_update=False``. Default: 1.0.
        batch_size (int): samples N in the rule of LayerNorm, at least 1. The other rules take N
            from the activations. Default: 32.
        use_nesterov (bool): Nesterov momentum. Default: False.
        decay_filter (Callable): Parameter -> bool, whether it decays; not used if ``params`` come
            in groups, which have their own weight decay. Default: all do.
        split_indices (Sequence[int], optional): numbers of the layers that end a group; the factors
            of a group are averaged over ranks together. Default: None, one group.
        enable_clip_grad (bool): bound the norm of each update by 1 before momentum.
            Default: False.
        frequency (int): steps from one refresh to the next (with ``trace_rule``: from one check of
            the traces to the next), at least 1. Default: 100.
        block_size (int, optional): size of the diagonal blocks into which larger factors are cut,
            at least 1. Default: None, no blocks.
        trace_rule (tuple[float, float], optional): :math:`(\omega_1, \omega_2)` with
            :math:`\omega_1 \ge \omega_2 \ge 0`; the paper has (.01, 0), (.01, .001) and (0, 0).
            Default: None.
        pi_damping (bool): divide the damping between A and G by their traces. Default: False.
        kl_clip (float, optional): bound :math:`\kappa > 0` of
            :math:`\eta^2 \sum \langle u, \nabla W \rangle`; larger steps are shrunk by one factor
            for all preconditioned layers. Default: None.
        moving_average (float): share of the old factors in a refresh, in [0, 1). Default: 0.0.
        params (Iterable[Parameter], optional): what to train, also in groups as for any optimizer.
            Default: None, ``net.trainable_params()``.

    Inputs:
        - **gradients** (tuple(Tensor)) - one for each of ``parameters``, in their shapes.

    Outputs:
        Tensor of bool, True.

    Raises:
        TypeError: if ``net`` is not a Cell, or the damping is none of the accepted types.
        ValueError: if a setting breaks its rule.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import BoostTrainOneStepCell
        >>> from mindspore_boost_ext import THOR
        >>> net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        >>> optimizer = THOR(net, 0.1, damping=0.03, momentum=0.9, frequency=10)
        >>> step = BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        >>> inputs, labels = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
        >>> float(step(Tensor(inputs), Tensor(labels)).asnumpy())
        16.0
        >>> optimizer.observations()["thor.inversions"]
        1
    """

    # For base.entries, which divides optimizers: entries for each parameter; and those for layers
    # and for updates, whose number may be that of the parameters by chance.
    parameter_aligned = ("layer_of", "normed")
    parameter_free = ("split_indices", "damping")

    def __init__(
        self,
        net: nn.Cell,
        learning_rate: Any,
        damping: Any,
        momentum: float,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        batch_size: int = 32,
        use_nesterov: bool = False,
        decay_filter: Callable[[Parameter], bool] = lambda parameter: True,
        split_indices: Sequence[int] | None = None,
        enable_clip_grad: bool = False,
        frequency: int = 100,
        *,
        block_size: int | None = None,
        trace_rule: tuple[float, float] | None = None,
        pi_damping: bool = False,
        kl_clip: float | None = None,
        moving_average: float = 0.0,
        params: Iterable[Any] | None = None,
    ) -> None:
        if not isinstance(net, nn.Cell):
            raise TypeError(f"THOR: net must be a Cell, got {shown(net)}")
        if not callable(decay_filter):
            raise TypeError(f"THOR: decay_filter must be a function, got {shown(decay_filter)}")
        # Only the section may have None as its momentum, and only THOR a schedule as its damping.
        real("[0, inf)").read("THOR.momentum", momentum)
        stored = ThorConfig.check("THOR", **dict(locals(), damping=0.0))
        trained = list(net.trainable_params() if params is None else params)
        super().__init__(learning_rate, trained, weight_decay, loss_scale)
        if not self.is_group:
            self.decay_flags = tuple(bool(decay_filter(one)) for one in self.parameters)
        self.momentum = Parameter(Tensor(momentum, ms.float32), name="momentum")
        self.moments = self.parameters.clone(prefix="moments", init="zeros")
        self.use_nesterov, self.opt = bool(use_nesterov), ops.ApplyMomentum()
        self.samples, self.frequency = float(batch_size), int(frequency)
        self.enable_clip_grad, self.kl_clip = bool(enable_clip_grad), kl_clip
        self.split_indices = stored["split_indices"]
        self.damping = _checked_damping(damping)
        block = _WHOLE if block_size is None else int(block_size)
        plans, self._reasons = layer_plans(net, self.parameters, block)
        self.curvature = Curvature(plans, stored["trace_rule"], bool(pi_damping), moving_average)
        self._register()

    def _register(self) -> None:
        """Note the layers, and make their taps, which the step attaches."""
        plans = self.curvature.plans
        self.taps = Taps(plans, self.curvature.pairs)
        number = {id(plan.weight): index for index, plan in enumerate(plans)}
        self.layer_of = tuple(number.get(id(parameter), -1) for parameter in self.parameters)
        reasons = [self._reasons.get(id(parameter), "") for parameter in self.parameters]
        self.normed = tuple(reason == LAYER_NORM for reason in reasons)
        self.next_refresh = state("thor.next_refresh", 0, np.int32)
        self._warned: set[tuple[str, str]] = set()
        # Runs on the host when the update is compiled. It returns True, which the graph uses.
        self.look_for_taps = ops.constexpr(self._warn_without_taps, reuse_result=False)
        if not plans:
            warn(f"THOR: {NO_LAYER}")

    def _warn_without_taps(self) -> bool:
        if self.factors and not self.taps.used:
            warn(
                "THOR: the training step computes no factors, so this is plain momentum: train "
                "with BoostTrainOneStepCell, or with ms.Model while this package is installed"
            )
        return True

    @property
    def factors(self) -> tuple[Parameter, ...]:
        """A and G of each layer in turn; the gradients by them are the new factors."""
        return self.curvature.factors

    def get_frequency(self) -> int:
        """Return the steps from one refresh to the next."""
        return self.frequency

    def get_weight_decay(self) -> Tensor | Tensors:
        """Return the weight decay of this step, without the factor ``loss_scale`` of MindSpore."""
        held = super().get_weight_decay()
        if not self.need_scale:  # else gradients are divided by it before they decay
            return held
        if not self.is_group:
            return held / self.loss_scale
        return each(ops.partial(_divided, self.loss_scale), held)

    def is_due(self) -> Tensor:
        """Return bool [1]: whether this step should refresh the curvature."""
        return self.global_step >= self.next_refresh

    def is_overdue(self) -> Tensor:
        """Return bool [1]: whether the step that should have refreshed it did not."""
        return self.global_step > self.next_refresh

    def is_due_now(self) -> bool:
        """Return, on the host, whether this step should refresh the curvature."""
        if not self.factors:
            return False
        return int(self.global_step.asnumpy()[0]) >= int(self.next_refresh.asnumpy())

    def refresh(self, factor_gradients: Tensors) -> Tensor:
        """Take in A and G of each layer in turn, as ``curvature.prepared`` returns them."""
        done = call(self._refresh_compiled, factor_gradients)
        return ops.depend(self.next_refresh, done)

    def _refresh(self, *factor_gradients: Tensor) -> Tensor:
        done, stopped = self.curvature.refresh(factor_gradients, self._damping_now())
        following = self.global_step[0] + self.frequency
        if self.curvature.trace_rule is not None:
            following = ops.where(stopped.all(), ops.ones_like(following) * _NEVER, following)
        return ops.depend(done, ops.assign(self.next_refresh, following))

    # One compiled function: in PYNATIVE_MODE hundreds of small operators would cost more.
    _refresh_compiled = ms.jit(_refresh)

    def _damping_now(self) -> Tensor:
        """Return λ of this step: float32 []."""
        if isinstance(self.damping, nn.Cell):
            return ops.reshape(ops.cast(self.damping(self.global_step), ms.float32), ())
        last = self.damping.shape[0] - 1
        return self.damping[ops.clamp(self.global_step[0], None, last)]

    def construct(self, gradients: Tensors) -> Tensor:
        """Update the parameters."""
        return call(self._update_compiled, gradients)

    def _update(self, *gradients: Tensor) -> Tensor:
        gradients = self.scale_grad(gradients)
        rate = self.get_lr()
        gradients = self.decay_weight(self._directions(gradients, rate))
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        if self.enable_clip_grad:
            gradients = each(_bounded, gradients)
        move = self._with_nesterov if self.use_nesterov else self._with_momentum
        done = self._each(move, rate, self.parameters, self.moments, gradients)
        return ops.depend(self.look_for_taps(), done)

    _update_compiled = ms.jit(_update)

    def _each(self, function: Any, rate: Any, *columns: tuple[Any, ...]) -> Tensors:
        """Call a function with the rate of each parameter and its entries of the columns."""
        if self.is_group_lr:
            return each(function, rate, *columns)
        return each(ops.partial(function, rate), *columns)

    def _with_momentum(
        self, rate: Tensor, weight: Parameter, moment: Parameter, gradient: Tensor
    ) -> Tensor:
        return self.opt(weight, moment, rate, gradient, self.momentum)

    def _with_nesterov(
        self, rate: Tensor, weight: Parameter, moment: Parameter, gradient: Tensor
    ) -> Tensor:
        """Do the same by Nesterov's rule, which the CPU kernel of ApplyMomentum ignores."""
        following = moment * self.momentum + gradient
        done = ops.assign_sub(weight, rate * (gradient + self.momentum * following))
        return ops.depend(done, ops.assign(moment, following))

    def _directions(self, gradients: Tensors, rate: Tensor | Tensors) -> Tensors:
        """Return the preconditioned gradients, in the dtypes of the parameters."""
        found = each(self._direction, self.layer_of, self.normed, gradients)
        if self.kl_clip is not None:
            found = self._clipped(found, gradients, rate)
        return each(_like, found, self.parameters)

    def _direction(self, layer: int, normed: bool, gradient: Tensor) -> Tensor:
        if layer >= 0:
            return self.curvature.layers[layer].precondition(gradient)
        if normed:
            gradient = ops.cast(gradient, ms.float32)
            curvature = ops.square(gradient) / self.samples + ops.sqrt(self._damping_now())
            return gradient / ops.maximum(curvature, _LEAST_CURVATURE)
        return gradient

    def _clipped(self, found: Tensors, gradients: Tensors, rate: Tensor | Tensors) -> Tensors:
        """Shrink the preconditioned directions so that the predicted KL divergence is bounded."""
        total = ops.addn(self._each(self._product, rate, self.layer_of, found, gradients))
        factor = ops.clamp(ops.sqrt(self.kl_clip / ops.clamp(total, 1e-30, None)), None, 1.0)
        return each(ops.partial(_shrunk, factor), self.layer_of, found)

    def _product(self, rate: Tensor, layer: int, direction: Tensor, gradient: Tensor) -> Tensor:
        """Return η² ⟨u, ∇W⟩ of one parameter; 0 for one that is not preconditioned."""
        if layer < 0:
            return ops.zeros((), ms.float32)
        return rate * rate * (direction * ops.cast(gradient, ms.float32)).sum()

    def observations(self) -> dict[str, Any]:
        """Return what BoostMonitor shows: refreshes, inversions and the change of the traces."""
        if not self.factors:
            return {}
        refreshes, *others = self.curvature.counters.asnumpy()
        observed: dict[str, Any] = {"thor.refreshes": int(refreshes.max())}
        names = ("inversions", "dampings_raised", "inverses_kept", "layers_passed_by")
        observed.update((f"thor.{name}", int(one.sum())) for name, one in zip(names, others))
        traces, changes = self.curvature.kept_trace.asnumpy(), self.curvature.change.asnumpy()
        for plan, trace, change in zip(self.curvature.plans, traces, changes):
            observed[f"thor.trace.{plan.weight.name}"] = float(trace)
            observed[f"thor.change.{plan.weight.name}"] = float(change)
        return observed

    def warn_of_troubles(self) -> None:
        """Warn once for each layer and cause: raised dampings, kept inverses, factors of zero."""
        names = [plan.weight.name for plan in self.curvature.plans]
        for trouble, counts in zip(_TROUBLES, self.curvature.counters.asnumpy()[2:]):
            affected = {(name, trouble) for name, count in zip(names, counts) if count}
            new = [name for name in names if (name, trouble) in affected - self._warned]
            self._warned |= affected
            if new:
                warn(f"THOR, {', '.join(new)}: {trouble}")

    def report(self) -> Report:
        """Return a table: each parameter, how its gradient is treated, and the memory for it."""
        report = Report("THOR: how each parameter is preconditioned")
        report.put(*self.rows())
        return report

    def rows(self) -> list[Row]:
        """Return one row for each parameter; ``counts`` holds the bytes of its curvature."""
        _, inversions, _, _, passed_by = self.curvature.counters.asnumpy()
        found = []
        for parameter, index in zip(self.parameters, self.layer_of):
            counts = {}
            if index < 0:
                reason = self._reasons[id(parameter)]
                status = LAYER_NORM if reason == LAYER_NORM else PLAIN
            elif passed_by[index] and not inversions[index]:
                status, reason = PLAIN, "it has got no factor: see the warning"
            else:
                plan, status = self.curvature.plans[index], PRECONDITIONED
                reason = f"{plan.kind}: A {_shape(plan.a_shape)}, G {_shape(plan.g_shape)}"
                counts = {"bytes": _bytes(self.curvature.layers[index])}
            found.append(Row(parameter.name, "THOR", status, reason, counts))
        return found

    def counts(self) -> dict[str, int]:
        """Return figures for a report: layers, convolutions among them, plain parameters, bytes."""
        plans = self.curvature.plans
        return {
            "layers": len(plans),
            "convolutions": sum(plan.kind == CONV for plan in plans),
            "plain_parameters": len(self.parameters) - len(plans),
            "bytes": _bytes(self.curvature),
        }


def _checked_damping(damping: Any) -> Any:
    """Return the damping as a schedule (Cell), or as float32 [steps]."""
    if isinstance(damping, nn.Cell):
        return damping
    values = damping.asnumpy() if isinstance(damping, Tensor) else damping
    if values is None or isinstance(values, (str, bytes, dict, bool)):
        raise TypeError(
            "THOR.damping must be a number, a list of numbers, a Tensor or a "
            f"LearningRateSchedule, got {shown(damping)}"
        )
    try:
        values = np.atleast_1d(np.asarray(values, np.float32))
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.ndim != 1 or not values.size or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(
            f"THOR.damping must be finite and >= 0 in every step, got {shown(damping)}"
        )
    return Tensor(values, ms.float32)


def _divided(scale: float, decay: Any) -> Any:
    return decay / scale


def _like(direction: Tensor, parameter: Parameter) -> Tensor:
    return _CAST(direction, parameter.dtype)


def _bounded(gradient: Tensor) -> Tensor:
    norm = ops.sqrt(ops.square(ops.cast(gradient, ms.float32)).sum())
    excess = ops.maximum(norm, _GRADIENT_NORM) / _GRADIENT_NORM
    return ops.cast(DIVIDE(gradient, excess), gradient.dtype)


def _shrunk(factor: Tensor, layer: int, direction: Tensor) -> Tensor:
    return direction * factor if layer >= 0 else direction


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _bytes(cell: nn.Cell) -> int:
    return sum(int(parameter.nbytes) for parameter in cell.get_parameters())


def thor_of(optimizer: nn.Cell) -> THOR | None:
    """Return the THOR in an optimizer: itself, or the one that FreezeOpt or LARS wraps."""
    return of_kind(optimizer, THOR)


thor = THOR
