"""AutoBoost: from a configuration to a network, an optimizer, and a report of what was done.

The configuration (folder ``config``) says what is wanted; ``AutoBoost`` applies it to one network
and one optimizer. Each object stands alone: there is no process-wide instance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, Build
from mindspore_boost_ext.algorithms import ALGORITHMS
from mindspore_boost_ext.base.arguments import check_groups, needed_optimizer
from mindspore_boost_ext.base.cells import check_cells
from mindspore_boost_ext.config.parse import ALGORITHMS as SWITCHES
from mindspore_boost_ext.config.parse import (
    SECTIONS,
    BoostConfig,
    ConfigSource,
    Decision,
    warn_of_idle_settings,
)
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import APPLIED, INACTIVE, SKIPPED, Report, Row
from mindspore_boost_ext.runtime.machine import tuning
from mindspore_boost_ext.stages.update import check_own_part, list_state_of_own_parts

_BUILDING: ContextVar[AutoBoost | None] = ContextVar("mindspore_boost_ext.building", default=None)
_TAG = "auto_boost"


class AutoBoost:
    """A configuration of the accelerators, ready to be applied.

    While a Model is being built, ``AutoBoost()`` without arguments is that Model's configuration: a
    step cell finds its settings in this way. Otherwise ``AutoBoost()`` is level O0.

    Args:
        level (str): ``"O0"``, ``"O1"`` or ``"O2"``. Default: ``"O0"``.
        boost_config_dict (Union[dict, str, os.PathLike, None]): the settings as a dict, as the path
            of a JSON file, or None or ``""`` for the defaults. Never changed. Default: ``""``.
        strict (bool, optional): whether unknown sections and keys are errors (else warnings).
            Default: None, which is True unless ``MINDSPORE_BOOST_EXT_STRICT=0`` is set.
        algorithms (Iterable[Algorithm]): algorithms of your own, which are on. Default: none.

    Attributes:
        own (tuple[Algorithm]): your own.
        config (BoostConfig): the checked settings.
        loss_fn (Cell, optional): the loss, if it is not part of the network; shows whether the
            outputs are classes.
        level (str): the level in force.
        boost_config_dict: the settings as given.

    Raises:
        TypeError: if ``level`` or ``boost_config_dict`` has the wrong type.
        ValueError: for everything wrong with the level or the settings, all in one message.

    Examples:
        >>> from mindspore_boost_ext import AutoBoost
        >>> boost = AutoBoost("O1", {"boost": {"mode": "disable_all"}})
        >>> boost.boost_config["less_bn"]
        False
    """

    def __new__(cls, *args: object, **kwargs: object) -> AutoBoost:
        """Make an object; without arguments it will share the configuration being built."""
        instance = super().__new__(cls)
        current = _BUILDING.get()
        if current is not None and not args and not kwargs:
            instance.__dict__.update(current.__dict__)
        return instance

    def __init__(
        self,
        level: str = "O0",
        boost_config_dict: ConfigSource = "",
        *,
        strict: bool | None = None,
        algorithms: Iterable[Algorithm] = (),
    ) -> None:
        if "config" in self.__dict__:
            return
        self.config = BoostConfig.parse(level, boost_config_dict, strict=strict)
        self.level = self.config.level
        self.boost_config_dict = boost_config_dict
        self.own = checked_algorithms(algorithms)
        self._ours = tuple(kind() for kind in ALGORITHMS)
        self._missing: dict[str, str] = {}
        self._undoable: list[Callable[[], None]] = []
        self._regroupings: list[Callable[[Any], Any]] = []
        self.loss_fn: nn.Cell | None = None
        self._report = Report(f"boost level {self.level}, mode {self.config.mode}")
        warn_of_idle_settings(self.config)
        record(self._report, self.plan())
        own = (Row(one.switch, "algorithms", APPLIED) for one in self.own)
        self._report.put(*own, *tuning())

    @staticmethod
    def current(optimizer: nn.Cell | None = None) -> AutoBoost:
        """Return the configuration being built, else that of ``optimizer``, else level O0."""
        tags = (getattr(one, _TAG, None) for one in _compat.with_wrapped(optimizer))
        return _BUILDING.get() or next(filter(None, tags), None) or AutoBoost()

    @staticmethod
    def is_building() -> bool:
        """Return whether a Model of this thread is being built."""
        return _BUILDING.get() is not None

    @property
    def boost_config(self) -> dict[str, bool]:
        """Which algorithms are switched on, as a new dict of switches."""
        switches = {decision.algorithm: decision.wanted for decision in self.plan()}
        own = {one.switch: one.switch not in self._missing for one in self.own}
        return {**switches, **own}

    def settings_in_force(self) -> dict[str, str]:
        """Return the switches and settings that affect the training, by their full names.

        Values are text that is the same in every process. Settings of algorithms that are off, and
        paths and limits of one host, are left out.
        """
        switches = self.boost_config
        found = {f"boost.{name}": str(on) for name, on in switches.items()}
        for name, kind in SECTIONS.items():
            readers = kind.readers.values() or (name,)
            if kind.for_every_step or any(switches[reader] for reader in readers):
                for key, value in vars(getattr(self.config, name)).items():
                    if key not in kind.of_one_host:
                        found[f"{name}.{key}"] = _as_text(value)
        for own in self.algorithms[len(ALGORITHMS) :]:
            given = own.compared_settings().items()
            found.update({f"{own.switch}.{name}": _as_text(value) for name, value in given})
        return found

    @property
    def device_number(self) -> int:
        """Devices in one server."""
        return self.config.common.device_number

    @property
    def grad_accumulation_step(self) -> int:
        """Micro-batches in one accumulation window."""
        return self.config.grad_accumulation.grad_accumulation_step

    def plan(self) -> tuple[Decision, ...]:
        """Return the decision on each algorithm, with the prerequisites known so far."""
        return self.config.plan(self._missing)

    def leave_out(self, algorithm: str, reason: str) -> None:
        """Note that a prerequisite of ``algorithm`` is not met, so that ``enable_all`` skips it."""
        self._missing[algorithm] = reason
        record(self._report, self.plan())
        if algorithm in [one.switch for one in self.own]:
            self._report.put(Row(algorithm, "algorithms", SKIPPED, reason))

    def look_for_unavailable(self, own_only: bool = False) -> None:
        """Leave out algorithms that cannot act here; with ``own_only``, only the user's own."""
        for algorithm in self.own if own_only else self.algorithms:
            reason = algorithm.unavailable(self.config)
            if reason:
                self.leave_out(algorithm.switch, reason)

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """This package's algorithms, followed by your own that can act here."""
        return (*self._ours, *(one for one in self.own if one.switch not in self._missing))

    def join(self, step: Any) -> list[str]:
        """Let the algorithms join a step; return the switches of your own that change its update.

        Args:
            step (BoostTrainOneStepCell): the step.
        """
        updates = []
        for algorithm in self.algorithms:
            before = step.update_part
            algorithm.join(step)
            if step.update_part is not before and algorithm in self.own:
                check_own_part(algorithm.switch, step.update_part, before)
                updates.append(algorithm.switch)
        list_state_of_own_parts(step)
        return updates

    def report(self) -> Report:
        """Return what was applied, skipped or left inactive, and why."""
        return self._report

    def network_auto_process_train(
        self, network: nn.Cell, optimizer: nn.Cell
    ) -> tuple[nn.Cell, nn.Cell]:
        """Apply the algorithms that change the network or the optimizer.

        Args:
            network (Cell): the network, without or with its loss.
            optimizer (Cell): the optimizer over its trainable parameters.

        Returns:
            tuple(Cell, Cell), the network and the optimizer to train with.

        Raises:
            TypeError, ValueError: if they do not fit the settings; the network is then unchanged.
        """
        check_cells(network=network, optimizer=optimizer)
        with self._all_or_nothing():
            self._look_at(optimizer)
            self.look_for_unavailable()
            check_groups(optimizer)
            build = self._build(network, optimizer)
            for algorithm in self.algorithms:
                if build.switches[algorithm.switch]:
                    algorithm.build(build)
        if _BUILDING.get() is None:
            setattr(build.optimizer, _TAG, self)
            # What another network is refused for is nothing to this one, and it holds this one.
            self._undoable.clear()
            self._regroupings.clear()
        return build.network, build.optimizer

    def _look_at(self, optimizer: nn.Cell) -> None:
        """Leave out algorithms that need another optimizer."""
        for algorithm in self._ours:
            if not algorithm.needs_nn_optimizer:
                continue
            if isinstance(optimizer, nn.Optimizer):
                if self._missing.pop(algorithm.switch, None):  # an earlier network had another
                    record(self._report, self.plan())
            else:
                self.leave_out(algorithm.switch, f"it needs an {needed_optimizer(optimizer)}")

    def _build(self, network: nn.Cell, optimizer: nn.Optimizer | None = None) -> Build:
        return Build(
            network,
            optimizer,
            self.config,
            self.boost_config,
            self._report,
            self.loss_fn,
            self._undoable,
            self._regroupings,
        )

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restore the networks if the code in the context fails."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the networks."""
        while self._undoable:
            self._undoable.pop()()

    def fit_groups(self, manager: Any) -> None:
        """Give the groups of a ``GroupLossScaleManager`` the rewritten network's parameters."""
        for regrouped in self._regroupings if hasattr(manager, "loss_scale_groups") else ():
            groups = regrouped(manager.loss_scale_groups)
            if [len(group) for group in groups] != [len(one) for one in manager.loss_scale_groups]:
                manager.loss_scale_groups = groups

    def network_auto_process_eval(self, network: nn.Cell) -> nn.Cell:
        """Change a network for evaluation as the trained one was changed.

        Args:
            network (Cell): the network for evaluation.
        """
        build = self._build(network)
        for algorithm in self.algorithms:
            if build.switches[algorithm.switch]:
                algorithm.evaluate(network, build)
        return network

    @contextlib.contextmanager
    def building(self) -> Iterator[AutoBoost]:
        """While the context is open, ``AutoBoost()`` in this thread is this configuration."""
        token = _BUILDING.set(self)
        try:
            with self._all_or_nothing():
                yield self
        finally:
            _BUILDING.reset(token)


