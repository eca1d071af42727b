"""The switch ``cheaper_operators``: layers and operators of the network put into another form."""

from __future__ import annotations

from collections import Counter

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import Algorithm, Build
from mindspore_boost_ext.cheaper_operators.operators import KNOWN, CheaperCell
from mindspore_boost_ext.report import SKIPPED
from mindspore_boost_ext.runtime.cells import exchange, layers_of


class CheaperOperatorsAlgorithm(Algorithm):
    """Cheaper operators."""

    switch = "cheaper_operators"

    def build(self, build: Build) -> None:
        """Replace what is known, in place."""
        network, target = build.network, ms.get_context("device_target")
        if target == "CPU":
            self._replace(network, build)
        found = layers_of(network, (CheaperCell,))
        if found:
            counts = Counter(KNOWN[type(one.plain)].name for one in found)
            reason = "the same values by faster operators"
            build.applied(self.switch, reason, counts)
            return
        reason = "no layer holds one of its operators; those called as functions are not seen"
        if target != "CPU":
            reason = f"MindSpore's operators are slow on CPU, and stay as they are on {target}"
        build.report.update(self.switch, SKIPPED, reason)

    @staticmethod
    def _replace(network: nn.Cell, build: Build) -> None:
        table = cheaper_operators(network)
        back = {id(one): one.plain for one in table.values()}
        build.on_failure(lambda: exchange(network, back))
        exchange(network, table)


def cheaper_operators(network: nn.Cell) -> dict[int, CheaperCell]:
    """Return what takes the place of the layers and operators of a network, by their ids."""
    done = {id(one.plain) for one in layers_of(network, (CheaperCell,))}
    cells = [cell for _, cell in network.cells_and_names()]
    layers = [cell for cell in cells if not _compat.has_hooks(cell)]
    operators = [one for cell in cells for one in _compat.primitives(cell).values()]
    return {
        id(plain): KNOWN[type(plain)].replacement(plain)
        for plain in [*layers, *operators]
        if id(plain) not in done and type(plain) in KNOWN and KNOWN[type(plain)].fits(plain)
    }
