"""LessBN: removes most BatchNorms of a residual network, and can normalise its classifier."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.cells import (
    check_cells,
    copy_settings,
    exchange,
    is_a,
    layers_of,
    name_of,
    parameters_in_lists,
)
from mindspore_boost_ext.base.order import names_in_code
from mindspore_boost_ext.base.randomness import kept_random_numbers
from mindspore_boost_ext.config.sections import LessBNConfig
from mindspore_boost_ext.less_batch_normalization.copies import everything_in
from mindspore_boost_ext.less_batch_normalization.graph import Graph
from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN, in_place_of
from mindspore_boost_ext.less_batch_normalization.residual_blocks import (
    OUTSIDE,
    Removal,
    classify,
    find_classifier,
)
from mindspore_boost_ext.less_batch_normalization.steps import BATCH_NORMS, does_else, own_construct
from mindspore_boost_ext.less_batch_normalization.tracing import trace_both
from mindspore_boost_ext.report import APPLIED, SKIPPED, NoEffectWarning, Row, warn

REMOVED, KEPT, NORMALISED = "removed", "kept", "normalised"
_HOOKED = "it has hooks"
Patterns = Sequence[str]


class RemovedBatchNorm(nn.Identity):
    """Replaces a BatchNorm, keeps its settings, and returns its input."""

    def __init__(self, batch_norm: nn.Cell) -> None:
        super().__init__()
        copy_settings(batch_norm, self)
        # The name and parameters of the layer, which this Cell does not own.
        self.__dict__["before"] = name_of(batch_norm.gamma), tuple(batch_norm.get_parameters())


@dataclass(frozen=True)
class Change:
    """What was done to one layer.

    Attributes:
        name: the layer, as in the names of its parameters.
        done: ``"removed"``, ``"kept"`` or ``"normalised"``.
        reason: why.
        now: whether it was done now, and not by an earlier rewriting.
        is_head: whether it is a classifier, or says why there is none.
    """

    name: str
    done: str
    reason: str
    now: bool = True
    is_head: bool = False


@dataclass(frozen=True)
class Rewriting:
    """What was done to a network.

    Attributes:
        changes: one entry for each BatchNorm, and one for the head if it was asked for.
        removed_parameters: parameters of removed layers, also of earlier rewritings.
        heads: the normalised heads, also of earlier rewritings.
        network: what was rewritten.
        exchanged: each Cell put in now, with the one that it replaced.
    """

    changes: tuple[Change, ...]
    removed_parameters: tuple[Parameter, ...]
    heads: tuple[CommonHeadLastFN, ...]
    network: nn.Cell
    exchanged: tuple[tuple[nn.Cell, nn.Cell], ...]

    def undo(self) -> None:
        """Put back the Cells that were taken out now."""
        exchange(self.network, {id(ours): theirs for ours, theirs in self.exchanged})

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters that the network has gained: the multipliers of the heads."""
        return tuple(head.multiplier for head in self.heads)

    def regrouped(self, groups: Iterable[Iterable[Parameter]]) -> list[list[Parameter]]:
        """Turn groups of the original parameters into groups of the rewritten network's.

        A multiplier joins the group that has the weight of its head.
        """
        gone = {id(parameter) for parameter in self.removed_parameters}
        multipliers = {id(head.weight): head.multiplier for head in self.heads}
        found = []
        for group in groups:
            left = [one for one in group if id(one) not in gone]
            joining = [multipliers[id(one)] for one in left if id(one) in multipliers]
            present = {id(one) for one in left}
            found.append(left + [one for one in joining if id(one) not in present])
        return found

    @property
    def counts(self) -> dict[str, int]:
        """How many BatchNorms are gone, how many are left, how many heads are normalised."""
        norms = [change.done for change in self.changes if not change.is_head]
        heads = [change.done for change in self.changes if change.is_head]
        counts = {f"batch_norms_{what}": norms.count(what) for what in (REMOVED, KEPT)}
        return {**counts, "heads_normalised": heads.count(NORMALISED)}

    @property
    def has_effect(self) -> bool:
        """Whether the network differs from the original, now or since an earlier rewriting."""
        return any(change.done != KEPT for change in self.changes)

    @property
    def is_new(self) -> bool:
        """Whether something was changed now."""
        return any(change.now and change.done != KEPT for change in self.changes)

    def rows(self, asked_by: str) -> Iterator[Row]:
        """Yield the row of less_bn in a report, and one for each layer."""
        status = APPLIED if self.has_effect else SKIPPED
        reason = "" if self.has_effect else "nothing in the network could be changed"
        yield Row("less_bn", asked_by, status, reason, self.counts)
        for change in self.changes:
            yield Row(f"less_bn {change.name}", "less_bn", change.done, change.reason)


