"""What most benchmarks train: the bundled networks, an optimizer, a batch of noise, two steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from resnets import BasicBlock, convolution, resnet18  # noqa: F401

from mindspore_boost_ext import GroupLossScaleManager, make_train_step
from mindspore_boost_ext.bundled import CLASSES, LeNet5, SmallResNet
from mindspore_boost_ext.cli.trial_settings import only

Step = Callable[[], object]  # trains one, and waits for it
NETWORKS: dict[str, Callable[[], nn.Cell]] = {"LeNet": LeNet5, "small ResNet": SmallResNet}
BATCH_SIZE, LEARNING_RATE = 32, 0.03  # those of examples/lenet.py


def resnet20() -> nn.Cell:
    """Return the ResNet-20 of He et al. for small images: three stages of three blocks."""
    return SmallResNet(16, (3, 3, 3), BasicBlock, convolution)


def cross_entropy() -> nn.Cell:
    """Return the loss of all benchmarks: the mean over the batch."""
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def with_loss(network: nn.Cell) -> nn.Cell:
    """Return the network with its cross-entropy."""
    return nn.WithLossCell(network, cross_entropy())


def momentum(network: nn.Cell, rate: float | list[float] = 1e-3) -> nn.Cell:
    """Return momentum 0.9; the default rate keeps weights finite when steps are timed."""
    return nn.Momentum(network.trainable_params(), rate, 0.9)


def falling(network: nn.Cell, steps: int, epochs: int) -> nn.Cell:
    """Return momentum for a training on the digits: the rate is half a cosine, one an epoch."""
    rates = nn.cosine_decay_lr(0.0, LEARNING_RATE, steps, steps // epochs, epochs)
    return momentum(network, rates)


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


def waiting(cell: nn.Cell, inputs: Sequence[Tensor] | None = None) -> Step:
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
        cross_entropy(),
        momentum(network) if optimizer is None else optimizer,
        config=only(*sections, **given),
        loss_scale_manager=manager,
    )
    return step.train_network.set_train()


def plain_step(network: nn.Cell, inputs: Sequence[Tensor] | None = None) -> Step:
    """Return a function that trains one step of MindSpore's own, and waits for it."""
    return waiting(plain(network), inputs)


def accuracy(network: nn.Cell, batches: Iterable[Sequence[Tensor]]) -> float:
    """Return the share of correct answers over all batches, in evaluation mode."""
    network.set_train(False)
    correct = [
        network(images).asnumpy().argmax(1) == labels.asnumpy() for images, labels in batches
    ]
    return float(np.mean(np.concatenate(correct)))


def outputs_of(
    cells: Iterable[nn.Cell], network: nn.Cell, images: Tensor
) -> list[tuple[nn.Cell, Tensor]]:
    """Run a network; return those of its cells that were called, each with what it returned."""
    called: list[tuple[nn.Cell, Any, Tensor]] = []
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)  # hooks run there
    hooks = [cell.register_forward_hook(lambda *one: called.append(one)) for cell in cells]
    network(images)
    for hook in hooks:
        hook.remove()
    ms.set_context(mode=before)
    return [(cell, output) for cell, _, output in called]


class Called(nn.Cell):
    """A function or a Cell within a Cell, so that a graph holds it whole."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        self.function = function

    def construct(self, *inputs: Tensor) -> Any:
        """Return what the function returns."""
        return self.function(*inputs)


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
