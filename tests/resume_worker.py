"""One process of ``test_resume_matrix``: trains and saves, or loads and goes on.

``resume_worker.py MODE first|second FOLDER FROM TO`` does so for some of the algorithms and sound
pairs, one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import nets
import numpy as np
import random_nets
from mindspore import Tensor
from models import model_of

from mindspore_boost_ext import AutoBoost, GroupLossScaleManager

STEPS, RESUME_AT = 12, 7  # the resume point divides no window and no schedule
DYNAMIC, GROUPED = "dynamic_loss_scale", "loss_scale_group"

# What is switched on, with settings that act within a few steps.
PARTS: dict[str, dict[str, Any]] = {
    "less_bn": {"less_bn": {"multiplier": 4.0, "heads": ["head"]}},
    "grad_freeze": {
        "grad_freeze": {"param_groups": 3, "freeze_p": 0.4, "total_steps": 9, "eval_frozen": True}
    },
    "grad_freeze_prefix": {
        "grad_freeze": {"param_groups": 3, "schedule": "cubic", "total_steps": 10}
    },
    "grad_accumulation": {
        "grad_accumulation": {"grad_accumulation_step": 3, "weighting": "samples"}
    },
    "thor": {"thor": {"damping": 0.1, "frequency": 3, "moving_average": 0.5}},
    "thor_trace": {"thor": {"damping": 0.1, "frequency": 2, "trace_rule": [0.1, 0]}},
    DYNAMIC: {},
    GROUPED: {},
    "clipping": {"gradients": {"clip_norm": 0.3}},
}
PARTS |= {
    f"dim_reduce_{method}": {"dim_reduce": {"method": method, "n_components": 4}}
    for method in ("p-bfgs", "p-sgd", "twa")
}
SWITCHES = ("less_bn", "grad_freeze", "grad_accumulation", "dim_reduce", GROUPED, "thor")
GOES_WITH_DIM_REDUCE = {"grad_accumulation", DYNAMIC, "clipping"}


def switch_of(name):
    """Return the switch of an entry; its own name if it has none."""
    return next((one for one in SWITCHES if name.startswith(one)), name)


def is_sound(pair):
    """Return whether two entries may be on together."""
    switches = {switch_of(name) for name in pair}
    if "dim_reduce" in switches:
        return switches - {"dim_reduce"} <= GOES_WITH_DIM_REDUCE and len(switches) == 2
    return len(switches) == 2 and not switches >= {DYNAMIC, GROUPED}


COMBINATIONS = [("nothing",), *((name,) for name in PARTS)]
COMBINATIONS += [pair for pair in itertools.combinations(PARTS, 2) if is_sound(pair)]


SPEC = random_nets.NetSpec(
    shape=(nets.FEATURES,),
    layers=(
        ("dense", "dense0", nets.FEATURES, 4, True),
        ("bn", "bn1", 4, False),
        ("tanh", "tanh2"),
        ("dense", "dense3", 4, 4, True),
        ("bn", "bn4", 4, False),
        ("relu", "relu5"),
        ("dense", "dense6", 4, 4, True),
        ("tanh", "tanh7"),
    ),
    features=4,
    outputs=nets.CLASSES,
    head_bias=True,
    aux=None,
    aux_size=0,
    losses=False,
    loss="ce",
    code_tie=False,
    spare=False,
    frozen=(),
    marks=(),
    seed=3,
)


def plain_net():
    return random_nets.network(SPEC)


def grouped_net():
    """Return the network with markers between two groups of loss scales, and their manager."""
    manager = GroupLossScaleManager([64.0, 4.0], [], growth_factor=2.0)
    net = random_nets.network(dataclasses.replace(SPEC, marks=(0, 3)), manager)
    parameters = net.trainable_params()
    manager.loss_scale_groups = [parameters[:4], parameters[4:]]
    return net, manager


def step_of(combination):
    """Return the step of a new Model with the parts of a combination."""
    net, arguments = plain_net(), {}
    if GROUPED in combination:
        net, arguments["loss_scale_manager"] = grouped_net()
    if DYNAMIC in combination:
        arguments["loss_scale_manager"] = ms.DynamicLossScaleManager(2**10, 2, 5)
    switches = {switch_of(name) for name in combination}
    boost = {name: name in switches for name in AutoBoost().boost_config}
    config = {"boost": {"mode": "manual", **boost}}
    for name in combination:
        config |= {key: dict(one) for key, one in PARTS.get(name, {}).items()}
    if "dim_reduce" in config:
        config["dim_reduce"]["pca_mat_path"] = nets.basis_file(plain_net, 4)
    return model_of(net, config, **arguments).train_network


def run(step, batches):
    for x, y in batches:
        step(Tensor(x), Tensor(y))


def batches():
    """Return batches of unequal sizes."""
    pairs = nets.batches(STEPS)
    return [(x[: 5 + number % 3], y[: 5 + number % 3]) for number, (x, y) in enumerate(pairs)]


def main(mode, role, folder, start, end):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    for combination in COMBINATIONS[int(start) : int(end)]:
        ms.set_seed(3)
        step, name = step_of(combination), str(Path(folder) / "-".join(combination))
        if role == "first":
            run(step, batches()[:RESUME_AT])
            ms.save_checkpoint(step, f"{name}.ckpt")
        else:
            ms.load_param_into_net(step, ms.load_checkpoint(f"{name}.ckpt"), strict_load=True)
        run(step, batches()[RESUME_AT:])
        np.savez(f"{name}.{role}.npz", **nets.weights(step))


if __name__ == "__main__":
    main(*sys.argv[1:])
