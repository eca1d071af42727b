"""Plugging into MindSpore: ``install``, ``uninstall``, and ``BoostModel``, which needs neither.

``install`` replaces, in MindSpore's modules, what leads to its own boost package: methods of
``ms.Model``, the function ``build_train_network`` in the four places where it is visible, and the
public names of ``mindspore.boost``. At boost level O0 without settings MindSpore's own code runs.
``uninstall`` puts back what was there. Where someone else has put a wrapper of their own around
ours meanwhile, theirs stays in place and ours becomes transparent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext._compat import ModelUnderConstruction
from mindspore_boost_ext._rules import shown
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper import (
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
)
from mindspore_boost_ext.config import ConfigSource
from mindspore_boost_ext.grad_freeze import FreezeOpt
from mindspore_boost_ext.group_loss_scale_manager import GroupLossScaleManager
from mindspore_boost_ext.report import LOGGER, NoEffectWarning, is_main_process, warn
from mindspore_boost_ext.runtime.machine import tune_machine
from mindspore_boost_ext.thor import thor_of
from mindspore_boost_ext.threads import ONE_AT_A_TIME, end_of_start, start_of_training

INSTALL_VARIABLE = "MINDSPORE_BOOST_EXT_INSTALL"


def make_step_cell(network: nn.Cell, optimizer: nn.Cell, loss_scale_manager: Any) -> nn.Cell:
    """Return the step cell for a network with its loss, as the loss-scale manager demands.

    Args:
        network (Cell): the network with its loss.
        optimizer (Cell): the optimizer.
        loss_scale_manager (LossScaleManager, optional): a manager of ``mindspore.amp``, a
            ``GroupLossScaleManager``, or None.
    """
    if loss_scale_manager is None:
        return BoostTrainOneStepCell(network, optimizer).set_train()
    update = loss_scale_manager.get_update_cell()
    if update is None:
        sens = loss_scale_manager.get_loss_scale()
        return BoostTrainOneStepCell(network, optimizer, sens).set_train()
    return BoostTrainOneStepWithLossScaleCell(network, optimizer, update).set_train()


def check_loss_scale_manager(manager: Any, boost: AutoBoost) -> None:
    """Check that a manager is one, and that it and the switch ``loss_scale_group`` go together.

    Raises:
        TypeError: if ``manager`` is not a loss-scale manager.
        ValueError: if the switch asks for groups and the manager has none, or the other way round.
    """
    if manager is not None and not hasattr(manager, "get_update_cell"):
        raise TypeError(
            f"loss_scale_manager must be a LossScaleManager or None, got {shown(manager)}"
        )
    grouped = isinstance(manager, GroupLossScaleManager)
    if not grouped:
        boost.leave_out("loss_scale_group", "the loss_scale_manager is no GroupLossScaleManager")
    if boost.boost_config["loss_scale_group"] and not grouped:
        raise ValueError(
            "boost.loss_scale_group is on, so loss_scale_manager must be a GroupLossScaleManager, "
            f"got {shown(manager)}"
        )
    if grouped and not boost.boost_config["loss_scale_group"]:
        remedy = "set it to True, in mode 'manual'"
        if boost.boost_config["dim_reduce"]:
            remedy = "dim_reduce excludes all others, so give another manager"
        raise ValueError(
            "loss_scale_manager is a GroupLossScaleManager, but boost.loss_scale_group is off: "
            f"{remedy}"
        )


def prepare_model(model: ms.Model, kwargs: dict[str, Any]) -> None:
    """Apply the boost settings of a Model under construction to its network and optimizer."""
    parts = ModelUnderConstruction(model)
    level = parts.boost_level
    if "acc_level" in kwargs:
        level = kwargs["acc_level"]
        warn("acc_level is the old name of boost_level: use boost_level")
    boost = AutoBoost(level, kwargs.get("boost_config_dict", ""))
    parts.boost_level = boost.level
    if boost.level == "O0":
        if isinstance(parts.optimizer, FreezeOpt):
            warn(
                "the optimizer is a FreezeOpt, but boost_level O0 freezes nothing: use O1 or O2",
                NoEffectWarning,
            )
        elif thor_of(parts.optimizer) is not None:
            check_loss_scale_manager(parts.loss_scale_manager, boost)
            parts.boost = boost  # only the step of this package brings THOR its factors
        return
    if parts.optimizer is None:
        warn(
            f"boost_level {boost.level} has no effect on a Model without an optimizer",
            NoEffectWarning,
        )
        return
    check_loss_scale_manager(parts.loss_scale_manager, boost)
    boost.loss_fn = parts.loss_fn
    with ONE_AT_A_TIME, boost.building():
        trained = boost.network_auto_process_train(parts.network, parts.optimizer)
        boost.fit_groups(parts.loss_scale_manager)
        if parts.eval_network is not None:
            parts.eval_network = boost.network_auto_process_eval(parts.eval_network)
    parts.network, parts.optimizer = trained
    parts.boost = boost


def build_model(plain_build: Callable[[ms.Model], nn.Cell], model: ms.Model) -> nn.Cell:
    """Return the step cell of a Model under construction; ``plain_build`` is ms.Model's own way."""
    parts = ModelUnderConstruction(model)
    if parts.boost is None:
        return with_report(plain_build(model))
    with ONE_AT_A_TIME, parts.boost.building():
        plain = parts.plain_train_network(plain_build)
    return boosted_step(plain, parts.optimizer, parts.loss_scale_manager, parts.boost)


