"""A view of an optimizer: the same optimizer, restricted to some of its parameters."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import exchanged, leaves
from mindspore_boost_ext.base.centralization import Centralization
from mindspore_boost_ext.base.entries import entries_at, is_divided
from mindspore_boost_ext.base.order import contents, is_of_libraries
from mindspore_boost_ext.config.rules import shown

# Attributes with the number of parameters: `lens` is ASGD's.
COUNTS = frozenset(("param_length", "lens"))


def optimizer_view(optimizer: nn.Optimizer, indices: Iterable[int]) -> nn.Optimizer:
    """Return the optimizer restricted to the parameters at ``indices``, sharing all its state.

    The view sees later changes of values (a learning rate, a loaded checkpoint), and the optimizer
    sees the view's updates. Later changes of Python attributes are not shared.

    Args:
        optimizer (nn.Optimizer): the optimizer, or ``nn.LARS`` over one. It is left as it is.
        indices (Iterable[int]): positions in ``optimizer.parameters``, strictly increasing, at
            least one.

    Returns:
        nn.Optimizer, a Cell of the same class. Its input is a tuple of gradients, one for each
        parameter of the view, in that order; its output is the optimizer's.

    Raises:
        TypeError: if ``optimizer`` is not an ``nn.Optimizer`` or an index is not an int.
        ValueError: if the positions are empty, not increasing, or out of range.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from mindspore_boost_ext.base.view import optimizer_view
        >>> net = nn.Dense(2, 2, weight_init="ones", bias_init="ones")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.5)
        >>> only_bias = optimizer_view(optimizer, [1])
        >>> result = only_bias((Tensor(np.ones(2, np.float32)),))
        >>> net.bias.asnumpy().tolist(), net.weight.asnumpy().tolist()
        ([0.5, 0.5], [[1.0, 1.0], [1.0, 1.0]])
        >>> int(optimizer.global_step.asnumpy()[0])
        1
    """
    if not isinstance(optimizer, nn.Optimizer):
        raise TypeError(f"optimizer must be an nn.Optimizer, got {shown(optimizer)}")
    positions = _checked(indices, len(optimizer.parameters))
    view: nn.Optimizer = _compat.shallow_copy(optimizer)
    attributes = {
        name: _restricted(name, value, optimizer, positions)
        for name, value in _compat.own_attributes(optimizer).items()
    }

    def bound(thing: Callable[..., object]) -> object:
        return _bound_to(view, thing) if _is_method(thing, optimizer) else thing

    for name, held in attributes.items():
        _check_functions(name, held, optimizer)
        vars(view)[name] = exchanged(held, bound)
    _compat.set_own_parameters(view, _kept_parameters(optimizer, attributes))
    for name, cell in _compat.children(optimizer).items():
        _compat.set_child(view, name, _restricted(name, cell, optimizer, positions))
    _compat.name_trained(view)
    return view


def _bound_to(view: nn.Optimizer, held: Callable[..., object]) -> Callable[..., object]:
    """Return a method of an optimizer's, perhaps in a partial, as one of the view's."""
    if isinstance(held, functools.partial):
        return functools.partial(_bound_to(view, held.func), *held.args, **held.keywords)
    method: Any = held
    return types.MethodType(method.__func__, view)


def _is_method(thing: object, optimizer: nn.Optimizer) -> bool:
    if isinstance(thing, functools.partial):
        return _is_method(thing.func, optimizer)
    return isinstance(thing, types.MethodType) and thing.__self__ is optimizer


def _check_functions(name: str, held: object, optimizer: nn.Optimizer) -> None:
    """Raise a ``ValueError`` for a function of the user's that refers to the whole optimizer."""
    kind = type(optimizer)
    if is_of_libraries(kind.__module__) or name in getattr(kind, "parameter_free", ()):
        return
    functions = (thing for thing in leaves(held) if isinstance(thing, types.FunctionType))
    closed = [
        thing for one in functions for cell in one.__closure__ or () for thing in contents(cell)
    ]
    if any(thing is optimizer or _is_method(thing, optimizer) for thing in closed):
        raise ValueError(
            f"{kind.__name__}.{name} is a function that refers to the optimizer, and so to all its "
            "weights, not those of a group: make it a method, or, if no update calls it, name it "
            f"in the class attribute parameter_free = ({name!r},)"
        )


def parameter_positions(
    optimizer: nn.Optimizer, parameters: Iterable[Parameter]
) -> tuple[int, ...]:
    """Return the positions of parameters in an optimizer, in rising order, each once.

    Raises:
        ValueError: if one of them is not trained by the optimizer.
    """
    where = {id(parameter): place for place, parameter in enumerate(optimizer.parameters)}
    given = list(parameters)
    for parameter in given:
        if id(parameter) not in where:
            raise ValueError(
                f"every parameter of a group must be one that the optimizer trains, got "
                f"{shown(getattr(parameter, 'name', parameter))}: leave it out of the group"
            )
    return tuple(sorted({where[id(parameter)] for parameter in given}))


def _checked(indices: Iterable[int], count: int) -> tuple[int, ...]:
    positions = tuple(indices)
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, int):
            raise TypeError(f"indices must be ints, got {shown(position)}")
    rising = all(one < two for one, two in zip(positions, positions[1:]))
    if not positions or not rising or positions[0] < 0 or positions[-1] >= count:
        raise ValueError(
            f"indices must be at least one position from 0 to {count - 1} of the optimizer's "
            f"parameters, in rising order, got {shown(positions)}"
        )
    return positions


def _restricted(
    name: str, value: object, optimizer: nn.Optimizer, positions: Sequence[int]
) -> object:
    """Return what the view holds under ``name`` where the optimizer holds ``value``."""
    count = len(optimizer.parameters)
    if name in COUNTS:
        return len(positions) if value == count else value
    if isinstance(value, Centralization):
        return value.restricted(positions)
    if isinstance(value, nn.Optimizer):
        same = [id(one) for one in value.parameters] == [id(one) for one in optimizer.parameters]
        return optimizer_view(value, positions) if same else value
    return entries_at(value, positions) if is_divided(name, value, optimizer) else value


def _kept_parameters(
    optimizer: nn.Optimizer, attributes: dict[str, Any]
) -> OrderedDict[str, Parameter]:
    """Return the Parameters that the view lists as its own: all but those cut away."""

    def members(holders: Iterable[Any]) -> set[int]:
        groups = (holder for holder in holders if isinstance(holder, (tuple, list)))
        return {id(item) for group in groups for item in group if isinstance(item, Parameter)}

    cut = members(vars(optimizer).values()) - members(attributes.values())
    listed = _compat.own_parameters(optimizer).items()
    for name, parameter in listed:
        is_divided(name, parameter, optimizer)  # refuses one that would have to be
    return OrderedDict((name, parameter) for name, parameter in listed if id(parameter) not in cut)
