"""Residual blocks and the classifier, found in the graph of a network."""

from __future__ import annotations

from dataclasses import dataclass

from mindspore import nn

from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN
from mindspore_boost_ext.less_batch_normalization.tracing import Graph, Node

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
ACTIVATIONS = frozenset(
    (
        *("relu", "relu6", "gelu", "gelucell", "fastgelu", "silu", "swish", "hswish", "hardswish"),
        *("leakyrelu", "prelu", "elu", "celu", "selu", "mish", "softplus", "sigmoid", "tanh"),
        *("hsigmoid", "hardsigmoid", "hardtanh", "softsign", "logsigmoid", "rrelu"),
    )
)
PASSING = frozenset(
    (
        *("identity", "cast", "mixedprecisioncast", "astype", "depend", "dropout", "dropout2d"),
        *("avgpool", "avgpool2d", "maxpool", "maxpool2d", "pad", "removedbatchnorm"),
    )
)
PRODUCTS = frozenset(("matmul", "bmm", "batchmatmul", "dense", "einsum"))
ADDITIONS = frozenset(("add", "iadd", "radd", "tensoradd", "addn", "tensoraddv2"))

REMOVED_IN_BRANCH = "inside a residual branch, directly after a convolution"
REMOVED_ON_SHORTCUT = "on the shortcut of a residual block"
LAST = "last BatchNorm of its residual branch"
OUTSIDE = "not in a residual block"


@dataclass(frozen=True)
class Removal:
    """Whether a BatchNorm may go, and why (not).

    Attributes:
        removable: whether it may.
        reason: in words.
        shortcut: whether it stands on a shortcut.
    """

    removable: bool
    reason: str
    shortcut: bool = False


def is_batch_norm(node: Node) -> bool:
    """Return whether a node is a BatchNorm, and nothing besides."""
    return isinstance(node.cell, BATCH_NORMS) and not own_construct(node.cell)


def own_construct(layer: nn.Cell) -> str:
    """Return why a layer of a subclass must stay: it may do more than MindSpore's; else empty."""
    kind = type(layer)
    if kind.construct.__module__.partition(".")[0] == "mindspore":
        return ""
    return f"{kind.__name__} has a construct of its own"


