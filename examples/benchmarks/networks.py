"""What most benchmarks train: the bundled networks, an optimizer, a batch of noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.bundled import CLASSES, BasicBlock, LeNet5, SmallResNet

NETWORKS: dict[str, Callable[[], nn.Cell]] = {"LeNet": LeNet5, "small ResNet": SmallResNet}


def with_loss(network: nn.Cell) -> nn.Cell:
    """Return the network with its cross-entropy, mean over the batch."""
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss)


def momentum(network: nn.Cell, **settings: object) -> nn.Cell:
    """Return the optimizer of all benchmarks: momentum 0.9 at a rate that keeps weights finite."""
    return nn.Momentum(network.trainable_params(), learning_rate=1e-3, momentum=0.9, **settings)


def batch(size: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return one batch of random images float32 ``[size, 1, 32, 32]`` with int32 labels."""
    generator = np.random.default_rng(seed)
    images = generator.normal(size=(size, 1, 32, 32)).astype(np.float32)
    return Tensor(images), Tensor(generator.integers(0, CLASSES, size).astype(np.int32))


__all__ = [
    "NETWORKS",
    "BasicBlock",
    "LeNet5",
    "SmallResNet",
    "batch",
    "momentum",
    "with_loss",
]
