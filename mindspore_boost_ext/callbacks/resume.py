"""Saves a run to a file after an epoch, and restores it from there."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn
from mindspore.train import Callback, RunContext

from mindspore_boost_ext.algorithm import seen_in_first_batch
from mindspore_boost_ext.base.arguments import innermost
from mindspore_boost_ext.boost_cell_wrapper import BoostTrainOneStepCell
from mindspore_boost_ext.callbacks.checkpoint import (
    FIRST_BATCH,
    RANK_IN_PATH,
    RANKS,
    SETTINGS,
    checkpoint_path,
    is_foreign,
    kind_of,
    of_rank,
    read_settings,
    remember_file,
    save_checkpoint,
    settings_of,
    step_in,
)
from mindspore_boost_ext.callbacks.epoch import DONE, RESTORES, is_last_of_epoch
from mindspore_boost_ext.config.rules import check_all, integer
from mindspore_boost_ext.integration.training import EndOfTraining
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.runtime.ranks import launched_count, launched_rank
from mindspore_boost_ext.stages.state import HostWrites

EPOCH = "epoch"
_EPOCH_NAMES = (EPOCH, "epoch_num")  # the second: ModelCheckpoint with append_info=["epoch_num"]
_NOT_PARAMETERS = (*_EPOCH_NAMES, "step_num", SETTINGS)
_MOST_SHOWN = 5
_GIVEN = ("learning_rate", "momentum")  # the Parameters of numbers that an optimizer is given
_RATES = "learning_rate_group_"  # of groups of parameters


class BoostCheckpoint(Callback):
    """Saves all that a run needs to continue in one file, after every ``epochs`` epochs.

    The file holds weights, the optimizer's state, the state of the accelerators, their settings and
    the epoch; :func:`restore` reads it. If writing is interrupted, the previous file stays. In the
    list of callbacks, put it after :class:`FlushAccumulation`. If a file cannot be written,
    training goes on, with a warning. If a training that begins anew finds a file at the path, it
    keeps that one, with ``.earlier`` in its name, and warns.

    The count of epochs continues from an earlier call of ``train`` with such a callback, from the
    restored epoch, or from ``initial_epoch``. If an algorithm ends the training
    (``short_schedule``), the last file is written then. An epoch that a callback breaks off does
    not count, and the file stays as it was.

    Args:
        path (Union[str, os.PathLike]): the file; ``.ckpt`` is added unless it ends in ``.ckpt`` or
            ``.safetensors``. With several ranks it must contain ``{rank}``, which becomes the
            number of the rank: moments may differ between ranks. Each rank then keeps the file
            before, too, with ``.before`` in its name: ranks that are killed while they save leave
            files of two epochs.
        epochs (int): number of epochs from one file to the next, at least 1. Default: 1.

    Raises:
        TypeError: if ``path`` is no path.
        ValueError: if ``path`` cannot be written, or ``epochs`` is less than 1. When training
            begins, if ranks share ``path``, or a Parameter has a name that the file itself uses.

    Examples:
        >>> import os, tempfile
        >>> from mindspore_boost_ext import BoostCheckpoint
        >>> callback = BoostCheckpoint(os.path.join(tempfile.mkdtemp(), "run.ckpt"))
    """

    def __init__(self, path: str | os.PathLike[str], epochs: int = 1) -> None:
        super().__init__()
        check_all("BoostCheckpoint", epochs=(epochs, integer(1)))
        given, self.path = path, os.path.abspath(checkpoint_path(path, None))
        self.epochs, self._steps_before = int(epochs), 0
        path = of_rank(self.path)
        folder = os.path.dirname(path) or "."
        is_folder = os.path.isdir(path) or os.path.basename(os.fspath(given)) in ("", ".", "..")
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or is_folder:
            raise ValueError(f"path must name a file in a folder that can be written, got {path!r}")

    def on_train_begin(self, run_context: RunContext) -> None:
        """Refuse one file for several ranks, and Parameters whose names the file itself uses."""
        _path_of_rank(self.path)
        network = run_context.original_args().train_network
        taken = [one.name for one in network.get_parameters() if one.name in _NOT_PARAMETERS]
        if taken:
            raise ValueError(
                f"BoostCheckpoint saves the epoch under the name {taken[0]!r}, but a Parameter of "
                "the network has this name: rename the Parameter"
            )
        self._before: int | None = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Continue the count of earlier calls, unless this call gives ``initial_epoch``."""
        run = run_context.original_args()
        self._steps_before = run.get("cur_step_num", 0)
        if self._before is None:
            self._before = DONE.get(step_in(run.train_network), 0) if run.cur_epoch_num == 1 else 0

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Write the file."""
        run = run_context.original_args()
        network, done = step_in(run.train_network), (self._before or 0) + run.cur_epoch_num
        is_over = isinstance(network, BoostTrainOneStepCell) and EndOfTraining(network).is_now()
        # Epochs may differ in length: an unexpected length alone is no sign of a break.
        stopped = run.get("stopped_in_step", run_context.get_stop_requested())
        is_broken = stopped and not is_last_of_epoch(run, self._steps_before)
        if is_broken and not is_over:
            self._warn(f"epoch {done} was interrupted: {self.path!r} was not changed")
            return
        DONE[network] = done
        if done % self.epochs != 0 and not is_over:
            return
        try:
            kind, path = kind_of(self.path), _path_of_rank(self.path)
            if os.path.exists(path):
                self._keep_what_is_there(path, network)
            save_checkpoint(run.train_network, path, append_dict={EPOCH: done}, format=kind)
        except OSError as error:
            self._warn(f"epoch {done} is not saved: {error.strerror}; training goes on")

    def _keep_what_is_there(self, path: str, step: nn.Cell) -> None:
        """Keep the file of another training, and with several ranks the one before."""
        name, suffix = os.path.splitext(path)
        if is_foreign(step, path):
            names = (f"{name}.earlier{number or ''}{suffix}" for number in itertools.count())
            if kept := self._keep(path, next(one for one in names if not os.path.exists(one))):
                self._warn(
                    f"{path!r} is the file of another training, which this one does not continue: "
                    f"it is kept as {kept!r}; to continue it, call restore before the training"
                )
        if launched_count() > 1:
            self._keep(path, f"{name}.before{suffix}")

    def _keep(self, path: str, kept: str) -> str:
        """Let the file that is about to be replaced have another name, too, and return that.

        If it cannot, return an empty text.
        """
        name, suffix = os.path.splitext(path)
        link = f"{name}.saving{suffix}"
        try:
            if os.path.exists(link):  # a process was killed here
                os.remove(link)
            # No symbolic link: save_checkpoint writes a new file, to which it would lead then.
            try:
                os.link(os.path.realpath(path), link)
            except OSError:  # a file system without hard links, such as a mounted bucket
                shutil.copyfile(path, link)
            os.replace(link, kept)
        except OSError as error:
            with contextlib.suppress(OSError):  # a part of a copy would take space
                os.remove(link)
            self._warn(f"cannot keep {path!r} as {kept!r} ({error.strerror}); the new one is saved")
            return ""
        return kept

    @staticmethod
    def _warn(message: str) -> None:
        """Warn from every rank: each has a file of its own."""
        rank = f"rank {launched_rank()}: " if launched_count() > 1 else ""
        warn(f"{rank}{message}", every_rank=True)


def restore(
    train_network: nn.Cell, path: str | os.PathLike[str], *, allow_other_settings: bool = False
) -> int:
    """Load a run into ``model.train_network``; nothing is loaded if anything does not fit.

    With equal seeds, data and settings, the run ends as it would have without the break. The states
    of the random generators of dropout and of shuffling are not in the file.

    Args:
        train_network (Cell): built as for the run that was saved.
        path (Union[str, os.PathLike]): a file of :class:`BoostCheckpoint`; or one of
            ``save_checkpoint`` or MindSpore's ``ModelCheckpoint`` that holds the whole
            ``train_network`` and ``epoch`` or ``epoch_num``. That epoch counts as done, so let
            ``ModelCheckpoint`` save at the end of epochs. ``{rank}`` becomes the rank's number.
        allow_other_settings (bool): whether other settings of the accelerators, or another number
            of ranks, are a warning, not an error. Settings that change the Parameters stay an
            error. Default: False.

    Returns:
        int, how many epochs are done: ``initial_epoch`` of ``model.train``.

    Raises:
        TypeError: if ``train_network`` is no Cell (a Model is none).
        ValueError: if the file cannot be read, does not say its epoch, was saved with other
            settings, or names, shapes or dtypes of Parameters differ.

    Examples:
        >>> import os, tempfile
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import BoostModel, restore, save_checkpoint
        >>> net = nn.Dense(4, 2)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> model = BoostModel(net, nn.MSELoss(), optimizer, boost_level="O1",
        ...                    boost_config_dict={"boost": {"mode": "disable_all"}})
        >>> path = os.path.join(tempfile.mkdtemp(), "run.ckpt")
        >>> save_checkpoint(model.train_network, path, append_dict={"epoch": 3})
        >>> restore(model.train_network, path)
        3
    """
    if not isinstance(train_network, nn.Cell):
        found = type(train_network).__name__
        raise TypeError(f"restore needs model.train_network, a Cell, got {found}")
    path = _path_of_rank(checkpoint_path(path, None))
    saved = _read(path)
    epoch = _epoch_of(saved, path)
    values = {name: one for name, one in saved.items() if isinstance(one, Parameter)}
    for name in _NOT_PARAMETERS:
        values.pop(name, None)
    settings = read_settings(saved)
    seen = {} if settings is None else settings.pop(FIRST_BATCH, {})
    step = step_in(train_network)
    changed = _other_settings(step, settings, path)
    if changed and not allow_other_settings:
        raise ValueError(f"{changed}. Use the file's settings, or set allow_other_settings=True")
    _check_parameters(train_network, values, path)
    if changed:
        warn(f"{changed}; training goes on with the present settings")
    if not getattr(step, "_has_run", False):  # else a callback may have set the rate
        _warn_of_rates(step, values, path)
    # MindSpore's own step, if it has trained, would go on with the memory that it knows.
    with HostWrites(tuple(train_network.get_parameters())).in_place():
        ms.load_param_into_net(train_network, values)
    now = seen_in_first_batch(step)
    if not (changed or now):  # a batch that this step has seen has decided
        now.update(seen)
    DONE[step] = epoch
    remember_file(step, path)
    RESTORES[step] = RESTORES.get(step, 0) + 1
    if isinstance(step, BoostTrainOneStepCell):
        step.was_restored, step.restored_settings = True, settings or {}
        step._has_run = step._was_looked_at = False  # the next step checks the loaded state
    return epoch


def _path_of_rank(path: str) -> str:
    rank, count = launched_rank(), launched_count()
    if count > 1 and RANK_IN_PATH not in path:
        name, suffix = os.path.splitext(path)
        own = name.replace(f"rank{rank}", f"rank{RANK_IN_PATH}")
        raise ValueError(
            f"path must name a separate file for each of the {count} ranks, got {path!r}: write "
            f"{(name + '.rank' + RANK_IN_PATH if own == name else own) + suffix!r}, with the braces"
        )
    return of_rank(path)


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        of_rank = ": each rank needs a file of its own" if launched_count() > 1 else ""
        raise ValueError(f"{path!r} cannot be read as a checkpoint: there is no such file{of_rank}")
    try:
        return ms.load_checkpoint(path, format=kind_of(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path!r} cannot be read as a checkpoint: {error}") from error


def _epoch_of(saved: Mapping[str, Any], path: str) -> int:
    for name in _EPOCH_NAMES:
        if isinstance(saved.get(name), Parameter) and saved[name].size == 1:
            return int(saved[name].asnumpy())
    raise ValueError(
        f"{path!r} does not say how many epochs are done: write it by BoostCheckpoint, by "
        'save_checkpoint with append_dict={"epoch": n}, or by ModelCheckpoint with '
        'CheckpointConfig(append_info=["epoch_num"])'
    )


def _other_settings(step: nn.Cell, saved: Mapping[str, str] | None, path: str) -> str:
    """Return which settings differ from a file's; empty if none does, or the file has none."""
    if saved is None:
        return ""
    now = settings_of(step)
    switches = [name for name in now if name.startswith("boost.")]
    # The file may be older than a switch, or than the entry for the number of ranks.
    known = {RANKS: now[RANKS], **dict.fromkeys(switches, str(False)), **saved}
    boost = getattr(step, "auto_boost", None)
    own = [] if boost is None else [f"{one.switch}." for one in boost.own]
    for name in now:  # which an algorithm of the user's own did not compare then
        if name.startswith(tuple(own)):
            known.setdefault(name, now[name])
    names = [name for name in {**known, **now} if known.get(name) != now.get(name)]
    if not names:
        return ""
    found = "; ".join(
        f"{name} was {known.get(name, 'not in force')} and is {now.get(name, 'not in force')}"
        for name in names[:_MOST_SHOWN]
    )
    more = len(names) - _MOST_SHOWN
    message = f"{path!r} was saved with other settings: {found}"
    return f"{message}; and {more} more" if more > 0 else message


