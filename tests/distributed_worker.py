"""One rank of all tests with several ranks: trains on its share, saves what it ends with.

Starting processes is what costs time, so all tests that need the same number share one start, in
both modes: see ``every_test.ended``.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import adasum_cases
import contract
import dim_reduce_worker
import exit_worker
import mindspore as ms
import nets
import numpy as np
import overflow_cases
import thor_worker
import unequal_worker
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from models import model_of

import mindspore_boost_ext
from mindspore_boost_ext import AdaSum, BoostTrainOneStepCell, GroupLossScaleManager, _compat
from mindspore_boost_ext.adasum import cell as adasum

STEPS, OVERFLOW_AT, SAVED_AT = 6, 2, 3
SCALE = 64.0
OVERFLOWING = ("dynamic", "grouped", "compiled dynamic", "adasum dynamic")
# What is on beside data parallel training, with its settings; the network and what it takes.
FURTHER: dict[str, dict[str, Any]] = {
    "smoothed": {
        "label_smoothing": {},
        "gradient_centralization": {},
        "cheaper_operators": {},
        "short_schedule": {"share": 0.5, "total_steps": 2 * STEPS},
    },
    "in parts": {"short_schedule": {"share": 0.5, "total_steps": 2 * STEPS, "parts": 2}},
    "growing": {"seq_length_warmup": {"phases": [[0.3, 0.25], [0.3, 0.5]], "total_steps": STEPS}},
    "adaptive": {
        "grad_freeze": {
            **{"param_groups": 3, "schedule": "adaptive"},
            **{"adaptive_window": 2, "adaptive_tolerance": 0.95},
        }
    },
}
# What compiles takes long on ranks that share cores: in GRAPH_MODE two of them do what goes another
# way there, and the rest runs in PYNATIVE_MODE; 3 and 8 ranks are in ``-m slow``.
CASES = {
    (2, "graph"): (
        *("plain", "accumulation", "freezing", "grouped", "sum", "adasum adam", "in parts"),
        "accumulation own",
    ),
    (2, "pynative"): (
        *(
            "accumulation own",
            "plain",
            "accumulation",
            "freezing",
            "dynamic",
            "grouped",
            "compiled dynamic",
        ),
        *("adasum compiled freezing", "adasum resumed", *FURTHER),
    ),
    (3, "graph"): ("adasum",),
    (3, "pynative"): ("adasum",),
    (4, "graph"): ("adasum servers sum", "adasum clipped accumulation norm"),
    (4, "pynative"): ("adasum servers",),
    (8, "graph"): ("plain", "dynamic", "adasum resumed", "adasum dynamic", "adasum freezing"),
    (8, "pynative"): ("adasum", "adasum adam"),
}
# The Cell itself over many tensors.
CLASS_RUNS = [one for one in CASES if one not in ((4, "pynative"), (8, "pynative"))]
STEPS_OF = {"adasum": 20}
# So small that all would be gathered: these are halved like large ones.
HALVED = ("adasum servers", "adasum servers sum", "adasum dynamic")


class CountingReducer(nn.Cell):
    """Counts, in PYNATIVE_MODE, how often gradients are reduced over the ranks."""

    def __init__(self, reducer):
        super().__init__(auto_prefix=False)
        self.reducer = reducer
        self.__dict__["calls"] = []

    def construct(self, gradients):
        self.calls.append(1)
        return self.reducer(gradients)


class OwnWindow(BoostTrainOneStepCell):
    """Updates with each micro-batch, and so never comes to the library's reduction."""

    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        return ops.depend(loss, self.optimizer(grads))


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


def case(name, with_adasum=True):
    """Return the network and the training step of a case, AdaSum switched off if so asked."""
    switches = dict.fromkeys(mindspore_boost_ext.AutoBoost().boost_config, False)
    config = {"boost": {"mode": "manual", **switches}}
    manager = None
    net = network_of(name)
    if name.startswith("adasum") and with_adasum:
        config["boost"]["adasum"] = True
        config["common"] = {"device_number": devices(name)}
    if "accumulation" in name:
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
    elif name.endswith("freezing"):
        config["boost"]["grad_freeze"] = True
        config["grad_freeze"] = {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}
    elif name.endswith("dynamic"):
        manager = ms.DynamicLossScaleManager(64, 2, 2)
    elif name == "adasum servers sum":  # a factor in the gradients that the optimizer divides out
        manager = ms.FixedLossScaleManager(SCALE, drop_overflow_update=False)
    elif name == "grouped":
        config["boost"]["loss_scale_group"] = True
        net, manager = marked()
    for section, values in FURTHER.get(name, {}).items():
        config["boost"][section] = True
        config[section] = values
    if "compiled" in name:
        config["boost"]["compiled_step"] = True
    if "clipped" in name:
        config["gradients"] = {"clip_norm": 0.1}
    settings = {} if manager is None else {"loss_scale_manager": manager}
    own = optimizer(name, net.trainable_params())
    if name.endswith("own"):
        boost = mindspore_boost_ext.AutoBoost("O1", config)
        loss_net = nn.WithLossCell(net, nets.loss_fn())
        return net, OwnWindow(*boost.network_auto_process_train(loss_net, own)).set_train()
    return net, model_of(net, config, own, **settings).train_network


def network_of(name):
    if name == "smoothed":
        return nets.Normalised()
    if name == "growing":
        return contract.MeanOfPlaces(1, channels_first=False)
    if name.endswith("norm"):
        return NormNet()
    small = name.startswith("adasum") and not name.endswith("freezing")
    return nets.MLP() if small else nets.Deep()


def devices(name):
    return 2 if name.startswith("adasum servers") else 1


