"""The base class of every section: settings with rules, and effects on other algorithms.

Imports no MindSpore.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

from mindspore_boost_ext.config.rules import Rule, check_all


def setting(default: object, rule: Rule, meaning: str) -> Any:
    """Declare a dataclass field that carries the rule its value must obey, and what it means."""
    return field(default=default, metadata={"rule": rule, "meaning": meaning})


@dataclass(frozen=True)
class Section:
    """What a section declares besides its settings; nothing by default."""

    path: ClassVar[str] = ""  # the section's name: that of its field in BoostConfig
    # Setting -> algorithm that reads it; if empty, the algorithm of the section's name reads all.
    readers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    for_every_step: ClassVar[bool] = False  # whether every step reads it, whatever is switched on
    left_out_of_all: ClassVar[str] = ""  # why enable_all leaves it out; empty if it does not
    given_means_on: ClassVar[bool] = False  # whether giving it switches it on, also in enable_all
    # The only algorithms that may be on beside this one; None: any.
    goes_with: ClassVar[frozenset[str] | None] = None
    # Settings that may differ between ranks and from run to run: paths and limits.
    of_one_host: ClassVar[frozenset[str]] = frozenset()

    def __set_name__(self, owner: type, name: str) -> None:
        """Python calls this for the fields of ``BoostConfig``, whose defaults are sections.

        It also does so, later, for a script's class that holds one.
        """
        type(self).path = type(self).path or name

    def __post_init__(self) -> None:
        """Check every setting by the rule in its field."""
        self.check(self.path, **vars(self))

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Return the rule of each setting, by name."""
        return {one.name: one.metadata["rule"] for one in fields(cls)}

    @classmethod
    def check(cls, prefix: str, **values: object) -> dict[str, Any]:
        """Check the settings among values given elsewhere; return the stored forms of these.

        A constructor gives all its arguments, by ``locals()``: what is no setting is left out.

        Raises:
            ValueError: naming every setting that breaks its rule, with the prefix in front.
        """
        rules = {name: rule for name, rule in cls.rules().items() if name in values}
        return check_all(prefix, **{name: (values[name], rule) for name, rule in rules.items()})

    def nothing_to_do(self) -> str:
        """Return why the algorithm has no effect with these settings; empty if it has one."""
        return ""

    def idle_settings(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield names of settings that another one makes ineffective, and why."""
        yield from ()

    def unread_settings(self, wanted: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield settings whose algorithm is off, if the algorithm of another setting is on."""
        if any(reader in wanted for reader in self.readers.values()):
            for name, reader in self.readers.items():
                if reader not in wanted:
                    yield (name,), f"{reader} is not switched on"

    def missing(self) -> str:
        """Return what the algorithm needs and was not given; empty if it has all."""
        return ""
