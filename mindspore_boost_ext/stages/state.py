"""Lets what the host sets between two steps (a checkpoint, a rate) reach the compiled step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import _compat


def state_of(cell: nn.Cell) -> ParameterTuple:
    """Return every Parameter of a Cell and of those in it, each once."""
    every = list({id(parameter): parameter for parameter in cell.get_parameters()}.values())
    first: dict[str, Parameter] = {}
    for one in every:
        if first.setdefault(one.name, one) is not one:
            raise ValueError(
                f"two Parameters of the training step are named {one.name!r}: {_remedy(cell, one)}"
            )
    return ParameterTuple(every)


def _remedy(cell: nn.Cell, parameter: Parameter) -> str:
    """Return how to give one of two Parameters another name."""
    within = [held for _, held in cell.cells_and_names() if isinstance(held, nn.Optimizer)]
    listed = [one for optimizer in within for one in _compat.own_parameters(optimizer).values()]
    if len({id(one) for one in listed if one.name == parameter.name}) > 1:
        return (
            "an optimizer that holds another one must rename what the inner one keeps, such as "
            "inner.global_step.name = 'inner.global_step'"
        )
    return (
        "give the optimizer the Parameters of this same network; before you make the optimizer of "
        "a second network, rename its Parameters by net.update_parameters_name('a.'); name the "
        "state of an Algorithm boost.<switch>.<name>"
    )


def connected(value: Tensor, state: tuple[Parameter, ...]) -> Tensor:
    """Return ``value``; graphs that branch after it read the Parameters of ``state`` anew.

    If only a branch uses a Parameter, MindSpore's graph keeps the memory that it had at first, and
    what the host sets is lost without a warning. The graph reads a Parameter anew if a part that
    always runs uses it. As the second input of ``Depend`` it is used, and no operator runs for it.
    """
    return ops.depend(value, state)


class HostWrites:
    """Lets PYNATIVE_MODE see what the host has set between two steps.

    In that mode ``set_data``, and so ``load_param_into_net``, gives a Parameter other memory.
    Functions that MindSpore has compiled, such as every optimizer, go on with the memory they know.
    So the new values are written to that memory, and the Parameter gets it back.
    """

    def __init__(self, state: tuple[Parameter, ...]) -> None:
        self.state = state
        self.known: list[Tensor] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Surround a step: it begins with what the host has set since the last one."""
        eager = ms.get_context("mode") == ms.PYNATIVE_MODE
        for one in self.state if eager and not self.known else ():
            if one.has_init:  # functions of ms.jit would take zeros, and lose what they write
                one.init_data()
        moved = [pair for pair in zip(self.state, self.known) if _was_moved(*pair)] if eager else []
        # Exchanged Parameters have each other's memory: copy it before it is written.
        own = {known.data_ptr() for known in self.known} if moved else set()
        values = [one.value().copy() if one.data_ptr() in own else one.value() for one, _ in moved]
        for (parameter, known), value in zip(moved, values):
            known.copy_(value)
            parameter.assign_value(known)
        yield
        if eager and not self.known:
            self.known = [_memory_of(one) for one in self.state]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Surround what gives Parameters other values: they keep their memory."""
        with self.followed():
            pass
        yield
        with self.followed():
            pass


def _was_moved(parameter: Parameter, known: Tensor) -> bool:
    same_kind = (parameter.shape, parameter.dtype) == (known.shape, known.dtype)
    return parameter.data_ptr() != known.data_ptr() and same_kind


def _memory_of(parameter: Parameter) -> Tensor:
    """Return a Tensor over the memory of a Parameter; before 2.9 it may not have any yet."""
    if parameter.data_ptr() == 0:
        parameter.copy_(parameter.value())
    return Tensor(parameter)
