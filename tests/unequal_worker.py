"""What ranks find out before they train when they were not given the same."""

from __future__ import annotations

import warnings

import mindspore as ms
import nets
import numpy as np
from mindspore import nn

from mindspore_boost_ext import BoostModel, BoostWarning


def settings(rank, name):
    """Return level and settings of a rank in a case."""
    level, switches = "O1", dict.fromkeys(("less_bn", "grad_freeze"), False)
    config = {"boost": {"mode": "manual", **switches}}
    if name == "clip" and rank == 0:
        config["gradients"] = {"clip_norm": 1.0}
    elif name == "window":
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": 2 + rank}
    elif name == "first batch":
        config["boost"]["short_schedule"] = True
        config["short_schedule"] = {"total_steps": 4, "parts": 2, "if_unfit": "skip"}
    elif name == "level" and rank == 1:
        level, config = "O0", None
    return {"boost_level": level, "boost_config_dict": config}


def model_of_rank(rank, name):
    """Build the Model of a case; ``net`` is trained by it."""
    ms.set_seed(rank if name == "seed" else 7)
    hidden = 5 if name == "shape" and rank == 1 else 6
    net = nn.SequentialCell(nn.Dense(nets.FEATURES, hidden), nn.Dense(hidden, nets.CLASSES))
    rate = {"rate": 0.1 * (1 + rank), "first batch": [0.4, 0.3, 0.2, 0.1]}.get(name, 0.1)
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    manager = {}
    if name == "scale":
        manager["loss_scale_manager"] = ms.FixedLossScaleManager(64.0 + rank, False)
    return BoostModel(net, nets.loss_fn(), optimizer, **settings(rank, name), **manager), net


NAMES = (
    "clip",
    "window",
    "level",
    "shape",
    "rate",
    "scale",
    "batches",
    "first batch",
    "seed",
    "equal",
)


def data_of_rank(rank, name):
    """Return the batches of a case."""
    if name == "first batch":  # rank 1 has too few samples to cut it in two
        size = 64 if rank == 0 else 56
        return nets.dataset(size // nets.BATCH, batch=size)
    return nets.dataset(2 + rank if name == "batches" else 2)


def outcome(rank, name):
    """Train a case; return what was raised or warned of, and whether a weight has moved."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    found, weights = [], None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model, net = model_of_rank(rank, name)
            weights = nets.weights(net)
            model.train(1, data_of_rank(rank, name), dataset_sink_mode=False)
        except ValueError as error:
            found.append(str(error))
    found += [str(one.message) for one in warned if isinstance(one.message, BoostWarning)]
    moved = weights is not None and any(
        not np.array_equal(value, nets.weights(net)[key]) for key, value in weights.items()
    )
    return {"messages": found, "moved": moved}


def outcomes(rank):
    """Return what this rank finds in each case."""
    return {name: outcome(rank, name) for name in NAMES}
