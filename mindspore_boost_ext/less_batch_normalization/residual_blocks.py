"""Residual blocks and the classifier, found in the graph of a network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspore import nn

from mindspore_boost_ext.less_batch_normalization.graph import SPLITS, Graph, Node
from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN
from mindspore_boost_ext.less_batch_normalization.steps import (
    ADDITIONS,
    CONCATENATIONS,
    PRODUCTS,
    is_batch_norm,
    is_convolution,
    own_construct,
    passes_on,
    words,
)

IN_BRANCH = "inside a residual branch, before its last BatchNorm"
OUTSIDE = "not in a residual block"
LAST = "last BatchNorm of its residual branch"
LONGEST = 6  # convolutions; each may divide the variance by 6, and BatchNorm adds 1e-5 to it


@dataclass(frozen=True)
class Removal:
    """Whether a BatchNorm may be removed, and why (not)."""

    removable: bool
    reason: str
    shortcut: bool = False  # whether it stands on one


def classify(graph: Graph) -> dict[Node, Removal]:
    """Return a ``Removal`` for each BatchNorm that a graph calls."""
    removals: dict[Node, Removal] = {}
    for block in _blocks(graph):
        # An inner block comes before the one around it, and decides on its BatchNorms.
        removals = {**block.removals(removals), **removals}
    outside = Removal(False, OUTSIDE)
    return {**{node: outside for node in graph.nodes if is_batch_norm(node)}, **removals}


def _blocks(graph: Graph) -> list[_Block]:
    """Return the residual blocks of a graph, then its densely connected ones."""
    above = _dominators(graph)
    joins = [node for node in graph.nodes if node.name in ADDITIONS | CONCATENATIONS]
    forked = [node for node in joins if len(node.data) == 2 and above[node] is not None]
    blocks = [_Block(graph, node, above) for node in forked]
    residual = [block for block in blocks if block.is_residual]
    for block in blocks:
        block.inner = {one.join for one in residual}
    return residual + [block for block in blocks if block.is_dense_layer]


def _dominators(graph: Graph) -> dict[Node | None, Node | None]:
    """Return, for each node, the nearest one on all ways to it; None if there is none."""
    above: dict[Node | None, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}

    def meet(one: Node | None, two: Node | None) -> Node | None:
        while one is not two:
            if depth[one] >= depth[two]:
                one = above[one]
            else:
                two = above[two]
        return one

    for node in graph.nodes:
        inputs: tuple[Node | None, ...] = node.data or (None,)
        above[node] = functools.reduce(meet, inputs)
        depth[node] = depth[above[node]] + 1
    return above


class _Block:
    """One addition or concatenation, its fork, and its two branches, listed from their ends."""

    def __init__(self, graph: Graph, join: Node, above: dict[Node | None, Node | None]) -> None:
        self.graph = graph
        self.join = join
        self.fork = above[join]
        self.inner: set[Node] = set()  # the additions of all residual blocks
        lines = [self._line(addend, above) for addend in join.data]
        self.shortcut, self.main = sorted(lines, key=_convolutions)
        fork = {self.fork}
        self.branch = _made_from(self.main[:1], lambda node: set(node.data) - fork)
        self.nodes = [node for node in graph.nodes if node in self.branch]

    def _line(self, node: Node | None, above: dict[Node | None, Node | None]) -> list[Node]:
        line = []
        while node is not None and node is not self.fork:
            line.append(node)
            node = above[node]
        return line

    @property
    def is_residual(self) -> bool:
        """Whether a branch of convolutions is added to its input, which is not part of a split."""
        is_whole = self.fork is not None and self.fork.name not in SPLITS
        return self.join.name in ADDITIONS and is_whole and _convolutions(self.main) > 0

    @property
    def is_dense_layer(self) -> bool:
        """Whether a branch that begins with a BatchNorm is concatenated with its input."""
        if self.join.name in ADDITIONS or self.shortcut or not _convolutions(self.main):
            return False
        return is_batch_norm(self.main[-1]) or self.main[-1].name == "removedbatchnorm"

    def removals(self, decided: dict[Node, Removal]) -> dict[Node, Removal]:
        """Return a removal for each BatchNorm on the branches; ``decided`` has inner blocks'."""
        in_branch = [node for node in self.nodes if is_batch_norm(node)]
        on_shortcut = [node for node in self.shortcut if is_batch_norm(node)]
        reason = self._not_understood()
        if reason:
            return {node: Removal(False, reason) for node in (*in_branch, *on_shortcut)}
        reasons = self._reasons_against({node for node, one in decided.items() if one.removable})
        found = {node: Removal(not reasons[node], reasons[node] or IN_BRANCH) for node in in_branch}
        return {**found, **{node: self._on_shortcut(node) for node in on_shortcut}}

    def _not_understood(self) -> str:
        """Return why the block must stay as it is; empty if it need not."""
        if _convolutions(self.shortcut) > 1:
            return "both branches of the addition have several convolutions"
        if _convolutions(self.shortcut) == _convolutions(self.main):
            return "both branches of the addition have one convolution"
        if _convolutions(self.main) > LONGEST:
            return f"a branch of more than {LONGEST} convolutions needs BatchNorms between them"
        return ""

    def _reasons_against(self, gone: set[Node]) -> dict[Node, str]:
        """Return, for each node, why the scale of its result matters; empty if it does not.

        It does not matter if every way to the end of the branch has a BatchNorm, and before it only
        steps that pass the scale on.
        """
        found: dict[Node, str] = {}
        followed: set[Node] = set()
        for node in reversed(self.nodes):
            users = self.graph.users[node]
            in_branch = [user for user in users if user in self.branch]
            in_branch.sort(key=lambda user: -len(user.data))  # a gate before what it is made from
            if any(is_batch_norm(user) or user in followed for user in in_branch):
                followed.add(node)
            reasons = [self._reason_against(user, found, gone) for user in in_branch]
            if len(in_branch) < len(users) or node in self.graph.outputs:
                elsewhere = "its result is used outside of its residual branch too"
                reasons.append(LAST if node is self.main[0] else elsewhere)
            found[node] = next(filter(None, reasons), "")
            if is_batch_norm(node) and node not in followed:
                found[node] = LAST
        return found

    def _reason_against(self, user: Node, found: dict[Node, str], gone: set[Node]) -> str:
        if is_batch_norm(user):
            return found[user] if user in gone else ""
        if user in self.inner:
            return "another residual block inside the branch"
        return found[user] if passes_on(user) else f"{words(user)} inside the branch"

    def _on_shortcut(self, node: Node) -> Removal:
        before = node.data[0]
        last = next(place for place, one in enumerate(self.main) if is_convolution(one))
        if not is_convolution(before):
            return Removal(False, "on a shortcut, but not directly after a convolution")
        if last == 0 or not is_batch_norm(self.main[last - 1]):
            return Removal(False, "on a shortcut, but no BatchNorm ends the other branch")
        users, outputs = self.graph.users, self.graph.outputs
        if any(len(users[one]) != 1 or one in outputs for one in (before, node)):
            return Removal(False, "on a shortcut, but the result is used elsewhere too")
        return Removal(True, "on the shortcut of a residual block", shortcut=True)


