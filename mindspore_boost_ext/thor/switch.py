"""The switch ``thor``: from the user's optimizer to a THOR that trains the same parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from mindspore import Tensor, nn

from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.config.sections import ThorConfig
from mindspore_boost_ext.thor.optimizer import THOR, thor_of

_MOMENTUM = 0.9
# What nn.Optimizer keeps of learning rate, weight decay and loss scale; one entry a parameter where
# these come in groups. Taken over as they are, so that every parameter keeps its group's settings.
_TAKEN_OVER = (
    *("learning_rate", "dynamic_lr", "is_group", "is_group_lr", "is_group_params_ordered"),
    *("weight_decay", "decay_flags", "dynamic_decay_flags", "exec_weight_decay"),
    *("loss_scale", "reciprocal_scale", "need_scale"),
)
_GROUPS = ("group_lr", "group_weight_decay", "group_params")


def thor_in_place_of(
    optimizer: nn.Optimizer, network: nn.Cell, settings: ThorConfig
) -> tuple[nn.Optimizer, str]:
    """Return THOR over the optimizer's parameters, with its learning rate and weight decay.

    Args:
        optimizer: the user's; not used any more after this. A THOR is returned as it is.
        network: where its layers are looked for.
        settings: section ``thor`` of the configuration.

    Returns:
        The optimizer, and one sentence on what took its place.

    Raises:
        ValueError: if the optimizer wraps another one.
    """
    if thor_of(optimizer) is not None:
        return optimizer, "the optimizer is THOR already, with settings of its own"
    if isinstance(optimizer, nn.LARS) or type(optimizer).__name__ == "FreezeOpt":
        raise ValueError(
            f"thor takes the place of the optimizer, but {type(optimizer).__name__} wraps one: "
            "give the plain optimizer"
        )
    arguments = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}
    if settings.momentum is None:
        arguments["momentum"] = _own_momentum(optimizer)
    damping = arguments.pop("damping")
    result = THOR(network, 0.1, damping=damping, params=list(optimizer.parameters), **arguments)
    for name in _TAKEN_OVER:
        if hasattr(optimizer, name):
            _replace(result, name, getattr(optimizer, name))
    for name in _GROUPS:
        if hasattr(optimizer, name):
            result.__dict__[name] = getattr(optimizer, name)
    # The schedules of a run that has begun go on; moments of plain gradients would not fit.
    result.global_step.set_data(Tensor(optimizer.global_step.value().copy()))
    kind = type(optimizer).__name__
    return result, f"in place of {kind}, with its parameters, learning rate and weight decay"


def _own_momentum(optimizer: nn.Optimizer) -> float:
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(momentum, (int, float, Tensor)):
        return float(host_array(momentum).reshape(()))
    return _MOMENTUM


def _replace(cell: nn.Cell, name: str, value: Any) -> None:
    """Set an attribute whatever kind it was before: a Cell keeps Parameters and Cells apart."""
    if hasattr(cell, name):
        delattr(cell, name)
    setattr(cell, name, value)


__all__ = ["thor_in_place_of"]
