"""Reads from an optimizer what it was made of: its arguments and groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.entries import entries_at, is_divided
from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import warn

# A group of parameters as MindSpore's optimizers take it: "params", "lr", "weight_decay" and so on.
Group = dict[str, Any]
ORDER = "order_params"
_LISTS = ("params", ORDER)
# Name of the learning rate of groups that have none of their own.
_DEFAULT_RATE = "learning_rate"
# MindSpore wraps a constructor that keeps its arguments in a function of this name.
_NOTES_ARGUMENTS = "opt_init_args_register."


def check_optimizer(optimizer: object, switch: str) -> None:
    """Refuse what is no ``nn.Optimizer``, such as one of ``mindspore.experimental``."""
    if not isinstance(optimizer, nn.Optimizer):
        raise TypeError(
            f"{switch} needs an {needed_optimizer(optimizer)}, or leave {switch} out: "
            f"boost.{switch}=False in mode 'manual'"
        )


def needed_optimizer(optimizer: object) -> str:
    """Return which optimizers fit, and which one was given."""
    return f"nn.Optimizer, got {class_name(optimizer)}: give one of mindspore.nn"


def class_name(optimizer: object) -> str:
    """Return the class of an optimizer; with its module, unless everybody knows that."""
    kind = type(optimizer)
    is_known = kind.__module__.startswith(("builtins", "mindspore.nn."))
    return kind.__name__ if is_known else f"{kind.__module__}.{kind.__name__}"


def base_of(optimizer: nn.Optimizer) -> nn.Optimizer:
    """Return the optimizer that holds the moments: for LARS, the one that it wraps.

    Raises:
        TypeError: if ``optimizer`` is not an ``nn.Optimizer``, or wraps one and is not LARS.
    """
    if not isinstance(optimizer, nn.Optimizer):
        raise TypeError(f"the optimizer must be an nn.Optimizer, got {class_name(optimizer)}")
    if isinstance(optimizer, nn.LARS):
        return base_of(optimizer.opt)
    if isinstance(_compat.wrapped_optimizer(optimizer), nn.Optimizer):
        raise TypeError(
            f"the optimizer must not be wrapped in a {type(optimizer).__name__}: give the inner "
            "optimizer, and wrap the result"
        )
    return optimizer


# ---- Groups ----


def innermost(optimizer: nn.Cell) -> nn.Cell:
    """Return the optimizer inside FreezeOpt, LARS and other wrappers; without one, itself."""
    *_, last = _compat.with_wrapped(optimizer)
    return last


def of_kind(optimizer: nn.Cell | None, *kinds: type) -> nn.Cell | None:
    """Return the optimizer of one of some classes: the given one, or one inside it; else None."""
    return next((one for one in _compat.with_wrapped(optimizer) if isinstance(one, kinds)), None)


def check_groups(optimizer: nn.Cell) -> None:
    """Refuse groups whose parameters MindSpore has used up before it could train them.

    Raises:
        ValueError: if there are no parameters, or those of a group were a generator or a filter.
    """
    optimizer = innermost(optimizer)
    if len(getattr(optimizer, "parameters", (None,))) == 0:
        raise ValueError(
            f"{type(optimizer).__name__} trains nothing: give it lists of parameters; MindSpore "
            "trains nothing of a group that is a generator or a filter"
        )
    for group in _noted_groups(optimizer) or ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            raise ValueError(
                f"{type(optimizer).__name__} does not train a group whose params are a "
                f"{type(group['params']).__name__}, which can be read only once: give a list"
            )


def members_of(params: Iterable[Any]) -> list[Parameter]:
    """Return all parameters of a list of Parameters or groups."""
    members: list[Parameter] = []
    for entry in params:
        members.extend(entry.get("params", ()) if isinstance(entry, dict) else (entry,))
    return members


def groups_of(optimizer: nn.Optimizer) -> list[Any]:
    """Return the parameters as the optimizer got them: a list of Parameters, or of group dicts.

    The dicts are new; rates are the present ones. A group holds only the settings that it was
    given; the others are the optimizer's defaults.
    """
    base = base_of(optimizer)
    check_groups(base)
    if not base.is_group:
        return list(base.parameters)
    noted = _noted_groups(base)
    return _groups_by_setting(base) if noted is None else [_present(one, base) for one in noted]


def _noted_groups(optimizer: nn.Cell) -> Sequence[Any] | None:
    """Return the parameters or groups that a constructor has kept; None if it kept none."""
    noted = getattr(optimizer, "init_params", {}).get("params")
    return noted if isinstance(noted, (list, tuple)) else None


def _present(group: Mapping[str, Any], base: nn.Optimizer) -> Group:
    """Return a copy of a group as it was given, with its rate as it is now."""
    copy = {key: list(value) if key in _LISTS else value for key, value in group.items()}
    if "lr" in copy:
        copy["lr"] = present_rate(copy["lr"], base.get_lr_parameter(copy["params"][0]))
    return copy


def _groups_by_setting(base: nn.Optimizer) -> list[Group]:
    """Return groups for an optimizer that did not keep them: one for each set of settings."""
    groups: dict[tuple[Any, ...], Group] = {}
    for place, parameter in enumerate(base.parameters):
        decay, centralized = base.group_weight_decay[place], base.group_grad_centralization[place]
        rate = base.get_lr_parameter(parameter)
        key = (id(rate), id(decay) if isinstance(decay, nn.Cell) else decay, centralized)
        if key not in groups:
            groups[key] = {"params": [], "weight_decay": _given_decay(decay, base)}
            if base.is_group_lr and getattr(rate, "name", "") != _DEFAULT_RATE:
                groups[key]["lr"] = present_rate(None, rate)
            if centralized:
                groups[key]["grad_centralization"] = True
        groups[key]["params"].append(parameter)
    return [*groups.values(), {ORDER: list(base.parameters)}]


# ---- Arguments ----


def present_rate(given: Any, held: Any) -> Any:
    """Return the learning rate ``held`` by an optimizer, in a form that constructors take.

    That is ``given`` if it is still the same number or list; else a number, a list or a
    schedule.
    """
    if isinstance(held, nn.Cell):
        return held
    now = host_array(held)
    is_array = isinstance(given, (int, float, list, tuple))
    return given if is_array and np.array_equal(np.float32(given), now) else now.tolist()


def _given_decay(held: Any, optimizer: nn.Optimizer) -> Any:
    """Return a weight decay as it was given: MindSpore has multiplied it by the loss scale."""
    if isinstance(held, nn.Cell):
        return held.weight_decay
    return float(host_array(held)) / optimizer.loss_scale


def _settings_of(params: Sequence[Any]) -> list[Group]:
    """Return the groups, without the entry for their order; empty if there are no groups."""
    return [entry for entry in params if isinstance(entry, dict) and ORDER not in entry]


def _default_rate(optimizer: nn.Optimizer) -> tuple[Any, bool]:
    """Return the learning rate of parameters whose group names none, and whether it is a guess."""
    kept = getattr(optimizer, "init_learning_rate", None)
    if kept is None and getattr(optimizer, "relative_step", False):
        return None, False  # AdaFactor computes it
    groups = _settings_of(groups_of(optimizer))
    heads = [group["params"][0] for group in groups if "lr" not in group]
    if heads or not groups:
        held = optimizer.get_lr_parameter((heads or optimizer.parameters)[0])
        return present_rate(kept, held), False
    # MindSpore keeps no default schedule that no group uses. A group's rate stands in, a fixed one
    # if there is one: beside a schedule MindSpore rounds fixed rates.
    rates = [group["lr"] for group in groups] if kept is None else [kept]
    return min(rates, key=lambda rate: not isinstance(rate, (int, float))), kept is None


def _default_decay(optimizer: nn.Optimizer) -> tuple[Any, bool]:
    """Return the weight decay of an optimizer that did not keep it, and whether it is a guess.

    If there are groups, each has a weight decay here; the result is that of the largest group.
    """
    if not optimizer.is_group:
        return _given_decay(optimizer.weight_decay, optimizer), False
    groups = _settings_of(groups_of(optimizer))
    decay = max(groups, key=lambda group: len(group["params"]))["weight_decay"]
    others = [group["weight_decay"] for group in groups]
    return decay, any(one is not decay and one != decay for one in others)


def _arguments_of(optimizer: nn.Optimizer) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return the constructor's arguments without the parameters, and which of them are guesses."""
    kind, guessed = type(optimizer), {}
    names = next((names for known, names in _HELD.items() if _constructor_is(kind, known)), ())
    if names:
        held = {name.rpartition(".")[2]: attrgetter(name)(optimizer) for name in names}
        arguments = {name: host_array(value).item() for name, value in held.items()}
        arguments["learning_rate"], guessed["learning_rate"] = _default_rate(optimizer)
        arguments["weight_decay"], guessed["weight_decay"] = _default_decay(optimizer)
        return arguments, guessed
    if not _keeps_its_arguments(kind):
        raise TypeError(
            f"cannot rebuild {kind.__name__}, as its arguments are not known: derive it from "
            "nn.Optimizer itself and decorate its __init__ with "
            "mindspore.nn.optim.optimizer.opt_init_args_register, which records them (the "
            "parameters must be the argument params)"
        )
    arguments = dict(optimizer.init_args)
    arguments.update(arguments.pop("kwargs", {}))  # Adam keeps its **kwargs as one argument
    if hasattr(optimizer, "init_learning_rate"):
        rate, guessed["learning_rate"] = _default_rate(optimizer)
        # MindSpore notes a Tensor as a number; only of a number it scales AdaFactor's updates.
        is_tensor = isinstance(rate, (int, float)) and not getattr(optimizer, "scale_lr", True)
        arguments["learning_rate"] = Tensor(rate, ms.float32) if is_tensor else rate
    return arguments, guessed


