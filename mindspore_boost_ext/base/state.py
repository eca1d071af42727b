"""State: what an algorithm keeps, and what optimizers share that Models put in one's place."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.arguments import base_of
from mindspore_boost_ext.base.cells import exchange, leaves

_PLACES = "boost_in_its_place"
_GAINED = "gained"
_LISTING = ("mindspore.", "mindspore_boost_ext.")


def state(
    name: str, value: object, dtype: type = np.float32, requires_grad: bool = False
) -> Parameter:
    """Return the Parameter ``boost.<name>``, which holds a part of an algorithm's state."""
    tensor = Tensor(np.asarray(value, dtype))
    return Parameter(tensor, name=f"boost.{name}", requires_grad=requires_grad)


def in_its_place(optimizer: nn.Optimizer) -> dict[str, Any]:
    """Return the dict of what earlier Models have put in this optimizer's place; add to it.

    The next Model continues with what is there. An optimizer that :func:`share_state` or
    :func:`share_places` has connected with another one has the same dict as that one.
    """
    return vars(base_of(optimizer)).setdefault(_PLACES, {})


def share_places(new: nn.Optimizer, old: nn.Optimizer) -> None:
    """Give ``new`` the dict that :func:`in_its_place` returns for ``old``."""
    vars(base_of(new))[_PLACES] = in_its_place(old)


def share_state(source: nn.Optimizer, target: nn.Optimizer) -> None:
    """Let ``target`` use the moments, counters, hyper-parameters and rates of ``source`` itself.

    They are found by name. If ``source`` lacks one, or has another shape or dtype, ``target`` keeps
    its own; the next optimizer that shares the state of ``source`` shares this one, too.
    """
    old, new = base_of(source), base_of(target)
    gained: dict[str, Parameter] = in_its_place(old).setdefault(_GAINED, {})
    known = {**gained, **{one.name: one for one in _state(old)}}
    replacements = _rates_by_identity(old, new)
    for parameter in _state(new):
        match = known.get(parameter.name)
        if match is not None and _alike(match, parameter):
            replacements[id(parameter)] = match
        else:
            gained[parameter.name] = parameter
    share_places(new, old)
    exchange(target, replacements)


def _rates_by_identity(old: nn.Optimizer, new: nn.Optimizer) -> dict[int, Parameter]:
    """Return ``old``'s learning rates by the ``id`` of those of ``new`` that they replace."""
    before = {one.name: old.get_lr_parameter(one) for one in old.parameters}
    found: dict[int, Parameter] = {}
    for parameter in new.parameters:
        rate, match = new.get_lr_parameter(parameter), before.get(parameter.name)
        if isinstance(rate, Parameter) and isinstance(match, Parameter) and _alike(match, rate):
            found[id(rate)] = match
    return found


def _alike(one: Parameter, two: Parameter) -> bool:
    return bool((one.shape, one.dtype) == (two.shape, two.dtype))


def _state(optimizer: nn.Optimizer) -> list[Parameter]:
    """Return the Parameters of an optimizer, without those that it trains and without rates."""
    trained = {id(parameter) for parameter in optimizer.parameters}
    held = [*optimizer.get_parameters(), *_hidden_in(optimizer).values()]
    untrained = [one for one in held if id(one) not in trained]
    return [one for one in untrained if not one.name.startswith("learning_rate")]


def list_hidden_parameters(holder: nn.Cell, network: nn.Cell) -> None:
    """Let an optimizer or a part list Parameters in lists and dicts: else no checkpoint has them.

    A name that the network uses is left out: a checkpoint holds each name only once.
    """
    own = _compat.own_parameters(holder)
    taken = {parameter.name for parameter in network.get_parameters()}.union(own)
    hidden = {name: one for name, one in _hidden_in(holder).items() if name not in taken}
    if hidden:
        _compat.set_own_parameters(holder, type(own)({**own, **hidden}))


def _hidden_in(optimizer: nn.Cell) -> dict[str, Parameter]:
    """Return, by name, the Parameters in an optimizer's lists and dicts that it does not list.

    Optimizers of ``mindspore.experimental`` hold their rates so, ASGD and NAdam also moments; the
    user's own may hold anything so. Those of ``mindspore.nn`` list all their Parameters.
    """
    if isinstance(optimizer, nn.Optimizer) and type(optimizer).__module__.startswith(_LISTING):
        return {}
    listed = {parameter.name for parameter in optimizer.get_parameters()}
    held = leaves(_compat.own_attributes(optimizer))
    # In a file, two Parameters of one name cannot be told apart. The name of an unnamed one has a
    # number that differs from run to run.
    found = (one for one in held if isinstance(one, Parameter) and "#" not in one.name)
    return {one.name: one for one in found if one.name not in listed}
