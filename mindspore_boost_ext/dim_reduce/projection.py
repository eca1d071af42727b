"""Projection onto a subspace of the weights, for P-BFGS, P-SGD and TWA; and P-SGD itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import Tensors, each
from mindspore_boost_ext.base.state import state
from mindspore_boost_ext.config.rules import check_all, integer, shown
from mindspore_boost_ext.config.sections import DimReduceConfig
from mindspore_boost_ext.dim_reduce.basis import rows_of_rank


class Subspace(nn.Cell):
    """What P-BFGS and P-SGD have in common: this rank's rows of the basis, and projections.

    Its arguments are those of ``DimReduce``.
    """

    divides_loss_scale = False

    def __init__(
        self,
        weight: Sequence[Parameter],
        pca_mat_local: np.ndarray,
        n_components: int,
        rank: int,
        rank_size: int,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.weight = ParameterTuple(weight)
        self.n_components, self.rank, self.rank_size = n_components, rank, rank_size
        self.sizes = tuple(int(np.prod(one.shape)) for one in weight)
        self.starts = tuple(int(one) for one in np.cumsum((0, *self.sizes))[:-1])
        rows = _checked_rows(pca_mat_local, n_components, rank, rank_size, sum(self.sizes))
        self.share = -(-n_components // rank_size)
        padded = np.zeros((self.share, sum(self.sizes)), np.float32)
        padded[: len(rows)] = rows
        # Not among the Cell's own Parameters, so that no checkpoint holds it.
        self.__dict__["basis"] = state("dim_reduce.basis", padded)
        self.first_row = rank * self.share
        self.padding = Tensor(np.zeros((self.share * rank_size - n_components, 1), np.float32))
        # Tells, after a checkpoint was loaded, whether the state was made in this basis.
        self.basis_mark = state("dim_reduce.basis_mark", basis_mark(padded))
        self.basis_mark.layerwise_parallel = True  # of this rank's rows: not to be broadcast
        self.from_rows = ops.MatMul(transpose_a=True)
        if rank_size > 1:
            self.all_gather = ops.AllGather()
            self.all_reduce = ops.AllReduce()

    # MindSpore never frees the graph of a function of ms.jit that holds a view (reshape, slice,
    # transpose, broadcast_to): views are taken outside of these functions, here and in DimReduce.

    def flat(self, values: Tensors) -> Tensor:
        """Return tensors of the weights' shapes as one float32 column [n, 1]."""
        return ops.concat(each(_column, values), 0)

    def parts(self, column: Tensor) -> Tensors:
        """Return a column [n, 1] as tensors of the weights' shapes and dtypes."""
        return each(ops.partial(self._part, column), self.starts, self.sizes, self.weight)

    def _part(self, column: Tensor, start: int, size: int, weight: Parameter) -> Tensor:
        values = ops.slice(column, (start, 0), (size, 1))
        return ops.cast(ops.reshape(values, weight.shape), weight.dtype)

    def projected(self, column: Tensor) -> Tensor:
        """Return the k coordinates [k, 1] of a column [n, 1], the same on every rank."""
        own = ops.matmul(self.basis, column)
        if self.rank_size > 1:
            own = self.all_gather(own)
        return own[: self.n_components]

    def reconstruct(self, coordinates: Tensor) -> Tensor:
        """Return the weights [n, m] that belong to coordinates [k, m]."""
        if self.share * self.rank_size > self.n_components:
            padding = ops.matmul(self.padding, ops.zeros_like(coordinates[:1]))
            coordinates = ops.concat((coordinates, padding), 0)
        own = coordinates[self.first_row : self.first_row + self.share]
        result = self.from_rows(self.basis, own)
        if self.rank_size > 1:
            result = self.all_reduce(result)
        return result

    def __call__(
        self,
        loss: Tensor,
        old_grad: Sequence[Tensor],
        loss_scale: Tensor,
        weight: Sequence[Parameter],
        weight_clone: Sequence[Tensor],
        *inputs: Tensor,
    ) -> Tensor | Tensors:
        """Run the step without the weights as inputs: they are known, and GRAPH_MODE takes none."""
        if not isinstance(loss_scale, Tensor):
            loss_scale = Tensor(float(loss_scale), ms.float32)
        gradients = ms.mutable(tuple(old_grad))  # else GRAPH_MODE compiles their values in
        self.follow_script()
        with _compat.without_autograd():
            return super().__call__(loss, gradients, loss_scale, (), (), *inputs)

    def follow_script(self) -> None:
        """Take over what the script has set since the last run, if it concerns the step."""

    def check_state(self) -> None:
        """Raise ``ValueError`` when a loaded checkpoint was made in another basis."""
        present = basis_mark(self.basis.asnumpy())
        loaded = self.basis_mark.asnumpy()
        if not np.allclose(loaded, present, rtol=1e-3, atol=1e-3):
            raise ValueError(
                "the loaded state belongs to another basis (boost.dim_reduce.basis_mark differs), "
                "or to another rank: save the basis of that run, give it as "
                "dim_reduce.pca_mat_path, and load each rank's own checkpoint"
            )


