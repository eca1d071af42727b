"""The graph of a network: the steps of its computation, and what each takes from others."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from mindspore import nn

FILLED = "pad with a number"
JOINED = "joinedtuples"  # a sum of tuples, such as the parts of a split and one more tensor
OPAQUE = "opaque cell"  # one node, though it may do anything; no class has this name
SPLITS = frozenset(("split", "chunk", "tensorsplit", "unstack", "unbind", JOINED))  # give tuples


class NotUnderstoodError(Exception):
    """The code does something that cannot be followed with proxies."""


@dataclass(eq=False)
class Node:
    """One step of the computation."""

    name: str  # what is done, in small letters without underscores: "relu", "conv2d"
    inputs: tuple[Node, ...]  # whose results it takes, in the order of the arguments
    cell: nn.Cell | None  # that does it; None for an operator or a function
    constant: bool  # whether the result does not depend on the values that enter the network

    @property
    def data(self) -> tuple[Node, ...]:
        """The inputs that depend on the inputs of the network, each once."""
        return tuple(dict.fromkeys(one for one in self.inputs if not one.constant))


@dataclass
class Graph:
    """What calling a Cell computes."""

    nodes: list[Node] = field(default_factory=list)  # each after those it depends on
    outputs: list[Node] = field(default_factory=list)  # what the call returns
    # For each Cell that was not understood, the reason. It is one node in ``nodes``.
    failures: dict[nn.Cell, str] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)  # ids of Cells whose Parameters other code reads
    fixed: dict[int, str] = field(default_factory=dict)  # ids of Cells that must stay, and why

    @functools.cached_property
    def users(self) -> dict[Node, list[Node]]:
        """For each node, the nodes that depend on its value; read it when all nodes are there."""
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for one in () if node.constant else node.data:
                found[one].append(node)
        return found
