"""The switch ``thor``: replaces the user's optimizer by a THOR over the same parameters."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.base.arguments import check_optimizer
from mindspore_boost_ext.base.cells import exchange
from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.base.state import in_its_place
from mindspore_boost_ext.config.sections import ThorConfig
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.thor.optimizer import THOR, thor_of

_MOMENTUM = 0.9
# Attributes of nn.Optimizer for learning rate, weight decay and loss scale. With groups, some have
# one entry for each parameter. They are copied unchanged, so that groups keep their settings.
_TAKEN_OVER = (
    *("learning_rate", "dynamic_lr", "is_group", "is_group_lr", "is_group_params_ordered"),
    *("weight_decay", "dynamic_weight_decay", "decay_flags", "dynamic_decay_flags"),
    "exec_weight_decay",
    *("loss_scale", "reciprocal_scale", "need_scale"),
)
_GROUPS = ("group_lr", "group_weight_decay", "group_params")
_KEY = "thor"


def thor_in_place_of(
    optimizer: nn.Optimizer, network: nn.Cell, settings: ThorConfig
) -> tuple[nn.Optimizer, str]:
    """Return a THOR in place of the optimizer, and a sentence for the report.

    The THOR has the optimizer's parameters, rates and step count. If the optimizer is THOR already,
    or an earlier Model has replaced it by a THOR with the same settings, that THOR is returned.

    Raises:
        TypeError: if the optimizer is not an ``nn.Optimizer``.
        ValueError: if the optimizer wraps another one, or computes its own rate.
    """
    if thor_of(optimizer) is not None:
        return optimizer, "the optimizer is THOR already, with its own settings"
    kind = type(optimizer).__name__
    if isinstance(optimizer, nn.LARS) or kind == "FreezeOpt":
        raise ValueError(
            f"thor replaces the optimizer, but {kind} wraps one: give the plain optimizer"
        )
    check_optimizer(optimizer, "thor")
    if getattr(optimizer, "relative_step", False):
        raise ValueError(
            f"thor takes over the optimizer's learning rate, but {kind} computes its own "
            "(relative_step): give it a learning_rate and relative_step=False"
        )
    reason = f"replaces {kind}, with its parameters, learning rate and weight decay"
    arguments = dict(vars(settings))
    if settings.momentum is None:
        arguments["momentum"] = _own_momentum(optimizer)
    names = ("nesterov", "use_nesterov")
    if any(getattr(optimizer, one, False) is True for one in names) and not settings.use_nesterov:
        reason += "; Nesterov's momentum is off (thor.use_nesterov)"
    made_of = [network, *optimizer.parameters]
    if _KEY in in_its_place(optimizer):
        earlier_made_of, earlier_arguments, earlier = in_its_place(optimizer)[_KEY]
        same = list(map(id, earlier_made_of)) == list(map(id, made_of))
        if same and earlier_arguments == arguments:
            return earlier, f"{reason}; continues from an earlier Model"
        warn(
            "thor starts anew, without the moments and factors of an earlier Model on this "
            f"{kind}: network, parameters or the section thor differ; to continue, keep them "
            "equal, or give both Models one THOR(net, ...) as their optimizer"
        )
    result = THOR(network, 0.1, params=made_of[1:], **arguments)
    for name in _TAKEN_OVER:
        if hasattr(optimizer, name):
            _replace(result, name, getattr(optimizer, name))
    if isinstance(optimizer, nn.AdaFactor):  # one number for all, not times the loss scale
        decay = Tensor(host_array(optimizer.weight_decay) * np.float32(optimizer.loss_scale))
        decays = (decay,) * len(result.parameters)
        _replace(result, "weight_decay", decays if optimizer.is_group else decay)
    for name in _GROUPS:
        if hasattr(optimizer, name):
            result.__dict__[name] = getattr(optimizer, name)
    # Schedules need the same step count. The moments are not shared: they are of plain gradients.
    exchange(result, {id(result.global_step): optimizer.global_step})
    in_its_place(optimizer)[_KEY] = (made_of, arguments, result)
    return result, reason


def _own_momentum(optimizer: nn.Optimizer) -> float:
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(momentum, (int, float, Tensor)):
        return float(host_array(momentum).reshape(()))
    return _MOMENTUM


def _replace(cell: nn.Cell, name: str, value: object) -> None:
    """Delete, then set an attribute: a Cell stores Parameters, Cells and other values apart."""
    if hasattr(cell, name):
        delattr(cell, name)
    setattr(cell, name, value)