def optimizer(name, parameters):
    if "adam" in name:
        return nn.Adam(parameters, 0.01)
    if name == "adasum servers sum":
        return nn.Momentum(parameters, 0.1, 0.9, loss_scale=SCALE)
    if name.startswith("adasum"):
        return nn.Momentum(parameters, 0.1, 0.9)
    if "short_schedule" in FURTHER.get(name, {}):
        return nn.SGD(parameters, [0.1 / (1 + step) for step in range(2 * STEPS)])
    return nn.SGD(parameters, 0.1)


def share(values, rank, ranks):
    """Return a rank's part of a batch."""
    count = len(values) // ranks
    return values[rank * count : (rank + 1) * count].copy()


def steps_of(name):
    """Return the batches of a case; to ``growing`` they are sequences of four places."""
    batches = nets.batches(STEPS_OF.get(name, STEPS))
    if name == "growing":
        places = np.linspace(0.5, 2, 4, dtype=np.float32)[:, None]
        return [(x[:, None] * places, y) for x, y in batches]
    return batches


def train_case(name, mode, folder):
    """Train one case; return what this rank ends with."""
    ms.set_auto_parallel_context(
        parallel_mode="data_parallel", gradients_mean=not name.endswith("sum")
    )
    net, step = halved_case(name)
    if mode == "pynative" and name == "accumulation":
        step.window_reducer = CountingReducer(step.window_reducer)
    result = {}
    if name.endswith("resumed"):
        path = f"{folder}/{mode}_rank{get_rank()}.ckpt"
        run(name, step, slice(0, SAVED_AT))
        ms.save_checkpoint(step, path)
        run(name, step, slice(SAVED_AT, STEPS))
        result["uninterrupted"] = lists_of(step)
        net, step = halved_case(name)
        ms.load_param_into_net(step, ms.load_checkpoint(path))
        run(name, step, slice(SAVED_AT, STEPS))
        result["resumed"] = lists_of(step)
    else:
        run(name, step)
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
        **result,
    }


def halved_case(name):
    """Return the case, whose tensors count as large ones if it is to be halved."""
    limit = 0 if name in HALVED else adasum.GATHERED_BYTES
    with mock.patch.object(adasum, "GATHERED_BYTES", limit):
        return case(name)


def run(name, step, part=slice(None)):
    """Train on this rank's share of some batches."""
    rank, ranks = get_rank(), get_group_size()
    for index, (x, y) in list(enumerate(steps_of(name)))[part]:
        x, y = share(x, rank, ranks), share(y, rank, ranks)
        if index == OVERFLOW_AT and rank == 1 and name in OVERFLOWING:
            x[0, 0] = np.inf  # on this rank alone
        step(Tensor(x), Tensor(y))


def lists_of(step):
    return {one.name: one.asnumpy().tolist() for one in step.get_parameters()}


def adasum_class(mode, folder):
    """Run the AdaSum Cell itself over all of Horovod's tensors at once; save the results."""
    rank, ranks = get_rank(), get_group_size()
    for count, large in adasum_cases.runs(ranks, mode):
        steps = adasum_cases.steps(ranks, large, mode)[rank]
        parameters = [
            Parameter(Tensor(np.zeros_like(value)), name=f"p{index}")
            for index, value in enumerate(steps)
        ]
        cell = AdaSum(rank, count, ranks // count, parameters)
        small = not large or not _compat.reduces_in_groups()
        assert cell.gathers == (small and ranks > count)
        old = tuple(Tensor(np.zeros_like(value)) for value in steps)
        combine = adasum_cases.Run(cell, parameters)
        for parameter, value in zip(parameters, steps):
            ms.ops.assign(parameter, Tensor(-value))
        combine(*old)
        found = {str(index): one.asnumpy() for index, one in enumerate(parameters)}
        np.savez(f"{folder}/{mode}_adasum{count}_{large}_rank{rank}.npz", **found)


def example():
    """Train as the example of many processes does; return what this rank printed."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
    import many_processes

    printed, words = io.StringIO(), ["many_processes.py", "--adasum", "--epochs", "1"]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(many_processes, "init"),  # it was called for all cases
        contextlib.redirect_stdout(printed),
    ):
        many_processes.main()
    return printed.getvalue()


def after_the_kill(folder):
    """Finish the run whose rank 1 was killed before this one began; return what differs."""
    import dying_worker  # which imports this module

    return dying_worker.resumed(folder) if dying_worker.checkpoint(folder, 0, 1).exists() else None


def results_of(mode, folder):
    """Return what this rank found in one mode, by case."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ranks = get_group_size()
    results = {name: train_case(name, mode, folder) for name in CASES.get((ranks, mode), ())}
    if (ranks, mode) in CLASS_RUNS:
        adasum_class(mode, folder)
    if ranks == 2:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        results["detector"] = overflow_cases.answers_of_rank(get_rank())
        results["unequal"] = unequal_worker.outcomes(get_rank(), mode)
        results["exit"] = exit_worker.results(get_rank(), folder, mode)
        results["thor"] = thor_worker.weights(get_rank())
        results["dim_reduce"] = dim_reduce_worker.results(get_rank(), folder, mode)
    if ranks == 2 and mode == "pynative":
        results["killed"] = after_the_kill(pathlib.Path(folder) / "killed")
    return results


def main(folder):
    init()
    results = {mode: results_of(mode, folder) for mode in ("graph", "pynative")}
    if get_group_size() == 2:
        results["graph"]["example"] = example()
        # Last, since it leaves a collective behind that nobody answers.
        results["pynative"]["dim_reduce"].update(dim_reduce_worker.late(get_rank(), folder))
    with open(f"{folder}/rank{get_rank()}.json", "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