def _check_parameters(train_network: nn.Cell, saved: Mapping[str, Parameter], path: str) -> None:
    """Compare names, shapes and dtypes of Parameters with those in a file."""
    wanted = {parameter.name: _form(parameter) for parameter in train_network.get_parameters()}
    found = {name: _form(one) for name, one in saved.items()}
    names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    rates = [name for name in names if name.startswith(_RATES) and name not in found]
    if rates:  # MindSpore does not save them, and version 0.1 did not either
        warn(f"{path!r} holds no {', '.join(rates)}: they keep the initial values of the optimizer")
        names = [name for name in names if name not in rates]
    if names:
        first = names[0]
        raise ValueError(
            f"{path!r} does not fit this training: {first} is {found.get(first, 'missing')} in "
            f"the file and {wanted.get(first, 'missing')} here ({len(names)} Parameters differ): "
            "give restore the Model's train_network, use the network, optimizer, loss scale and "
            "settings of the saved run, and append nothing but the epoch"
        )


def _warn_of_rates(step: nn.Cell, saved: Mapping[str, Parameter], path: str) -> None:
    """Warn if learning rate or momentum of the file replaces another one that the script gives."""
    optimizer, replaced = innermost(step.optimizer), []
    if not isinstance(optimizer, nn.Optimizer):  # in others schedulers of the script set rates
        return
    for one in optimizer.get_parameters():
        is_given = one.name in _GIVEN or one.name.startswith(_RATES)
        if is_given and one.name in saved:
            asked, found = (each.asnumpy().reshape(-1) for each in (one, saved[one.name]))
            steps = np.flatnonzero(asked != found)
            if steps.size:
                words = f"{one.name} {found[steps[0]]:.6g} in place of {asked[steps[0]]:.6g}"
                replaced.append(words + (f" from step {steps[0]} on" if asked.size > 1 else ""))
    if replaced:
        warn(
            f"{path!r} brings {'; '.join(replaced)}, which the optimizer was made with: the run "
            "goes on with the file's, unless you set it after restore"
        )


def _form(parameter: Parameter) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"