def is_convolution(node: Node) -> bool:
    """Return whether a node is a convolution, as a layer or as an operator."""
    return node.name in CONVOLUTIONS or isinstance(node.cell, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def classify(graph: Graph) -> dict[Node, Removal]:
    """Return a removal on each BatchNorm that a graph calls."""
    removals = {node: Removal(False, OUTSIDE) for node in graph.nodes if is_batch_norm(node)}
    dominators = _dominators(graph)
    users = graph.users()
    for node in graph.nodes:
        if node.name in ADDITIONS and len(node.data) == 2 and dominators[node] is not None:
            for norm, removal in _Block(graph, node, dominators, users).removals().items():
                removals[norm] = _stricter(removals[norm], removal)
    return removals


def _stricter(one: Removal, two: Removal) -> Removal:
    """Return what holds for a BatchNorm on the branches of two additions."""
    if one.reason == OUTSIDE or (one.removable and two.reason != OUTSIDE and not two.removable):
        return two
    return one


def _dominators(graph: Graph) -> dict[Node, Node | None]:
    """Return the immediate dominator of each node; None for those without one."""
    above: dict[Node, Node | None] = {}
    depth: dict[Node | None, int] = {None: 0}
    for node in graph.nodes:
        inputs = node.data
        common: Node | None = inputs[0] if inputs else None
        for other in inputs[1:]:
            common = _meet(common, other, above, depth)
        above[node] = common
        depth[node] = depth[common] + 1
    return above


def _meet(
    one: Node | None,
    two: Node | None,
    above: dict[Node, Node | None],
    depth: dict[Node | None, int],
) -> Node | None:
    """Return the nearest node that dominates both."""
    while one is not two:
        if depth[one] >= depth[two]:
            one = above[one] if one is not None else None
        else:
            two = above[two] if two is not None else None
    return one


class _Block:
    """One addition with its fork and its two branches, each from the addition backwards."""

    def __init__(
        self,
        graph: Graph,
        addition: Node,
        dominators: dict[Node, Node | None],
        users: dict[Node, list[Node]],
    ) -> None:
        self.fork = dominators[addition]
        self.users = users
        self.outputs = set(graph.outputs)
        branches = [self._line(addend, dominators) for addend in addition.data]
        self.shortcut, self.main = sorted(branches, key=_convolutions)

    def _line(self, node: Node | None, dominators: dict[Node, Node | None]) -> list[Node]:
        line = []
        while node is not None and node is not self.fork:
            line.append(node)
            node = dominators[node]
        return line

    def removals(self) -> dict[Node, Removal]:
        """Return what may happen to the BatchNorms on the branches."""
        norms = [node for node in (*self.main, *self.shortcut) if is_batch_norm(node)]
        reason = self._not_understood()
        if reason:
            return {node: Removal(False, reason) for node in norms}
        found = {node: Removal(False, "not directly after a convolution") for node in norms}
        stretch = self._stretch()
        for node in stretch[1:]:
            if is_batch_norm(node) and is_convolution(node.data[0]):
                found[node] = Removal(True, REMOVED_IN_BRANCH)
        found[stretch[0]] = Removal(False, LAST)
        for node in self.shortcut:
            if is_batch_norm(node):
                found[node] = self._on_shortcut(node)
        return found

    def _not_understood(self) -> str:
        """Return why the block must stay as it is; empty if it need not."""
        if not _convolutions(self.main):
            return OUTSIDE
        if _convolutions(self.shortcut) > 1:
            return "both branches of the addition have several convolutions"
        if _convolutions(self.shortcut) == _convolutions(self.main):
            return "both branches of the addition have one convolution"
        stretch = self._stretch()
        if not stretch:
            return "no BatchNorm follows the last convolution of the branch (pre-activation)"
        first = max(place for place, node in enumerate(stretch) if is_convolution(node))
        if any(is_batch_norm(node) for node in stretch[first:]):
            return "a BatchNorm stands before the first convolution (pre-activation)"
        return self._no_sequence(stretch)

    def _stretch(self) -> list[Node]:
        """Return the main branch from its last BatchNorm back to the fork."""
        last = next(place for place, node in enumerate(self.main) if is_convolution(node))
        if last == 0 or not is_batch_norm(self.main[last - 1]):
            return []
        return self.main[last - 1 :]

    def _no_sequence(self, stretch: list[Node]) -> str:
        for node, before in zip(stretch, [*stretch[1:], self.fork]):
            if node.data != (before,):
                return f"the branch is no plain sequence: {node.name} takes more than one value"
            if not (is_batch_norm(node) or is_convolution(node) or node.name in KNOWN):
                return f"unknown operation in the branch: {node.name}"
            if node is not stretch[0] and self._is_used_elsewhere(node):
                return f"the branch is no plain sequence: {node.name} is used elsewhere too"
        return ""

    def _is_used_elsewhere(self, node: Node) -> bool:
        return len(self.users[node]) != 1 or node in self.outputs

    def _on_shortcut(self, node: Node) -> Removal:
        before = node.data[0]
        if not is_convolution(before):
            return Removal(False, "on a shortcut, but not directly after a convolution")
        if self._is_used_elsewhere(before) or self._is_used_elsewhere(node):
            return Removal(False, "on a shortcut, but the result is used elsewhere too")
        return Removal(True, REMOVED_ON_SHORTCUT, shortcut=True)


KNOWN = ACTIVATIONS | PASSING


def _convolutions(line: list[Node]) -> int:
    return sum(is_convolution(node) for node in line)


def find_classifier(graph: Graph) -> tuple[nn.Dense | None, str]:
    """Return the network's last Dense in the order of execution, if it is its classifier.

    It is if it has several outputs, nothing with weights comes after it, and nothing made from the
    same data joins its result before the network returns it, alone or with what it was made from,
    or compares it with labels. So the gate of a squeeze-and-excitation, the first layer of a
    generator, or one of two heads is none. In a network whose code was not understood it has to be
    the last layer with weights.

    Returns:
        tuple, the Dense or None, and the reason.
    """
    nodes = [node for node in graph.nodes if _dense_inside(node, graph)]
    if not nodes:
        return None, "the network has no Dense"
    node = nodes[-1]
    inside = _dense_inside(node, graph)
    failure = graph.failures.get(node.cell, "")
    if len(inside) > 1:
        return None, failure or "the last Dense is not found"
    if failure and not _is_last(inside[0], node.cell):
        return None, f"the last Dense is not the last layer with weights, and {failure}"
    if sum(node.cell is other.cell for other in nodes) > 1:
        return None, "the last Dense is called more than once"
    if isinstance(inside[0], CommonHeadLastFN):
        return None, "the last Dense is normalised already"
    reason = own_construct(inside[0]) or _no_classes(inside[0]) or _joined(graph, node)
    return (None, reason) if reason else (inside[0], "the last Dense in the order of execution")


def _is_last(layer: nn.Cell, network: nn.Cell) -> bool:
    """Return whether no layer with weights stands behind another one in the network's own order."""
    last = list(network.get_parameters())[-1]
    return any(last is one for one in layer.get_parameters())


def _no_classes(dense: nn.Dense) -> str:
    if dense.out_channels > 1:
        return ""
    return "the last Dense has one output: it tells no classes apart"


def _dense_inside(node: Node, graph: Graph) -> list[nn.Cell]:
    """Return the Dense layers of a node, normalised ones too."""
    kinds = (nn.Dense, CommonHeadLastFN)
    if isinstance(node.cell, kinds):
        return [node.cell]
    if node.cell is None or node.cell not in graph.failures:
        return []
    return [cell for _, cell in node.cell.cells_and_names() if isinstance(cell, kinds)]


def _joined(graph: Graph, start: Node) -> str:
    """Return what keeps the result of ``start`` from being the network's own; empty if nothing."""
    sources = _sources(graph)
    own, after = {start}, graph.nodes[graph.nodes.index(start) + 1 :]
    for node in after:
        if node.constant or not own.intersection(node.data):
            continue
        others = [one for one in node.data if one not in own]
        if any(sources[one] & sources[start] for one in others):
            return f"the result of the last Dense is joined with other features ({node.name})"
        if others:
            continue  # the labels
        if _has_weights(node):
            return f"layers with weights come after the last Dense ({node.name})"
        own.add(node)
    for one in graph.outputs:
        apart = not (_comes_before(start, one) or _comes_before(one, start))
        if apart and not one.constant and sources[one] & sources[start]:
            return "the network has other outputs beside that of the last Dense"
    return ""


def _has_weights(node: Node) -> bool:
    """Return whether a node multiplies what comes in by weights, as a layer or as an operator."""
    if node.cell is not None and any(True for _ in node.cell.get_parameters()):
        return True
    return is_convolution(node) or (
        node.name in PRODUCTS and any(one.constant for one in node.inputs)
    )


def _comes_before(node: Node, end: Node) -> bool:
    """Return whether ``end`` is made from ``node``."""
    pending, seen = [end], {end}
    while pending:
        fresh = [one for one in pending.pop().inputs if one not in seen]
        seen.update(fresh)
        pending += fresh
    return node in seen


def _sources(graph: Graph) -> dict[Node, frozenset[Node]]:
    """Return for each node the inputs of the network that it depends on."""
    found: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        inputs = [found[one] for one in node.data]
        found[node] = frozenset().union(*inputs) if node.inputs else frozenset((node,))
    return found


__all__ = [
    "Removal",
    "classify",
    "find_classifier",
    "is_batch_norm",
    "is_convolution",
    "own_construct",
]