def with_report(plain: nn.Cell) -> nn.Cell:
    """Let MindSpore's own step tell that nothing was done, so that scripts run at level O0 too."""
    if isinstance(plain, nn.TrainOneStepCell) and not hasattr(plain, "report"):
        plain.report = AutoBoost().report
    return plain


def boosted_step(plain: nn.Cell, optimizer: nn.Cell, manager: Any, boost: AutoBoost) -> nn.Cell:
    """Return our step cell in place of ``plain``, MindSpore's own without loss scaling.

    Where MindSpore needs a step cell of another kind, that one is returned, with a warning.
    """
    if type(plain) is not nn.TrainOneStepCell:
        warn(
            f"boost has no effect here: MindSpore trains this network with {type(plain).__name__} "
            "(pipeline stages, or gradient accumulation over them)",
            NoEffectWarning,
        )
        if manager is None:
            return plain
        return ms.amp.build_train_network(plain.network, optimizer, loss_scale_manager=manager)
    with ONE_AT_A_TIME, boost.building():
        cell = make_step_cell(plain.network, optimizer, manager)
    inputs = plain.get_inputs()
    if inputs:
        cell.set_inputs(*inputs)
    if is_main_process():
        LOGGER.info("%s", boost.report())
    return cell


def boosted_build_train_network(
    original: Callable[..., nn.Cell],
    network: nn.Cell,
    optimizer: nn.Cell,
    loss_fn: nn.Cell | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    boost_config_dict: ConfigSource = None,
    **kwargs: Any,
) -> nn.Cell:
    """``mindspore.amp.build_train_network`` with the accelerators of ``boost_level``.

    Args:
        original: MindSpore's function of that name.
        network (Cell): as for that function.
        optimizer (Cell): as for that function.
        loss_fn (Cell, optional): as for that function.
        level (str): the level of mixed precision.
        boost_level (str): ``"O0"``, ``"O1"`` or ``"O2"``.
        boost_config_dict: settings for the level, as for ``AutoBoost``.
        **kwargs: as for that function.
    """
    boost = AutoBoost(boost_level, boost_config_dict)
    if boost.level == "O0" and AutoBoost.is_building():
        return original(network, optimizer, loss_fn, level, boost.level, **kwargs)
    if boost.level == "O0" and thor_of(optimizer) is None:
        return with_report(original(network, optimizer, loss_fn, level, boost.level, **kwargs))
    if "loss_scale_manager" in kwargs:
        manager = kwargs.pop("loss_scale_manager")
    else:
        manager = _compat.default_loss_scale_manager(level)
    check_loss_scale_manager(manager, boost)
    boost.loss_fn = loss_fn
    with ONE_AT_A_TIME, boost.building():
        network, optimizer = boost.network_auto_process_train(network, optimizer)
        boost.fit_groups(manager)
        kwargs["loss_scale_manager"] = None
        plain = original(network, optimizer, loss_fn, level, "O0", **kwargs)
    return boosted_step(plain, optimizer, manager, boost)


