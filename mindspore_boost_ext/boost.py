"""AutoBoost: from a configuration to a network, an optimizer, and a report of what was done.

The configuration says what is wanted (``config.py``); ``AutoBoost`` applies it to one network and
one optimizer. Each object stands alone: there is no process-wide instance, and nothing is mutated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from mindspore import nn

from mindspore_boost_ext.adasum.cell import obstacle
from mindspore_boost_ext.base.centralization import output_axes
from mindspore_boost_ext.base.rebuild import ParameterProcess
from mindspore_boost_ext.config.parse import BoostConfig, ConfigSource, Decision, tell
from mindspore_boost_ext.dim_reduce.setup import prepare
from mindspore_boost_ext.grad_freeze.freezing import FreezeOpt, GradientFreeze
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.less_batch_normalization.head import no_classes
from mindspore_boost_ext.less_batch_normalization.rewrite import (
    KEPT,
    Rewriting,
    fitted,
    less_bn,
    tell_effect,
)
from mindspore_boost_ext.report import APPLIED, INACTIVE, SKIPPED, Report, Row
from mindspore_boost_ext.runtime.machine import tuning
from mindspore_boost_ext.thor.optimizer import thor_of
from mindspore_boost_ext.thor.switch import thor_in_place_of

_BUILDING: ContextVar[AutoBoost | None] = ContextVar("mindspore_boost_ext.building", default=None)
_TAG = "auto_boost"


class AutoBoost:
    """A configuration of the accelerators, ready to be applied.

    Without arguments, while a Model is being built, it is that Model's configuration; so a step
    cell finds its settings by ``AutoBoost()``. Elsewhere ``AutoBoost()`` is level O0.

    Args:
        level (str): ``"O0"``, ``"O1"`` or ``"O2"``. Default: ``"O0"``.
        boost_config_dict (Union[dict, str, os.PathLike, None]): the settings as a dict, as the path
            of a JSON file, or None or ``""`` for the defaults. Never changed. Default: ``""``.
        strict (bool, optional): whether unknown sections and keys are errors (else warnings).
            Default: None, which is True unless ``MINDSPORE_BOOST_EXT_STRICT=0`` is set.

    Attributes:
        config (BoostConfig): the checked settings.
        loss_fn (Cell, optional): the loss of a network that is given without; tells whether
            outputs are classes.
        level (str): the level in force.
        boost_config_dict: the settings as given.

    Raises:
        TypeError: if ``level`` or ``boost_config_dict`` has the wrong type.
        ValueError: for everything wrong with the level or the settings, all in one message.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore_boost_ext import AutoBoost
        >>> boost = AutoBoost("O1", {"boost": {"mode": "disable_all"}})
        >>> boost.boost_config["less_bn"]
        False
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AutoBoost:
        """Make an object; without arguments it will share the configuration being built."""
        instance = super().__new__(cls)
        current = _BUILDING.get()
        if current is not None and not args and not kwargs:
            instance.__dict__.update(current.__dict__)
        return instance

    def __init__(
        self, level: str = "O0", boost_config_dict: ConfigSource = "", *, strict: bool | None = None
    ) -> None:
        """Check the settings; nothing is applied yet."""
        if "config" in self.__dict__:
            return
        self.config = BoostConfig.parse(level, boost_config_dict, strict=strict)
        self.level = self.config.level
        self.boost_config_dict = boost_config_dict
        self._missing: dict[str, str] = {}
        self._rewriting: Rewriting | None = None
        self._undoable: list[Rewriting] = []
        self.loss_fn: nn.Cell | None = None
        self._report = Report(f"boost level {self.level}, mode {self.config.mode}")
        tell(self.config)
        record(self._report, self.plan())
        for row in tuning():
            self._report.put(row)

    @staticmethod
    def current(optimizer: nn.Cell | None = None) -> AutoBoost:
        """Return the configuration being built, else that of ``optimizer``, else level O0."""
        building = _BUILDING.get()
        while building is None and optimizer is not None:
            building = getattr(optimizer, _TAG, None)
            optimizer = getattr(optimizer, "opt", None)  # LARS and FreezeOpt wrap an optimizer
        return building or AutoBoost()

    @staticmethod
    def is_building() -> bool:
        """Tell whether a Model of this thread is being built."""
        return _BUILDING.get() is not None

    @property
    def boost_config(self) -> dict[str, bool]:
        """Which algorithms are switched on, as a new dict of switches."""
        return {decision.algorithm: decision.wanted for decision in self.plan()}

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
            TypeError, ValueError: if they do not go with the settings; the network is then as it
                was before.
        """
        with self._all_or_nothing():
            return self._processed(network, optimizer)

    def _processed(self, network: nn.Cell, optimizer: nn.Cell) -> tuple[nn.Cell, nn.Cell]:
        reason = obstacle(self.device_number)
        if reason:
            self.leave_out("adasum", reason)
        if self.boost_config["less_bn"]:
            optimizer = self._fitted(network, optimizer, self._less_bn(network))
            points = self.config.common.gradient_split_groups
            ParameterProcess().assign_parameter_group(network.trainable_params(), points)
        if self.boost_config["thor"]:
            optimizer, reason = thor_in_place_of(optimizer, network, self.config.thor)
            self._report.put(Row("thor", self._report["thor"].asked_by, APPLIED, reason))
        if self.boost_config["grad_freeze"]:
            network, optimizer = self._freeze(network, optimizer)
        if self.boost_config["dim_reduce"]:
            asked_by = self._report["dim_reduce"].asked_by
            optimizer, reason, counts = prepare(network, optimizer, self.config.dim_reduce)
            self._report.put(Row("dim_reduce", asked_by, APPLIED, reason, counts))
        if _BUILDING.get() is None:
            setattr(optimizer, _TAG, self)
        return network, optimizer

    def _less_bn(self, network: nn.Cell) -> Rewriting:
        """Rewrite a network in place."""
        section = self.config.less_bn
        settings = {name: value for name, value in vars(section).items() if name != "gc_flag"}
        reason = no_classes(network, self.loss_fn) if section.fn_flag and not section.heads else ""
        if reason:
            settings["fn_flag"] = False
            self._report.put(Row("less_bn head", "less_bn", KEPT, reason))
        rewriting = less_bn(network, **settings)
        self._undoable.append(rewriting)
        return rewriting

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Give networks back as they were if what is done in the context fails."""
        try:
            yield
        except BaseException:
            while self._undoable:
                self._undoable.pop().undo()
            raise

    def _fitted(self, network: nn.Cell, optimizer: nn.Cell, rewriting: Rewriting) -> nn.Cell:
        """Return the optimizer over the parameters that the rewritten network has."""
        self._rewriting = rewriting
        tell_effect(rewriting)
        for row in rewriting.rows(self._report["less_bn"].asked_by):
            self._report.put(row)
        trained = {id(parameter) for parameter in getattr(optimizer, "parameters", ())}
        lost = any(id(parameter) in trained for parameter in rewriting.surplus)
        missed = any(id(parameter) not in trained for parameter in rewriting.fresh)
        if thor_of(optimizer) is not None and (lost or missed):
            raise ValueError(
                "less_bn has changed the network after THOR was made over it: use the section "
                "'thor' with a plain optimizer, or rewrite with LessBN(network) before THOR"
            )
        return fitted(optimizer, rewriting, self._centralized(network, optimizer))

    def _centralized(self, network: nn.Cell, optimizer: nn.Cell) -> dict[str, int]:
        """Return the weights whose gradients are to be centralized, and put a row for it."""
        if not self.config.less_bn.gc_flag:
            return {}
        names = {parameter.name for parameter in getattr(optimizer, "parameters", ())}
        found = {name: axis for name, axis in output_axes(network).items() if name in names}
        reason = "" if found else "no weight has more than one input for an output"
        if self.boost_config["thor"] or thor_of(optimizer) is not None:
            found, reason = {}, "THOR has a rule of its own for each weight"
        status = SKIPPED if reason else APPLIED
        counts = {"weights": len(found)}
        self._report.put(Row("gradient centralization", "less_bn", status, reason, counts))
        return found

    def fit_groups(self, manager: Any) -> None:
        """Give a manager's loss-scale groups the parameters that the rewritten network has.

        Args:
            manager: a loss-scale manager, or None; only a ``GroupLossScaleManager`` has groups.
        """
        if self._rewriting is None or not isinstance(manager, GroupLossScaleManager):
            return
        groups = self._rewriting.regrouped(manager.loss_scale_groups)
        if [len(one) for one in groups] != [len(one) for one in manager.loss_scale_groups]:
            manager.loss_scale_groups = groups

    def _freeze(self, network: nn.Cell, optimizer: nn.Cell) -> tuple[nn.Cell, nn.Cell]:
        if isinstance(optimizer, FreezeOpt):
            return network, optimizer  # the user's own groups and schedule
        settings = self.config.grad_freeze
        freezing = GradientFreeze(
            settings.param_groups,
            settings.freeze_type,
            settings.freeze_p,
            settings.total_steps,
            seed=settings.seed,
            schedule=settings.schedule,
            prefix_fraction=settings.prefix_fraction,
            prefix_start=settings.prefix_start,
        )
        return freezing.freeze_generate(network, optimizer)

    def network_auto_process_eval(self, network: nn.Cell) -> nn.Cell:
        """Give a network for evaluation the form in which it is trained.

        Args:
            network (Cell): the network for evaluation.
        """
        if self.boost_config["less_bn"]:
            rewriting = self._less_bn(network)
            if rewriting.is_new:
                counts = rewriting.counts
                reason = "a network of its own, rewritten like the trained one"
                self._report.put(Row("less_bn (evaluation)", "less_bn", APPLIED, reason, counts))
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


def record(report: Report, decisions: tuple[Decision, ...]) -> None:
    """Put a row into ``report`` for each decision."""
    for one in decisions:
        status = APPLIED
        if not one.wanted:
            status = INACTIVE if one.asked_by == "-" else SKIPPED
        report.put(Row(one.algorithm, one.asked_by, status, one.reason))


__all__ = ["AutoBoost", "record"]
