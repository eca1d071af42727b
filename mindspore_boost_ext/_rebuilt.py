"""A stand-in for ``mindspore_boost_ext.base.rebuilt``, with its signature, until that is merged.

Only what LessBN needs: parameters leave by a view of the optimizer; for parameters that join, an
optimizer of the same class is made from the arguments that MindSpore noted down.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspore import Parameter, nn

from mindspore_boost_ext.optimizer_view import optimizer_view


def rebuilt(
    optimizer: nn.Optimizer,
    removed: Iterable[Parameter] = (),
    added: Iterable[Parameter] = (),
    centralize: Any = None,
) -> nn.Optimizer:
    """Return an optimizer like another, over other parameters.

    Args:
        optimizer (nn.Optimizer): the optimizer. It is left as it is.
        removed (Iterable[Parameter]): parameters to train no longer.
        added (Iterable[Parameter]): parameters to train as well.
        centralize: not used here.
    """
    gone, extra = {id(one) for one in removed}, list(added)
    if not extra:
        places = [i for i, one in enumerate(optimizer.parameters) if id(one) not in gone]
        return optimizer_view(optimizer, places)
    params = list(optimizer.init_params["params"])
    if params and isinstance(params[0], dict):
        groups = [{**one, "params": _kept(one["params"], gone)} for one in params]
        params = [*groups, {"params": extra}]
    else:
        params = [*_kept(optimizer.parameters, gone), *extra]
    rate = optimizer.learning_rate if optimizer.dynamic_lr else optimizer.init_learning_rate
    return type(optimizer)(params, learning_rate=rate, **optimizer.init_args)


def _kept(parameters: Iterable[Parameter], gone: set[int]) -> list[Parameter]:
    return [one for one in parameters if id(one) not in gone]


__all__ = ["rebuilt"]