def _as_text(value: object) -> str:
    """Return a setting as text that is the same in every process."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def checked_algorithms(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    """Refuse objects that are no Algorithm, and names that are empty or taken."""
    if isinstance(algorithms, (str, Algorithm)):
        raise TypeError(f"algorithms must be a list of Algorithms, got {shown(algorithms)}")
    algorithms = tuple(algorithms)
    taken = {*SWITCHES, *SECTIONS}
    for one in algorithms:
        if not isinstance(one, Algorithm):
            raise TypeError(f"algorithms must contain Algorithm objects, got {shown(one)}")
        if not isinstance(one.switch, str):
            raise TypeError(f"algorithms: switch must be a name, got {shown(one.switch)}")
        if not one.switch or one.switch in taken:
            why = "is taken" if one.switch else "is empty"
            raise ValueError(
                f"algorithms: the switch {one.switch!r} of {type(one).__name__} {why}: give the "
                "class its own name, switch = '...'"
            )
        taken.add(one.switch)
    return algorithms


def record(report: Report, decisions: tuple[Decision, ...]) -> None:
    """Put a row into ``report`` for each decision."""
    for decision in decisions:
        left_out = INACTIVE if decision.asked_by == "-" else SKIPPED
        status = APPLIED if decision.wanted else left_out
        report.put(Row(decision.algorithm, decision.asked_by, status, decision.reason))
