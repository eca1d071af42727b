"""``ms.Model`` and ``build_train_network`` with the accelerators, and ``BoostModel``.

At boost level O0, without a THOR or algorithms of the user's own, MindSpore's own code runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.amp import LossScaleManager
from mindspore.dataset import Dataset

from mindspore_boost_ext import _compat
from mindspore_boost_ext._compat import ModelUnderConstruction
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.boost import AutoBoost, checked_algorithms
from mindspore_boost_ext.boost_cell_wrapper import (
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
)
from mindspore_boost_ext.config.parse import ConfigSource
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.grad_freeze.freezing import FreezeOpt
from mindspore_boost_ext.integration.outside import level_and_settings, settings_from_outside
from mindspore_boost_ext.integration.record import BUILT, is_own_step, own_step, record_step
from mindspore_boost_ext.integration.training import fit_model, train_model
from mindspore_boost_ext.report import (
    APPLIED,
    INACTIVE,
    LOGGER,
    SKIPPED,
    NoEffectWarning,
    Row,
    is_main_process,
    warn,
)
from mindspore_boost_ext.runtime.release import release_dropped, release_with
from mindspore_boost_ext.runtime.threads import (
    ONE_AT_A_TIME,
    end_of_start,
)
from mindspore_boost_ext.stages.loss_scale import SECTION
from mindspore_boost_ext.thor.optimizer import thor_of

# The arguments of ms.Model that give its level; the second is the old name.
_LEVELS = {"boost_level", "acc_level"}


def make_step_cell(
    network: nn.Cell, optimizer: nn.Cell, loss_scale_manager: LossScaleManager | None
) -> nn.Cell:
    """Return the step cell for a network with its loss, as the loss-scale manager demands."""
    update = None if loss_scale_manager is None else loss_scale_manager.get_update_cell()
    if update is not None:
        return BoostTrainOneStepWithLossScaleCell(network, optimizer, update).set_train()
    sens = None if loss_scale_manager is None else loss_scale_manager.get_loss_scale()
    return BoostTrainOneStepCell(network, optimizer, sens).set_train()


def check_loss_scale_manager(manager: object, boost: AutoBoost) -> None:
    """Check that a manager is one, and that it and the settings go together.

    Raises:
        TypeError: if ``manager`` is not a loss-scale manager.
        ValueError: if an algorithm needs another one.
    """
    if manager is not None and not hasattr(manager, "get_update_cell"):
        raise TypeError(
            f"loss_scale_manager must be a LossScaleManager or None, got {shown(manager)}"
        )
    for algorithm in boost.algorithms:
        algorithm.check_loss_scale(manager, boost)


def manager_of(
    given: LossScaleManager | None, boost: AutoBoost, is_own: bool
) -> LossScaleManager | None:
    """Return ``given``, or the loss-scale manager of section ``loss_scale`` in place of it.

    ``given`` is the script's own (``is_own``), which stays, or the one of its amp level, or None.
    """
    if SECTION not in boost.config.given or boost.level == "O0":
        return given
    asked_by, section = f"section {SECTION}", boost.config.loss_scale
    if given is not None and is_own:
        reason = "the script has its own loss-scale manager"
        boost.report().put(Row(SECTION, asked_by, SKIPPED, reason))
        return given
    boost.report().put(Row(SECTION, asked_by, APPLIED, f"dynamic, from {section.init:g} on"))
    return ms.amp.DynamicLossScaleManager(section.init, section.factor, section.window)


def with_report(plain: nn.Cell, brought: bool = False) -> nn.Cell:
    """Give MindSpore's own step an empty report, so that scripts which read it run at O0, too.

    If the script made the step (``brought``), the report says so. Other Cells stay as they are.
    """
    if isinstance(plain, nn.TrainOneStepCell) and not hasattr(plain, "report"):
        boost = AutoBoost()
        if brought:
            boost.report().put(Row("step", "-", INACTIVE, own_step(type(plain).__name__)))
        plain.report = boost.report
    return plain


def construct_model(
    construct: Callable[..., None], model: ms.Model, *args: object, **kwargs: object
) -> None:
    """Construct a Model as ``construct`` does; without a level, it gets the one from outside.

    It keeps its own settings if there are none outside.
    """
    signature = inspect.signature(construct)
    given = signature.bind_partial(model, *args, **kwargs).arguments
    trains = given.get("optimizer") is not None
    own = bool(_LEVELS & {*given, *given.get("kwargs", ())})
    if trains and not own:
        kwargs.update({name: value for name, value in settings_from_outside().items() if value})
    construct(model, *args, **kwargs)
    parts = _compat.ModelUnderConstruction(model)
    level, unused = parts.boost_level or "O0", parts.boost
    if unused is not None and not isinstance(model.train_network, BoostTrainOneStepCell):
        parts.boost = None
        _construct_at_o0(unused, construct, signature.bind_partial(model, *args, **kwargs), model)
    network = given["network"]
    is_step = not trains and given.get("loss_fn") is None
    # Else the launcher's summary says it, or the Model's own level counts.
    if is_step and not (BUILT or own):
        _warn_of_own_step(network)
    for built in BUILT:
        built.add(network, model.train_network, trains, level)
        if trains and own and isinstance(model.train_network, BoostTrainOneStepCell):
            built.own_levels.append(type(network).__name__)


def _warn_of_own_step(network: nn.Cell) -> None:
    """Warn if level and settings from the environment reach a step cell of the script's own."""
    if is_own_step(network) and settings_from_outside().get("boost_level", "O0") != "O0":
        words = "level and settings from the environment have no effect on this Model: "
        warn(words + own_step(type(network).__name__), NoEffectWarning)


