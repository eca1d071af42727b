"""What a subclass of a step cell has of its own, and what then does not run."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from mindspore import nn

from mindspore_boost_ext.report import NoEffectWarning, warn

# What a step that chooses among variants does not call: they are the library's steps.
_NOT_IN_VARIANTS = (
    "gradient_accumulation_process",
    "adasum_process",
    "update",
    "_get_overflow_status",
    "_process_loss_scale",
)


class Overridable:
    """Asks which of the library's methods are still those that run."""

    choice_part: Any
    window_part: Any

    def runs_our_construct(self) -> bool:
        """Return whether no subclass has put a ``construct`` of its own in place of ours."""
        return not self.overridden("construct")

    def overridden(self, *names: str) -> list[str]:
        """Return those of the names for which a subclass has a method of its own."""
        ours = self._library_class()
        known = [one for one in names if hasattr(ours, one)]
        return [one for one in known if getattr(type(self), one) is not getattr(ours, one)]

    def calls_update(self) -> bool:
        """Return whether the step ends in ``update``, which clips and runs the update's part."""
        if self.runs_our_construct():
            return True
        leads = {"construct", "update", "update_part", "close_window"}  # the first: ours, within
        leads |= set() if self.window_part is None else {"gradient_accumulation_process"}
        leads |= set() if self.choice_part is None else {"gradient_freeze_process"}
        return bool(leads & self._names_used())

    def warn_of_what_does_not_run(self) -> None:
        """Warn of methods of a subclass that the step does not call."""
        lost = self.overridden(*_NOT_IN_VARIANTS) if self.choice_part is not None else []
        if lost:
            warn(
                f"{type(self).__name__} has methods of its own that are not called, "
                f"{', '.join(lost)}: the step has variants, each of which is the library's. Change "
                "the update by an Algorithm (algorithms=[...]) instead",
                NoEffectWarning,
            )

    def _names_used(self) -> set[str]:
        """Return the names that a subclass's ``construct`` uses, also in methods of its own."""
        found: set[str] = set()
        asked = ["construct"]
        while asked:
            fresh = _names_in(getattr(type(self), asked.pop())) - found
            found |= fresh
            asked += self.overridden(*fresh) + [one for one in fresh if self._is_new(one)]
        return found

    def _is_new(self, name: str) -> bool:
        """Return whether a name is a method that the library's class has not."""
        method = getattr(type(self), name, None)
        return inspect.isfunction(method) and not hasattr(self._library_class(), name)

    def _library_class(self) -> type[nn.Cell]:
        """Return the class of this package that the object is of, not the user's subclass."""
        own = __name__.partition(".")[0]
        return next(kind for kind in type(self).__mro__ if kind.__module__.startswith(own))


def _names_in(function: Callable[..., object]) -> set[str]:
    """Return the names in a function's code, and in those of the functions inside."""
    codes, names = [getattr(inspect.unwrap(function), "__code__", None)], set[str]()
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            names |= set(code.co_names)
            codes += code.co_consts
    return names
