"""What an optimizer was made of, read back from it: its arguments and groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import warn

# A group of parameters as MindSpore's optimizers take it: "params", "lr", "weight_decay" and so on.
Group = dict[str, Any]
ORDER = "order_params"
_LISTS = ("params", ORDER)
# The name of a rate that groups without one share.
_DEFAULT_RATE = "learning_rate"
# MindSpore marks a constructor that keeps its arguments by wrapping it in this.
_NOTES_ARGUMENTS = "opt_init_args_register."


def base_of(optimizer: nn.Optimizer) -> nn.Optimizer:
    """Return the optimizer that holds the moments: under LARS the one that it wraps.

    Raises:
        TypeError: if ``optimizer`` is none, or wraps one in another way.
    """
    if not isinstance(optimizer, nn.Optimizer):
        raise TypeError(f"the optimizer must be an nn.Optimizer, got {shown(optimizer)}")
    if isinstance(optimizer, nn.LARS):
        return base_of(optimizer.opt)
    if isinstance(_compat.wrapped_optimizer(optimizer), nn.Optimizer):
        raise TypeError(
            f"the optimizer must not be wrapped in a {type(optimizer).__name__}: give the one "
            "inside, and wrap the new one"
        )
    return optimizer


# ---- Groups ----


def innermost(optimizer: nn.Cell) -> nn.Cell:
    """Return the optimizer that FreezeOpt, LARS and the like wrap; one that wraps none itself."""
    while (inner := _compat.wrapped_optimizer(optimizer)) is not None:
        optimizer = inner
    return optimizer


def check_groups(optimizer: nn.Cell) -> None:
    """Refuse groups whose parameters MindSpore has used up before it could train them.

    Args:
        optimizer (Cell): an optimizer; of one that wraps it, such as LARS, the inner one counts.

    Raises:
        ValueError: if the ``"params"`` of a group were a generator, a filter or the like.
    """
    optimizer = innermost(optimizer)
    if len(getattr(optimizer, "parameters", (None,))) == 0:
        raise ValueError(
            f"{type(optimizer).__name__} trains nothing: give it parameters, in lists; of a "
            "generator or a filter in a group MindSpore trains nothing"
        )
    kept = getattr(optimizer, "init_params", {}).get("params", ())
    for group in kept if isinstance(kept, (list, tuple)) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            raise ValueError(
                f"{type(optimizer).__name__} trains nothing of a group whose params are a "
                f"{type(group['params']).__name__}, which can be gone through once: give a list"
            )


def groups_of(optimizer: nn.Optimizer) -> list[Any]:
    """Return the parameters as the optimizer got them: a list of Parameters, or of group dicts.

    The dicts are new ones; rates are the present ones. A group keeps what it says and no more, so
    that the rest is the default of the optimizer.
    """
    base = base_of(optimizer)
    check_groups(base)
    if not base.is_group:
        return list(base.parameters)
    kept = getattr(base, "init_params", {}).get("params")
    if not isinstance(kept, (list, tuple)):
        return _groups_by_setting(base)
    return [_present(group, base) for group in kept]


def _present(group: Mapping[str, Any], base: nn.Optimizer) -> Group:
    """Return a copy of a group as it was given, with its rate as it is now."""
    copy = {key: list(value) if key in _LISTS else value for key, value in group.items()}
    if "lr" in copy:
        copy["lr"] = present_rate(copy["lr"], base.get_lr_parameter(copy["params"][0]))
    return copy


def _groups_by_setting(base: nn.Optimizer) -> list[Group]:
    """Return groups for an optimizer that did not note them: one for each set of settings."""
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
    """Return a learning rate in the form in which constructors take it.

    Args:
        given: what the user gave: a number, list, schedule or anything; None if not known.
        held: what the optimizer holds for it: a Parameter or a schedule.

    Returns:
        ``given`` where it still says what the optimizer does, else a number, list or schedule.
    """
    if isinstance(held, nn.Cell):
        return held
    now = host_array(held)
    if isinstance(given, (int, float, list, tuple)) and np.array_equal(
        np.asarray(given, np.float32), now
    ):
        return given
    return now.tolist()


def _given_decay(held: Any, optimizer: nn.Optimizer) -> Any:
    """Return a weight decay as it was given: MindSpore multiplies the loss scale in."""
    if isinstance(held, nn.Cell):
        return held.weight_decay
    return float(host_array(held)) / optimizer.loss_scale


def _default_rate(optimizer: nn.Optimizer) -> Any:
    """Return the learning rate of parameters whose group names none."""
    kept = getattr(optimizer, "init_learning_rate", None)
    if kept is None and getattr(optimizer, "relative_step", False):
        return None  # AdaFactor computes it
    groups = _settings_of_groups(optimizer)
    heads = [group["params"][0] for group in groups if "lr" not in group]
    if _has_lost_rate(optimizer):
        # A fixed one, if there is one: MindSpore rounds fixed rates beside others.
        rates = [group["lr"] for group in groups]
        return min(rates, key=lambda rate: not isinstance(rate, (int, float)))
    if groups and not heads:
        return kept
    return present_rate(kept, optimizer.get_lr_parameter((heads or optimizer.parameters)[0]))


def _settings_of_groups(optimizer: nn.Optimizer) -> list[Group]:
    """Return the groups without the order of their parameters; none if it has no groups."""
    return [one for one in groups_of(optimizer) if isinstance(one, dict) and ORDER not in one]


def _has_lost_rate(optimizer: nn.Optimizer) -> bool:
    """Return whether the default rate is not known: MindSpore keeps no schedule that none uses."""
    groups = _settings_of_groups(optimizer)
    kept = getattr(optimizer, "init_learning_rate", None)
    computed = getattr(optimizer, "relative_step", False)
    return bool(groups) and kept is None and not computed and all("lr" in one for one in groups)


def _has_lost_decay(optimizer: nn.Optimizer) -> bool:
    """Return whether the default weight decay is not known, and the groups' do not tell it."""
    if hasattr(optimizer, "init_args"):
        return False
    decays = [group["weight_decay"] for group in _settings_of_groups(optimizer)]
    return any(one is not decays[0] and one != decays[0] for one in decays)


