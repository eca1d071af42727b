"""One rank of ``test_dim_reduce_ranks.py``: trains in a subspace whose rows are shared out."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import nets
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

from mindspore_boost_ext import AutoBoost, BoostModel

STEPS, K = 6, 5  # 5 rows: 3 and 2 on two ranks
CASES = ("p-bfgs", "p-sgd", "scaled", "accumulated")


def build(name, folder, timeout=120):
    """Return the network and the step of one case."""
    switches = dict.fromkeys(AutoBoost().boost_config, False)
    config = {
        "boost": {"mode": "manual", **switches, "dim_reduce": True},
        "dim_reduce": {"weight_load_dir": str(folder), "n_components": K, "timeout": timeout},
    }
    settings = {}
    if name == "p-sgd":
        config["dim_reduce"]["method"] = "p-sgd"
    elif name == "scaled":
        settings["loss_scale_manager"] = ms.DynamicLossScaleManager(64, 2, 2)
    elif name == "accumulated":
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
    net = nets.MLP()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    model = BoostModel(
        net, nets.loss_fn(), optimizer, boost_level="O1", boost_config_dict=config, **settings
    )
    return net, model.train_network


def result(name, folder, rows=slice(None)):
    """Train on some rows of each batch; return weights and observations."""
    net, step = build(name, folder)
    for x, y in nets.batches(STEPS):
        step(Tensor(x[rows].copy()), Tensor(y[rows].copy()))
    weights = {key: value.tolist() for key, value in nets.weights(net).items()}
    return {"weights": weights, "observations": step.observations()}


def refusal(folder, timeout=120):
    try:
        build("p-bfgs", folder, timeout)
    except (TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    folder = pathlib.Path(folder)
    half = slice(4 * rank, 4 * rank + 4)
    results = {name: result(name, folder / "snapshots", half) for name in CASES}
    results["missing on rank 1"] = refusal(folder / ("snapshots" if rank == 0 else "nowhere"))
    results["others on rank 1"] = refusal(folder / ("snapshots" if rank == 0 else "others"))
    # Last, since rank 0 leaves a broadcast behind that rank 1 has not answered.
    time.sleep(rank * 6)
    results["late rank 1"] = refusal(folder / "snapshots", 2)
    with open(folder / f"rank{rank}.json", "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
