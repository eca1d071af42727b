"""Principal directions of a training run: an orthonormal basis from snapshots, and its files."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, BinaryIO

import numpy as np

from mindspore_boost_ext.config.rules import integer, shown

Layout = tuple[tuple[str, tuple[int, ...]], ...]

# Columns in a block: 40 snapshots of them in float64 fit into the cache of one core.
_COLUMNS = 8192
# Shares of the largest variance: below the first, rounding; below the second, P needs two passes.
_ROUNDING, _ILL_CONDITIONED = 1e-13, 1e-8
# How far from orthonormal a basis of a file may be: float32 errs by 1e-6, other programs by more.
ORTHONORMAL_WITHIN = 1e-4


@dataclass(frozen=True, eq=False)
class Basis:
    """An orthonormal basis of a subspace of the weights.

    Attributes:
        components: float32 [k, n], orthonormal rows; columns in the order of ``layout``.
        explained: float64 [k], the share of the snapshots' variance along each row; empty when it
            is not known.
        mean: float32 [n], the mean of the snapshots; None when it is not known.
        layout: name and shape of each weight, in the order of the columns; None when not known.
    """

    components: np.ndarray
    explained: np.ndarray
    mean: np.ndarray | None = None
    layout: Layout | None = None


def width(layout: Layout) -> int:
    """Return the number of weights n of a layout."""
    return sum(int(np.prod(shape)) for _, shape in layout)


def principal_basis(
    snapshots: np.ndarray,
    n_components: int,
    *,
    layout: Layout | None = None,
    overwrite: bool = False,
) -> Basis:
    """Return the principal directions of snapshots.

    Args:
        snapshots: float32 or float64 [t, n]; may be a ``numpy.memmap`` larger than the memory.
        n_components: k, at most t - 1: centring takes one direction.
        layout: name and shape of each weight, kept with the basis. Default: None.
        overwrite: whether the basis may be written into the first rows of ``snapshots``, which
            then hold no snapshots any more. Default: False.

    Raises:
        ValueError: if the snapshots are too few, vary in fewer than k directions, or are not
            finite.

    Examples:
        >>> import numpy as np
        >>> from mindspore_boost_ext.dim_reduce.basis import principal_basis
        >>> basis = principal_basis(np.array([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]), 1)
        >>> np.abs(basis.components).tolist(), basis.explained.tolist()
        ([[1.0, 0.0]], [1.0])
    """
    coefficients, explained = principal_coefficients(snapshots, n_components)
    mean = snapshot_mean(snapshots)
    return Basis(project(snapshots, coefficients, overwrite), explained, mean, layout)


def principal_coefficients(
    snapshots: np.ndarray, n_components: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return C [k, t] with ``P = C @ centred snapshots``, and the explained shares [k]; float64.

    C is small. If each rank reads the snapshots, the ranks need to share only C.
    """
    count = _check_snapshots(snapshots, n_components)
    gram = _gram((block for block, _ in _centred(snapshots)), count)
    if not np.isfinite(gram).all():
        raise ValueError("the snapshots hold inf or nan: leave out those of a run that diverged")
    variances, vectors = np.linalg.eigh(gram)
    variances, vectors = variances[::-1], vectors[:, ::-1]
    found = int((variances > _ROUNDING * max(variances[0], 0.0)).sum())
    if found < n_components:
        raise ValueError(
            f"n_components is {n_components}, but the {count} snapshots vary in {found} directions "
            "only: take snapshots further apart, or lower n_components"
        )
    kept = vectors[:, :n_components]
    signs = np.sign(kept[np.abs(kept).argmax(axis=0), np.arange(n_components)])
    coefficients = (kept * signs / np.sqrt(variances[:n_components])).T
    if variances[n_components - 1] < _ILL_CONDITIONED * variances[0]:
        coefficients = _orthonormalised(snapshots, coefficients)
    return coefficients, variances[:n_components] / np.maximum(variances, 0.0).sum()


def project(snapshots: np.ndarray, coefficients: np.ndarray, overwrite: bool) -> np.ndarray:
    """Return ``coefficients @ centred snapshots`` as float32 [rows, n], maybe in their place."""
    if overwrite and snapshots.dtype == np.float32:
        target = snapshots[: len(coefficients)]
    else:
        target = np.empty((len(coefficients), snapshots.shape[1]), np.float32)
    for block, columns in _centred(snapshots):
        target[:, columns] = coefficients @ block
    return target


def snapshot_mean(snapshots: np.ndarray) -> np.ndarray:
    """Return the mean of the snapshots, float32 [n]."""
    mean = np.empty(snapshots.shape[1], np.float32)
    for columns in _blocks(snapshots.shape[1]):
        mean[columns] = snapshots[:, columns].mean(axis=0, dtype=np.float64)
    return mean