class ProjectedGradient(Subspace):
    r"""P-SGD: projects the gradient onto the subspace; the user's optimizer does the rest.

    .. math::
        w \leftarrow optimizer(w, P^T P g)

    If the optimizer's step is a sum of gradients (SGD, momentum), the weights stay in the subspace
    through their start. With Adam, similar optimizers or weight decay, they leave it.

    Args:
        optimizer (Cell): the optimizer over the weights.
        subspace: the arguments of :class:`Subspace`, by name.

    Inputs:
        As for :class:`DimReduce`; ``old_grad`` reaches the optimizer with its loss scale.

    Outputs:
        Tensor, ``loss``.
    """

    def __init__(self, optimizer: nn.Cell, **subspace: Any) -> None:
        super().__init__(**subspace)
        self.optimizer = optimizer

    def construct(self, loss: Tensor, old_grad: Tensors, *others: object) -> Tensor:
        """Project the gradient and run the optimizer; weights and inputs are not needed."""
        return ops.depend(loss, self.optimizer(self.parts(self._inside(self.flat(old_grad)))))

    @ms.jit
    def _inside(self, column: Tensor) -> Tensor:
        return self.reconstruct(self.projected(column))

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return 0: nothing is searched for, so no loss is needed."""
        return Tensor(0.0)

    def observations(self) -> dict[str, Any]:
        """Return nothing: the projection counts nothing."""
        return {}


def _column(value: Tensor) -> Tensor:
    return ops.reshape(ops.cast(value, ms.float32), (-1, 1))


def basis_mark(rows: np.ndarray) -> np.ndarray:
    """Return float32 [rows]: each row times one fixed vector, which tells two bases apart."""
    probe = np.sin(np.arange(1, rows.shape[1] + 1) * 0.7) * np.sqrt(2.0)
    return (rows.astype(np.float64) @ probe).astype(np.float32)


def _checked_rows(
    rows: np.ndarray, n_components: int, rank: int, rank_size: int, size: int
) -> np.ndarray:
    check_all(
        "DimReduce",
        n_components=(n_components, DimReduceConfig.rules()["n_components"]),
        rank=(rank, integer(0)),
        rank_size=(rank_size, integer(1)),
    )
    if rank >= rank_size:
        raise ValueError(f"DimReduce.rank must be below rank_size {rank_size}, got {rank}")
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype.kind != "f":
        raise ValueError(f"DimReduce.pca_mat_local must be a float matrix, got {shown(rows)}")
    own = rows_of_rank(n_components, rank, rank_size)
    count = own.stop - own.start
    if len(rows) not in (count, -(-n_components // rank_size)) or rows.shape[1] != size:
        raise ValueError(
            f"DimReduce.pca_mat_local must be [{count}, {size}] for rank {rank} of {rank_size}, "
            f"n_components {n_components} and {size} weights, got {list(rows.shape)}"
        )
    if not np.isfinite(rows).all():
        raise ValueError("DimReduce.pca_mat_local holds inf or nan")
    return rows
