"""The switch ``cheaper_operators``: layers and operators of the network put into another form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, Build
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell
from mindspore_boost_ext.cheaper_operators.known import KNOWN
from mindspore_boost_ext.report import APPLIED, SKIPPED
from mindspore_boost_ext.runtime.cells import exchange, layers_of

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell

_REASON = "the same values by faster operators"


class CheaperOperatorsAlgorithm(Algorithm):
    """Cheaper operators."""

    switch = "cheaper_operators"

    def build(self, build: Build) -> None:
        """Replace what is known, in place."""
        network, target = build.network, ms.get_context("device_target")
        table = _exchanged(network, build.switches)
        back = {id(one): one.plain for one in table.values()}
        build.on_failure(lambda: exchange(network, back))
        found = layers_of(network, (CheaperCell,))
        if found:
            build.applied(self.switch, _REASON, _counts(found))
            return
        reason = "no layer holds one of its operators; those called as functions are not seen"
        if target != "CPU":
            reason = f"MindSpore's operators are slow on CPU, and stay as they are on {target}"
        elif cheaper_operators(network):
            reason = (
                "in PYNATIVE_MODE BatchNorm1d, GroupNorm, LayerNorm, ELU, padding and losses stay "
                "as they are without compiled_step"
            )
        build.report.update(self.switch, SKIPPED, reason)

    def join(self, step: BoostTrainOneStepCell) -> None:
        """Replace what the Model's loss holds, and count, now that layers have their dtypes."""
        if not self.is_on(step):
            return
        _exchanged(step.network, step.auto_boost.boost_config)
        found = layers_of(step.network, (CheaperCell,))
        used = [one for one in found if not (one.fp16 or one.bf16)]
        if used:
            reason = _REASON if found == used else f"{_REASON}; layers of 16 bits keep MindSpore's"
            step.report().update(self.switch, APPLIED, reason, _counts(used))
        elif found:
            reason = "all of its layers compute in 16 bits, by MindSpore's own"
            step.report().update(self.switch, SKIPPED, reason)


def _exchanged(network: nn.Cell, switches: Mapping[str, Any]) -> dict[int, CheaperCell]:
    """Replace what is known, and return what takes which place."""
    if ms.get_context("device_target") != "CPU":
        return {}
    eager = ms.get_context("mode") != ms.GRAPH_MODE and not switches["compiled_step"]
    table = cheaper_operators(network, eager)
    exchange(network, table)
    return table


def _counts(found: Sequence[CheaperCell]) -> Counter[str]:
    return Counter(one.counted_as for one in found)  # mixed precision may have wrapped ``plain``


def cheaper_operators(network: nn.Cell, eager: bool = False) -> dict[int, CheaperCell]:
    """Return what takes the place of the layers and operators of a network, by their ids.

    ``eager`` says whether Python runs it, operator by operator.
    """
    placed = layers_of(network, (CheaperCell,))
    done = {id(one.plain) for one in placed}
    own = {id(cell) for one in placed for _, cell in one.cells_and_names()}  # no layers of the user
    cells = [cell for _, cell in network.cells_and_names() if id(cell) not in own]
    held: dict[int, tuple[Any, nn.Cell | None]]
    held = {id(cell): (cell, None) for cell in cells if not _compat.has_hooks(cell)}
    for holder in cells:
        held.update({id(one): (one, holder) for one in _compat.primitives(holder).values()})
    found = {}
    for place, (plain, holder) in held.items():
        known = KNOWN.get(type(plain))
        if known is None or place in done or known.holder not in (None, type(holder)):
            continue
        if known.fits(plain) and (known.eagerly or not eager):
            found[place] = known.replacement(plain)
    return found