def orthonormality_error(components: np.ndarray) -> float:
    """Return the largest entry of ``|P P^T - I|``, summed in float64; nan if P is not finite."""
    blocks = (components[:, columns] for columns in _blocks(components.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        gram = _gram((block.astype(np.float64) for block in blocks), len(components))
    return float(np.abs(gram - np.eye(len(components))).max(initial=0.0))


def rows_of_rank(n_components: int, rank: int, rank_size: int) -> slice:
    """Return which rows of a basis a rank holds: equal shares, the last ones shorter or empty."""
    share = -(-n_components // rank_size)
    return slice(min(rank * share, n_components), min((rank + 1) * share, n_components))


def reordered(rows: np.ndarray, present: Layout, wanted: Layout) -> np.ndarray:
    """Return ``rows`` with columns in the order of ``wanted``, which has the same weights."""
    if present == wanted:
        return rows
    ends = np.cumsum([int(np.prod(shape)) for _, shape in present])
    parts = dict(zip((name for name, _ in present), np.split(rows, ends[:-1], axis=-1)))
    return np.concatenate([parts[name] for name, _ in wanted], axis=-1)


def _check_snapshots(snapshots: np.ndarray, n_components: int) -> int:
    integer(1).read("n_components", n_components)
    if not isinstance(snapshots, np.ndarray) or snapshots.ndim != 2 or snapshots.dtype.kind != "f":
        raise ValueError(f"snapshots must be a float array [t, n], got {shown(snapshots)}")
    count, size = snapshots.shape
    if n_components > min(count - 1, size):
        raise ValueError(
            f"n_components is {n_components}, but {count} snapshots of {size} weights give at most "
            f"{max(min(count - 1, size), 0)} directions (centring takes one): "
            "take more snapshots, or lower n_components"
        )
    return count


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _COLUMNS):
        yield slice(start, min(start + _COLUMNS, size))


def _gram(blocks: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Return the sum of ``block @ block.T`` over blocks of columns, [count, count]."""
    return sum((block @ block.T for block in blocks), np.zeros((count, count)))


def _centred(snapshots: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
    """Yield blocks of columns minus their means, in float64, each with its place."""
    for columns in _blocks(snapshots.shape[1]):
        block = snapshots[:, columns].astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf: the Gram matrix shows it later
            block -= block.mean(axis=0)
        yield block, columns


def _orthonormalised(snapshots: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    gram = _gram((coefficients @ block for block, _ in _centred(snapshots)), len(coefficients))
    return np.linalg.solve(np.linalg.cholesky(gram), coefficients)


# ---- Files: .npz holds all of a Basis, .npy the matrix alone (the form of mindspore.boost) ----


def save_basis(path: str | os.PathLike[str], basis: Basis) -> None:
    """Write a basis to ``path``, all or nothing: a reader sees the old file or the new one.

    Args:
        path: ends in ``.npz``, or in ``.npy`` for the components alone.
        basis: what to write.

    Raises:
        ValueError: if the path ends in neither, or is a symbolic link.
    """
    path = os.path.abspath(os.fspath(path))
    if not path.endswith((".npy", ".npz")):
        raise ValueError(f"a basis is saved as .npz or .npy, got {shown(path)}")
    if os.path.islink(path):
        raise ValueError(f"{path} is a symbolic link: give the file itself")
    folder, name = os.path.split(path)
    # Not by mkstemp: other accounts, such as those of ranks, could not read its files.
    with tempfile.TemporaryDirectory(prefix=".basis-", dir=folder) as scratch:
        with open(os.path.join(scratch, name), "xb") as file:
            if path.endswith(".npy"):
                np.lib.format.write_array(file, basis.components, allow_pickle=False)
            else:
                np.savez(file, **_members(basis))
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)


def _members(basis: Basis) -> dict[str, np.ndarray]:
    members = {"components": basis.components, "explained": basis.explained}
    if basis.mean is not None:
        members["mean"] = basis.mean
    if basis.layout is not None:
        members["layout"] = np.frombuffer(json.dumps(basis.layout).encode(), np.uint8)
    return members


def load_basis(
    path: str | os.PathLike[str], n_components: int, layout: Layout | None = None
) -> Basis:
    """Read and check a basis; return its first ``n_components`` rows.

    Nothing in a file is ever executed: pickled objects and compressed members are refused.

    Args:
        path: a ``.npz`` file of :func:`save_basis`, or a ``.npy`` file with a float matrix [k, n].
        n_components: how many rows are wanted.
        layout: the weights of the network, to compare with. Default: None, no comparison.

    Raises:
        ValueError: naming the file and what is wrong: missing, a symbolic link, damaged, pickled,
            wrong width or dtype, too few rows, not finite, not orthonormal, of another network.
    """
    integer(1).read("n_components", n_components)
    path = os.fspath(path)
    try:
        with open_regular(path) as file:
            is_npz = path.endswith(".npz")
            basis = _read_npz(file) if is_npz else Basis(_read_array(file), np.empty(0))
        _check_basis(basis, n_components, layout)
    except Exception as error:  # a damaged or hostile file may make its readers raise anything
        raise ValueError(
            f"cannot use the basis {path}: {_reason(error)}: give one that save_basis has written "
            "for this network, or dim_reduce.weight_load_dir to make one"
        ) from error
    components = basis.components[:n_components].astype(np.float32, copy=False)
    mean, explained = basis.mean, basis.explained[:n_components]
    if layout is not None and basis.layout is not None:
        components = reordered(components, basis.layout, layout)
        mean = None if mean is None else reordered(mean, basis.layout, layout)
    return Basis(components, explained, mean, layout or basis.layout)


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a symbolic link, a folder or a device is a ValueError."""
    if os.path.islink(path):
        raise ValueError("it is a symbolic link")
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is not a regular file")
    with os.fdopen(handle, "rb") as file:
        yield file


def _read_npz(file: BinaryIO) -> Basis:
    with zipfile.ZipFile(file) as archive:
        arrays = {}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its members are compressed: write it with save_basis")
            with archive.open(info) as member:
                arrays[info.filename] = _read_array(member)
    if "components.npy" not in arrays:
        raise ValueError("it holds no array 'components'")
    explained, layout = arrays.get("explained.npy", np.empty(0)), _layout(arrays.get("layout.npy"))
    return Basis(arrays["components.npy"], explained, arrays.get("mean.npy"), layout)


def _layout(text: np.ndarray | None) -> Layout | None:
    if text is None:
        return None
    if text.dtype != np.uint8:
        raise ValueError("its layout is damaged")
    entries = json.loads(text.tobytes().decode("utf-8"))
    try:
        return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in entries)
    except (TypeError, ValueError):
        raise ValueError("its layout is damaged") from None


def _read_array(file: IO[bytes]) -> np.ndarray:
    """Read one array in NumPy's format; refuse a file whose length does not fit its header."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it has version {version} of NumPy's format, not 1.0 or 2.0")
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, by_columns, dtype = read[version[0]](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are never read")
    content = file.read()
    if len(content) != int(np.prod(shape, dtype=np.float64)) * dtype.itemsize:
        raise ValueError("it is damaged: its length does not fit its header")
    values = np.frombuffer(content, dtype)
    return values.reshape(shape[::-1]).T if by_columns else values.reshape(shape)


def _check_basis(basis: Basis, n_components: int, layout: Layout | None) -> None:
    components = basis.components
    if components.ndim != 2 or components.dtype.kind != "f":
        raise ValueError(
            f"it must hold a float matrix, got {components.dtype} {list(components.shape)}"
        )
    if len(components) < n_components:
        raise ValueError(f"it has {len(components)} rows, but n_components is {n_components}")
    if basis.explained.ndim != 1 or basis.explained.dtype.kind != "f":
        raise ValueError(f"its shares of variance have shape {list(basis.explained.shape)}")
    if basis.mean is not None and basis.mean.shape != (components.shape[1],):
        raise ValueError(f"its mean has shape {list(basis.mean.shape)}")
    if layout is not None:
        _check_layout(basis, layout)
    mean = np.empty(0) if basis.mean is None else basis.mean
    if not all(np.isfinite(one).all() for one in (components, basis.explained, mean)):
        raise ValueError("it holds inf or nan")
    error = orthonormality_error(components[:n_components])
    if not error <= ORTHONORMAL_WITHIN:
        raise ValueError(
            f"its rows are not orthonormal: P P^T differs from the identity by {error:.1e}"
        )


def _check_layout(basis: Basis, layout: Layout) -> None:
    if basis.components.shape[1] != width(layout):
        raise ValueError(
            f"it has {basis.components.shape[1]} columns, but the network has {width(layout)} "
            "trained weights: it belongs to another network"
        )
    if basis.layout is not None:
        difference = first_difference(dict(layout), dict(basis.layout))
        if difference:
            raise ValueError(f"it belongs to another network: {difference}")


def first_difference(
    wanted: dict[str, tuple[int, ...]], found: dict[str, Sequence[int]] | dict[str, tuple[int, ...]]
) -> str:
    """Return in words the first parameter of ``wanted`` that ``found`` does not hold; else ""."""
    for name, shape in wanted.items():
        if name not in found:
            return f"it has no parameter {name!r} {list(shape)}"
        if tuple(found[name]) != tuple(shape):
            return f"parameter {name!r} is {list(found[name])} there, but {list(shape)} here"
    return ""
