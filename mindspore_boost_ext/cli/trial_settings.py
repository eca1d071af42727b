"""How ``compare`` switches each algorithm on: settings that act within a short run.

``runs()`` lists what can be chosen: every switch of the configuration, accelerators that an object,
not a switch, selects, and the recipes "fast" and "fastest". A switch without an entry here
runs with its default settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.bundled import LeNet5, SmallResNet
from mindspore_boost_ext.config.parse import ALGORITHMS
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.recipes import recipe

PLAIN = "plain"
LENET, RESNET = "lenet", "resnet"
Parts = tuple[nn.Cell, dict[str, Any]]


def _falling(steps: int, epochs: int) -> np.ndarray:
    """Return half a cosine, one value an epoch."""
    return np.asarray(nn.cosine_decay_lr(0.0, 1.0, steps, steps // epochs, epochs))


def warmed_up(steps: int, epochs: int = 1) -> np.ndarray:
    """Return a straight line up, over a tenth of the steps, and half a cosine down."""
    done = (np.arange(steps) + 1) / steps
    falling = 0.5 * (1 + np.cos(np.pi * np.clip((done - 0.1) / 0.9, 0, 1)))
    return np.asarray(np.minimum(done / 0.1, 1) * falling)


class PlainTraining(NamedTuple):
    """How a bundled network is trained without any accelerator."""

    network: Callable[[], nn.Cell]  # makes it
    rate: float  # the highest learning rate
    course: Callable[[int, int], np.ndarray]  # (steps, epochs) -> share of that rate in each step
    weight_decay: float = 0.0  # of all weights


NETWORKS: Mapping[str, PlainTraining] = {
    LENET: PlainTraining(LeNet5, 0.03, _falling),
    RESNET: PlainTraining(partial(SmallResNet, 8), 0.1, warmed_up, 5e-4),
}


class Setup(NamedTuple):
    """What the settings of a run may depend on."""

    network: str  # "lenet" or "resnet"
    steps: int  # how many the run takes
    snapshots: str = ""  # the folder of a plain run's weights, for the algorithm that needs one


def _dynamic_parts(network: str) -> Parts:
    manager = ms.DynamicLossScaleManager(2**16, 2, 100)
    return NETWORKS[network].network(), {"loss_scale_manager": manager}


def _grouped_parts(network: str) -> Parts:
    """LeNet-5 with a group of loss scales for the convolutions and one for the dense layers."""
    manager = GroupLossScaleManager([2.0**10, 2.0**10], [])

    class GroupedLeNet5(LeNet5):
        def construct(self, image: Tensor) -> Tensor:
            hidden = self.pool(self.relu(self.conv1(manager(image, 0, 1))))
            hidden = self.flatten(self.pool(self.relu(self.conv2(hidden))))
            hidden = self.relu(self.fc1(manager(hidden, 1, 2)))
            return manager(self.fc3(self.relu(self.fc2(hidden))), 2, 3)

    net = GroupedLeNet5()
    convolutions = [*net.conv1.trainable_params(), *net.conv2.trainable_params()]
    dense = [one for layer in (net.fc1, net.fc2, net.fc3) for one in layer.trainable_params()]
    manager.loss_scale_groups = [convolutions, dense]
    return net, {"loss_scale_manager": manager}


@dataclass(frozen=True)
class TrialSettings:
    """How to run one algorithm on a bundled network."""

    sections: Callable[[Setup], Mapping[str, Any]] = lambda setup: {}  # of the configuration
    # Name of the network -> the network, and further arguments of ``ms.Model``.
    parts: Callable[[str], Parts] = lambda network: (NETWORKS[network].network(), {})
    snapshots: bool = False  # whether a plain run before it has to leave snapshots of its weights
    networks: tuple[str, ...] = tuple(NETWORKS)  # on which it is run
    modes: tuple[str, ...] = ("graph", "pynative")  # in which it is run
    unsuited: str = ""  # why it is not run with others
    rate: float = 1.0  # the learning rate, as a multiple of the plain run's
    window: int = 1  # steps for one update


def _freezing(setup: Setup) -> Mapping[str, Any]:
    """Return MindSpore's schedule for LeNet-5; on the ResNet, half is frozen early, for good."""
    if setup.network == LENET:
        return {"grad_freeze": {"param_groups": 5, "total_steps": setup.steps}}
    half = {"schedule": "step", "prefix_start": 0.1, "prefix_fraction": 0.5}
    return {"grad_freeze": {**half, "total_steps": setup.steps}}


