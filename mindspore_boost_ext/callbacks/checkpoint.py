"""Saving a checkpoint so that a crash never costs the one before."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import mindspore as ms

from mindspore_boost_ext.config.rules import shown


def save_checkpoint(save_obj: Any, path: str | os.PathLike[str], **settings: Any) -> None:
    """Save a checkpoint; the file at ``path`` is the old one or the new one, never a part.

    Give it ``model.train_network`` to resume a run bit for bit: that holds weights, the optimizer's
    state, and the state of every accelerator. Load it with ``ms.load_checkpoint`` and
    ``ms.load_param_into_net`` into a Model, also into one that has stepped already.

    Args:
        save_obj (Union[Cell, list, dict]): what to save, as for ``ms.save_checkpoint``.
        path (Union[str, os.PathLike]): the file, or a link to it. ``.ckpt`` is added when it
            is missing, or ``.safetensors`` with ``format="safetensors"``.
        **settings: further arguments of ``ms.save_checkpoint``; ``async_save`` is not among them.

    Raises:
        TypeError: for ``async_save``: the file would be put in its place before it is written.
        ValueError: if ``path`` is empty, or no str.
        OSError: if the file cannot be written, naming the path: no such folder, read-only, disk
            full. What was at ``path`` is still there.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

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
        raise TypeError("save_checkpoint takes no async_save: the file has to be whole on return")
    suffix = f".{settings.get('format', 'ckpt')}"
    path = os.fspath(path)
    if not isinstance(path, str) or not path:
        raise ValueError(f"path must be a non-empty str or os.PathLike of one, got {shown(path)}")
    path = path if path.endswith(suffix) else path + suffix
    path = os.path.realpath(path) if os.path.islink(path) else path  # the link stays one
    folder = os.path.dirname(path) or "."
    try:
        # A folder of its own: MindSpore makes a second, temporary file beside the one it is given.
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as near:
            fresh = os.path.join(near, os.path.basename(path))
            ms.save_checkpoint(save_obj, fresh, **settings)
            _flush(fresh)
            os.replace(fresh, path)
        _flush(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"cannot save the checkpoint {path!r} ({reason}); what was there before is untouched",
        ) from error


def _flush(path: str) -> None:
    """Bring a file, or the entries of a folder, to the disk."""
    with contextlib.suppress(PermissionError):  # Windows opens no folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


__all__ = ["save_checkpoint"]
