"""One rank of ``test_distributed.py``: trains on its half of the data, saves what it ends with."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import nets
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

import mindspore_boost_ext
from mindspore_boost_ext import GroupLossScaleManager

STEPS, OVERFLOW_AT = 6, 2


class CountingReducer(nn.Cell):
    """Counts, in PYNATIVE_MODE, how often gradients are reduced over the ranks."""

    def __init__(self, reducer):
        super().__init__(auto_prefix=False)
        self.reducer = reducer
        self.__dict__["calls"] = []

    def construct(self, gradients):
        self.calls.append(1)
        return self.reducer(gradients)


def marked():
    manager = GroupLossScaleManager([64.0, 4.0], [], growth_factor=2.0, shrink_factor=0.5)

    class Marked(nets.Deep):
        def construct(self, x):
            x = self.first(manager(x, 0, 1))
            return manager(self.last(manager(x, 1, 2)), 2, 3)

    net = Marked()
    del net.hidden
    groups = [net.first.trainable_params(), net.last.trainable_params()]
    manager.loss_scale_groups = groups
    return net, manager


def case(name):
    switches = dict.fromkeys(mindspore_boost_ext.AutoBoost().boost_config, False)
    config = {"boost": {"mode": "manual", **switches}}
    manager = None
    net = nets.Deep()
    if name == "accumulation":
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
    elif name == "freezing":
        config["boost"]["grad_freeze"] = True
        config["grad_freeze"] = {"param_groups": 3, "schedule": [0, 1, 2], "total_steps": 3}
    elif name == "dynamic":
        manager = ms.DynamicLossScaleManager(64, 2, 2)
    elif name == "grouped":
        config["boost"]["loss_scale_group"] = True
        net, manager = marked()
    settings = {} if manager is None else {"loss_scale_manager": manager}
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    model = ms.Model(
        net, nets.loss_fn(), optimizer, boost_level="O1", boost_config_dict=config, **settings
    )
    return net, model.train_network


def main(mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    results = {}
    for name in ("plain", "accumulation", "freezing", "dynamic", "grouped"):
        net, step = case(name)
        if mode == "pynative" and name == "accumulation":
            step.window_reducer = CountingReducer(step.window_reducer)
        for index, (x, y) in enumerate(nets.batches(STEPS)):
            half = slice(4 * rank, 4 * rank + 4)
            x, y = x[half].copy(), y[half]
            if index == OVERFLOW_AT and rank == 1 and name in ("dynamic", "grouped"):
                x[0, 0] = np.inf  # on this rank alone
            step(Tensor(x), Tensor(y))
        counted = getattr(step.window_reducer, "calls", None)
        results[name] = {
            "weights": {key: value.tolist() for key, value in nets.weights(net).items()},
            "observations": step.observations(),
            "reductions": None if counted is None else len(counted),
        }
    with open(f"{folder}/rank{rank}.json", "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