def _construct_at_o0(
    boost: AutoBoost, construct: Callable[..., None], plain: inspect.BoundArguments, model: ms.Model
) -> None:
    """Construct a Model again, at level O0: its class builds the training step itself.

    The changes to its network are undone, because they are for a step of this package.
    """
    boost.undo()
    warn(
        f"boost_level {boost.level} has no effect on this {type(model).__name__}, whose class "
        "builds the training step itself: give network, loss and optimizer to ms.Model",
        NoEffectWarning,
    )
    for held in (plain.arguments, plain.arguments.get("kwargs", {})):
        for name in _LEVELS & held.keys():
            held[name] = "O0"
        held.pop("boost_config_dict", None)  # at O0 it would be warned of once more
    construct(*plain.args, **plain.kwargs)
    with_report(model.train_network, True)


def prepare_model(model: ms.Model, kwargs: dict[str, Any]) -> None:
    """Apply the boost settings of a Model under construction to its network and optimizer."""
    parts = ModelUnderConstruction(model)
    level = parts.boost_level
    if "acc_level" in kwargs:
        level = kwargs["acc_level"]
        warn("acc_level is the old name of boost_level: use boost_level")
    own = model.algorithms if isinstance(model, BoostModel) else ()
    boost = AutoBoost(level, kwargs.get("boost_config_dict", ""), algorithms=own)
    parts.boost_level = boost.level
    if boost.level == "O0" and not own:
        if isinstance(parts.optimizer, FreezeOpt):
            warn(
                "the optimizer is a FreezeOpt, but boost_level O0 freezes nothing: use O1 or O2",
                NoEffectWarning,
            )
        elif isinstance(parts.optimizer, nn.Cell) and thor_of(parts.optimizer) is not None:
            check_loss_scale_manager(parts.loss_scale_manager, boost)
            parts.boost = boost  # only the step of this package gives THOR its factors
        return
    if parts.optimizer is None:
        words = f"boost_level {boost.level} has no effect on a Model without an optimizer"
        if parts.loss_fn is None and is_own_step(parts.network):
            words += f": {own_step(type(parts.network).__name__)}"
        warn(words, NoEffectWarning)
        return
    if not isinstance(parts.optimizer, nn.Cell):
        raise TypeError(
            f"boost_level {boost.level} takes one optimizer, got {shown(parts.optimizer)}: leave "
            "the level out, or give each network its own Model"
        )
    manager = manager_of(parts.loss_scale_manager, boost, parts.has_own_manager)
    check_loss_scale_manager(manager, boost)
    boost.loss_fn = parts.loss_fn
    with ONE_AT_A_TIME, boost.building():
        trained = boost.network_auto_process_train(parts.network, parts.optimizer)
        boost.fit_groups(manager)
        if parts.eval_network is not None:
            parts.eval_network = boost.network_auto_process_eval(parts.eval_network)
    parts.network, parts.optimizer = trained
    parts.boost = boost


def build_model(plain_build: Callable[[ms.Model], nn.Cell], model: ms.Model) -> nn.Cell:
    """Return the step cell of a Model under construction; ``plain_build`` is ms.Model's method."""
    parts = ModelUnderConstruction(model)
    if parts.boost is None:
        return with_report(plain_build(model), parts.optimizer is None)
    with ONE_AT_A_TIME, parts.boost.building():
        release_dropped()
        plain = parts.plain_train_network(plain_build)
    manager = manager_of(parts.loss_scale_manager, parts.boost, parts.has_own_manager)
    step = boosted_step(plain, parts.optimizer, manager, parts.boost)
    release_with(model, step)
    parts.boost = None  # it has its step
    return step


