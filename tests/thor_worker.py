"""What a rank does for ``test_thor_distributed.py``: trains with THOR on its half of the data."""

from __future__ import annotations

import nets
from mindspore import Tensor
from thor_cases import pairs, train_layer

STEPS, FREQUENCY = 4, 2


def weights(rank):
    """Train on the half of a rank; return the weights."""
    step, _ = train_layer([], frequency=FREQUENCY)
    for x, target in pairs(STEPS):
        half = slice(4 * rank, 4 * rank + 4)
        step(Tensor(x[half]), Tensor(target[half]))
    return {name: value.tolist() for name, value in nets.weights(step).items()}