_FIXED_SIZE = "LeNet-5 needs images of a fixed size: use --network resnet"
TRIAL_SETTINGS: dict[str, TrialSettings] = {
    # LeNet-5 has no BatchNorm: only the head of less_bn can act, and must be asked for by name.
    "less_bn": TrialSettings(
        lambda setup: {"less_bn": {"heads": ["fc3"]}} if setup.network == LENET else {}
    ),
    "grad_freeze": TrialSettings(_freezing),
    "adasum": TrialSettings(
        lambda setup: {"common": {"device_number": 1}},
        networks=(),
        unsuited="needs several processes: run your own script through msrun",
    ),
    "grad_accumulation": TrialSettings(
        lambda setup: {"grad_accumulation": {"grad_accumulation_step": 2}}, window=2
    ),
    "dim_reduce": TrialSettings(
        lambda setup: {"dim_reduce": {"n_components": 20, "weight_load_dir": setup.snapshots}},
        snapshots=True,
    ),
    "thor": TrialSettings(
        lambda setup: {"thor": {"damping": 0.1, "frequency": 20, "batch_size": 32}},
        rate=1 / 3,  # as tuned by examples/benchmarks/thor.py; at plain's rate it diverges
    ),
    "progressive_resizing": TrialSettings(
        lambda setup: {"progressive_resizing": {"total_steps": setup.steps}},
        networks=(RESNET,),
        unsuited=_FIXED_SIZE,
    ),
    "seq_length_warmup": TrialSettings(
        lambda setup: {"seq_length_warmup": {"total_steps": setup.steps}},
        networks=(),
        unsuited="images are not sequences: see examples/benchmarks/time_to_accuracy.py",
    ),
    "short_schedule": TrialSettings(lambda setup: {"short_schedule": {"total_steps": setup.steps}}),
    "compiled_step": TrialSettings(
        modes=("pynative",), unsuited="in GRAPH_MODE every step is compiled: use --mode pynative"
    ),
    "loss_scale_group": TrialSettings(
        parts=_grouped_parts, networks=(LENET,), unsuited="its markers are in the bundled LeNet-5"
    ),
    "dynamic_loss_scale": TrialSettings(parts=_dynamic_parts),
    "fast": TrialSettings(lambda setup: recipe("fast", setup.steps)),
    "fastest": TrialSettings(lambda setup: recipe("fastest", setup.steps)),
}


def runs() -> tuple[str, ...]:
    """Return the names that can be chosen, in the order of the configuration's switches."""
    return (*ALGORITHMS, *(name for name in TRIAL_SETTINGS if name not in ALGORITHMS))


def settings_of(name: str) -> TrialSettings:
    """Return how to run one algorithm; plain training is the same without settings."""
    return TRIAL_SETTINGS.get(name, TrialSettings())


def only(*names: str, **sections: Any) -> dict[str, Any]:
    """Return settings that switch some algorithms on and all others off."""
    switches = {algorithm: algorithm in names for algorithm in ALGORITHMS}
    return {"boost": {"mode": "manual", **switches}, **sections}


def configuration(name: str, setup: Setup) -> tuple[str, dict[str, Any]]:
    """Return level and settings with which ``ms.Model`` runs one algorithm alone.

    Its ``name`` is ``"plain"``, or one of :func:`runs`.
    """
    if name == PLAIN:
        return "O0", {}
    return "O1", only(name, **settings_of(name).sections(setup))
