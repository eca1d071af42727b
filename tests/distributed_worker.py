"""One rank of ``test_distributed.py``: trains on its share of the data, saves what it ends with."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import adasum_cases
import mindspore as ms
import nets
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

import mindspore_boost_ext
from mindspore_boost_ext import AdaSum, GroupLossScaleManager

STEPS, OVERFLOW_AT = 6, 2
OVERFLOWING = ("dynamic", "grouped", "adasum dynamic")
PLAIN = ("plain", "accumulation", "freezing", "dynamic", "grouped")
ADASUM = ("adasum", "adasum servers", "adasum adam")
ADASUM += ("adasum clipped accumulation norm", "adasum freezing", "adasum dynamic")
# What runs where: start-up and compilation of many processes are what costs time.
CASES = {
    (2, "graph"): (*PLAIN, "sum", "adasum"),
    (2, "pynative"): PLAIN,
    (3, "graph"): ("adasum",),
    (4, "graph"): ("plain", *ADASUM),
    (4, "pynative"): ("adasum servers", "adasum dynamic"),
    (8, "graph"): ("plain", "adasum servers"),
}
STEPS_OF = {"adasum": 20}


class CountingReducer(nn.Cell):
    """Counts, in PYNATIVE_MODE, how often gradients are reduced over the ranks."""

    def __init__(self, reducer):
        super().__init__(auto_prefix=False)
        self.reducer = reducer
        self.__dict__["calls"] = []

    def construct(self, gradients):
        self.calls.append(1)
        return self.reducer(gradients)


class NormNet(nn.Cell):
    """Dense, BatchNorm, Dense: statistics in the step."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(nets.FEATURES, nets.HIDDEN)
        self.norm = nn.BatchNorm1d(nets.HIDDEN)
        self.last = nn.Dense(nets.HIDDEN, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.last(self.norm(self.first(x)))


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


def case(name, adasum=True):
    """Return the network and the training step of a case, AdaSum switched off if so asked."""
    switches = dict.fromkeys(mindspore_boost_ext.AutoBoost().boost_config, False)
    config = {"boost": {"mode": "manual", **switches}}
    manager = None
    net = network(name)
    if name.startswith("adasum") and adasum:
        config["boost"]["adasum"] = True
        config["common"] = {"device_number": devices(name)}
    if "accumulation" in name:
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
    elif name.endswith("freezing"):
        config["boost"]["grad_freeze"] = True
        config["grad_freeze"] = {"param_groups": 3, "schedule": [0, 1, 2], "total_steps": 3}
    elif name.endswith("dynamic"):
        manager = ms.DynamicLossScaleManager(64, 2, 2)
    elif name == "grouped":
        config["boost"]["loss_scale_group"] = True
        net, manager = marked()
    if "clipped" in name:
        config["gradients"] = {"clip_norm": 0.1}
    settings = {} if manager is None else {"loss_scale_manager": manager}
    model = ms.Model(
        net,
        nets.loss_fn(),
        optimizer(name, net.trainable_params()),
        boost_level="O1",
        boost_config_dict=config,
        **settings,
    )
    return net, model.train_network


def network(name):
    if name.endswith("norm"):
        return NormNet()
    small = name.startswith("adasum") and not name.endswith("freezing")
    return nets.MLP() if small else nets.Deep()


def devices(name):
    return 2 if name == "adasum servers" else 1


def optimizer(name, parameters):
    if "adam" in name:
        return nn.Adam(parameters, 0.01)
    if name.startswith("adasum"):
        return nn.Momentum(parameters, 0.1, 0.9)
    return nn.SGD(parameters, 0.1)


def share(values, rank, ranks):
    """Return a rank's part of a batch."""
    count = nets.BATCH // ranks
    return values[rank * count : (rank + 1) * count].copy()


def steps_of(name):
    return nets.batches(STEPS_OF.get(name, STEPS))


def train(name, mode):
    """Train one case; return what this rank ends with."""
    rank, ranks = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=name != "sum")
    net, step = case(name)
    if mode == "pynative" and name == "accumulation":
        step.window_reducer = CountingReducer(step.window_reducer)
    for index, (x, y) in enumerate(steps_of(name)):
        x, y = share(x, rank, ranks), share(y, rank, ranks)
        if index == OVERFLOW_AT and rank == 1 and name in OVERFLOWING:
            x[0, 0] = np.inf  # on this rank alone
        step(Tensor(x), Tensor(y))
    counted = getattr(step.window_reducer, "calls", None)
    return {
        "weights": {one.name: one.asnumpy().tolist() for one in net.trainable_params()},
        "others": {
            one.name: one.asnumpy().tolist()
            for one in net.get_parameters()
            if not one.requires_grad
        },
        "observations": step.observations(),
        "reductions": None if counted is None else len(counted),
        "row": step.report()["adasum"].cells(),
    }


def adasum_class(folder):
    """Run the AdaSum Cell itself over all of Horovod's tensors at once; save the results."""
    rank, ranks = get_rank(), get_group_size()
    for count in adasum_cases.device_numbers(ranks):
        steps = adasum_cases.steps(ranks)[rank]
        parameters = [
            Parameter(Tensor(np.zeros_like(value)), name=f"p{index}")
            for index, value in enumerate(steps)
        ]
        cell = AdaSum(rank, count, ranks // count, parameters)
        old = tuple(Tensor(np.zeros_like(value)) for value in steps)
        run = adasum_cases.Run(cell, parameters)
        for parameter, value in zip(parameters, steps):
            ms.ops.assign(parameter, Tensor(-value))
        run(*old)
        found = {str(index): one.asnumpy() for index, one in enumerate(parameters)}
        np.savez(f"{folder}/adasum{count}_rank{rank}.npz", **found)


def main(mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    results = {name: train(name, mode) for name in CASES[get_group_size(), mode]}
    adasum_class(folder)
    with open(f"{folder}/rank{get_rank()}.json", "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
