"""Finds what a subclass of a step cell overrides, and what then does not run."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from mindspore import nn

from mindspore_boost_ext.base.order import contents, is_of_libraries, names_of
from mindspore_boost_ext.report import INACTIVE, NoEffectWarning, warn

# Methods that decide on the overflow of a step, and on the next scale.
OWN_RULE = (
    *("_get_overflow_status", "get_overflow_status"),
    *("_process_loss_scale", "process_loss_scale"),
)
# Methods that a step with variants does not call: the variants are the library's steps.
_NOT_IN_VARIANTS = (
    "gradient_accumulation_process",
    "adasum_process",
    "update",
    "close_window",
    *OWN_RULE,
    "_no_sens_impl",
)


class Overridable(nn.Cell):
    """Finds out which of the library's methods still run."""

    scales_loss = False  # by a part of its own, whatever sens is

    def runs_our_construct(self) -> bool:
        """Return whether no subclass has put a ``construct`` of its own in place of ours."""
        return not self.overridden("construct") and self.reaches("construct")

    def host_chooses(self) -> bool:
        """Return whether Python runs a variant of this step, and not the step itself."""
        own = self.overridden("construct", "gradient_freeze_process")
        return self.choice_part is not None and not own

    def overridden(self, *names: str) -> list[str]:
        """Return those of the names whose methods a subclass overrides."""
        ours = self._library_class()
        known = [name for name in names if hasattr(ours, name)]
        return [one for one in known if getattr(type(self), one) is not getattr(ours, one)]

    def calls_update(self, *, clips: bool = False) -> bool:
        """Return whether the step ends in our ``update``, which clips and runs ``update_part``.

        A direct call of ``update_part`` counts, too, unless ``clips`` is True.
        """
        ends = [] if clips else ["update_part"]
        if not self._leads_to("update", *ends):
            return False
        ends += [] if self.window_part is None else ["gradient_accumulation_process"]
        ends += [] if self.choice_part is None else ["gradient_freeze_process"]
        return self.reaches("update", "close_window", *ends)

    def reaches(self, *names: str) -> bool:
        """Return whether the code of a subclass's step uses one of the names.

        A step that calls the library's uses all of them.
        """
        if not self._leads_to("__call__", "construct", *names):
            return False
        own = self.overridden("construct", "_no_sens_impl")
        if "construct" not in own and "gradient_freeze_process" in names:
            return True
        without_sens = not (self.sense_flag or self.scales_loss)
        way = "_no_sens_impl" if own == ["_no_sens_impl"] and without_sens else "construct"
        handed_on = without_sens and "_no_sens_impl" not in own
        return self._leads_to(way, *names, *(["_no_sens_impl"] if handed_on else []))

    def _leads_to(self, way: str, *names: str) -> bool:
        """Return whether a method ends in the library's, or its code uses one of the names.

        A callable that is no Python function has no code to look at, and counts as one that does.
        """
        for method in self._above_ours(way):
            used = self._names_used(method)
            if _code_of(method) is None or not used.isdisjoint(names):
                return True
            if way not in used:
                return False
            if any(kind.__name__ in used for kind in self._library_class().__mro__):
                return True  # by the name of the class; else it calls the class below
        return True

    def reduces_each_batch(self) -> bool:
        """Return whether a subclass's code reduces gradients over ranks, or updates, by itself."""
        process, ends = "gradient_accumulation_process", ("close_window", "window_part")
        # Each rank divides a weighted window by weights of its own: that must come before.
        if getattr(self.window_part, "is_weighted", False) and self.reaches(process, *ends):
            return not self._leads_to(process, *ends)
        used = set[str]().union(*map(self._names_used, self._own_methods()))
        if "grad_reducer" in used:
            return True
        # A construct of its own that never reduces, and runs not ours, leaves that to the window.
        ways = map(self._names_used, self._above_ours("construct"))
        return "optimizer" in used and all("construct" in way for way in ways)

    def names_of_own(self) -> set[str]:
        """Return the names that the code of a subclass uses, without its constructor."""
        if "_names_of_own" not in self.__dict__:  # reading code takes time
            used = map(self._names_used, self._own_methods())
            self.__dict__["_names_of_own"] = set[str]().union(*used)
        found: set[str] = self.__dict__["_names_of_own"]
        return found

    def _own_methods(self) -> list[Callable[..., object]]:
        held = [item for kind in self._kinds_above_ours() for item in vars(kind).items()]
        functions = [_function_of(one) for name, one in held if name != "__init__"]
        return [function for function in functions if inspect.isroutine(function)]

    def updates_past(self, method: str) -> bool:
        """Return whether the step calls the optimizer, and neither ``update`` nor ``method``."""
        used = self.used_in("__call__", "construct", "_no_sens_impl", "update")
        return "optimizer" in used and not (self.calls_update() or self.reaches(method))

    def moves_schedule(self) -> bool:
        """Return whether a subclass's code advances ``step``, as mindspore.boost's step does."""
        ways = ("construct", "gradient_freeze_process")
        return any("freeze_nets" in self.used_in(way) and self.touches(way, "step") for way in ways)

    def touches(self, way: str, name: str, how: str = "STORE_ATTR") -> bool:
        """Return whether a subclass's method sets an attribute of the step; or reads, LOAD_ATTR."""
        code = _code_of(getattr(type(self), way)) if self.overridden(way) else None
        if code is None:
            return False
        steps = list(dis.get_instructions(code))
        return any(
            step.opname == how and step.argval == name and before.argval == code.co_varnames[0]
            for before, step in zip(steps, steps[1:])
        )

    def used_in(self, *ways: str) -> set[str]:
        """Return the names that the code of some methods uses, where a subclass overrides them."""
        methods = (getattr(type(self), way) for way in self.overridden(*ways))
        return set[str]().union(*map(self._names_used, methods))

    def declines(self, method: str) -> bool:
        """Return whether a method that a subclass overrides says no."""
        return bool(self.overridden(method)) and not getattr(self, method)()

    def leave_out(self, row: str, asked_by: str, method: str = "update") -> None:
        """Report, and warn, that something has no effect because nothing calls ``method``."""
        reason = self.why_left_out(method)
        self.report().update(row, INACTIVE, reason)
        warn(f"{asked_by} has no effect: {reason}", NoEffectWarning)

    def why_left_out(self, method: str = "update") -> str:
        """Return the reason if a subclass makes updates without a call of our ``method``."""
        return (
            f"the code of the methods that {type(self).__name__} overrides does not call {method} "
            "of BoostTrainOneStepCell"
        )

    def warn_of_what_does_not_run(self) -> None:
        """Warn of methods of a subclass that the step does not call."""
        lost = self.overridden(*_NOT_IN_VARIANTS) if self.choice_part is not None else []
        used = self.used_in("construct", "gradient_freeze_process")
        if lost := [method for method in lost if method not in used]:
            warn(
                f"{type(self).__name__} overrides methods that are not called, "
                f"{', '.join(lost)}: with these settings the library's own variants of the step "
                "are run. Change the update by an Algorithm (algorithms=[...]) instead",
                NoEffectWarning,
            )

    def check_update(self, batch: tuple[object, ...]) -> None:
        """Refuse a method of the user's that is called ``update`` but takes something else."""
        method = type(self).update
        ends = ("_trained", "close_window", "gradient_accumulation_process")
        if not (batch and self.overridden("update") and callable(method) and self.reaches(*ends)):
            return
        try:
            inspect.signature(method).bind(self, None, None, *batch)
        except TypeError as error:
            raise ValueError(
                f"update of {type(self).__name__} is called with (loss, gradients, *inputs), where "
                "inputs are the batch: let it take these, or give it another name"
            ) from error

    def warn_of_own_reducer(self, ours: object) -> None:
        """Warn if a subclass's own ``grad_reducer`` is not the only one that reduces."""
        others = {"each variant of the step": self.choice_part, "a full window": self.window_part}
        found = " and ".join(name for name, part in others.items() if part is not None)
        if found and self.grad_reducer is not ours:
            warn(
                f"{type(self).__name__} has its own grad_reducer, but {found} uses the "
                "library's, over all ranks: set reducer_of in an Algorithm (algorithms=[...]), "
                "which applies to all of them, or leave that section out",
                NoEffectWarning,
            )

    def _above_ours(self, way: str) -> list[Callable[..., object]]:
        return [vars(one)[way] for one in self._kinds_above_ours() if way in vars(one)]

    def _kinds_above_ours(self) -> tuple[type, ...]:
        return type(self).__mro__[: type(self).__mro__.index(self._library_class())]

    def _names_used(self, function: Callable[..., object]) -> set[str]:
        """Return the names that a function uses, also through the user's methods and functions."""
        found: set[str] = set()
        asked, seen = [function], set[int]()
        while asked:
            function = _function_of(asked.pop())
            seen.add(id(function))
            code = _code_of(function)
            here = set[str]() if code is None else names_of(code)
            unseen = here - found
            found |= unseen
            mine = [*self.overridden(*unseen - {"construct"}), *filter(self._is_new, unseen)]
            called = [method for name in mine for method in self._above_ours(name)]
            called += _users_functions(function, here)
            asked += [each for each in called if id(_function_of(each)) not in seen]
        return found

    def _is_new(self, name: str) -> bool:
        """Return whether a name is a method that the library's class does not have."""
        method = getattr(type(self), name, None)
        return inspect.isfunction(method) and not hasattr(self._library_class(), name)

    def _library_class(self) -> type[nn.Cell]:
        """Return the object's nearest class of this package, not the user's subclass."""
        own = __name__.partition(".")[0]
        return next(kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == own)