def arguments_of(optimizer: nn.Optimizer) -> dict[str, Any]:
    """Return the arguments of the constructor, but for the parameters.

    Raises:
        TypeError: if they cannot be known: a class of the user's own that does not note them.
    """
    kind = type(optimizer)
    read = next((read for known, read in _READERS.items() if _constructor_is(kind, known)), None)
    if read is not None:
        arguments = {**read(optimizer), "learning_rate": _default_rate(optimizer)}
        arguments["weight_decay"] = _default_decay(optimizer)
        return arguments
    if not _keeps_its_arguments(kind):
        raise TypeError(
            f"the arguments of {kind.__name__} are not known, so no other one can be made: derive "
            "it from nn.Optimizer itself and decorate its __init__ with "
            "mindspore.nn.optim.optimizer.opt_init_args_register, which keeps them (its "
            "parameters must be called params)"
        )
    arguments = dict(optimizer.init_args)
    arguments.update(arguments.pop("kwargs", {}))  # Adam keeps its **kwargs as one argument
    if hasattr(optimizer, "init_learning_rate"):
        arguments["learning_rate"] = _default_rate(optimizer)
    return arguments


def _default_decay(optimizer: nn.Optimizer) -> Any:
    """Return the weight decay of an optimizer that did not note it.

    With groups, each of which has its own here, it is that of the largest one.
    """
    if not optimizer.is_group:
        return _given_decay(optimizer.weight_decay, optimizer)
    groups = _settings_of_groups(optimizer)
    return max(groups, key=lambda group: len(group["params"]))["weight_decay"]


def _adam_weight_decay(optimizer: nn.Optimizer) -> dict[str, Any]:
    return {name: float(getattr(optimizer, name)) for name in ("beta1", "beta2", "eps")}


def _adam_offload(optimizer: nn.Optimizer) -> dict[str, Any]:
    return {
        **_adam_weight_decay(optimizer),
        "loss_scale": optimizer.loss_scale,
        "use_locking": optimizer.opt.use_locking,
        "use_nesterov": optimizer.opt.use_nesterov,
    }


# How to read the arguments of the optimizers of MindSpore that do not note them.
_READERS: Mapping[type, Callable[[nn.Optimizer], dict[str, Any]]] = MappingProxyType(
    {nn.AdamWeightDecay: _adam_weight_decay, nn.AdamOffload: _adam_offload}
)


def _constructor(kind: type) -> Any:
    return inspect.unwrap(inspect.getattr_static(kind, "__init__"))


def _constructor_is(kind: type, other: type) -> bool:
    return bool(_constructor(kind) is _constructor(other))


def _keeps_its_arguments(kind: type) -> bool:
    """Return whether what ``init_args`` holds are arguments of this class, not of a base class."""
    noting = [
        one
        for one in kind.__mro__
        if "__init__" in vars(one) and _constructor(one).__qualname__.startswith(_NOTES_ARGUMENTS)
    ]
    # Of several that note, the innermost writes last.
    return len(noting) == 1 and _constructor_is(kind, noting[0])


# ---- Construction ----


def construct_like(optimizer: nn.Optimizer, params: Sequence[Any]) -> nn.Optimizer:
    """Return a new optimizer like another over other parameters.

    Args:
        optimizer (nn.Optimizer): the model: its class, hyper-parameters and learning rate count,
            and LARS around it.
        params (Sequence): Parameters, or groups as for any optimizer. A group's own settings count.

    Returns:
        nn.Optimizer, with moments and global step as at the start.
    """
    base = base_of(optimizer)
    arguments = arguments_of(base)
    _warn_of_lost_defaults(base, params, arguments)
    new = type(base)(params=list(params), **arguments)
    _keep_rate_names(base, new)
    new.unique = base.unique
    if _placement(new) != _placement(base):
        new.target = base.target
    if isinstance(optimizer, nn.LARS):
        return type(optimizer)(new, **optimizer.init_args)
    return new


def _warn_of_lost_defaults(
    old: nn.Optimizer, params: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    """Say which parameters get a default that is another group's, since MindSpore kept none."""
    lost = {
        "lr": ("learning_rate", _has_lost_rate(old), "a number as learning_rate"),
        "weight_decay": ("weight_decay", _has_lost_decay(old), "one weight_decay to all groups"),
    }
    for key, (setting, is_lost, remedy) in lost.items():
        groups = [one for one in params if isinstance(one, dict) and ORDER not in one]
        names = [one.name for group in groups if key not in group for one in group["params"]]
        if is_lost and names:
            value = arguments[setting]
            warn(
                f"{', '.join(names)}: the {setting} is {shown(value)}, that of another group, for "
                f"{type(old).__name__} does not keep a default that no group uses: give {remedy}, "
                f"or a group without {key!r}"
            )


def _placement(optimizer: nn.Optimizer) -> tuple[Any, ...]:
    """Return what setting ``target`` changes: kernels too, even if it names the device itself."""
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
