"""TrajectorySampler keeps snapshots of the trained weights: stage one of training in a subspace."""

from __future__ import annotations

import os
import re
import tempfile
import weakref

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, RunContext

from mindspore_boost_ext._compat import CallbackParameters
from mindspore_boost_ext.config.rules import (
    boolean,
    check_all,
    integer,
    one_of,
    optional_path,
    plain,
    shown,
)
from mindspore_boost_ext.report import is_main_process

_SAFE_PREFIX = re.compile(r"[A-Za-z0-9_]+\Z")


class TrajectorySampler(Callback):
    """Saves snapshots of the trainable parameters during training.

    Args:
        folder (Union[str, os.PathLike]): where the snapshots go; made if missing.
        every (int): epochs or steps between two snapshots, at least 1. Default: 1.
        unit (str): ``"epoch"`` or ``"step"``. Default: ``"epoch"``.
        keep (int): how many snapshots stay at most; older ones are removed. Default: 64.
        format (str): ``"ckpt"`` or ``"safetensors"``. Default: ``"ckpt"``.
        initial (bool): whether to save the weights before the first step, too. A new training from
            the same weights needs them. Default: True.
        prefix (str): letters, digits and underscores. Default: ``"snapshot"``.
        resume (bool): whether snapshots in the folder belong to this run. If so, the numbers go on,
            and no initial snapshot is added. Default: False, which refuses them.

    Raises:
        ValueError: if an argument breaks its rule; when training begins, if the folder cannot be
            used, or holds another run's snapshots of this prefix and ``resume`` is False.

    Examples:
        >>> import os, tempfile
        >>> import numpy as np, mindspore as ms
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import TrajectorySampler
        >>> net = nn.Dense(2, 1)
        >>> data = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
        >>> dataset = ms.dataset.NumpySlicesDataset(data).batch(2)
        >>> model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.train(3, dataset, callbacks=[TrajectorySampler(folder, keep=2)])
        ...     sorted(os.listdir(folder))
        ['snapshot-00002.ckpt', 'snapshot-00003.ckpt']
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 1,
        unit: str = "epoch",
        keep: int = 64,
        format: str = "ckpt",
        initial: bool = True,
        prefix: str = "snapshot",
        resume: bool = False,
    ) -> None:
        super().__init__()
        check_all(
            "TrajectorySampler",
            folder=(folder, optional_path()),
            every=(every, integer(1)),
            unit=(unit, one_of(("epoch", "step"))),
            keep=(keep, integer(1)),
            format=(format, one_of(("ckpt", "safetensors"))),
            initial=(initial, boolean()),
            resume=(resume, boolean()),
        )
        if folder is None or not isinstance(prefix, str) or not _SAFE_PREFIX.match(prefix):
            raise ValueError(
                "TrajectorySampler needs a folder, and a prefix of letters, digits and "
                f"underscores, got {shown(folder)} and {shown(prefix)}"
            )
        self.folder = os.path.abspath(os.fspath(folder))
        self.every, self.keep = every, keep
        self.unit, self.format = str(plain(unit)), str(plain(format))
        self.initial, self.prefix, self.resume = initial, prefix, resume
        self._next = 0
        self._seen = 0  # step count at the last call; in sink mode several steps back
        self._steps = self._epochs = 0  # over all calls of train
        self._epochs_before: int | None = None
        self._samples: weakref.ref[nn.Cell] | None = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Check the folder, and save the weights before the first step."""
        if not is_main_process():
            return
        parameters = run_context.original_args()
        self._seen = int(parameters.get("cur_step_num", 0) or 0)
        self._epochs_before = None
        goes_on = self._samples is not None and self._samples() is parameters.network
        self._prepare_folder(self.resume or goes_on)
        self._samples = weakref.ref(parameters.network)
        if self.initial and self._next == 0:
            self._save(parameters)
        self._next = max(self._next, 1)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Add the epochs of earlier calls if this call counts its epochs from 1 again."""
        is_first = run_context.original_args().cur_epoch_num == 1
        if self._epochs_before is None:
            self._epochs_before = self._epochs if is_first else 0

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Save after every ``every`` steps."""
        parameters, before = run_context.original_args(), self._steps
        self._steps += parameters.cur_step_num - self._seen
        self._seen = parameters.cur_step_num
        if self.unit == "step" and self._steps // self.every > before // self.every:
            self._save(parameters)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Save after every ``every`` epochs."""
        parameters = run_context.original_args()
        self._epochs = (self._epochs_before or 0) + parameters.cur_epoch_num
        if self.unit == "epoch" and self._epochs % self.every == 0:
            self._save(parameters)

    def snapshots(self) -> list[str]:
        """Return the paths of this sampler's snapshots, oldest first."""
        pattern = re.compile(rf"{self.prefix}-(\d+)\.(ckpt|safetensors)\Z")
        found = [match for match in map(pattern.match, os.listdir(self.folder)) if match]
        found.sort(key=lambda match: int(match[1]))
        return [os.path.join(self.folder, match[0]) for match in found]

    def _prepare_folder(self, goes_on: bool) -> None:
        try:
            if os.path.islink(self.folder):
                raise ValueError("it is a symbolic link: give the folder itself")
            os.makedirs(self.folder, exist_ok=True)
            there = self.snapshots()
            if there and not goes_on:
                raise ValueError(
                    f"it holds {len(there)} snapshots of another run: give an empty folder, or "
                    "resume=True when they belong to this run"
                )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"TrajectorySampler cannot use {self.folder}: {reason}") from error
        if there:
            self._next = int(there[-1].rpartition("-")[2].partition(".")[0]) + 1

    def _save(self, parameters: CallbackParameters) -> None:
        if not is_main_process():
            return
        name = f"{self.prefix}-{self._next:05d}.{self.format}"
        trained = parameters.network.trainable_params()
        # Those of a loss, too, which dim_reduce trains in the same directions.
        trained += getattr(parameters.get("optimizer"), "parameters", ())
        content = [{"name": one.name, "data": one} for one in dict.fromkeys(trained)]
        # Written in a scratch folder on the same disk, then moved: a reader never sees half a file.
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".unfinished-") as scratch:
            written = os.path.join(scratch, name)
            ms.save_checkpoint(content, written, format=self.format)
            os.replace(written, os.path.join(self.folder, name))
        self._next += 1
        for path in self.snapshots()[: -self.keep]:
            os.unlink(path)
