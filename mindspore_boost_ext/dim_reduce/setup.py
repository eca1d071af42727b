"""Makes the optimizer and a rank's rows of the basis from the section ``dim_reduce``."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchange
from mindspore_boost_ext.base.state import in_its_place, share_places
from mindspore_boost_ext.config.sections import DimReduceConfig
from mindspore_boost_ext.dim_reduce.basis import (
    Basis,
    Layout,
    load_basis,
    principal_coefficients,
    project,
    reordered,
    rows_of_rank,
    snapshot_mean,
)
from mindspore_boost_ext.dim_reduce.p_bfgs import P_BFGS, SEARCH_SETTINGS, TWA, DimReduce
from mindspore_boost_ext.dim_reduce.projection import ProjectedGradient
from mindspore_boost_ext.dim_reduce.snapshots import layout_of, read_snapshots, snapshot_files
from mindspore_boost_ext.grad_freeze.optimizer import FreezeOpt
from mindspore_boost_ext.runtime.ranks import rank_and_count

# The attribute of an optimizer with this rank's rows of the basis, which rank it is, and of how
# many: arguments of the step's Cell. Upstream stores True there.
_TAG = "dim_reduce"
# Keys for the next Model on the same optimizer: its SGD, its search and the mean at its start.
_SGD, _SEARCH, _MEAN = "dim_reduce.sgd", "dim_reduce.search", "dim_reduce.mean"


def prepare(
    network: nn.Cell, optimizer: nn.Cell, settings: DimReduceConfig
) -> tuple[nn.Cell, str, dict[str, int]]:
    """Make the basis; return the optimizer to train with, and a sentence and counts for the report.

    With ``"p-bfgs"``, an SGD of learning rate 1 replaces the user's optimizer.

    Raises:
        ValueError: if the optimizer is a ``FreezeOpt``; if the snapshots or the basis cannot be
            used, on any rank.
        TimeoutError: if a rank does not answer within ``settings.timeout`` seconds.
    """
    if isinstance(optimizer, FreezeOpt):
        raise ValueError(
            "dim_reduce trains all weights in every step, but the optimizer is a FreezeOpt: give "
            "the optimizer that it wraps"
        )
    trained = {id(parameter) for parameter in optimizer.parameters}
    ordered = [parameter for parameter in network.trainable_params() if id(parameter) in trained]
    known = {id(one) for one in ordered}
    ordered += [parameter for parameter in optimizer.parameters if id(parameter) not in known]
    read = _from_file if settings.pca_mat_path else _from_folder
    layout, (rank, rank_size) = layout_of(ordered), _ranks()
    own, source, snapshots = read(layout, settings, rank, rank_size)
    reason = f"{settings.method} in {settings.n_components} directions of {source}"
    reason += _explained(own.explained)
    if settings.method == P_BFGS:
        reason = f"{type(optimizer).__name__} is replaced by SGD(1.0), as upstream does; {reason}"
        optimizer = _taking_steps_whole(optimizer, ordered)
    elif settings.method == TWA:
        reason += _start_at_mean(optimizer, ordered, own.mean)
    rows = reordered(own.components, layout, layout_of(optimizer.parameters))
    optimizer.__dict__[_TAG] = {"pca_mat_local": rows, "rank": rank, "rank_size": rank_size}
    counts = {"components": settings.n_components, "weights": rows.shape[1]}
    if snapshots:
        counts["snapshots"] = snapshots
    return optimizer, reason, counts


def make_dim_reduce(
    network: nn.Cell, optimizer: nn.Cell, settings: DimReduceConfig, gradients_mean: bool
) -> nn.Cell | None:
    """Return the Cell that does the step in the subspace, or None if ``optimizer`` has no basis."""
    own = getattr(optimizer, _TAG, None)
    if not isinstance(own, dict):
        return None
    subspace = {**own, "weight": optimizer.parameters, "n_components": settings.n_components}
    if settings.method != P_BFGS:
        return ProjectedGradient(optimizer, **subspace)
    rules = {name: getattr(settings, name) for name in SEARCH_SETTINGS}
    search = DimReduce(network, optimizer, **subspace, **rules, gradients_mean=gradients_mean)
    _go_on(search, in_its_place(optimizer))
    return search


def _go_on(search: DimReduce, kept: dict[str, Any]) -> None:
    """Let a search continue with the state of an earlier Model's search in the same basis."""
    own, earlier = _compat.own_parameters(search), kept.get(_SEARCH)
    if earlier is not None and np.array_equal(
        earlier["basis_mark"].asnumpy(), own["basis_mark"].asnumpy()
    ):
        exchange(search, {id(one): earlier[name] for name, one in own.items()})
    kept[_SEARCH] = dict(_compat.own_parameters(search))


