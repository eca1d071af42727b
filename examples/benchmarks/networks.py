"""Networks and data of the benchmarks; LeNet-5 is the bundled one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext.bundled import LeNet5

CLASSES = 10


class BasicBlock(nn.Cell):
    """Two 3x3 convolutions with BatchNorm around a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut = nn.SequentialCell()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.SequentialCell(
                nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def construct(self, x: Tensor) -> Tensor:
        """Return the block's output, ``[batch, outputs, height / stride, width / stride]``."""
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(branch + self.shortcut(x))


class SmallResNet(nn.Cell):
    """A ResNet of 7 basic blocks in 3 stages: 17 convolutions, 53 trainable parameters.

    Args:
        width (int): channels of the first stage; the others have 2 and 4 times as many.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.SequentialCell(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for outputs, count in ((width, 3), (2 * width, 2), (4 * width, 2)):
            for index in range(count):
                stride = 2 if index == 0 and outputs != width else 1
                blocks.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.SequentialCell(blocks)
        self.head = nn.Dense(inputs, CLASSES)

    def construct(self, image: Tensor) -> Tensor:
        """Return the logits, ``[batch, 10]``."""
        features = self.blocks(self.stem(image))
        return self.head(features.mean((2, 3)))


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
