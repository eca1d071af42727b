"""What cheaper operators replace in a network, for the tests of several of them."""

from __future__ import annotations

import contract
import nets
from mindspore import nn

from mindspore_boost_ext import AutoBoost


def replaced(net, compiled=True):
    """Return the row of the report after AutoBoost has seen a network that trains nothing.

    With a compiled step, as LayerNorm is left alone in PYNATIVE_MODE without.
    """
    config = contract.switched(cheaper_operators=True, compiled_step=compiled)
    boost = AutoBoost("O1", config)
    with_weight = nn.CellList([net, nn.Dense(2, 2)])
    boost.network_auto_process_train(with_weight, nets.momentum(with_weight.trainable_params()))
    return boost.report()["cheaper_operators"]
