"""What a rank does for ``test_dim_reduce_ranks.py``: trains in a subspace, rows shared out."""

from __future__ import annotations

import pathlib
import time

import mindspore as ms
import nets
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import AutoBoost, BoostModel

STEPS, K = 6, 5  # 5 rows: 3 and 2 on two ranks
CASES = {"graph": ("p-bfgs",), "pynative": ("p-bfgs", "p-sgd", "scaled", "accumulated", "sum")}


def built_case(name, folder, timeout=120):
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
    elif name == "sum":  # that of the rows' losses, which the ranks add up, too
        settings["loss_fn"] = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="sum")
    net = nets.MLP()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    return net, model_of(net, config, optimizer, BoostModel, **settings).train_network


def result(name, folder, rows=slice(None)):
    """Train on some rows of each batch; return weights and observations."""
    net, step = built_case(name, folder)
    for x, y in nets.batches(STEPS):
        step(Tensor(x[rows].copy()), Tensor(y[rows].copy()))
    weights = {key: value.tolist() for key, value in nets.weights(net).items()}
    return {"weights": weights, "observations": step.observations()}


def refusal(folder, timeout=120):
    try:
        built_case("p-bfgs", folder, timeout)
    except (TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def prepare(folder):
    """Write the snapshots that the ranks are going to read."""
    for name, first in (("snapshots", 0), ("others", 50)):
        (folder / name).mkdir()
        for index in range(8):
            net = nets.MLP(seed=first + index)
            ms.save_checkpoint(net, str(folder / name / f"run-{index}.ckpt"))


def results(rank, folder, mode):
    """Train all cases on the half of a rank; return what each ends with, and the errors."""
    folder = pathlib.Path(folder)
    half = slice(4 * rank, 4 * rank + 4)
    found = {}
    for name in CASES[mode]:
        ms.set_auto_parallel_context(gradients_mean=name != "sum")
        found[name] = result(name, folder / "snapshots", half)
    ms.set_auto_parallel_context(gradients_mean=True)
    found["missing on rank 1"] = refusal(folder / ("snapshots" if rank == 0 else "nowhere"))
    found["others on rank 1"] = refusal(folder / ("snapshots" if rank == 0 else "others"))
    return found


def late(rank, folder):
    """Let rank 1 come late; rank 0 leaves a broadcast behind that rank 1 has not answered."""
    time.sleep(rank * 6)
    return {"late rank 1": refusal(pathlib.Path(folder) / "snapshots", 2)}
