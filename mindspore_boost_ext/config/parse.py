"""Configuration of the accelerators: levels, modes, sections. One error names every problem.

``BoostConfig.parse`` turns the user's ``boost_config_dict`` into frozen dataclasses.
``BoostConfig.plan`` says which algorithms it switches on, and what asked for each. Sections declare
what they switch on or exclude. Levels and modes: ``docs/configuration.md``. Imports no MindSpore.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Union

import mindspore_boost_ext.config.sections as sections
from mindspore_boost_ext.config.files import read_json
from mindspore_boost_ext.config.rules import (
    Rule,
    boolean,
    described,
    one_of,
    plain,
    printable,
    shown,
    switched_off,
)
from mindspore_boost_ext.config.section import Section
from mindspore_boost_ext.config.whole_training import (
    ProgressiveResizingConfig,
    SeqLengthWarmupConfig,
    ShortScheduleConfig,
)
from mindspore_boost_ext.report import NoEffectWarning, warn

ALGORITHMS = (
    "less_bn",
    "grad_freeze",
    "adasum",
    "grad_accumulation",
    "dim_reduce",
    "loss_scale_group",
    "thor",
    "progressive_resizing",
    "seq_length_warmup",
    "short_schedule",
    "label_smoothing",
    "gradient_centralization",
    "compiled_step",
    "cheaper_operators",
)
MODES = ("auto", "manual", "enable_all", "disable_all")
LEVELS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "O0": frozenset(),
        "O1": frozenset({"less_bn", "grad_freeze"}),
        "O2": frozenset({"less_bn", "grad_freeze", "adasum"}),
    }
)
STRICT_VARIABLE = "MINDSPORE_BOOST_EXT_STRICT"
_SWITCHES = ("mode", *ALGORITHMS)
_MOST_NAMES = 1000  # in one section; far more than there are
_MOST_PLACES = 4  # that a message names
_ALIASES = MappingProxyType(
    {"dim_reduce": ("n_component", "n_components"), "common": ("device_num", "device_number")}
)

ConfigSource = Union[Mapping[str, Any], str, "os.PathLike[str]", None]


class BoostConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        problems (tuple(str)): one sentence for each thing that is wrong.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"boost configuration: {count}\n  " + "\n  ".join(problems))


@dataclass(frozen=True)
class Decision:
    """Whether an algorithm is wanted, what asked for it, and, if it is left out, why.

    ``wanted`` is True only for algorithms to apply; ``asked_by`` is ``"-"`` if nothing asked.
    """

    algorithm: str
    wanted: bool
    asked_by: str = "-"
    reason: str = ""


@dataclass(frozen=True)
class BoostConfig:
    """A checked configuration. Build it with :meth:`parse`; equal configurations compare equal.

    Args:
        level (str): ``"O0"``, ``"O1"`` or ``"O2"``.
        mode (str): ``"auto"``, ``"manual"``, ``"enable_all"`` or ``"disable_all"``.
        given_switches (tuple): the switches that the user gave in section ``boost``, as pairs of
            name and bool.
        given (frozenset(str)): names of the sections that the user gave.
        common, less_bn, grad_freeze, grad_accumulation, dim_reduce, thor, progressive_resizing,
            seq_length_warmup, short_schedule, label_smoothing, gradient_centralization,
            compiled_step, cheaper_operators, gradients, loss_scale (Section): the settings of the
            section of that name.
    """

    level: str = "O0"
    mode: str = "auto"
    given_switches: tuple[tuple[str, bool], ...] = ()
    given: frozenset[str] = frozenset()
    common: sections.CommonConfig = sections.CommonConfig()
    less_bn: sections.LessBNConfig = sections.LessBNConfig()
    grad_freeze: sections.GradFreezeConfig = sections.GradFreezeConfig()
    grad_accumulation: sections.GradAccumulationConfig = sections.GradAccumulationConfig()
    dim_reduce: sections.DimReduceConfig = sections.DimReduceConfig()
    thor: sections.ThorConfig = sections.ThorConfig()
    progressive_resizing: ProgressiveResizingConfig = ProgressiveResizingConfig()
    seq_length_warmup: SeqLengthWarmupConfig = SeqLengthWarmupConfig()
    short_schedule: ShortScheduleConfig = ShortScheduleConfig()
    label_smoothing: sections.LabelSmoothingConfig = sections.LabelSmoothingConfig()
    gradient_centralization: sections.GradientCentralizationConfig = (
        sections.GradientCentralizationConfig()
    )
    compiled_step: sections.CompiledStepConfig = sections.CompiledStepConfig()
    cheaper_operators: sections.CheaperOperatorsConfig = sections.CheaperOperatorsConfig()
    gradients: sections.GradientsConfig = sections.GradientsConfig()
    loss_scale: sections.LossScaleConfig = sections.LossScaleConfig()

    @property
    def switches(self) -> dict[str, bool]:
        """The switches that the user gave, as a new dict."""
        return dict(self.given_switches)

    @classmethod
    def parse(
        cls, level: str = "O0", source: ConfigSource = None, *, strict: bool | None = None
    ) -> BoostConfig:
        """Check ``source`` and return it as a configuration.

        Args:
            level: ``"O0"``, ``"O1"`` or ``"O2"``.
            source: a dict, the path of a JSON file, or None or ``""`` for the defaults. Sections
                and keys may be left out; a section may be None. The source is never changed.
            strict: whether unknown names are errors; otherwise a warning names them. Default: None,
                which is True unless the environment sets ``MINDSPORE_BOOST_EXT_STRICT=0``.

        Raises:
            TypeError: if ``level`` is not a str, or ``source`` is none of the accepted types.
            BoostConfigError: (a ValueError) with every problem found: unknown level, section or
                key, and each value that breaks its rule.
        """
        strict = not switched_off(STRICT_VARIABLE) if strict is None else strict
        return _Parser(strict).parse(level, source)

    def plan(self, missing: Mapping[str, str] | None = None) -> tuple[Decision, ...]:
        """Decide on each algorithm, in the order of ``ALGORITHMS``.

        Args:
            missing: the reason for each algorithm whose prerequisites this run does not meet.
                Mode ``enable_all`` leaves these out; the other modes do not read it.
        """
        decisions = [self._with_effect(self._decide(one, missing or {})) for one in ALGORITHMS]
        for decision in decisions:
            allowed = self.section(decision.algorithm).goes_with
            if decision.wanted and allowed is not None:
                decisions = [_excluded(other, decision.algorithm, allowed) for other in decisions]
        return tuple(decisions)

    def section(self, algorithm: str) -> Section:
        """Return the section of an algorithm; an empty :class:`Section` if it has none."""
        return getattr(self, algorithm, Section())

    def _with_effect(self, decision: Decision) -> Decision:
        """Switch an algorithm off if its own settings leave it nothing to do."""
        reason = self.section(decision.algorithm).nothing_to_do() if decision.wanted else ""
        return dataclasses.replace(decision, wanted=False, reason=reason) if reason else decision

    def _decide(self, algorithm: str, missing: Mapping[str, str]) -> Decision:
        if self.level == "O0":
            return Decision(algorithm, False, reason="level O0 switches nothing on")
        if self.mode == "disable_all":
            return Decision(algorithm, False, reason="mode disable_all")
        section, switch = self.section(algorithm), self.switches.get(algorithm)
        by_section = section.given_means_on and algorithm in self.given
        forbidden = section.given_means_on and switch is False
        by_switch = f"boost.{algorithm}={switch}"
        if self.mode == "enable_all":
            left_out = "" if by_section else section.left_out_of_all
            reason = missing.get(algorithm, by_switch if forbidden else left_out)
            return Decision(algorithm, not reason, "mode enable_all", reason)
        if forbidden or (self.mode == "manual" and switch is False):
            return Decision(algorithm, False, reason=by_switch)
        if self.mode == "manual" and switch:
            return Decision(algorithm, True, by_switch)
        if by_section:
            return Decision(algorithm, True, f"section {algorithm}")
        if algorithm in LEVELS[self.level]:
            return Decision(algorithm, True, f"level {self.level}")
        given = ", and its section alone does not switch it on" if algorithm in self.given else ""
        off = f"not in level {self.level}" if algorithm in LEVELS["O2"] else "in no level"
        return Decision(algorithm, False, reason=f"{off}{given}")

    def notices(self) -> tuple[str, ...]:
        """Return one sentence for each given switch, section or setting that has no effect."""
        plan = {decision.algorithm: decision for decision in self.plan()}
        wanted = {algorithm for algorithm, one in plan.items() if one.wanted}
        overruler = f"mode {self.mode!r} decides; use mode 'manual' to set switches"
        if self.level == "O0":
            overruler = "level O0 decides; use level O1 or O2 to set switches"
        refused = {name for name, on in self.switches.items() if not on and self.mode == "manual"}
        found = []
        if self.level == "O0" and self.mode != "auto":
            found.append(f"boost.mode={self.mode!r} has no effect: level O0 switches nothing on")
        for algorithm, value in self.switches.items():
            if value != plan[algorithm].wanted:
                overruled = plan[algorithm].wanted or plan[algorithm].asked_by == "-"
                reason = overruler if overruled else plan[algorithm].reason
                found.append(f"boost.{algorithm}={value} has no effect: {reason}")
        for section, kind in SECTIONS.items():
            readers = kind.readers.values() or (section,)
            # What is switched off by name may keep its settings.
            if section not in self.given or wanted.intersection(readers) or refused >= {*readers}:
                continue
            if kind.for_every_step:
                reason = "" if self.level != "O0" else "level O0 trains with MindSpore's own step"
            else:  # asked for, and then left out; or off
                known = [plan[reader] for reader in readers if reader in plan]
                asked = [one.reason for one in known if one.asked_by != "-"]
                mode = "" if self.mode == "manual" else "boost.mode to 'manual' and "
                off = f"{' or '.join(readers)} is not switched on: set {mode}its switch to True"
                reason = "; ".join(asked) or self._why_off() or off
            if reason:
                found.append(f"section {section!r} has no effect: {reason}")
        return (*found, *self._idle_settings(wanted))

    def _why_off(self) -> str:
        """Return why no method is on, with the remedy; empty if some may be."""
        if self.level == "O0":
            return "level O0 switches nothing on; use level O1 or O2"
        return "mode disable_all switches nothing on" if self.mode == "disable_all" else ""

    def _idle_settings(self, wanted: Collection[str]) -> Iterator[str]:
        """Yield one sentence for each setting without effect in a section that has an effect."""
        for section in SECTIONS:
            given = self.section(section)
            idle = given.idle_settings() if section in wanted else given.unread_settings(wanted)
            for names, reason in idle:
                for name in names:
                    if getattr(given, name) != getattr(type(given), name):
                        yield f"{section}.{name} has no effect: {reason}"


def _excluded(decision: Decision, by: str, allowed: Collection[str]) -> Decision:
    if not decision.wanted or decision.algorithm == by or decision.algorithm in allowed:
        return decision
    return dataclasses.replace(decision, wanted=False, reason=f"{by} excludes this algorithm")


SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        field.name: type(field.default)
        for field in dataclasses.fields(BoostConfig)
        if isinstance(field.default, Section)
    }
)
_NAMES = ("boost", *SECTIONS)


class _Parser:
    """Collects every problem of one source before it raises."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.problems: list[str] = []
        self.cause: BaseException | None = None

    def parse(self, level: str, source: ConfigSource) -> BoostConfig:
        if not isinstance(level, str):
            raise TypeError(f"level must be one of {', '.join(LEVELS)}, got {shown(level)}")
        document = self._document(source)
        level = self._level(level, document)
        self._names("", document, _NAMES)
        before = len(self.problems)
        boost = self._section("boost", document.get("boost"), _SWITCHES)
        mode = self._value("boost.mode", boost.pop("mode", "auto"), one_of(MODES))
        self._names("boost", boost, _SWITCHES)
        named = [name for name in ALGORITHMS if name in boost]
        switches = {name: self._value(f"boost.{name}", boost[name], boolean()) for name in named}
        boost_is_read = len(self.problems) == before
        settings = {name: self._settings(name, document.get(name)) for name in SECTIONS}
        settings = {name: one for name, one in settings.items() if one is not None}
        given = frozenset(name for name in SECTIONS if document.get(name) is not None)
        config = BoostConfig(level, mode, tuple(switches.items()), given, **settings)
        if boost_is_read:
            self._relations(config, settings)
        if self.problems:
            raise BoostConfigError(self.problems) from self.cause
        return config

    def _add(self, problem: str, cause: BaseException | None = None) -> None:
        self.problems.append(problem)
        self.cause = self.cause or cause

    def _document(self, source: ConfigSource) -> dict[str, Any]:
        source = plain(source)  # type: ignore[assignment]
        if source is None or (isinstance(source, str) and not source):
            return {}
        if isinstance(source, (str, os.PathLike)):
            try:
                source = read_json(source)
            except ValueError as error:
                self._add(str(error), error.__cause__)
                return {}
        if not isinstance(source, Mapping):
            raise TypeError(
                "boost_config_dict must be a dict, the path of a JSON file, None or '', "
                f"got {shown(source)}"
            )
        return self._entries("", source, _NAMES)

    def _entries(
        self, section: str, source: Mapping[Any, Any], known: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the items of a Mapping of any class, under names that are plain strings."""
        where = f"section {section}" if section else "boost_config_dict"
        found: dict[str, Any] = {}
        try:
            for count, name in enumerate(source):
                if count == _MOST_NAMES:
                    self._add(f"{where} has more than {_MOST_NAMES} names: leave unknown ones out")
                    return {}
                own = plain(name)
                if not isinstance(own, str):
                    self._unknown(section, name, known)
                elif own in found:
                    self._add(f"{where} has {shown(own)} twice, also as {shown(name)}: give one")
                else:
                    found[own] = source[name]
        except Exception as error:  # the user's class may raise anything
            self._add(f"{where} cannot be read: {described(error)}: give a dict", error)
        return found

    def _level(self, level: object, document: dict[str, Any]) -> str:
        """Check the level. The document may give it under its old name, ``acc_level``."""
        if "acc_level" in document:
            level = document.pop("acc_level")
            warn("acc_level is the old name of boost_level: use boost_level")
        own = plain(level)
        if not isinstance(own, str) or own not in LEVELS:
            self._add(f"level must be one of {', '.join(LEVELS)}, got {shown(level)}")
            return "O0"
        return own

    def _names(self, path: str, names: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for name in names:
            if name not in known:
                self._unknown(path, name, known)

    def _unknown(self, path: str, name: object, known: tuple[str, ...]) -> None:
        text = name[:200] if isinstance(name, str) else ""
        kind = "key" if path else "section"
        # Anything but a string, and a blank string, is shown by its repr.
        own = printable(text)[:200] if text.strip() else shown(name)
        sentence = f"{f'{path}.' if path else ''}{own} is not a known {kind}"
        sentence += f": {_hint(path, text, known)}"
        if self.strict:
            self.problems.append(sentence)
        else:
            warn(f"{sentence} (ignored)")

    def _section(self, name: str, content: object, known: tuple[str, ...]) -> dict[str, Any]:
        if content is None:
            return {}
        if not isinstance(content, Mapping):
            is_switch = name in ALGORITHMS and isinstance(content, bool)
            remedy = ": give a switch in section boost" if is_switch else ""
            self._add(f"{name} must be a dict of settings or None, got {shown(content)}{remedy}")
            return {}
        found = self._entries(name, content, known)
        alias, own = _ALIASES.get(name, ("", ""))
        if not alias or alias not in found:
            return found
        if own in found:
            self._add(f"{name}.{alias} and {name}.{own} are the same setting: give one")
            del found[alias]
        else:
            warn(f"{name}.{alias} is read as {name}.{own}")
            found[own] = found.pop(alias)
        return found

    def _settings(self, name: str, content: object) -> Any:
        """Return a section with the given settings; None if one of them breaks its rule."""
        section = SECTIONS[name]
        rules = section.rules()
        values = self._section(name, content, tuple(rules))
        self._names(name, values, tuple(rules))
        problems = len(self.problems)
        read = {
            key: self._value(f"{name}.{key}", value, rules[key])
            for key, value in values.items()
            if key in rules
        }
        return section(**read) if len(self.problems) == problems else None

    def _value(self, path: str, value: object, rule: Rule) -> Any:
        """Return a value in its stored form. If it breaks its rule, note that, and return it."""
        try:
            return rule.read(path, value)
        except ValueError as error:
            is_section = isinstance(value, Mapping) and path.rpartition("boost.")[2] in SECTIONS
            remedy = ": give settings in a section of that name beside boost" if is_section else ""
            self._add(f"{error}{remedy}", error.__cause__)
            return value

    def _relations(self, config: BoostConfig, read: Collection[str]) -> None:
        """Check that algorithms that are on, and whose sections are valid, have what they need."""
        for decision in config.plan():
            known = decision.wanted and decision.algorithm in read
            missing = config.section(decision.algorithm).missing() if known else ""
            self.problems += [missing] if missing else []


def _hint(section: str, name: str, known: Collection[str]) -> str:
    """Return what an unknown name in ``section`` may mean; an empty section is the top level."""
    if section and name in SECTIONS:
        switch = f", or as the switch boost.{name}" if name in _SWITCHES else ""
        return f"it is a section: give it beside {section}{switch}"
    places = [f"{one}.{name}" for one, kind in SECTIONS.items() if name in kind.rules()]
    places += [f"boost.{name}"] if name in _SWITCHES else []
    if places:
        more = ", ..." if places[_MOST_PLACES:] else ""
        return f"did you mean {' or '.join(places[:_MOST_PLACES])}{more}?"
    near = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known) or 'none'}"


def warn_of_idle_settings(config: BoostConfig) -> None:
    """Name all switches, sections and settings without effect in one warning."""
    notices = config.notices()
    if notices:
        warn("boost configuration: " + "; ".join(notices), NoEffectWarning)
