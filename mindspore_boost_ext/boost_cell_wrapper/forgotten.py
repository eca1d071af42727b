"""Refuses networks whose gradients MindSpore would leave out of later steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspore_boost_ext import _compat


@contextlib.contextmanager
def refusing_what_is_forgotten(asks_for_less: bool) -> Iterator[None]:
    """Refuse a network that MindSpore would train wrongly after this step.

    If a step in PYNATIVE_MODE is the first to differentiate a function of ``ms.jit``, MindSpore
    leaves gradients that this step does not ask for out of all later steps.
    """
    if not asks_for_less:
        yield
        return
    before = _compat.differentiated_functions()
    yield
    now = _compat.differentiated_functions()
    found = sorted({function for key, function in now.items() if key not in before})
    if found:
        raise ValueError(
            f"the first step that runs the ms.jit functions of the network ({', '.join(found)}) "
            "on inputs of this shape freezes weights, or refreshes no factors of THOR. In "
            "PYNATIVE_MODE MindSpore would leave the missing gradients out of all later steps, "
            "too: remove ms.jit, or train in GRAPH_MODE, or begin with a step that freezes "
            "nothing (group 0 of grad_freeze)"
        )
