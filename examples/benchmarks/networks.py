"""What most benchmarks train: the bundled networks, an optimizer, a batch of noise, two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import GroupLossScaleManager, make_train_step
from mindspore_boost_ext.bundled import CLASSES, LeNet5, SmallResNet

NETWORKS: dict[str, Callable[[], nn.Cell]] = {"LeNet": LeNet5, "small ResNet": SmallResNet}


def with_loss(network: nn.Cell) -> nn.Cell:
    """Return the network with its cross-entropy, mean over the batch."""
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.WithLossCell(network, loss)


def momentum(network: nn.Cell, **settings: object) -> nn.Cell:
    """Return the optimizer of all benchmarks: momentum 0.9 at a rate that keeps weights finite."""
    return nn.Momentum(network.trainable_params(), learning_rate=1e-3, momentum=0.9, **settings)


def batch(
    size: int = 32,
    seed: int = 0,
    shape: tuple[int, ...] = (1, 32, 32),
    classes: int = CLASSES,
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
    """Return this package's step, with the methods of these sections of the settings alone."""
    off = {"less_bn": False, "grad_freeze": False}
    switches = {"mode": "manual", **off, **dict.fromkeys(sections.keys() - {"gradients"}, True)}
    step = make_train_step(
        network,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        momentum(network) if optimizer is None else optimizer,
        config={"boost": switches, **{name: one for name, one in sections.items() if one}},
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


class MarkedLeNet(LeNet5):
    """LeNet-5 with two groups of layers, which are set here: the convolutions, the dense layers."""

    def __init__(self, manager: GroupLossScaleManager) -> None:
        super().__init__()
        self.manager = manager
        manager.loss_scale_groups = _two_groups(self, self.conv1, self.conv2)

    def construct(self, image: Tensor) -> Tensor:
        """Return the logits, ``[batch, 10]``."""
        hidden = self.pool(self.relu(self.conv1(image)))
        hidden = self.pool(self.relu(self.conv2(hidden)))
        hidden = self.manager(self.flatten(hidden), 1, 2)
        hidden = self.relu(self.fc1(hidden))
        hidden = self.relu(self.fc2(hidden))
        return self.manager(self.fc3(hidden), 2, 3)


class MarkedResNet(SmallResNet):
    """The small ResNet with two groups: stem and blocks of the first stage, everything above."""

    def __init__(self, manager: GroupLossScaleManager) -> None:
        super().__init__()
        self.manager = manager
        self.lower, self.upper = self.blocks[:3], self.blocks[3:]
        manager.loss_scale_groups = _two_groups(self, self.stem, self.lower)

    def construct(self, image: Tensor) -> Tensor:
        """Return the logits, ``[batch, 10]``."""
        features = self.upper(self.manager(self.lower(self.stem(image)), 1, 2))
        return self.manager(self.head(features.mean((2, 3))), 2, 3)


MARKED = {"LeNet": MarkedLeNet, "small ResNet": MarkedResNet}


def grouped(name: str, scale: float = 1024.0) -> nn.Cell:
    """Return this package's step of a network with a scale for each of two groups."""
    manager = GroupLossScaleManager(scale, [])
    return ours(MARKED[name](manager), manager=manager, loss_scale_group={})


def _two_groups(network: nn.Cell, *lower: nn.Cell) -> list[list[Parameter]]:
    """Return the parameters of the lower Cells of a network, and all others."""
    below = [one for cell in lower for one in cell.trainable_params()]
    taken = {id(one) for one in below}
    return [below, [one for one in network.trainable_params() if id(one) not in taken]]
