"""How ``compare`` switches each algorithm on: settings that act within a short run.

``runs()`` lists what can be chosen: every switch of the configuration that this version can apply,
and the accelerators that are chosen by an object instead of a switch. A switch without an entry
here runs with its default settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from mindspore_boost_ext.bundled import LeNet5
from mindspore_boost_ext.config.parse import ALGORITHMS
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager

PLAIN = "plain"
Parts = tuple[nn.Cell, dict[str, Any]]


def _plain_parts() -> Parts:
    return LeNet5(), {}


def _dynamic_parts() -> Parts:
    return LeNet5(), {"loss_scale_manager": ms.DynamicLossScaleManager(2**16, 2, 100)}


def _grouped_parts() -> Parts:
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
    """How to run one algorithm on the bundled network.

    Attributes:
        sections: the sections of the configuration, from the number of steps and the folder of
            snapshots.
        parts: makes the network, and further arguments of ``ms.Model``.
        snapshots: whether a plain run before this one has to leave snapshots of its weights.
        unsuited: why it is not run here; empty when it is.
        rate: the learning rate over that of the plain run.
        window: steps for one update.
    """

    sections: Callable[[int, str], Mapping[str, Any]] = lambda steps, snapshots: {}
    parts: Callable[[], Parts] = _plain_parts
    snapshots: bool = False
    unsuited: str = ""
    rate: float = 1.0
    window: int = 1


TRIAL_SETTINGS: dict[str, TrialSettings] = {
    # LeNet-5 has no BatchNorm: what is left of it is the head, which then must be asked for.
    "less_bn": TrialSettings(lambda steps, snapshots: {"less_bn": {"heads": ["fc3"]}}),
    "grad_freeze": TrialSettings(
        lambda steps, snapshots: {"grad_freeze": {"param_groups": 5, "total_steps": steps}}
    ),
    "adasum": TrialSettings(
        lambda steps, snapshots: {"common": {"device_number": 1}},
        unsuited="needs several processes: run your own script through msrun",
    ),
    "grad_accumulation": TrialSettings(
        lambda steps, snapshots: {"grad_accumulation": {"grad_accumulation_step": 2}}, window=2
    ),
    "dim_reduce": TrialSettings(
        lambda steps, snapshots: {"dim_reduce": {"n_components": 20, "weight_load_dir": snapshots}},
        snapshots=True,
    ),
    "thor": TrialSettings(
        lambda steps, snapshots: {"thor": {"damping": 0.1, "frequency": 20, "batch_size": 32}},
        rate=1 / 3,  # as tuned by examples/benchmarks/thor.py; at the plain one's it diverges
    ),
    "progressive_resizing": TrialSettings(
        lambda steps, snapshots: {"progressive_resizing": {"total_steps": steps}},
        unsuited="LeNet-5 fixes the size of images: see examples/benchmarks/time_to_accuracy.py",
    ),
    "seq_length_warmup": TrialSettings(
        lambda steps, snapshots: {"seq_length_warmup": {"total_steps": steps}},
        unsuited="images are no sequences: see examples/benchmarks/time_to_accuracy.py",
    ),
    "loss_scale_group": TrialSettings(parts=_grouped_parts),
    "dynamic_loss_scale": TrialSettings(parts=_dynamic_parts),
}


def runs() -> tuple[str, ...]:
    """Return the names that can be chosen, in the order of the configuration's switches."""
    return (*ALGORITHMS, *(name for name in TRIAL_SETTINGS if name not in ALGORITHMS))


def configuration(name: str, steps: int, snapshots: str) -> tuple[str, dict[str, Any]]:
    """Return level and settings with which ``ms.Model`` runs one algorithm alone.

    Args:
        name: ``"plain"``, or one of :func:`runs`.
        steps: how many steps the run takes.
        snapshots: the folder of a plain run's weights, for the algorithm that needs one.
    """
    if name == PLAIN:
        return "O0", {}
    switches = {algorithm: algorithm == name for algorithm in ALGORITHMS}
    sections = TRIAL_SETTINGS.get(name, TrialSettings()).sections(steps, snapshots)
    return "O1", {"boost": {"mode": "manual", **switches}, **sections}


def parts(name: str) -> Parts:
    """Return the network of a run, and further arguments of ``ms.Model``."""
    return TRIAL_SETTINGS.get(name, TrialSettings()).parts()


__all__ = ["PLAIN", "TRIAL_SETTINGS", "TrialSettings", "configuration", "parts", "runs"]
