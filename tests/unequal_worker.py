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
    elif name == "level" and rank == 1:
        level, config = "O0", None
    return {"boost_level": level, "boost_config_dict": config}


def model_of_rank(rank, name):
    """Build the Model of a case; ``net`` is trained by it."""
    ms.set_seed(rank if name == "seed" else 7)
    hidden = 5 if name == "shape" and rank == 1 else 6
    net = nn.SequentialCell(nn.Dense(nets.FEATURES, hidden), nn.Dense(hidden, nets.CLASSES))
    rate = 0.1 * (1 + rank) if name == "rate" else 0.1
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    manager = {}
    if name == "scale":
        manager["loss_scale_manager"] = ms.FixedLossScaleManager(64.0 + rank, False)
    return BoostModel(net, nets.loss_fn(), optimizer, **settings(rank, name), **manager), net


NAMES = ("clip", "window", "level", "shape", "rate", "scale", "batches", "seed", "equal")


def outcome(rank, name):
    """Train a case; return what was raised or warned of, and whether a weight has moved."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    found, weights = [], None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model, net = model_of_rank(rank, name)
            weights = nets.weights(net)
            batches = 2 + rank if name == "batches" else 2
            model.train(1, nets.dataset(batches), dataset_sink_mode=False)
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