def _users_functions(function: Callable[..., Any], names: set[str]) -> list[Callable[..., Any]]:
    """Return the user's functions that a function may call, also in modules and classes."""
    around = getattr(function, "__globals__", {})
    near = [around.get(name) for name in names]
    cells = getattr(function, "__closure__", None) or ()
    near += [held for cell in cells for held in contents(cell)]
    members = [
        getattr(one, name, None)
        for one in near
        if inspect.ismodule(one) or inspect.isclass(one)
        for name in names
    ]
    found: list[Any] = [getattr(one, "__func__", one) for one in (*near, *members)]
    functions = [one for one in found if inspect.isfunction(one)]
    return [one for one in functions if not is_of_libraries(str(one.__module__))]


def _function_of(held: Callable[..., object]) -> Callable[..., object]:
    """Return the function in what a class holds under the name of a method."""
    function: Any = held
    if isinstance(held, property):
        function = held.fget
    elif isinstance(held, functools.partialmethod):
        function = held.func
    elif isinstance(held, (staticmethod, classmethod)):
        function = held.__func__
    return inspect.unwrap(function)


def _code_of(held: Callable[..., object]) -> types.CodeType | None:
    """Return the code of what a class holds as a method; None if it is no Python function."""
    code = getattr(_function_of(held), "__code__", None)
    return code if isinstance(code, types.CodeType) else None
