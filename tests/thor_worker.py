"""One rank of ``test_thor_distributed.py``: trains with THOR on its half of the data."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import nets
from mindspore import Tensor
from mindspore.communication import get_rank, init
from test_thor import pairs, train

STEPS, FREQUENCY = 4, 2


def main(mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    step, _ = train([], frequency=FREQUENCY)
    for x, target in pairs(STEPS):
        half = slice(4 * rank, 4 * rank + 4)
        step(Tensor(x[half]), Tensor(target[half]))
    weights = {name: value.tolist() for name, value in nets.weights(step).items()}
    with open(f"{folder}/rank{rank}.json", "w", encoding="utf-8") as file:
        json.dump(weights, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
