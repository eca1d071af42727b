"""DimReduce: training in the few main directions of an earlier training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops

from mindspore_boost_ext.base.cells import layers_of
from mindspore_boost_ext.base.mapping import call, each
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.base.sums import DIVIDE, chosen
from mindspore_boost_ext.config.sections import DimReduceConfig
from mindspore_boost_ext.dim_reduce.projection import Subspace
from mindspore_boost_ext.runtime.eval_copy import EvalCopy

P_BFGS, TWA = "p-bfgs", "twa"
# The arguments of DimReduce that are settings of its section.
_OF_TRIALS = ("trials", "first_update_scaling", "stall_limit")
SEARCH_SETTINGS = ("rho", "gamma", "alpha", "sigma", *_OF_TRIALS)
_CURVATURE_ABOVE = 1e-20
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(mint.nn.Dropout, mint.nn.Dropout2d),  # classes of their own
)
_ROUNDING = float(np.finfo(np.float32).eps)


class DimReduce(Subspace):
    r"""P-BFGS: a quasi-Newton step with line search in a subspace.

    ``python -m mindspore_boost_ext --explain dim_reduce`` prints the rule. Source: Li et al., Low
    Dimensional Trajectory Hypothesis is True, TPAMI 2022.

    Args:
        network (Cell): the network with its loss, for the trials; a loss of several elements counts
            as their sum.
        optimizer (Cell): must subtract the step unchanged, as ``nn.SGD(weight, 1.0)`` does.
        weight (tuple(Parameter)): the trained parameters, in the order of the basis' columns.
        pca_mat_local (numpy.ndarray): float [rows, n], this rank's rows of the orthonormal basis:
            rows rank·c to (rank+1)·c, c = ceil(k / rank_size); zero rows at its end are padding.
        n_components (int): k, the rows of all ranks together, 1 <= k <= n.
        rho (float): factor between two trials, in (0, 1).
        gamma (float): momentum of the residual, in [0, 1).
        alpha (float): rate of the residual, >= 0.
        sigma (float): share of the linear decrease that a trial must reach, in (0, 1).
        rank (int): number of this rank.
        rank_size (int): number of ranks.
        trials (int): step lengths tried before the step is given up. Default: 2, as upstream.
        first_update_scaling (bool): scale the first B so that its step fits the curvature.
            Default: False, as upstream.
        stall_limit (int, optional): failures in a row after which B shrinks; with None it never
            does, as upstream. Default: 3.
        gradients_mean (bool): whether gradients and losses are means over the ranks; else they are
            sums. Default: True.

    Inputs:
        - **loss** (Tensor) - the loss at the present weights, of this rank.
        - **old_grad** (tuple(Tensor)) - its gradients, the same on all ranks, times ``loss_scale``.
        - **loss_scale** (Union[Tensor, float]) - divided out of the gradients, once.
        - **weight** (tuple(Tensor)) - not used: the parameters of the constructor are.
        - **weight_clone** (tuple(Tensor)) - not used: the step saves the weights itself.
        - **\*inputs** (tuple(Tensor)) - the inputs of ``network`` for the trials.

    Outputs:
        Tensor, ``loss``, when the step is done.

    Raises:
        ValueError: if an argument breaks its rule.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext import DimReduce
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> weight = net.trainable_params()
        >>> basis = np.array([[1.0, 0.0]], np.float32)
        >>> optimizer = nn.SGD(weight, 1.0)
        >>> step = DimReduce(network, optimizer, weight, basis, 1, 0.55, 0.9, 0.0, 0.4, 0, 1)
        >>> inputs = Tensor(np.eye(2, dtype=np.float32)), Tensor(np.zeros((2, 1), np.float32))
        >>> gradient = (Tensor(np.ones((1, 2), np.float32)),)
        >>> loss = step(network(*inputs), gradient, 1.0, weight, weight, *inputs)
        >>> net.weight.asnumpy().tolist()
        [[0.0, 1.0]]
    """

    divides_loss_scale = True

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        weight: Sequence[Parameter],
        pca_mat_local: np.ndarray,
        n_components: int,
        rho: float,
        gamma: float,
        alpha: float,
        sigma: float,
        rank: int,
        rank_size: int,
        *,
        trials: int = 2,
        first_update_scaling: bool = False,
        stall_limit: int | None = 3,
        gradients_mean: bool = True,
    ) -> None:
        DimReduceConfig.check("DimReduce", **locals())
        super().__init__(tuple(weight), pca_mat_local, n_components, rank, rank_size)
        self.network = network
        self.optimizer = optimizer
        self.rho, self.gamma, self.alpha, self.sigma = rho, gamma, alpha, sigma
        self.trials, self.first_update_scaling = trials, first_update_scaling
        self.stall_limit, self.gradients_mean = stall_limit or 0, gradients_mean
        self.shrinking = rho**trials
        self.is_low = any(one.dtype != ms.float32 for one in weight)
        self.eye = Tensor(np.eye(n_components, dtype=np.float32))
        self.outer = ops.MatMul(transpose_b=True)
        self._make_state()
        self._make_scratch()
        self.without_dropout = without_dropout(network)
        self.trial_network = self.without_dropout.network
        self.has_dropout = self.trial_network is not network

    def follow_script(self) -> None:
        """Let the trials see what the script has set on the network."""
        self.without_dropout.follow()

    def _make_state(self) -> None:
        k, n = self.n_components, sum(self.sizes)
        self.inverse_hessian = state("dim_reduce.inverse_hessian", np.eye(k))
        self.last_gradient = state("dim_reduce.last_gradient", np.zeros((k, 1)))
        self.last_step = state("dim_reduce.last_step", np.zeros((k, 1)))
        self.residual = state("dim_reduce.residual", np.zeros((n, 1)))
        counters = ("updates", "failures_in_a_row", "accepted_steps", "failed_searches")
        for name in (*counters, "trials_run"):
            setattr(self, name, state(f"dim_reduce.{name}", 0, np.int32))
        self.step_length = state("dim_reduce.step_length", 0.0)

    def _make_scratch(self) -> None:
        """Make buffers for what a trial changes: the weights and the network's other Parameters."""
        trained = {id(one) for one in self.weight}
        held = [one for one in self.network.get_parameters() if id(one) not in trained]
        self.__dict__["held"] = ParameterTuple(held)
        self.__dict__["held_before"] = ParameterTuple(
            [Parameter(one.value().copy(), f"saved.{one.name}", False) for one in held]
        )
        # Parameters, too: if Tensors pass in a tuple from one function of ms.jit to the next,
        # PYNATIVE_MODE keeps each as a constant.
        k, columns = self.n_components, ("weights_before", "direction", "in_subspace", "gradient")
        shapes = dict.fromkeys(columns, self.residual.shape)
        shapes.update(next_inverse_hessian=(k, k), next_gradient=(k, 1), next_step=(k, 1))
        for name, shape in shapes.items():
            self.__dict__[name] = state(f"dim_reduce.{name}", np.zeros(shape))

    def construct(
        self,
        loss: Tensor,
        old_grad: tuple[Tensor, ...],
        loss_scale: Tensor,
        weight: Sequence[Parameter],
        weight_clone: Sequence[Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        """Search along the quasi-Newton direction, step, and return the loss."""
        if isinstance(loss, tuple):
            raise TypeError("dim_reduce needs the loss: let the network return only the loss")
        gradient = DIVIDE(self.flat(old_grad), ops.cast(loss_scale, ms.float32))
        weights = ops.depend(self.flat(self.weight), loss)
        slope, updated = self._propose(gradient, weights)
        start = call(self._loss_here, (loss, *inputs))
        length = ops.where(ops.isnan(slope), slope, ops.ones_like(slope))
        accepted = ops.isnan(length)  # False; True if the slope is nan: then there is no search
        tried = ops.zeros_like(self.trials_run)
        while ops.logical_and(ops.logical_not(accepted), tried < self.trials):
            loss_there = call(self._loss_at, (length, *inputs))
            accepted = loss_there < start + self.sigma * length * slope
            tried = tried + 1
            # No `if` in here: inside a loop, each `if` that runs leaks memory (MindSpore 2.10).
            length = ops.where(accepted, length, length * self.rho)
        delta = self._conclude(accepted, length, tried, start, slope, updated)
        delta = ops.depend(delta, self._set_weights(self.weights_before))
        if not self.is_low:
            return ops.depend(loss, self.optimizer(self.parts(delta)))
        # Behind the loop, a graph's nn.SGD of float16 reads a trial's weights.
        before = self.flat(self.weight)
        done = self.optimizer(self.parts(delta))
        return ops.depend(loss, self._set_weights(ops.depend(before - delta, done)))

    @ms.jit
    def _propose(self, gradient: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Update B, find the direction, save the weights; return slope and whether B changed."""
        coordinates = self.projected(gradient)
        inverse_hessian, updated = self._updated_inverse_hessian(coordinates)
        inverse_hessian = inverse_hessian * self._shrunk()
        step = -ops.matmul(inverse_hessian, coordinates)
        both = self.reconstruct(ops.concat((step, coordinates), 1))
        done = (
            ops.assign(self.gradient, gradient),
            ops.assign(self.next_gradient, coordinates),
            ops.assign(self.next_inverse_hessian, inverse_hessian),
            ops.assign(self.next_step, step),
            ops.assign(self.direction, both[:, :1]),
            ops.assign(self.in_subspace, both[:, 1:]),
            ops.assign(self.weights_before, weights),
        )
        return ops.depend((coordinates * step).sum(), done), updated

    def _shrunk(self) -> Tensor | float:
        """Return the factor on B, by which a search starts where the last failed one ended."""
        if self.stall_limit == 0:
            return 1.0
        beyond = ops.maximum(self.failures_in_a_row - (self.stall_limit - 1), 0)
        return ops.pow(Tensor(self.shrinking, ms.float32), ops.cast(beyond, ms.float32))

    def _updated_inverse_hessian(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return B after the last accepted step, and whether that step had curvature to add."""
        old, s = self.inverse_hessian, self.last_step
        y = coordinates - self.last_gradient
        curvature = (y * s).sum()
        known = curvature > _CURVATURE_ABOVE
        r = 1.0 / ops.select(known, curvature, ops.ones_like(curvature))
        if self.first_update_scaling:
            first = ops.logical_and(known, self.updates == 0)
            scaled = self.eye * (curvature / ops.clamp((y * y).sum(), 1e-37))
            old = ops.where(first, scaled, old)
        by = ops.matmul(old, y)
        crosses = self.outer(s, by) + self.outer(by, s)
        # Not r * r, which float32 cannot hold if steps and gradients have unusual units.
        new = old - r * crosses + (r * (r * (y * by).sum()) + r) * self.outer(s, s)
        return ops.where(known, new, self.inverse_hessian), known

    def _loss_here(self, loss: Tensor, *inputs: Tensor) -> Tensor:
        """Return f at the present weights: the step's loss, or a new one if that had dropout."""
        if self.has_dropout:
            return call(self._trial_loss, (loss, *inputs))
        return self._agreed(loss)

    def _loss_at(self, length: Tensor, *inputs: Tensor) -> Tensor:
        """Return f after a step of that length; the weights stay there."""
        there = self._set_weights(self.weights_before + length * self.direction)
        return call(self._trial_loss, (ops.depend(length, there), *inputs))

    def _set_weights(self, column: Tensor) -> tuple[Tensor, ...]:
        return each(ops.assign, self.weight, self.parts(column))

    def _trial_loss(self, after: Tensor, *inputs: Tensor) -> Tensor:
        """Return the loss of all ranks at the present weights."""
        return self._agreed(call(self._untraced_loss, (after, *inputs)))

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return this rank's loss at the present weights; change nothing."""
        return call(self._untraced_loss, (self.step_length, *inputs))

    def _untraced_loss(self, after: Tensor, *inputs: Tensor) -> Tensor:
        """Run the network, and restore its Parameters that are not trained."""
        after = ops.depend(after, each(ops.partial(_copied, after), self.held_before, self.held))
        inputs = ops.depend(inputs, after)
        loss = call(self.trial_network, inputs)
        return ops.depend(loss, each(ops.partial(_copied, loss), self.held, self.held_before))

    def _agreed(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks, float32, shape ()."""
        loss = ops.reshape(ops.cast(loss, ms.float32).sum(), (1,))
        if self.rank_size > 1:
            loss = self.all_reduce(loss)
            if self.gradients_mean:
                loss = loss / float(self.rank_size)
        return ops.reshape(loss, ())

    @ms.jit
    def _conclude(
        self,
        accepted: Tensor,
        length: Tensor,
        tried: Tensor,
        start: Tensor,
        slope: Tensor,
        updated: Tensor,
    ) -> Tensor:
        """Keep the step or give it up; return the column that the optimizer subtracts."""
        length = ops.select(accepted, length, ops.zeros_like(length))
        step = chosen(accepted, self.direction * length, ops.zeros_like(self.direction))
        residual = self.gamma * self.residual + self.gradient - self.in_subspace
        delta = self.alpha * residual - step
        delta = ops.depend(delta, ops.assign(self.residual, residual))
        delta = ops.depend(delta, self._remember(accepted, length, start, slope))
        return ops.depend(delta, self._count(accepted, length, tried, updated))

    def _remember(self, accepted: Tensor, length: Tensor, start: Tensor, slope: Tensor) -> Tensor:
        """Store the state of an accepted step; count the failed searches in a row."""
        done = accepted
        if self.stall_limit > 0:
            asked, least = -self.sigma * slope, _ROUNDING * ops.abs(start)
            stalled = ops.logical_and(ops.logical_not(accepted), asked > least)
            # Shrunk below rounding, the search starts anew; batches without gradient do not count.
            gone = ops.logical_and(asked <= least, asked > least * self._shrunk())
            anew = ops.cast(ops.logical_or(accepted, gone), ms.int32)
            in_a_row = (self.failures_in_a_row + ops.cast(stalled, ms.int32)) * (1 - anew)
            done = ops.depend(done, ops.assign(self.failures_in_a_row, in_a_row))
        state = (self.inverse_hessian, self.last_gradient, self.last_step)
        new = (self.next_inverse_hessian, self.next_gradient, length * self.next_step)
        return ops.depend(done, each(ops.partial(_replaced, accepted), state, new))

    def _count(self, accepted: Tensor, length: Tensor, tried: Tensor, updated: Tensor) -> Tensor:
        one = ops.cast(accepted, ms.int32)
        done = (
            ops.assign_add(self.accepted_steps, one),
            ops.assign_add(self.failed_searches, 1 - one),
            ops.assign_add(self.updates, one * ops.cast(updated, ms.int32)),
            ops.assign_add(self.trials_run, tried),
        )
        return ops.depend(ops.assign(self.step_length, length), done)

    # State under the names of mindspore.boost.
    bk = property(lambda self: self.inverse_hessian, doc="B, under upstream's name.")
    sk = property(lambda self: self.last_step, doc="The last step s, under upstream's name.")
    gk_last = property(lambda self: self.last_gradient, doc="The last projected gradient.")
    max_search_time = property(lambda self: self.trials, doc="``trials``, under upstream's name.")

    def observations(self) -> dict[str, Any]:
        """Return the counters, and the length of the last step (0.0 when its search failed)."""
        return {
            "dim_reduce.accepted_steps": int(self.accepted_steps.asnumpy()),
            "dim_reduce.failed_searches": int(self.failed_searches.asnumpy()),
            "dim_reduce.trials": int(self.trials_run.asnumpy()),
            "dim_reduce.step_length": float(self.step_length.asnumpy()),
        }


def without_dropout(network: nn.Cell) -> EvalCopy:
    """Return a copy of the network, over the same Parameters, whose dropout is switched off."""
    return EvalCopy(network, layers_of(network, _DROPOUTS))


def _copied(after: Tensor, target: Parameter, source: Parameter) -> Tensor:
    """Write one Parameter into another after ``after`` is computed."""
    return ops.assign(target, ops.depend(source, after))


def _replaced(accepted: Tensor, place: Parameter, new: Tensor) -> Tensor:
    """Write the new value if the step was accepted."""
    return ops.assign(place, ops.where(accepted, new, place))
