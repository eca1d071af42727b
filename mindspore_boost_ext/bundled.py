"""Bundled networks and data: LeNet-5, a small ResNet, 1,797 digits, for examples and ``compare``.

Source and licence of the data: ``data/README.md``.

References: E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository; Y. LeCun, L. Bottou, Y. Bengio, P. Haffner (1998), Gradient-based learning
applied to document recognition (here with ReLU, max pooling and fully connected channels).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn

DIGITS_FILE = Path(__file__).resolve().parent / "data" / "digits.npz"
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"
CLASSES = 10
DIGITS_MAX = 16  # a pixel of the 8x8 digits counts the dark points of a 4x4 block


class DatasetError(ValueError):
    """A data file is missing or damaged, or does not fit the request; the message is one line."""


class Shard(NamedTuple):
    """The part of the data that one of several processes works on."""

    rank: int = 0  # number of the process
    ranks: int = 1  # how many there are


WHOLE = Shard()


class Labelled(NamedTuple):
    """Images with their classes."""

    images: np.ndarray  # [n, height, width], uint8 as stored
    labels: np.ndarray  # [n], uint8, the class of each image


class LeNet5(nn.Cell):
    """LeNet-5: two convolutions with pooling, three dense layers.

    Args:
        num_classes (int): Length of the output. Default: ``10``.
        channels (int): Channels of the input image. Default: ``1``.

    Inputs:
        - **image** (Tensor) - float32 ``[batch, channels, 32, 32]``.

    Outputs:
        Tensor, float32 ``[batch, num_classes]``, the logits.
    """

    def __init__(self, num_classes: int = CLASSES, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_classes)

    def construct(self, image: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        hidden = self.pool(self.relu(self.conv1(image)))
        hidden = self.pool(self.relu(self.conv2(hidden)))
        hidden = self.flatten(hidden)
        hidden = self.relu(self.fc1(hidden))
        hidden = self.relu(self.fc2(hidden))
        return self.fc3(hidden)


class BasicBlock(nn.Cell):
    """Two 3x3 convolutions with BatchNorm, and a shortcut, projected where the shape changes."""

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
        """Returns the block's output, ``[batch, outputs, height / stride, width / stride]``."""
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(branch + self.shortcut(x))


class SmallResNet(nn.Cell):
    """A ResNet of 7 basic blocks in 3 stages: 17 convolutions, 53 trainable parameters.

    Args:
        width (int): channels of the first stage; the others have 2 and 4 times as many.
        counts (Sequence[int]): blocks of each stage.
        block, convolution (Callable): make a block and the first convolution.
    """

    def __init__(
        self,
        width: int = 8,
        counts: Sequence[int] = (3, 2, 2),
        block: Callable[..., nn.Cell] = BasicBlock,
        convolution: Callable[..., nn.Cell] = nn.Conv2d,
    ) -> None:
        super().__init__()
        self.stem = nn.SequentialCell(convolution(1, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for outputs, count in zip((width, 2 * width, 4 * width), counts):
            for _ in range(count):
                blocks.append(block(inputs, outputs, 2 if inputs != outputs else 1))
                inputs = outputs
        self.blocks = nn.SequentialCell(blocks)
        self.head = nn.Dense(inputs, CLASSES)

    def construct(self, image: Tensor) -> Tensor:
        """Returns the logits, ``[batch, 10]``."""
        features = self.blocks(self.stem(image))
        return self.head(features.mean((2, 3)))


def load_digits(path: Path = DIGITS_FILE) -> Labelled:
    """Reads the bundled 1,797 handwritten digits.

    Args:
        path (Path): The ``.npz`` file, see ``data/README.md``.

    Returns:
        Labelled, images uint8 ``[1797, 8, 8]`` in 0..16 and labels uint8 ``[1797]`` in 0..9.

    Raises:
        DatasetError: The file is missing, unreadable or not the bundled one.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror or error}): "
            "restore it from the source repository"
        ) from error
    if hashlib.sha256(content).hexdigest() != DIGITS_SHA256:
        raise DatasetError(
            f"{path} is damaged (its SHA-256 is not the one in data/README.md): "
            "restore it from the source repository"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return Labelled(arrays["images"], arrays["labels"])


def stratified_split(
    labels: np.ndarray, seed: int = 0, every: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Splits indices at random so that each class is divided in the same proportion.

    The shuffled indices are sorted by class (a stable sort keeps them shuffled inside a class) and
    every ``every``-th goes to the test set: a class of n gives n/every test items, to within 1.

    Args:
        labels (np.ndarray): ``[n]``, the classes.
        seed (int): Seed of the shuffle; equal seeds give equal splits. Default: ``0``.
        every (int): One item in ``every`` is kept for testing, at least 2. Default: ``5``.

    Returns:
        Two int64 arrays, the training and the test indices: disjoint, together 0..n-1.
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    is_test = np.arange(len(labels)) % every == 0
    return by_class[~is_test], by_class[is_test]


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Enlarges square images by bilinear interpolation (pixel centres at half-integers).

    Args:
        images (np.ndarray): ``[n, s, s]``, any real dtype.
        side (int): Height and width of the result, at least s.

    Returns:
        np.ndarray, float32 ``[n, side, side]``.

    Examples:
        >>> from mindspore_boost_ext.bundled import enlarge
        >>> enlarge(np.array([[[0, 4], [0, 4]]]), 4)[0, 0].tolist()
        [0.0, 1.0, 3.0, 4.0]
    """
    old = images.shape[-1]
    # Where each new pixel centre lies on the old grid; beyond the outer centres the edge repeats.
    position = np.clip((np.arange(side) + 0.5) * old / side - 0.5, 0, old - 1)
    # Linear weight of each old pixel: 1 at distance 0, falling to 0 at distance 1. Rows sum to 1.
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(old))).astype(np.float32)
    return weights @ images.astype(np.float32) @ weights.T