def boosted_step(
    plain: nn.Cell, optimizer: nn.Cell, manager: LossScaleManager | None, boost: AutoBoost
) -> nn.Cell:
    """Return our step cell in place of ``plain``, MindSpore's own without a loss scale.

    If MindSpore needs another kind of step cell, that one is returned, with a warning.
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
    boost_level: str | None = None,
    boost_config_dict: ConfigSource = None,
    algorithms: Sequence[Algorithm] = (),
    any_optimizer: bool = False,
    **kwargs: object,
) -> nn.Cell:
    """Do as ``original``, ``mindspore.amp.build_train_network``, does, with the accelerators.

    ``level`` is that of mixed precision. The environment gives ``boost_level`` if the call does
    not. ``any_optimizer`` accepts those of ``mindspore.experimental``, which ``original`` refuses.
    """
    if not isinstance(optimizer, nn.Cell):
        raise TypeError(
            f"optimizer must be one optimizer, got {shown(optimizer)}: give each network, or each "
            "part of one, its own step"
        )
    boost_level, boost_config_dict = level_and_settings(boost_level, boost_config_dict)
    boost = AutoBoost(boost_level, boost_config_dict, algorithms=algorithms)
    if boost.level == "O0" and AutoBoost.is_building():
        return original(network, optimizer, loss_fn, level, boost.level, **kwargs)
    is_experimental = not isinstance(optimizer, nn.Optimizer) and hasattr(optimizer, "param_groups")
    refused = any_optimizer and is_experimental  # by MindSpore's function
    if boost.level == "O0" and not (algorithms or refused) and thor_of(optimizer) is None:
        plain = original(network, optimizer, loss_fn, level, boost.level, **kwargs)
        return record_step(network, with_report(plain), boost.level)
    is_own = "loss_scale_manager" in kwargs
    own = kwargs.pop("loss_scale_manager", None)
    manager: Any = own if is_own else _compat.default_loss_scale_manager(level)
    manager = manager_of(manager, boost, is_own)
    check_loss_scale_manager(manager, boost)
    boost.loss_fn, given = loss_fn, network
    with ONE_AT_A_TIME, boost.building():
        network, optimizer = boost.network_auto_process_train(network, optimizer)
        boost.fit_groups(manager)
        kwargs["loss_scale_manager"] = None
        accepted = nn.SGD(optimizer.parameters) if refused else optimizer
        plain = original(network, accepted, loss_fn, level, "O0", **kwargs)
    return record_step(given, boosted_step(plain, optimizer, manager, boost), boost.level)


def open_data(
    plain: Callable[..., Any], model: ms.Model, *args: object, **kwargs: object
) -> object:
    """Open the data of a training or an evaluation as ``plain`` does; then its start is over."""
    opened = plain(model, *args, **kwargs)
    end_of_start()
    return opened


class BoostModel(ms.Model):
    """``ms.Model`` with the accelerators built in: works whether or not they are installed.

    Takes the arguments of ``mindspore.train.Model``. This package reads ``boost_level`` and
    ``boost_config_dict``.

    Args:
        algorithms (Sequence[Algorithm]): algorithms of your own, which are on at every level.
            Default: none.

    Raises:
        TypeError: if ``algorithms`` holds anything else, or the level is no str.
        ValueError: for everything wrong with the level or the settings, all in one message.

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

    def __init__(
        self, *args: object, algorithms: Sequence[Algorithm] = (), **kwargs: object
    ) -> None:
        self.algorithms = checked_algorithms(algorithms)
        construct_model(ms.Model.__init__, self, *args, **kwargs)

    def _build_boost_network(self, kwargs: dict[str, Any]) -> None:
        prepare_model(self, kwargs)

    def _build_train_network(self) -> nn.Cell:
        return build_model(ms.Model._build_train_network, self)

    def train(self, epoch: int, train_dataset: Dataset, *args: object, **kwargs: object) -> object:
        """Train as ``ms.Model.train`` does."""
        return train_model(ms.Model.train, self, epoch, train_dataset, *args, **kwargs)

    def fit(self, epoch: int, train_dataset: Dataset, *args: object, **kwargs: object) -> object:
        """Train and validate as ``ms.Model.fit`` does."""
        return fit_model(ms.Model.fit, self, epoch, train_dataset, *args, **kwargs)

    def _exec_preprocess(self, *args: object, **kwargs: object) -> object:
        return open_data(ms.Model._exec_preprocess, self, *args, **kwargs)
