"""What most benchmarks train: the bundled networks, an optimizer, a batch of noise, two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext import GroupLossScaleManager, make_train_step
from mindspore_boost_ext.bundled import CLASSES, LeNet5, SmallResNet
from mindspore_boost_ext.cli.trial_settings import only

NETWORKS: dict[str, Callable[[], nn.Cell]] = {"LeNet": LeNet5, "small ResNet": SmallResNet}


def with_loss(network: nn.Cell) -> nn.Cell:
    """Return the network with its cross-entropy, mean over the batch."""
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss)


def momentum(network: nn.Cell) -> nn.Cell:
    """Return the optimizer of all benchmarks: momentum 0.9 at a rate that keeps weights finite."""
    return nn.Momentum(network.trainable_params(), learning_rate=1e-3, momentum=0.9)


def batch(
    size: int = 32, seed: int = 0, shape: tuple[int, ...] = (1, 32, 32), classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    """Return one batch of random samples, float32 of this shape, with int32 labels."""
    generator = np.random.default_rng(seed)
    samples = generator.normal(size=(size, *shape)).astype(np.float32)
    return Tensor(samples), Tensor(generator.integers(0, classes, size).astype(np.int32))


def wait(outputs: Any) -> np.ndarray:
    """Wait for a step's outputs; return its loss."""
    loss = outputs[0] if isinstance(outputs, tuple) else outputs  # or (loss, overflow, scale)
    return loss.asnumpy()


def waiting(cell: nn.Cell, inputs: Sequence[Tensor] | None = None) -> Callable[[], np.ndarray]:
    """Return a function that trains one step, on noise without ``inputs``, and waits for it."""
    inputs = batch() if inputs is None else inputs
    cell.set_train()
    return lambda: wait(cell(*inputs))


def plain(network: nn.Cell, optimizer: nn.Cell | None = None) -> nn.Cell:
    """Return MindSpore's own step, with :func:`momentum` if there is no optimizer."""
    optimizer = momentum(network) if optimizer is None else optimizer
    return nn.TrainOneStepCell(with_loss(network), optimizer).set_train()


def ours(
    network: nn.Cell, optimizer: nn.Cell | None = None, manager: Any = None, **sections: Any
) -> nn.Cell:
    """Return this package's step, with the methods of these sections of the settings only."""
    given = {name: one for name, one in sections.items() if one}
    step = make_train_step(
        network,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        momentum(network) if optimizer is None else optimizer,
        config=only(*sections, **given),
        loss_scale_manager=manager,
    )
    return step.train_network.set_train()


def plain_step(network: nn.Cell, inputs: Sequence[Tensor] | None = None) -> Callable[[], object]:
    """Return a function that trains one step of MindSpore's own, and waits for it."""
    return waiting(plain(network), inputs)


def accuracy(network: nn.Cell, batches: Iterable[Sequence[Tensor]]) -> float:
    """Return the share of correct answers over all batches, in evaluation mode."""
    network.set_train(False)
    correct = [
        network(images).asnumpy().argmax(1) == labels.asnumpy() for images, labels in batches
    ]
    return float(np.mean(np.concatenate(correct)))


class Head(nn.Cell):
    """The mean over the image, and the classifier."""

    def __init__(self, dense: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.dense = dense

    def construct(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.dense(x.mean((2, 3)))


class Marked(nn.Cell):
    """A network in two parts, each with a scale of its own and a marker above it."""

    def __init__(self, lower: nn.Cell, upper: nn.Cell, manager: GroupLossScaleManager) -> None:
        super().__init__()
        self.lower, self.upper, self.manager = lower, upper, manager
        manager.loss_scale_groups = [lower.trainable_params(), upper.trainable_params()]

    def construct(self, image: Tensor) -> Tensor:
        """Return the logits, ``[batch, 10]``."""
        return self.manager(self.upper(self.manager(self.lower(image), 1, 2)), 2, 3)


def marked(name: str, manager: GroupLossScaleManager) -> Marked:
    """Return LeNet-5, divided above its convolutions, or the ResNet, above its first stage."""
    net = NETWORKS[name]()
    if isinstance(net, LeNet5):
        lower = [net.conv1, net.relu, net.pool, net.conv2, net.relu, net.pool, net.flatten]
        upper = [net.fc1, net.relu, net.fc2, net.relu, net.fc3]
    else:
        lower, upper = [net.stem, net.blocks[:3]], [net.blocks[3:], Head(net.head)]
    return Marked(nn.SequentialCell(lower), nn.SequentialCell(upper), manager)


def grouped(name: str, scale: float = 1024.0) -> nn.Cell:
    """Return this package's step of a network with a scale for each of two groups."""
    manager = GroupLossScaleManager(scale, [])
    return ours(marked(name, manager), manager=manager, loss_scale_group={})
