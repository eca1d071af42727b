"""Where a network uses its weights last: a weight that is used again later is frozen later."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.order import in_order_of_construct, parameters_read


def in_order_of_last_use(network: nn.Cell) -> list[Parameter]:
    """Return the trainable parameters of a network in the order of their last use.

    It is the order of ``trainable_params``, except for a parameter that several Cells hold, whose
    Cell stands in several places, or that another Cell's code reads. So an embedding that is also
    the output's matrix stands at the output. A parameter that a Cell's code reads has its place at
    the end of that Cell. But if the Cell itself holds it, such as positions added to the input, the
    place is before the first child that the code calls after the use.
    """
    last = {id(one): one for one in network.trainable_params()}
    for parameter in _uses(network):
        if id(parameter) in last:  # a dict keeps the order of insertion
            last[id(parameter)] = last.pop(id(parameter))
    return list(last.values())


def _uses(cell: nn.Cell) -> Iterator[Parameter]:
    """Yield the parameters that a Cell and its inner Cells use, some perhaps several times."""
    own = list(cell.get_parameters(expand=False))
    yield from own
    read = {id(one): one for one in parameters_read(cell)}
    places: dict[int, int] = {}  # in ``construct``, where each parameter and child is used last
    if any(id(one) in read for one in own):
        for place, use in enumerate(in_order_of_construct(cell)):
            places.update((id(one), place) for one in (use if isinstance(use, tuple) else (use,)))
    for child in _compat.children(cell).values():
        if isinstance(child, nn.Cell):
            called = places.get(id(child), -1)
            for one in own:
                if id(one) in read and places.get(id(one), math.inf) < called:
                    yield read.pop(id(one))
            yield from _uses(child)
    # In the order in which the Cell holds them: its code may read a bias before its weight.
    held = [read.pop(id(parameter)) for parameter in cell.get_parameters() if id(parameter) in read]
    yield from (*held, *read.values())
