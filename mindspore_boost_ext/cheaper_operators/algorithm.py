"""The switch ``cheaper_operators``: replaces layers and operators of the network by faster ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, Build, StepCell
from mindspore_boost_ext.base.cells import exchange, has_replaced_construct, layers_of
from mindspore_boost_ext.base.sums import is_on_cpu
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.cheaper_operators.functions import CalledFunctions
from mindspore_boost_ext.cheaper_operators.known import KNOWN
from mindspore_boost_ext.report import APPLIED, SKIPPED


class CheaperOperatorsAlgorithm(Algorithm):
    """Cheaper operators."""

    switch = "cheaper_operators"

    def build(self, build: Build) -> None:
        """Replace the layers and operators that are known, in place."""
        network, eager = build.network, _is_eager(build.switches)
        table = _exchanged(network, eager)
        back = {id(one): one.plain for one in table.values()}
        build.on_failure(lambda: exchange(network, back))
        build.report.update(self.switch, *_outcome(network, eager))

    def join(self, step: StepCell) -> None:
        """Replace those in the Model's loss, too; count all, now that layers have their dtypes."""
        if not self.is_on(step):
            return
        network, rows = step.network, step.report()  # with the step, it would refer to itself
        eager = _is_eager(step.auto_boost.boost_config)
        _exchanged(network, eager)

        def report(called: Collection[str] | None = None) -> None:
            rows.update(self.switch, *_outcome(network, eager, called))

        report()
        if is_on_cpu() and not eager:
            step.surrounding_part = CalledFunctions(report).in_place


def _is_eager(switches: Mapping[str, Any]) -> bool:
    """Return whether Python runs the network, operator by operator."""
    return ms.get_context("mode") != ms.GRAPH_MODE and not switches["compiled_step"]


def _exchanged(network: nn.Cell, eager: bool) -> dict[int, CheaperCell]:
    """Replace what is known; return the replacements by the ids of what they replace."""
    table = cheaper_operators(network, eager) if is_on_cpu() else {}
    exchange(network, table)
    return table


def _outcome(
    network: nn.Cell, eager: bool, called: Collection[str] | None = None
) -> tuple[str, str, Counter[str]]:
    """Return status, reason and counts; ``called`` is None until the first step has shown it."""
    found = layers_of(network, (CheaperCell,))
    used = [one for one in found if not (one.fp16 or one.bf16)]
    counts = Counter(one.counted_as for one in used)  # mixed precision may have wrapped ``plain``
    if used or called:
        sixteen = "" if found == used else "; 16-bit layers keep MindSpore's"
        functions = f"; functions called: {', '.join(sorted(called))}" if called else ""
        return APPLIED, f"the same values by faster operators{sixteen}{functions}", counts
    return SKIPPED, _idle(network, eager, bool(found), called is not None), counts


def _idle(network: nn.Cell, eager: bool, in_16_bits: bool, has_run: bool) -> str:
    """Return why nothing is replaced."""
    if not is_on_cpu():
        target = ms.get_context("device_target")
        return f"only MindSpore's CPU operators are slow; those on {target} stay"
    if in_16_bits:
        return "all of these layers compute in 16 bits, with MindSpore's operators"
    if eager and cheaper_operators(network):
        return (
            "in PYNATIVE_MODE BatchNorm1d, GroupNorm, LayerNorm, ELU, padding and losses stay "
            "as they are without compiled_step"
        )
    if eager:
        return "no layer has an operator to replace; functions need graphs: add compiled_step"
    if has_run:
        return (
            "no layer has an operator to replace, and no function in the first step's graphs has "
            "a size that gains"
        )
    return "no layer has an operator to replace; the first step shows which functions are called"


def cheaper_operators(network: nn.Cell, eager: bool = False) -> dict[int, CheaperCell]:
    """Return the replacements of a network's layers and operators, by the ids of these.

    ``eager`` says whether Python runs the network, operator by operator.
    """
    placed = layers_of(network, (CheaperCell,))
    done = {id(one.plain) for one in placed}
    own = {id(cell) for one in placed for _, cell in one.cells_and_names()}  # not the user's layers
    cells = [cell for _, cell in network.cells_and_names() if id(cell) not in own]
    held: dict[int, tuple[Any, nn.Cell | None]]
    held = {
        id(cell): (cell, None)
        for cell in cells
        if not (_compat.has_hooks(cell) or has_replaced_construct(cell))
    }
    for holder in cells:
        held.update({id(one): (one, holder) for one in _compat.primitives(holder).values()})
    found = {}
    for place, (plain, holder) in held.items():
        known = KNOWN.get(type(plain))
        if known is None or place in done or known.holder not in (None, type(holder)):
            continue
        # Recomputed are all operators but a Cell's last: then statistics would move twice.
        if isinstance(holder, nn.BatchNorm1d) and _compat.is_recomputed(holder):
            continue
        if known.fits(plain) and (known.eagerly or not eager):
            found[place] = known.replacement(plain)
    return found
