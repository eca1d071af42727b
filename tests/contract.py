"""What the contract suite and others know of every algorithm; a new one joins by an entry here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from models import loss_of, model_of

from mindspore_boost_ext import AutoBoost, GroupLossScaleManager

STEPS, RESUME_AT = 12, 7  # the resume point divides no window and no schedule
FALLING = [0.1 - 0.0008 * step for step in range(120)]


def switched(**switches):
    """Return a configuration in which just these switches are on."""
    off = dict.fromkeys(AutoBoost().boost_config, False)
    return {"boost": {"mode": "manual", **off, **switches}}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What the suite needs to know of an algorithm.

    ``on`` switches it on, with settings that act within a few steps; ``row`` is its row in the
    report (None for no algorithm at all); ``net`` makes the network; ``model`` gives further
    arguments of ms.Model from the network; ``gains`` are parameters that the network itself gains;
    ``inputs`` makes what the network takes of features ``[batch, 3]``.
    """

    name: str
    on: dict[str, Any]
    row: str | None = None
    net: Callable[[], Any] = nets.MLP
    model: Callable[[Any], dict[str, Any]] = lambda net: {}
    gains: tuple[str, ...] = ()
    inputs: Callable[[Any], Any] = lambda x: x

    def batches(self, count):
        """Return ``count`` pairs (inputs, labels) as NumPy arrays."""
        return [(self.inputs(x), y) for x, y in nets.batches(count)]

    def dataset(self, count):
        """Return the same batches as a MindSpore dataset."""
        inputs, labels = map(np.concatenate, zip(*self.batches(count)))
        return ms.dataset.NumpySlicesDataset((inputs, labels), shuffle=False).batch(nets.BATCH)


def grouped_net():
    """A network with markers between two groups of loss scales."""
    manager = GroupLossScaleManager([64.0, 4.0], [], growth_factor=2.0)

    class Marked(nets.MLP):
        def construct(self, x):
            x = self.relu(self.first(manager(x, 0, 1)))
            return manager(self.second(manager(x, 1, 2)), 2, 3)

    net = Marked()
    manager.loss_scale_groups = [net.first.trainable_params(), net.second.trainable_params()]
    net.__dict__["groups"] = manager  # beside the network's own attributes, so that names stay
    return net


ALGORITHMS = [
    Algorithm("nothing", switched()),
    Algorithm(
        "dynamic loss scale",
        switched(),
        "overflow detection",
        model=lambda net: {"loss_scale_manager": ms.DynamicLossScaleManager(2**10, 2, 5)},
    ),
    Algorithm(
        "loss_scale_group",
        switched(loss_scale_group=True),
        "loss_scale_group",
        net=grouped_net,
        model=lambda net: {"loss_scale_manager": net.groups},
    ),
]


ALGORITHMS += [
    Algorithm(
        "grad_accumulation",
        {**switched(grad_accumulation=True), "grad_accumulation": {"grad_accumulation_step": 3}},
        "grad_accumulation",
    ),
    Algorithm(
        "grad_freeze",
        {
            **switched(grad_freeze=True),
            "grad_freeze": {"param_groups": 2, "freeze_p": 0.5, "total_steps": 5},
        },
        "grad_freeze",
        net=nets.Deep,
    ),
    Algorithm(
        "grad_freeze, prefix",
        {
            **switched(grad_freeze=True),
            "grad_freeze": {"param_groups": 3, "schedule": "cubic", "total_steps": 10},
        },
        "grad_freeze",
        net=nets.Deep,
    ),
    Algorithm(
        "grad_freeze, adaptive",
        {
            **switched(grad_freeze=True),
            "grad_freeze": {
                "param_groups": 3,
                "schedule": "adaptive",
                "adaptive_window": 2,
                "adaptive_tolerance": 0.95,
            },
        },
        "grad_freeze",
        net=nets.Deep,
    ),
]


