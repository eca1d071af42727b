"""The switch ``less_bn``: rewrites the network, rebuilds the optimizer, centralizes gradients."""

from __future__ import annotations

from mindspore import Parameter, nn

from mindspore_boost_ext.algorithm import Algorithm, Build
from mindspore_boost_ext.base.arguments import check_optimizer, innermost
from mindspore_boost_ext.base.centralization import place_of_rule
from mindspore_boost_ext.base.rebuild import ParameterProcess
from mindspore_boost_ext.grad_freeze.optimizer import rebuilt_with_groups
from mindspore_boost_ext.gradient_centralization.algorithm import centralized_weights
from mindspore_boost_ext.less_batch_normalization.cell import warn_of
from mindspore_boost_ext.less_batch_normalization.head import no_classes
from mindspore_boost_ext.less_batch_normalization.rewrite import KEPT, Rewriting, less_bn
from mindspore_boost_ext.report import APPLIED, SKIPPED, Row
from mindspore_boost_ext.thor.optimizer import thor_of

_CENTRALIZATION = "gradient centralization"
_CENTRALIZES = "; less_bn.gc_flag still centralizes gradients"


class LessBNAlgorithm(Algorithm):
    """LessBN, its head, and gradient centralization."""

    switch = "less_bn"
    needs_nn_optimizer = True

    def __init__(self) -> None:
        # What the user's optimizer does not train, then what the trained network keeps, too.
        self._frozen: frozenset[str] = frozenset()
        self._multipliers: dict[int, Parameter] = {}  # of heads, by ids of their weights
        self._no_head = ""  # why none is put in unasked, also not into a network for evaluation

    def build(self, build: Build) -> None:
        """Rewrite the network, and fit the optimizer to its parameters."""
        trained = {id(one) for one in getattr(build.optimizer, "parameters", ())}
        parameters = build.network.trainable_params() if trained else ()
        self._frozen = frozenset(one.name for one in parameters if id(one) not in trained)
        section = build.config.less_bn
        if section.fn_flag and not section.heads:
            self._no_head = no_classes(build.network, build.loss_fn)
        rewriting = self._rewritten(build.network, build)
        # A separate network for evaluation keeps the same layers, also where these have hooks.
        kept = [one.name for one in rewriting.changes if one.done == KEPT and not one.is_head]
        self._frozen |= {f"{name}.{part}" for name in kept for part in ("gamma", "beta")}
        self._multipliers = {id(head.weight): head.multiplier for head in rewriting.heads}
        build.regroupings.append(rewriting.regrouped)
        centralize = self._centralized(build) if build.config.less_bn.gc_flag else {}
        warn_of(rewriting, _CENTRALIZES if centralize else "")
        build.report.put(*rewriting.rows(build.report[self.switch].asked_by))
        build.optimizer = _rebuilt_for(build.optimizer, rewriting, centralize)
        points = build.config.common.gradient_split_groups
        ParameterProcess().assign_parameter_group(build.network.trainable_params(), points)

    def evaluate(self, network: nn.Cell, build: Build) -> None:
        """Rewrite a network for evaluation like the trained one."""
        rewriting = self._rewritten(network, build)
        for head in rewriting.heads:
            # A Dense of its own may share the trained weight.
            head.multiplier = self._multipliers.get(id(head.weight), head.multiplier)
        if rewriting.is_new:
            reason = "a separate network, rewritten like the trained one"
            row = Row("less_bn (evaluation)", self.switch, APPLIED, reason, rewriting.counts)
            build.report.put(row)

    def _centralized(self, build: Build) -> dict[str, int]:
        """Return whose gradients to centralize; none if the optimizer has no place for it."""
        found = centralized_weights(build, _CENTRALIZATION, self.switch)
        if found and not place_of_rule(innermost(build.optimizer)):
            reason = f"{type(build.optimizer).__name__} never calls gradients_centralization"
            build.report.put(Row(_CENTRALIZATION, self.switch, SKIPPED, reason))
            return {}
        return found

    def _rewritten(self, network: nn.Cell, build: Build) -> Rewriting:
        """Rewrite a network in place."""
        section = build.config.less_bn
        settings = {name: value for name, value in vars(section).items() if name != "gc_flag"}
        if self._no_head:
            settings["fn_flag"] = False
            build.report.put(Row("less_bn head", "less_bn", KEPT, self._no_head))
        # The head costs accuracy: it comes only with removed BatchNorms, or if ``heads`` names it.
        rewriting = less_bn(
            network, **settings, head_alone=False, frozen=self._frozen, loss_fn=build.loss_fn
        )
        build.on_failure(rewriting.undo)
        return rewriting


def _rebuilt_for(
    optimizer: nn.Cell, rewriting: Rewriting, centralize: dict[str, int]
) -> nn.Optimizer:
    """Return an optimizer over the parameters of a rewritten network.

    If nothing is to change, it is ``optimizer`` itself. A ``FreezeOpt`` keeps groups and schedule.
    """
    trained = {id(parameter) for parameter in getattr(optimizer, "parameters", ())}
    removed = [one for one in rewriting.removed_parameters if id(one) in trained]
    added = [one for one in rewriting.added_parameters if id(one) not in trained]
    if thor_of(optimizer) is not None and (removed or added):
        raise ValueError(
            "less_bn has changed the network for which THOR was made: use the section 'thor' with "
            "a plain optimizer, or call LessBN(network) before THOR"
        )
    check_optimizer(optimizer, "less_bn")
    if not (removed or added or centralize):
        return optimizer
    return rebuilt_with_groups(optimizer, removed, added, centralize)
