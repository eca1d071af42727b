"""Rebuilding an optimizer: other parameters, other groups, centralized gradients.

What it does: :func:`rebuilt` makes an optimizer like another one, without some of its parameters,
with some more, with their gradients centralized. ``OptimizerProcess`` and ``ParameterProcess`` are
the same under the names and in the steps of ``mindspore.boost``.

Update rule: that of the optimizer; with centralization see
:mod:`mindspore_boost_ext.gradient_centralization`.

When it helps: after a network has been rewritten. When it hurts: a class of the user's own whose
arguments cannot be known is refused with a remedy, not guessed.
Measured effect: none by itself. Cost: none in training; the new optimizer has moments of its own.
Devices and modes: run on CPU in both modes for the 15 optimizers of ``mindspore.nn``
with CPU kernels; ``Lamb`` and ``LARS`` built and compiled; written, not run, for GPU and Ascend.
How it combines: a freezing optimizer (``FreezeOpt``) is made over the new one.
Reference: none; MindSpore's ``nn.Optimizer`` is what it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Union

from mindspore import Parameter, nn

from mindspore_boost_ext._rules import shown
from mindspore_boost_ext.gradient_centralization import (
    UNTOUCHED,
    install_centralization,
    output_axis_of,
)
from mindspore_boost_ext.optimizer_settings import (
    ORDER,
    Group,
    base_of,
    construct_like,
    copy_state,
    groups_of,
)

Centralize = Union[Mapping[str, int], Container[Any], None]


def rebuilt(
    optimizer: nn.Optimizer,
    removed: Iterable[Parameter | str] = (),
    added: Iterable[Parameter] = (),
    centralize: Centralize = None,
    carry_state: bool = False,
) -> nn.Optimizer:
    """Return an optimizer like another, over other parameters or with centralized gradients.

    Args:
        optimizer (nn.Optimizer): an optimizer of ``mindspore.nn``, also under ``nn.LARS``, or one
            of a class whose ``__init__`` notes its arguments. It is left as it is.
        removed (Iterable[Union[Parameter, str]]): parameters to train no longer, themselves or
            their names; those that the optimizer does not train are passed over. Default: none.
        added (Iterable[Parameter]): parameters to train as well. One with the name of a removed one
            takes its place, in its group and order. The others come last, with the default learning
            rate and weight decay of the optimizer. Default: none.
        centralize (Union[dict, Container, None]): whose gradients to centralize: names or
            Parameters; or a dict from names to output axes, as ``output_axes`` returns it.
            Default: None, the groups that say ``grad_centralization``.
        carry_state (bool): whether moments, global step and so on go on from where they are.
            Else they start again. Default: ``False``.

    Returns:
        nn.Optimizer of the same class, with the same hyper-parameters and the present learning
        rates; every parameter keeps the settings of its group.

    Raises:
        TypeError: if ``optimizer`` is none, wraps another one (but LARS), or its arguments are
            not known.
        ValueError: if no parameter is left, or an added one is trained already.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.base import rebuilt
        >>> net = nn.Dense(3, 2)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> new = rebuilt(optimizer, removed=["bias"], centralize=["weight"])
        >>> type(new).__name__, [parameter.name for parameter in new.parameters]
        ('Momentum', ['weight'])
    """
    params = _changed(groups_of(optimizer), list(removed), list(added))
    return _made(optimizer, params, centralize, carry_state)


def _made(
    optimizer: nn.Optimizer, params: Sequence[Any], centralize: Centralize, carry_state: bool
) -> nn.Optimizer:
    """Return an optimizer like another over ``params``, centralizing what is asked for."""
    new = construct_like(optimizer, params)
    base = base_of(new)
    flags = getattr(base, "grad_centralization_flags", (False,) * len(base.parameters))
    axes = [_axis(one, centralize, flag) for one, flag in zip(base.parameters, flags)]
    if any(axis != UNTOUCHED for axis in axes) or any(flags):
        install_centralization(base, axes)
    if carry_state:
        copy_state(optimizer, new)
    return new


def _axis(parameter: Parameter, centralize: Centralize, in_group: bool) -> int:
    """Return the output axis of a parameter if its gradient is to be centralized."""
    if centralize is None:
        wanted = in_group
    elif isinstance(centralize, Mapping):
        return centralize.get(parameter.name, UNTOUCHED)
    else:
        wanted = _holds(centralize, parameter)
    return output_axis_of(parameter) if wanted else UNTOUCHED


def _holds(container: Container[Any], parameter: Parameter) -> bool:
    """Tell whether a container holds a parameter (the very object) or its name."""
    if isinstance(container, Iterable):
        return any(one is parameter or _is_name(one, parameter) for one in container)
    return parameter.name in container


def _is_name(one: Any, parameter: Parameter) -> bool:
    return isinstance(one, str) and one == parameter.name


# ---- Parameters and groups ----


def _changed(
    params: Sequence[Any], removed: Sequence[Parameter | str], added: Sequence[Parameter]
) -> list[Any]:
    """Return Parameters, or groups, without some and with others."""
    trained = _members(params)
    leaving = {id(one) for one in trained if _holds(removed, one)}
    kept = {one.name for one in trained if id(one) not in leaving}
    for one in added:
        if one.name in kept:
            raise ValueError(
                f"added must be parameters that the optimizer does not train yet, got {one.name!r}"
            )
    by_name = {one.name: one for one in added}
    stand_in = {id(one): by_name.pop(one.name, None) for one in trained if id(one) in leaving}

    def edited(parameters: Iterable[Parameter]) -> list[Parameter]:
        replaced = (stand_in.get(id(one), one) for one in parameters)
        return [one for one in replaced if one is not None]

    last = list(by_name.values())
    if not is_grouped(params):
        result: list[Any] = edited(params) + last
    else:
        result = _with_members(params, edited, last)
    if not _members(result):
        raise ValueError("removed must leave the optimizer at least one parameter to train")
    return result


def _with_members(
    groups: Sequence[Group],
    edited: Callable[[Iterable[Parameter]], list[Parameter]],
    last: list[Parameter],
) -> list[Group]:
    """Return groups with other members, and without the groups that have become empty."""
    result: list[Group] = []
    for group in groups:
        if ORDER in group:
            result.append({ORDER: edited(group[ORDER]) + last})
            continue
        members = edited(group["params"])
        if members:
            result.append({**group, "params": members})
    return [*result, {"params": last}] if last else result


def is_grouped(params: Sequence[Any]) -> bool:
    """Tell whether parameters come as groups; anything but Parameters or dicts is an error."""
    if not params:
        raise ValueError("the optimizer must have at least one parameter, got an empty list")
    for kind in (Parameter, dict):
        if all(isinstance(one, kind) for one in params):
            return kind is dict
    raise TypeError(
        f"parameters must be a list of Parameters, or a list of dicts, got {shown(params)}"
    )


def _members(params: Sequence[Any]) -> list[Parameter]:
    """Return all parameters of a list of them, or of groups."""
    members: list[Parameter] = []
    for one in params:
        members.extend(one.get("params", ()) if isinstance(one, dict) else (one,))
    return members


__all__ = ["rebuilt"]
