"""Saves a checkpoint so that a crash never destroys the previous one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.algorithm import seen_in_first_batch
from mindspore_boost_ext.base.arguments import innermost
from mindspore_boost_ext.base.learning_rate import take_in_rates
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.runtime.ranks import launched_rank, rank_count

SETTINGS = "boost.settings"
RANK_IN_PATH = "{rank}"
# Further entries among the settings: what the first batch has shown, and the number of ranks.
FIRST_BATCH, RANKS = "first batch", "number of ranks"


# Step cell -> the files that it was restored from, or has been saved to, whatever leads there, and
# their state then: another training may write to the same place.
_FILES: WeakKeyDictionary[nn.Cell, dict[str, tuple[int, int]]] = WeakKeyDictionary()

_TAKEN = (-1, -1)  # the state of a file that another training has written, which was said


def save_checkpoint(save_obj: Any, path: str | os.PathLike[str], **settings: Any) -> None:
    """Save a checkpoint; the file at ``path`` is always the whole old or the whole new one.

    To resume a run bit for bit, save ``model.train_network``: it holds the weights, the state of
    the optimizer and of every accelerator, and their settings. Load the file with :func:`restore`
    (save it with ``append_dict={"epoch": n}`` then, ``n`` being the epochs that are done), or with
    ``ms.load_checkpoint`` and ``ms.load_param_into_net`` (an encrypted file only with these). The
    Model that loads it may have trained before.

    Args:
        save_obj (Union[Cell, list, dict]): what to save, as for ``ms.save_checkpoint``.
        path (Union[str, os.PathLike]): the file, or a link to it. ``.ckpt`` is added when it
            is missing, or ``.safetensors`` with ``format="safetensors"``. ``{rank}`` becomes the
            number of the rank, as in :func:`restore`.
        **settings: further arguments of ``ms.save_checkpoint``, except ``async_save``.

    Raises:
        TypeError: for ``async_save``, with which the file would get its name before it is written;
            or if ``path`` is no path.
        ValueError: if ``path`` is empty, or bytes.
        OSError: if the file cannot be written (no such folder, read-only, disk full); the message
            names the path. The old file is still there.

    Examples:
        >>> import os, tempfile
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import save_checkpoint
        >>> path = os.path.join(tempfile.mkdtemp(), "run.ckpt")
        >>> save_checkpoint(nn.Dense(4, 2), path)
        >>> sorted(ms.load_checkpoint(path))
        ['bias', 'weight']
    """
    if settings.get("async_save"):
        raise TypeError("save_checkpoint takes no async_save: the file must be complete on return")
    path = of_rank(checkpoint_path(path, settings.get("format", "ckpt")))
    step = step_in(save_obj)
    if isinstance(step, nn.TrainOneStepCell):
        take_in_rates(innermost(step.optimizer))
        seen = seen_in_first_batch(step)
        seen = {FIRST_BATCH: seen} if seen else {}
        in_force: Any = json.dumps({**settings_of(step), **seen})
        if kind_of(path) == "safetensors":  # holds only tensors
            in_force = Tensor(np.frombuffer(in_force.encode(), np.uint8).copy())
        settings["append_dict"] = {**(settings.get("append_dict") or {}), SETTINGS: in_force}
    path = os.path.realpath(path) if os.path.islink(path) else path  # keep the link
    folder = os.path.dirname(path) or "."
    try:
        # A folder of its own: MindSpore makes a second, temporary file beside the one it is given.
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as near:
            written = os.path.join(near, os.path.basename(path))
            ms.save_checkpoint(save_obj, written, **settings)
            _flush(written)
            os.replace(written, path)
        if isinstance(step, nn.Cell):
            remember_file(step, path)
        with contextlib.suppress(OSError):  # some file systems flush no folders
            _flush(folder)
    except Exception as error:
        # The package safetensors, which may be missing, raises an error that is no OSError.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(
            getattr(error, "errno", None),
            f"cannot save the checkpoint {path!r} ({reason}); an earlier file is unchanged",
        ) from error


def remember_file(step: nn.Cell, path: str) -> None:
    """Remember that a file is one of a step's, and how it is now."""
    files, place = _FILES.setdefault(step, {}), os.path.realpath(path)
    if files.get(place) != _TAKEN:
        files[place] = _state_of(path)


def is_foreign(step: nn.Cell, path: str) -> bool:
    """Return whether another training has written a file.

    Of a file that was this step's, it says so once: two trainings that alternate would keep each
    other's files without end.
    """
    files, place = _FILES.get(step, {}), os.path.realpath(path)
    if place not in files:
        return True
    changed = files[place] not in (_state_of(path), _TAKEN)
    if changed:
        files[place] = _TAKEN
    return changed


def _state_of(path: str) -> tuple[int, int]:
    """Return what changes when a file is written anew."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def kind_of(path: str) -> str:
    """Return the format of a file, by the suffix of its path."""
    return "safetensors" if path.endswith(".safetensors") else "ckpt"


def checkpoint_path(path: str | os.PathLike[str], kind: str | None = "ckpt") -> str:
    """Return a path as a str with the suffix of a format; None: the format that its suffix names.

    Raises:
        TypeError: if it is no path.
        ValueError: if it is empty, or no str.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a str or os.PathLike, got {shown(path)}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ValueError(f"path must be a non-empty str or os.PathLike of one, got {shown(path)}")
    kind = kind or kind_of(text)
    return text if text.endswith(f".{kind}") else f"{text}.{kind}"


def of_rank(path: str) -> str:
    """Return the path of this rank's file: its number in place of the braces."""
    return path.replace(RANK_IN_PATH, str(launched_rank()))


def step_in(train_network: nn.Cell) -> nn.Cell:
    """Return the step that a Cell holds as ``network``, such as MindSpore's Cell for sink mode.

    Anything else is returned as it is.
    """
    inner = getattr(train_network, "network", None)
    return inner if isinstance(inner, nn.TrainOneStepCell) else train_network


def settings_of(step: nn.Cell) -> dict[str, str]:
    """Return a step's settings in force (O0's for MindSpore's own step) and the number of ranks."""
    boost = step.auto_boost if isinstance(step, BoostTrainOneStepCell) else AutoBoost()
    return {RANKS: str(rank_count()), **boost.settings_in_force()}


def read_settings(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings that :func:`save_checkpoint` has put into a file; None without any."""
    text = saved.get(SETTINGS)
    if isinstance(text, Tensor):
        text = text.asnumpy().tobytes().decode()
    settings = json.loads(text) if isinstance(text, str) else None
    return settings if isinstance(settings, dict) else None


def _flush(path: str) -> None:
    """Write a file, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