def _taking_steps_whole(optimizer: nn.Cell, ordered: Sequence[Any]) -> nn.Optimizer:
    """Return the SGD that replaces the user's optimizer: one for all Models on that optimizer."""
    kept = in_its_place(optimizer)
    found: nn.Optimizer | None = kept.get(_SGD)
    if found is None or [id(one) for one in found.parameters] != [id(one) for one in ordered]:
        found = kept[_SGD] = nn.SGD(ordered, learning_rate=1.0)
        share_places(found, optimizer)
    return found


def _from_file(
    layout: Layout, settings: DimReduceConfig, rank: int, rank_size: int
) -> tuple[Basis, str, int]:
    """Return this rank's rows, and their source in words; 0 for the number of snapshots."""
    path, k = str(settings.pca_mat_path), settings.n_components

    def read() -> tuple[Basis, int]:
        basis = load_basis(path, k, layout)
        return basis, zlib.crc32(np.ascontiguousarray(basis.components).data)

    basis = _agreed(read, settings.timeout, rank_size)
    rows = np.array(basis.components[rows_of_rank(k, rank, rank_size)])
    return replace(basis, components=rows), f"basis {path}", 0


def _from_folder(
    layout: Layout, settings: DimReduceConfig, rank: int, rank_size: int
) -> tuple[Basis, str, int]:
    """Make a basis of snapshots; return this rank's rows, their source, and how many there are."""
    folder, k = str(settings.weight_load_dir), settings.n_components

    def read() -> tuple[np.ndarray, int]:
        files = snapshot_files(folder)
        if len(files) <= k:
            raise ValueError(
                f"dim_reduce.n_components is {k}, which needs at least {k + 1} snapshots, but "
                f"{folder} holds {len(files)} (.ckpt, .safetensors): take more, or lower it"
            )
        matrix = read_snapshots(files, layout, settings.memory_limit)
        return matrix, zlib.crc32(snapshot_mean(matrix).data)

    matrix = _agreed(read, settings.timeout, rank_size)
    coefficients, explained = _coefficients(matrix, k, settings.timeout, rank, rank_size)
    mean = snapshot_mean(matrix) if settings.method == TWA else None
    own = coefficients[rows_of_rank(k, rank, rank_size)]
    rows = project(matrix, own, overwrite=not isinstance(matrix, np.memmap))
    return Basis(rows, explained, mean), folder, len(matrix)