ALGORITHMS += [
    Algorithm(
        "less_bn, head",
        {**switched(less_bn=True), "less_bn": {"multiplier": 4.0, "heads": ["second"]}},
        "less_bn",
        gains=("second.multiplier",),
    ),
    Algorithm(
        "thor",
        {**switched(thor=True), "thor": {"damping": 0.1, "frequency": 3, "moving_average": 0.5}},
        "thor",
    ),
    Algorithm(
        "thor, trace rule, dynamic loss scale",
        {**switched(thor=True), "thor": {"damping": 0.1, "frequency": 2, "trace_rule": [0.1, 0]}},
        "thor",
        model=lambda net: {"loss_scale_manager": ms.DynamicLossScaleManager(2**10, 2, 5)},
    ),
]


ALGORITHMS += [
    Algorithm(
        f"dim_reduce, {method}",
        {
            **switched(dim_reduce=True),
            "dim_reduce": {"method": method, "n_components": 8, "pca_mat_path": nets.basis_file()},
        },
        "dim_reduce",
    )
    for method in ("p-bfgs", "p-sgd", "twa")
]


class MeanOfPlaces(nn.Cell):
    """Dense, tanh, the mean over all places, Dense: for images and sequences of any size."""

    def __init__(self, places, channels_first):
        super().__init__()
        self.first = nn.Dense(nets.FEATURES, nets.HIDDEN, activation="tanh")
        self.last = nn.Dense(nets.HIDDEN, nets.CLASSES)
        self.places, self.channels_first = places, channels_first
        nets.fill(self)

    def construct(self, x):
        if self.channels_first:
            x = x.transpose(0, 2, 3, 1)
        return self.last(self.first(x).mean(self.places))


ALGORITHMS += [
    Algorithm(
        "progressive_resizing",
        {
            **switched(progressive_resizing=True),
            "progressive_resizing": {"phases": [[0.3, 0.5], [0.3, 0.75]], "total_steps": 15},
        },
        "progressive_resizing",
        net=lambda: MeanOfPlaces((1, 2), channels_first=True),
        inputs=lambda x: np.multiply.outer(x, np.linspace(0, 2, 16, dtype="f").reshape(4, 4)),
    ),
    Algorithm(
        "seq_length_warmup",
        {
            **switched(seq_length_warmup=True),
            "seq_length_warmup": {"phases": [[0.3, 0.25], [0.3, 0.5]], "total_steps": 15},
        },
        "seq_length_warmup",
        net=lambda: MeanOfPlaces(1, channels_first=False),
        inputs=lambda x: x[:, None] * np.linspace(0.5, 2, 4, dtype="f")[:, None],
    ),
    Algorithm(
        "short_schedule",
        {**switched(short_schedule=True), "short_schedule": {"share": 0.6, "total_steps": 120}},
        "short_schedule",
        model=lambda net: {"optimizer": nn.Momentum(net.trainable_params(), FALLING, 0.9)},
    ),
    Algorithm(
        "short_schedule in parts",
        {
            **switched(short_schedule=True),
            "short_schedule": {"share": 0.6, "total_steps": 120, "parts": 2},
        },
        "short_schedule",
        model=lambda net: {"optimizer": nn.Momentum(net.trainable_params(), FALLING, 0.9)},
    ),
    Algorithm("label_smoothing", switched(label_smoothing=True), "label_smoothing"),
    Algorithm(
        "gradient_centralization",
        switched(gradient_centralization=True),
        "gradient_centralization",
    ),
    Algorithm("compiled_step", switched(compiled_step=True), "compiled_step"),
    Algorithm(
        "cheaper_operators",
        switched(cheaper_operators=True),
        "cheaper_operators",
        net=nets.Normalised,
    ),
]


everyone = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)


def build(algorithm, config, model_arguments=None):
    ms.set_seed(3)
    net = algorithm.net()
    return net, model_of(net, config, **(model_arguments(net) if model_arguments else {}))


def switched_on(algorithm):
    return build(algorithm, algorithm.on, model_arguments=algorithm.model)


def run(model, steps):
    return [loss_of(model.train_network(Tensor(x), Tensor(y))) for x, y in steps]