# The attributes in which MindSpore's optimizers that do not keep their arguments have them.
_BETAS = ("beta1", "beta2", "eps")
_OFFLOADED = (*_BETAS, "loss_scale", "opt.use_locking", "opt.use_nesterov")
_HELD: Mapping[type, tuple[str, ...]] = {nn.AdamWeightDecay: _BETAS, nn.AdamOffload: _OFFLOADED}


def _constructor(kind: type) -> Any:
    return inspect.unwrap(inspect.getattr_static(kind, "__init__"))


def _constructor_is(kind: type, other: type) -> bool:
    return bool(_constructor(kind) is _constructor(other))


def _keeps_its_arguments(kind: type) -> bool:
    """Return whether ``init_args`` holds the arguments of this class, not of a base class."""
    noting = [
        one
        for one in kind.__mro__
        if "__init__" in vars(one) and _constructor(one).__qualname__.startswith(_NOTES_ARGUMENTS)
    ]
    # If several constructors keep arguments, the innermost one writes last.
    return len(noting) == 1 and _constructor_is(kind, noting[0])


# ---- Construction ----


def construct_like(optimizer: nn.Optimizer, params: Sequence[Any]) -> nn.Optimizer:
    """Return a new optimizer like another, over Parameters or groups; under LARS if that one is.

    A group's own settings hold. Moments and global step start anew.
    """
    base = base_of(optimizer)
    arguments, guessed = _arguments_of(base)
    for name, is_guess in guessed.items():
        if is_guess:
            _warn_of_guess(base, params, name, arguments[name])
    _cut_to(params, arguments, base)
    new = type(base)(params=list(params), **arguments)
    _keep_rate_names(base, new)
    _keep_decay_flags(optimizer, new)
    new.unique = base.unique
    if _placement(new) != _placement(base):
        new.target = base.target
    if isinstance(optimizer, nn.LARS):
        return type(optimizer)(new, **optimizer.init_args)
    return new