def _coefficients(
    matrix: np.ndarray, k: int, timeout: float, rank: int, rank_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Let rank 0 find the directions, and send them to all as two float32 parts: high and low."""
    if rank_size == 1:
        return principal_coefficients(matrix, k)
    result = np.zeros((k, len(matrix) + 1))
    failure: ValueError | None = None
    if rank == 0:
        try:
            coefficients, explained = principal_coefficients(matrix, k)
            result = np.concatenate((coefficients, explained[:, None]), axis=1)
        except ValueError as error:
            failure, result = error, result * np.nan
    high = result.astype(np.float32)
    low = (result - high).astype(np.float32)
    result = np.float64(broadcasts(np.stack([high, low]), (0,), timeout)[0]).sum(axis=0)
    if failure is not None:
        raise failure
    if not np.isfinite(result).all():
        raise ValueError("rank 0 could not make the basis of dim_reduce: see its own error")
    return result[:, :-1], result[:, -1]


def _agreed(read: Callable[[], tuple[Any, int]], timeout: float, rank_size: int) -> Any:
    """Read on every rank; check that all ranks could read, and that they read the same."""
    if rank_size == 1:
        return read()[0]
    content, checksum, failure = None, 0, None
    try:
        content, checksum = read()
    except ValueError as error:
        failure = error
    mine = np.array([failure is None, checksum >> 16, checksum & 0xFFFF], np.float32)
    answers = broadcasts(mine, tuple(range(rank_size)), timeout)
    if failure is not None:
        raise failure
    failed = [other for other, answer in enumerate(answers) if not answer[0]]
    if failed:
        raise ValueError(
            f"dim_reduce: rank {', '.join(map(str, failed))} could not read its snapshots or "
            "basis: see its own error"
        )
    differing = [other for other in range(rank_size) if (answers[other] != answers[0]).any()]
    if differing:
        raise ValueError(
            f"dim_reduce: rank {', '.join(map(str, differing))} read other snapshots or another "
            "basis than rank 0: give all ranks the same files"
        )
    return content


def broadcasts(values: np.ndarray, roots: Sequence[int], timeout: float) -> np.ndarray:
    """Let the ranks ``roots`` in turn send ``values`` to all; return what they sent, stacked.

    ``values`` are float32, of the same shape on all ranks. A ``TimeoutError`` names the first rank
    that has not answered within ``timeout`` seconds.
    """
    heard: list[np.ndarray] = []
    failures: list[Exception] = []

    def listen() -> None:
        try:
            for root in roots:
                # One tensor at a time: given several, Broadcast on CPU sets only the first.
                sent = ops.Broadcast(root)((Tensor(values),))
                heard.append(sent[0].asnumpy().copy())
        except Exception as error:  # raised in the thread that waits
            failures.append(error)

    # A collective cannot be cancelled: it stays in a thread that ends with the process.
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(timeout)
    if failures:
        raise failures[0]
    if len(heard) < len(roots):
        raise TimeoutError(
            f"dim_reduce: rank {roots[len(heard)]} has not answered within dim_reduce.timeout = "
            f"{timeout:g} seconds; look at its log, or raise the timeout if it is only slow"
        )
    return np.array(heard)


def _ranks() -> tuple[int, int]:
    """Return this rank, and the number of ranks over which the step reduces gradients."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode in ("semi_auto_parallel", "auto_parallel"):
        raise ValueError(
            f"dim_reduce needs whole weights on every rank, but parallel_mode is {mode}"
        )
    if mode in ("data_parallel", "hybrid_parallel"):
        return rank_and_count()
    return 0, 1


def _explained(shares: np.ndarray) -> str:
    """Return in words the variance along the first 5, the first 10 and all directions."""
    sums = np.cumsum(shares)
    counts = sorted({min(count, len(sums)) for count in (5, 10, len(sums))} - {0})
    words = ", ".join(f"first {count} {sums[count - 1]:.1%}" for count in counts)
    return f", explained variance: {words}" if words else ""


def _start_at_mean(optimizer: nn.Cell, ordered: Sequence[Any], mean: np.ndarray | None) -> str:
    """Set the weights to the mean, unless an earlier Model on this optimizer did; say which."""
    if mean is None:
        raise ValueError(
            "dim_reduce.method 'twa' starts at the mean of the snapshots, which this basis does "
            "not hold: give a .npz file of save_basis, or dim_reduce.weight_load_dir instead"
        )
    kept = in_its_place(optimizer)
    if np.array_equal(kept.get(_MEAN, ()), mean):
        return "; the weights continue those of an earlier Model, begun at the snapshots' mean"
    kept[_MEAN] = mean
    ends = np.cumsum([parameter.size for parameter in ordered])
    for parameter, part in zip(ordered, np.split(mean, ends[:-1])):
        values = Tensor(part.reshape(parameter.shape).copy())
        parameter.set_data(values.astype(parameter.dtype))
    return "; the weights start at the mean of the snapshots"