@dataclass
class _Plan:
    """Which layers to exchange (compared by identity), and the reason for each."""

    network: nn.Cell
    settings: LessBNConfig
    head_alone: bool
    frozen: Collection[str]
    loss_fn: nn.Cell | None
    graphs: list[Graph]
    exchanged: list[tuple[nn.Cell, nn.Cell]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fixed = {key: why for graph in self.graphs for key, why in graph.fixed.items()}

    def norms(self) -> None:
        """Decide on every BatchNorm."""
        removals = _removals(self.graphs)
        failures, above = _failures(self.graphs)
        elsewhere = _held_elsewhere(self.network, self.loss_fn)
        elsewhere.update(*(graph.read for graph in self.graphs))
        for cell in layers_of(self.network, (*BATCH_NORMS, RemovedBatchNorm)):
            if isinstance(cell, RemovedBatchNorm):
                self.changes.append(Change(cell.before[0], REMOVED, "removed before", now=False))
                continue
            name = name_of(cell.gamma)
            removal = removals.get(id(cell), Removal(False, does_else(cell) or "never called"))
            against = self._against_removal(cell, removal, elsewhere)
            if against == OUTSIDE:  # as far as is known
                against = above.get(id(cell), against)
            # Code that was not understood explains more than what was seen without it.
            against = failures.get(id(cell), against) if against else self._objection(name, removal)
            if against:
                self.changes.append(Change(name, KEPT, against))
                continue
            self.exchanged.append((RemovedBatchNorm(cell), cell))
            self.changes.append(Change(name, REMOVED, removal.reason))

    def _against_removal(self, norm: nn.Cell, removal: Removal, elsewhere: set[int]) -> str:
        """Return why a BatchNorm cannot go; empty if it can."""
        if any(id(one) in elsewhere for one in (norm, norm.gamma, norm.beta)):
            return "other code reads its parameters"
        if _compat.has_hooks(norm):
            return _HOOKED
        if self.network.training and not norm.training:
            return "it is in evaluation mode while the network trains"
        if not (self._trains(norm.gamma) or self._trains(norm.beta)):
            return "its scale and shift are not trained, as in a frozen part"
        return self.fixed.get(id(norm), "") if removal.removable else removal.reason

    def _trains(self, parameter: Parameter) -> bool:
        return bool(parameter.requires_grad) and parameter.name not in self.frozen

    def _objection(self, name: str, removal: Removal) -> str:
        """Return why the user wants a removable BatchNorm to stay; empty if not."""
        if removal.shortcut and self.settings.keep_shortcut:
            return "on a shortcut, and keep_shortcut is set"
        if self.settings.include is not None and not _matches(name, self.settings.include):
            return "no pattern of include matches"
        return "a pattern of exclude matches" if _matches(name, self.settings.exclude) else ""

    def idle_patterns(self) -> list[str]:
        """Return the patterns that match no layer."""
        settings = self.settings
        norms = [change.name for change in self.changes if not change.is_head]
        layers = layers_of(self.network, (nn.Dense, CommonHeadLastFN))
        dense = [name_of(layer.weight) for layer in layers]
        asked = [(one, norms) for one in (*(settings.include or ()), *settings.exclude)]
        asked += [(head, dense) for head in settings.heads or ()]
        return [pattern for pattern, names in asked if not fnmatch.filter(names, pattern)]

    def heads(self) -> None:
        """Decide on the classifier, or on the Dense layers that the user names."""
        for head in layers_of(self.network, (CommonHeadLastFN,)):
            name = name_of(head.weight)
            self.changes.append(Change(name, NORMALISED, "before", now=False, is_head=True))
        dense_layers, reason = self._classifiers()
        if not dense_layers:
            self.changes.append(Change("head", KEPT, reason, is_head=True))
        for dense in dense_layers:
            name, against = name_of(dense.weight), self._against_head(dense)
            if against:
                self.changes.append(Change(name, KEPT, against, is_head=True))
                continue
            self.exchanged.append((in_place_of(dense, self.settings.multiplier), dense))
            self.changes.append(Change(name, NORMALISED, reason, is_head=True))

    def _against_head(self, dense: nn.Dense) -> str:
        """Return why a Dense cannot be normalised; empty if it can."""
        if dense is self.network:
            return "the network itself is this Dense: put it into a Cell"
        if _compat.has_hooks(dense):
            return _HOOKED
        if not self._trains(dense.weight):
            return "its weight is not trained, as in a frozen part"
        return own_construct(dense) or self.fixed.get(id(dense), "")

    def _classifiers(self) -> tuple[list[nn.Dense], str]:
        """Return the Dense layers to normalise, and why these or none."""
        patterns = self.settings.heads
        if patterns is not None:
            layers = layers_of(self.network, (nn.Dense,))
            named = [layer for layer in layers if _matches(name_of(layer.weight), patterns)]
            return named, "a pattern of heads matches" if named else "no Dense matches heads"
        if self.head_alone or any(change.done == REMOVED for change in self.changes):
            return find_classifier(self.graphs[0])
        return [], "no BatchNorm was removed: to normalise a Dense anyway, name it in less_bn.heads"


def _held_elsewhere(network: nn.Cell, loss_fn: nn.Cell | None) -> set[int]:
    """Return ids of Parameters that Cells other than BatchNorms hold, as attributes or in lists.

    The code of these Cells may read them, as a penalty on the scales of BatchNorms does.
    """
    roots = [network] if loss_fn is None else [network, loss_fn]
    cells = [cell for root in roots for _, cell in root.cells_and_names()]
    held: list[object] = []
    for cell in cells:
        is_ours = type(cell).__module__.startswith("mindspore_boost_ext.")
        if not (is_ours or is_a(cell, BATCH_NORMS)):
            read = names_in_code(cell)
            held += [*_compat.own_parameters(cell).values(), *parameters_in_lists(cell)]
            held += [value for name, value in vars(cell).items() if name in read]
    return {id(one) for one in everything_in(held) if issubclass(type(one), Parameter)}


def less_bn(
    network: nn.Cell,
    fn_flag: bool = False,
    *,
    keep_shortcut: bool = False,
    include: Patterns | None = None,
    exclude: Patterns = (),
    multiplier: float = 1.0,
    heads: Patterns | None = None,
    head_alone: bool = True,
    frozen: Collection[str] = (),
    loss_fn: nn.Cell | None = None,
) -> Rewriting:
    """Rewrite a network in place; a second call changes nothing.

    Patterns are those of a shell (``"layer1.*"``). They match the names of layers as they are in
    the names of parameters, such as ``"layer1.0.bn1"``.

    Args:
        network (Cell): the network, with or without its loss.
        fn_flag (bool): whether to normalise the classifier. Default: ``False``.
        keep_shortcut (bool): whether BatchNorms on shortcuts stay. Default: ``False``.
        include (Sequence[str], optional): patterns of BatchNorms that may go. Default: None, all.
        exclude (Sequence[str]): patterns of BatchNorms that stay. Default: ``()``.
        multiplier (float): initial multiplier of the head, > 0. Default: ``1.0``.
        heads (Sequence[str], optional): patterns of the Dense layers to normalise instead of the
            classifier. Default: None.
        head_alone (bool): whether the classifier is normalised even if no BatchNorm is removed.
            Default: ``True``.
        frozen (Collection[str]): names of Parameters that no optimizer trains. Their layers stay,
            like those without ``requires_grad``: they could not relearn what is lost.
            Default: ``()``.
        loss_fn (Cell, optional): the loss, if ``network`` is without it. BatchNorms whose
            parameters it holds stay. Default: None.

    Returns:
        Rewriting, what was done and why.

    Raises:
        TypeError: if ``network`` is not a Cell.
        ValueError: for everything wrong with the settings, all in one message.

    Examples:
        >>> from mindspore import nn
        >>> from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn
        >>> class Block(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv1, self.conv2 = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        ...         self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        ...         self.relu = nn.ReLU()
        ...     def construct(self, x):
        ...         y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        ...         return self.relu(x + y)
        >>> for change in less_bn(Block()).changes:
        ...     print(change.name, change.done)
        bn1 removed
        bn2 kept
    """
    check_cells(network=network)
    settings = LessBNConfig(**LessBNConfig.check(LessBNConfig.path, **locals()))
    with kept_random_numbers():
        graphs = trace_both(network)
    plan = _Plan(network, settings, head_alone, frozen, loss_fn, graphs)
    with _fixed_at_rest(network):
        plan.norms()
    if fn_flag:
        plan.heads()
    idle = plan.idle_patterns()
    if idle:
        warn(f"less_bn: no layer matches {', '.join(map(repr, idle))}", NoEffectWarning)
    exchange(network, {id(theirs): ours for ours, theirs in plan.exchanged})
    normalised = tuple(layers_of(network, (CommonHeadLastFN,)))
    removed = _removed_parameters(network)
    return Rewriting(tuple(plan.changes), removed, normalised, network, tuple(plan.exchanged))


@contextlib.contextmanager
def _fixed_at_rest(network: nn.Cell) -> Iterator[None]:
    """Let BatchNorms in evaluation mode, in a network that trains, say that statistics are fixed.

    They do not remove the scale, which the removal of one before them would set free.
    """
    norms = layers_of(network, BATCH_NORMS) if network.training else []
    in_evaluation = [(norm, norm.use_batch_statistics) for norm in norms if not norm.training]
    for one, _ in in_evaluation:
        one.use_batch_statistics = False
    try:
        yield
    finally:
        for one, before in in_evaluation:
            one.use_batch_statistics = before


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _removals(graphs: Iterable[Graph]) -> dict[int, Removal]:
    """Return one removal for each BatchNorm; if it must stay in one place, it stays."""
    found: dict[int, Removal] = {}
    for graph in graphs:
        for node, removal in classify(graph).items():
            before = found.get(id(node.cell))
            if before is None or before.removable:
                found[id(node.cell)] = removal
    return found


def _failures(graphs: Iterable[Graph]) -> tuple[dict[int, str], dict[int, str]]:
    """Return why code was not understood, for each Cell directly in one with such, and deeper."""
    failures = [one for graph in graphs for one in graph.failures.items()]

    def by_id(parts: Callable[[nn.Cell], Iterable[nn.Cell]]) -> dict[int, str]:
        return {id(part): reason for failed, reason in failures for part in parts(failed)}

    return by_id(nn.Cell.cells), by_id(lambda cell: (one for _, one in cell.cells_and_names()))


def _removed_parameters(network: nn.Cell) -> tuple[Parameter, ...]:
    """Return the parameters of removed layers that no other Cell of the network has."""
    removed = layers_of(network, (RemovedBatchNorm,))
    left = {id(parameter) for parameter in network.get_parameters()}
    parameters = dict.fromkeys(one for cell in removed for one in cell.before[1])
    return tuple(one for one in parameters if id(one) not in left)