def train_model(
    plain_train: Callable[..., Any],
    model: ms.Model,
    epoch: int,
    train_dataset: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Train as ``plain_train`` does, after a look at how long the training is."""
    step, size = model.train_network, getattr(train_dataset, "get_dataset_size", None)
    if not isinstance(step, BoostTrainOneStepCell):
        return plain_train(model, epoch, train_dataset, *args, **kwargs)
    with start_of_training():
        if callable(size) and isinstance(epoch, int):
            train = inspect.signature(plain_train)
            given = train.bind(model, epoch, train_dataset, *args, **kwargs).arguments
            first = kwargs.get("initial_epoch", given.get("initial_epoch"))
            step.expect_training(epoch - int(first or 0), size())
        return plain_train(model, epoch, train_dataset, *args, **kwargs)


def open_data(plain: Callable[..., Any], model: ms.Model, *args: Any, **kwargs: Any) -> Any:
    """Open the data of a training or an evaluation as ``plain`` does; then its start is over."""
    opened = plain(model, *args, **kwargs)
    end_of_start()
    return opened


class BoostModel(ms.Model):
    """``ms.Model`` with the accelerators built in: works whether or not they are installed.

    Takes the arguments of ``mindspore.train.Model``; of them ``boost_level`` and
    ``boost_config_dict`` are read by this package.

    Raises:
        ValueError: for everything wrong with the level or the settings, all in one message.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import BoostModel
        >>> net = nn.Dense(4, 2)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> model = BoostModel(net, nn.MSELoss(), optimizer, boost_level="O1",
        ...                    boost_config_dict={"boost": {"mode": "disable_all"}})
        >>> type(model.train_network).__name__
        'BoostTrainOneStepCell'
    """

    def _build_boost_network(self, kwargs: dict[str, Any]) -> None:
        prepare_model(self, kwargs)

    def _build_train_network(self) -> nn.Cell:
        return build_model(ms.Model._build_train_network, self)

    def train(self, epoch: int, train_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Train as ``ms.Model.train`` does."""
        return train_model(ms.Model.train, self, epoch, train_dataset, *args, **kwargs)

    def fit(self, epoch: int, train_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Train and validate as ``ms.Model.fit`` does."""
        return train_model(ms.Model.fit, self, epoch, train_dataset, *args, **kwargs)

    def _exec_preprocess(self, *args: Any, **kwargs: Any) -> Any:
        return open_data(ms.Model._exec_preprocess, self, *args, **kwargs)


class _Session:
    """One installation: which attributes were replaced, by what, and what stood there before."""

    def __init__(self) -> None:
        self.active = True
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, holder: Any, name: str, ours: Any) -> None:
        """Put ``ours`` in place of ``holder.name``."""
        self._replaced.append((holder, name, ours, vars(holder)[name]))
        setattr(holder, name, ours)

    def end(self) -> None:
        """Put back what stood there, except where someone has replaced ours meanwhile."""
        self.active = False
        for holder, name, ours, before in reversed(self._replaced):
            if vars(holder).get(name) is ours:
                setattr(holder, name, before)

    def wrap(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``ours`` with ``original`` as its first argument while the session is active."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.active:
                return ours(original, *args, **kwargs)
            return original(*args, **kwargs)

        return wrapper


_lock = threading.RLock()
_session: _Session | None = None
_users = 0  # open ``installed()`` contexts, while it was they who installed


def install() -> None:
    """Make ``ms.Model``, ``build_train_network`` and ``mindspore.boost`` use this package.

    Tunes the machine again where ``uninstall`` had undone that. Calling it again changes nothing.
    Safe to call from several threads.
    """
    with _lock:
        if _session is None:
            _plug_in()
            tune_machine()


def _plug_in() -> None:
    global _session
    with _lock:
        if _session is not None:
            return
        session = _Session()
        prepare = _compat.model_method(_compat.PREPARE_METHOD)
        build = _compat.model_method(_compat.BUILD_METHOD)
        session.replace(
            ms.Model,
            _compat.PREPARE_METHOD,
            session.wrap(prepare, lambda _, model, kwargs: prepare_model(model, kwargs)),
        )
        session.replace(ms.Model, _compat.BUILD_METHOD, session.wrap(build, build_model))
        for name in ("train", "fit"):
            session.replace(ms.Model, name, session.wrap(vars(ms.Model)[name], train_model))
        opens = vars(ms.Model)[_compat.OPEN_METHOD]
        session.replace(ms.Model, _compat.OPEN_METHOD, session.wrap(opens, open_data))
        wrappers: dict[Any, Any] = {}
        for holder in _compat.build_function_holders():
            function = holder.build_train_network
            if function not in wrappers:
                wrappers[function] = session.wrap(function, boosted_build_train_network)
            session.replace(holder, "build_train_network", wrappers[function])
        for module, name, holders in _compat.upstream_names():
            ours = _own(module, name)
            for holder in holders:
                session.replace(holder, name, ours)
        _session = session


def uninstall() -> None:
    """Put back what ``install`` replaced, and undo the tuning of the machine as far as possible.

    Calling it again changes nothing. Thread-safe.
    """
    with _lock:
        _unplug()
        tune_machine(False)


def _unplug() -> None:
    global _session
    with _lock:
        if _session is not None:
            _session.end()
            _session = None


def is_installed() -> bool:
    """Tell whether ``ms.Model`` uses this package."""
    return _session is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for the time of a ``with`` block, also of several at once in different threads.

    What was installed before stays installed.
    """
    global _users
    with _lock:
        _users += 1 if _users or not is_installed() else 0
        _plug_in()
        counted = _users > 0
    try:
        yield
    finally:
        with _lock:
            _users -= counted
            if counted and not _users:
                _unplug()
            elif not counted:
                _plug_in()


def _own(module: str, name: str) -> Any:
    """Return this package's object for a public name of ``mindspore.boost.<module>``."""
    return getattr(importlib.import_module(f"mindspore_boost_ext.{module}"), name)


__all__ = ["BoostModel", "install", "installed", "is_installed", "uninstall"]