def _convolutions(line: list[Node]) -> int:
    return sum(is_convolution(node) for node in line)


def _made_from(ends: Iterable[Node], parts: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return nodes and all nodes that they are made from."""
    pending, found = list(ends), set(ends)
    while pending:
        unseen = set(parts(pending.pop())) - found
        found |= unseen
        pending += unseen
    return found


def find_classifier(graph: Graph) -> tuple[list[nn.Dense], str]:
    """Return the network's last Dense in the order of execution, if it is its classifier, and why.

    It is the classifier if it has several outputs, no weights come after it, and nothing made from
    the same data joins its result before the network returns it or compares it with labels. The
    network may also return what the result is made from. So the gate of a squeeze-and-excitation,
    the first layer of a generator, or one of two heads is no classifier. If the network's code was
    not understood, it must be the last layer with weights.
    """
    nodes = [node for node in graph.nodes if _dense_inside(node, graph)]
    if not nodes:
        return [], "the network has no Dense"
    node = nodes[-1]
    found = _dense_inside(node, graph)
    failure = graph.failures.get(node.cell, "")
    if len(found) > 1:
        return [], failure or "the last Dense was not found"
    if failure and not _is_last(found[0], node.cell):
        return [], f"the last Dense is not the last layer with weights, and {failure}"
    if sum(node.cell is other.cell for other in nodes) > 1:
        return [], "the last Dense is called more than once"
    if isinstance(found[0], CommonHeadLastFN):
        return [], "the last Dense is normalised already"
    one_output = "the last Dense has one output, so it is no classifier"
    is_single = found[0].out_channels == 1
    reason = own_construct(found[0]) or (one_output if is_single else _joined(graph, node))
    return ([], reason) if reason else (found, "the last Dense in the order of execution")


def _is_last(layer: nn.Cell, network: nn.Cell) -> bool:
    """Return whether a layer holds the last parameter in the network's own order."""
    last = list(network.get_parameters())[-1]
    return any(last is parameter for parameter in layer.get_parameters())


def _dense_inside(node: Node, graph: Graph) -> list[nn.Cell]:
    """Return the Dense layers of a node, normalised ones too."""
    kinds = (nn.Dense, CommonHeadLastFN)
    if isinstance(node.cell, kinds):
        return [node.cell]
    if node.cell is None or node.cell not in graph.failures:
        return []
    return [cell for _, cell in node.cell.cells_and_names() if isinstance(cell, kinds)]


def _joined(graph: Graph, start: Node) -> str:
    """Return why the result of ``start`` is not the network's own; empty if it is."""
    sources = _sources(start)
    made_from = {
        one: _made_from([one], lambda node: node.inputs) for one in (start, *graph.outputs)
    }
    own, after = {start}, graph.nodes[graph.nodes.index(start) + 1 :]
    for node in after:
        if node.constant or not own.intersection(node.data):
            continue
        others = [one for one in node.data if one not in own]
        if any(_sources(one) & sources for one in others):
            return f"the result of the last Dense is joined with other features ({node.name})"
        if others:
            continue  # the labels
        if _has_weights(node):
            return f"layers with weights come after the last Dense ({node.name})"
        own.add(node)
    for output in graph.outputs:
        apart = start not in made_from[output] and output not in made_from[start]
        if apart and not output.constant and _sources(output) & sources:
            return "the network has other outputs besides that of the last Dense"
    return ""


def _has_weights(node: Node) -> bool:
    """Return whether a node multiplies its inputs by weights, as a layer or as an operator."""
    if node.cell is not None and any(True for _ in node.cell.get_parameters()):
        return True
    return is_convolution(node) or (
        node.name in PRODUCTS and any(one.constant for one in node.inputs)
    )


def _sources(node: Node) -> set[Node]:
    """Return the inputs of the network that a node depends on."""
    return {one for one in _made_from([node], lambda each: each.data) if not one.inputs}