class EpochOrder(ds.Sampler):
    """An order of training images that depends on a seed and the epoch, and so can be resumed.

    Args:
        count (int): Images in an epoch, the first ones of the dataset.
        seed (int): Seed of the order.
        first_epoch (int): Epochs trained before. Default: ``0``.
    """

    def __init__(self, count: int, seed: int, first_epoch: int = 0) -> None:
        super().__init__(count)
        self.count = count
        self.seed = seed
        self.epoch = first_epoch

    def __iter__(self) -> Iterator[int]:
        """Yields the indices of the images of the next epoch."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        self.epoch += 1
        yield from order.tolist()


def digits_datasets(
    batch_size: int,
    side: int = 32,
    channels: int = 1,
    split_seed: int = 0,
    order: Callable[[int], ds.Sampler] | None = None,
    most: int | None = None,
    shard: Shard = WHOLE,
) -> tuple[ds.Dataset, ds.Dataset]:
    """Builds the training and test pipelines of the bundled digits (1,437 and 360 images).

    Args:
        batch_size (int): Images per batch, 1..1437.
        side (int): Height and width the 8x8 images are enlarged to. Default: ``32``.
        channels (int): The grey image is repeated over this many channels. Default: ``1``.
        split_seed (int): Seed of the split. It is not the seed of training, so that runs with
            different training seeds are tested on the same images. Default: ``0``.
        order (Callable[[int], ds.Sampler] | None): Makes the sampler from the number of training
            images. Default: None, MindSpore's shuffle, which changes with every epoch.
        most (int | None): Use at most this many images of each part. Default: None, all.
        shard (Shard): The part of the data for this process, only without ``order``. Training parts
            have equal length and come from one shuffle (a few images may be in two parts). The test
            part is every ``ranks``-th image. Default: everything.

    Returns:
        Two datasets of (float32 ``[batch, channels, side, side]`` in [0, 1], int32 ``[batch]``).

    Raises:
        DatasetError: The bundled file is missing or damaged, or ``batch_size`` is too large.
    """
    digits = load_digits()
    pixels = enlarge(digits.images, side) / np.float32(DIGITS_MAX)
    pixels = np.repeat(pixels[:, None], channels, axis=1)
    labels = digits.labels.astype(np.int32)
    train, test = (part[spread(len(part), most)] for part in stratified_split(labels, split_seed))
    available = len(train) // shard.ranks
    if batch_size > available:  # every epoch would be empty
        raise DatasetError(
            f"batch size must be at most {available}, the number of training images, "
            f"got {batch_size}"
        )

    def dataset(part: np.ndarray, **how: Any) -> ds.Dataset:
        return ds.NumpySlicesDataset({"image": pixels[part], "label": labels[part]}, **how)

    how: dict[str, Any] = {"shuffle": True} if order is None else {"sampler": order(len(train))}
    if shard.ranks > 1:
        how.update(num_shards=shard.ranks, shard_id=shard.rank)
    # The last, incomplete batch is dropped, so that all steps have one shape.
    return (
        dataset(train, **how).batch(batch_size, drop_remainder=True),
        dataset(test[shard.rank :: shard.ranks], shuffle=False).batch(batch_size),
    )


def spread(count: int, most: int | None) -> np.ndarray:
    """Returns ``most`` indices, evenly over ``count``: sorted items give some of each class."""
    if most is None or most >= count:
        return np.arange(count)
    return np.arange(most) * count // most