def _cut_to(params: Sequence[Any], arguments: dict[str, Any], old: nn.Optimizer) -> None:
    """Cut arguments that have one entry for each parameter to the parameters that are left."""
    orders = [entry[ORDER] for entry in params if isinstance(entry, dict) and ORDER in entry]
    wanted = orders[0] if orders else members_of(params)
    if [id(one) for one in wanted] == [id(parameter) for parameter in old.parameters]:
        return
    places = {one.name: place for place, one in enumerate(old.parameters)}
    for name, value in arguments.items():
        if name == _DEFAULT_RATE or not is_divided(name, value, old):
            continue
        new = [one.name for one in wanted if one.name not in places]
        if new:
            raise ValueError(
                f"{type(old).__name__} has no entry of {name} for {new[0]}, which was added to "
                "the network: leave out the algorithm that adds it"
            )
        arguments[name] = entries_at(value, [places[one.name] for one in wanted])


def _keep_decay_flags(old: nn.Optimizer, new: nn.Optimizer) -> None:
    """Keep the decay flags that a script has set after the constructor."""
    base = base_of(old)  # LARS takes the flags over, and sets those of the inner optimizer to False
    held = zip(base.parameters, getattr(old, "decay_flags", ()), _decays(base))
    said = {id(one): flag for one, flag, made in held if flag != made}
    if said:
        now = zip(new.parameters, new.decay_flags)
        new.decay_flags = tuple([said.get(id(one), flag) for one, flag in now])


def _decays(optimizer: nn.Optimizer) -> list[bool]:
    """Return for each parameter whether MindSpore's constructor lets it decay."""
    if optimizer.is_group:
        return [isinstance(one, nn.Cell) or one > 0 for one in optimizer.group_weight_decay]
    names = [parameter.name for parameter in optimizer.parameters]
    return ["beta" not in name and "gamma" not in name for name in names]


def _warn_of_guess(old: nn.Optimizer, params: Sequence[Any], setting: str, value: Any) -> None:
    """Warn which parameters get another group's setting, since MindSpore kept no default."""
    remedies = {
        "learning_rate": ("lr", "a number as learning_rate"),
        "weight_decay": ("weight_decay", "one weight_decay to all groups"),
    }
    key, remedy = remedies[setting]
    groups = [group for group in _settings_of(params) if key not in group]
    names = [one.name for group in groups for one in group["params"]]
    if names:
        warn(
            f"{', '.join(names)}: the {setting} is {shown(value)}, taken from another group, "
            f"because {type(old).__name__} does not keep a default that no group uses: give "
            f"{remedy}, or one group without {key!r}"
        )


def _placement(optimizer: nn.Optimizer) -> tuple[Any, ...]:
    """Return what setting ``target`` changes. It changes kernels even if it names the device."""
    sparse = getattr(optimizer, "sparse_opt", None)
    on_device = getattr(optimizer, "_is_device", None)
    return optimizer.target, on_device, getattr(sparse, "name", None)


def _keep_rate_names(old: nn.Optimizer, new: nn.Optimizer) -> None:
    """Give learning rates the names they had; the constructor numbers groups from 0."""
    known = {id(parameter) for parameter in old.parameters}
    for parameter in new.parameters:
        if id(parameter) in known:
            before, now = old.get_lr_parameter(parameter), new.get_lr_parameter(parameter)
            if isinstance(before, Parameter) and isinstance(now, Parameter):
                now.name = before.name
