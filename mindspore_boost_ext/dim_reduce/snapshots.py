"""Snapshots of a network's trained weights: a folder of checkpoints as one matrix."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np

from mindspore_boost_ext.dim_reduce.basis import Layout, first_difference, open_regular, width

FORMATS = (".ckpt", ".safetensors")
MEBIBYTE = 1 << 20


def layout_of(parameters: Sequence[Any]) -> Layout:
    """Return name and shape of each Parameter."""
    return tuple((one.name, tuple(int(side) for side in one.shape)) for one in parameters)


def snapshot_files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the snapshots in a folder, sorted; hidden files are left out.

    Raises:
        ValueError: if the folder is missing, unreadable, a symbolic link or no folder, or one of
            its snapshots is a symbolic link.
    """
    folder = os.fspath(folder)
    try:
        if os.path.islink(folder):
            raise ValueError("it is a symbolic link: give the folder itself")
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"cannot use the snapshots in {folder}: {reason}: dim_reduce.weight_load_dir must be a "
            "folder that TrajectorySampler has filled"
        ) from error
    wanted = [name for name in names if name.endswith(FORMATS) and not name.startswith(".")]
    files = [os.path.join(folder, name) for name in wanted]
    for path in files:
        if os.path.islink(path):
            raise ValueError(
                f"cannot use the snapshot {path}: it is a symbolic link: give the file"
            )
    return files


def read_snapshots(files: Sequence[str], layout: Layout, memory_limit: float) -> np.ndarray:
    """Return the weights of ``layout`` in all files as float32 [t, n].

    Args:
        files: paths that end in ``.ckpt`` or ``.safetensors``.
        layout: the weights, in the order of the columns.
        memory_limit: MiB that the matrix may take; a larger one is a ``numpy.memmap`` of a scratch
            file without a name, which is deleted with it.

    Raises:
        ValueError: naming file and parameter: damaged, of another network, not finite.
    """
    matrix = _matrix((len(files), width(layout)), memory_limit)
    for row, path in zip(matrix, files):
        _read_into(row, path, layout)
    return matrix


def _matrix(shape: tuple[int, int], memory_limit: float) -> np.ndarray:
    if 4 * shape[0] * shape[1] <= memory_limit * MEBIBYTE or 0 in shape:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile(prefix="snapshots-") as scratch:
        return np.memmap(scratch, np.float32, "w+", shape=shape)


def _read_into(row: np.ndarray, path: str, layout: Layout) -> None:
    try:
        values = _load(path, frozenset(name for name, _ in layout))
        found = {name: tuple(one.shape) for name, one in values.items()}
        difference = first_difference(dict(layout), found)
        if difference:
            raise ValueError(f"it belongs to another network: {difference}")
        start = 0
        for name, shape in layout:
            end = start + int(np.prod(shape))
            row[start:end] = values[name].astype(ms.float32).asnumpy().reshape(-1)
            if not np.isfinite(row[start:end]).all():
                raise ValueError(f"parameter {name!r} holds inf or nan")
            start = end
    except (OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot use the snapshot {path}: {reason}: leave it out") from error


def _load(path: str, names: frozenset[str]) -> dict[str, Any]:
    """Return the Parameters of a checkpoint whose names are in ``names``."""
    kind = "safetensors" if path.endswith(".safetensors") else "ckpt"
    with open_regular(path):
        pass  # our own message for a missing file, a folder, a device or a link
    seen: list[str] = []

    def wanted(name: str) -> bool:
        seen.append(name)
        return name in names

    try:
        loaded: dict[str, Any] = ms.load_checkpoint(path, choice_func=wanted, format=kind)
    except ValueError as error:
        if seen and names.isdisjoint(seen):
            return {}  # MindSpore takes this for a mistake in choice_func
        raise ValueError("it is damaged, or not a checkpoint") from error
    return loaded
