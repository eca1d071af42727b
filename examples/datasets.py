"""Datasets of the examples: the bundled handwritten digits, and MNIST from the user's own files.

Plain functions from files to NumPy arrays, and from arrays or files to a MindSpore pipeline that
yields ``(image, label)`` batches: image float32 ``[batch, channels, height, width]`` in [0, 1],
label int32 ``[batch]``. Every file is checked before it is used; whatever is wrong with one is
reported as a ``DatasetError`` that names the file, the fault and the remedy in one line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore.dataset import transforms, vision

DIGITS_FILE = Path(__file__).resolve().parent / "data" / "digits.npz"
DIGITS_SHA256 = "b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e"
DIGITS_MAX = 16  # a pixel of the 8x8 digits counts the dark points of a 4x4 block

MNIST_CLASSES = 10
MNIST_SIDE = 28
MNIST_PADDING = 2  # 28 + 2 * 2 = 32, the side LeNet-5 was designed for
MNIST_MAX_ITEMS = 100_000  # the original files hold 60,000; bounds what a .gz may unpack to
MNIST_ITEMS = {  # file name -> (idx magic number, shape of one item)
    "train-images-idx3-ubyte": (2051, (MNIST_SIDE, MNIST_SIDE)),
    "train-labels-idx1-ubyte": (2049, ()),
    "t10k-images-idx3-ubyte": (2051, (MNIST_SIDE, MNIST_SIDE)),
    "t10k-labels-idx1-ubyte": (2049, ()),
}
_BLOCK = 1 << 20  # bytes held in memory while a file is copied


class DatasetError(ValueError):
    """A data file is missing or damaged, or does not fit the request; the message is one line."""


class Shard(NamedTuple):
    """The part of the data that one of several processes works on.

    Attributes:
        rank: number of the process, from 0.
        ranks: how many there are.
    """

    rank: int = 0
    ranks: int = 1


WHOLE = Shard()


class Labelled(NamedTuple):
    """Images with their classes.

    Attributes:
        images: ``[n, height, width]``, uint8 as stored.
        labels: ``[n]``, uint8, the class of each image.
    """

    images: np.ndarray
    labels: np.ndarray


# --------------------------------------------------------------------------- handwritten digits


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
            f"{path} cannot be read ({_reason(error)}): restore it from the source repository"
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
        >>> enlarge(np.array([[[0, 4], [0, 4]]]), 4)[0, 0].tolist()
        [0.0, 1.0, 3.0, 4.0]
    """
    old = images.shape[-1]
    # Where each new pixel centre lies on the old grid; beyond the outer centres the edge repeats.
    position = np.clip((np.arange(side) + 0.5) * old / side - 0.5, 0, old - 1)
    # Linear weight of each old pixel: 1 at distance 0, falling to 0 at distance 1. Rows sum to 1.
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(old))).astype(np.float32)
    enlarged: np.ndarray = weights @ images.astype(np.float32) @ weights.T
    return enlarged


def digits_datasets(
    batch_size: int,
    side: int = 32,
    channels: int = 1,
    split_seed: int = 0,
    shard: Shard = WHOLE,
) -> tuple[ds.Dataset, ds.Dataset]:
    """Builds the training and test pipelines of the bundled digits (1,437 and 360 images).

    Args:
        batch_size (int): Images per batch, 1..1437.
        side (int): Height and width the 8x8 images are enlarged to. Default: ``32``.
        channels (int): The grey image is repeated over this many channels. Default: ``1``.
        split_seed (int): Seed of the split; apart from the seed of training, so that runs with
            different training seeds are tested on the same images. Default: ``0``.
        shard (Shard): The part for this process. Default: everything.

    Returns:
        Two datasets of (float32 ``[batch, channels, side, side]`` in [0, 1], int32 ``[batch]``).

    Raises:
        DatasetError: The bundled file is missing or damaged, or ``batch_size`` is too large.
    """
    digits = load_digits()
    pixels = enlarge(digits.images, side) / np.float32(DIGITS_MAX)
    pixels = np.repeat(pixels[:, None], channels, axis=1)
    labels = digits.labels.astype(np.int32)
    train, test = stratified_split(labels, split_seed)
    _check_batch_size(batch_size, len(train) // shard.ranks)
    return (
        array_dataset(pixels[train], labels[train], batch_size, training=True, shard=shard),
        array_dataset(pixels[test], labels[test], batch_size, training=False, shard=shard),
    )


def array_dataset(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    *,
    training: bool,
    shard: Shard = WHOLE,
) -> ds.Dataset:
    """Wraps arrays in a pipeline; reshuffles every epoch when training, with MindSpore's seed.

    Args:
        images (np.ndarray): float32 ``[n, channels, height, width]``.
        labels (np.ndarray): int32 ``[n]``.
        batch_size (int): Images per batch.
        training (bool): Shuffle, and drop the last incomplete batch so that all steps have one
            shape; otherwise keep order and every image.
        shard (Shard): The part for this process: when training, parts of one length of images
            shuffled alike (a few images may be in two parts); otherwise every ``ranks``-th image.

    Returns:
        Dataset with the columns ``image`` and ``label``.
    """
    if not training:
        images, labels = (one[shard.rank :: shard.ranks] for one in (images, labels))
    columns = {"image": images, "label": labels}
    parts = {"num_shards": shard.ranks, "shard_id": shard.rank} if training else {}
    dataset = ds.NumpySlicesDataset(columns, shuffle=training, **parts)
    return dataset.batch(batch_size, drop_remainder=training)


# ----------------------------------------------------------------------------------------- MNIST


def unpack_mnist(source: Path, target: Path) -> None:
    """Checks the four MNIST files in ``source`` and writes them, unpacked, to ``target``.

    MindSpore's loader takes every file whose name resembles an MNIST file, ``.gz`` included, so it
    is given a folder that holds these four and nothing else. Files are streamed: no more than the
    header announces is unpacked, and the header is bounded by ``MNIST_MAX_ITEMS``.

    Args:
        source (Path): Folder with the original files, each plain or with ``.gz``.
        target (Path): Existing empty folder, about 55 MB are written for the original files.

    Raises:
        DatasetError: The folder or a file is missing or damaged, or images and labels disagree.
    """
    if not source.is_dir():
        raise DatasetError(
            f"{source} is not a folder: --data-dir takes the folder that holds "
            f"{', '.join(MNIST_ITEMS)} (each may end in .gz)"
        )
    # All four are looked for before the first is copied: a missing file is reported at once.
    found = {name: _find_idx(source, name) for name in MNIST_ITEMS}
    counts = {name: _copy_idx(path, target / name) for name, path in found.items()}
    for part in ("train", "t10k"):
        images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        if counts[images] != counts[labels]:
            raise DatasetError(
                f"{found[images]} holds {counts[images]} images but {found[labels].name} "
                f"{counts[labels]} labels: download both files again"
            )
        largest = int(np.fromfile(target / labels, np.uint8, offset=8).max())
        if largest >= MNIST_CLASSES:
            raise DatasetError(
                f"{found[labels]} holds the label {largest}, MNIST has 0 to 9: "
                "download the file again"
            )


def mnist_datasets(
    folder: Path, batch_size: int, shard: Shard = WHOLE
) -> tuple[ds.Dataset, ds.Dataset]:
    """Builds the training and test pipelines of MNIST, zero-padded from 28x28 to 32x32.

    The files are read while the datasets are used, so the folder has to stay until then.

    Args:
        folder (Path): What ``unpack_mnist`` wrote.
        batch_size (int): Images per batch, at most the number of training images.
        shard (Shard): The part for this process; parts have one length, so that a few images may
            be in two of them where the number of processes does not divide. Default: everything.

    Returns:
        Two datasets of (float32 ``[batch, 1, 32, 32]`` in [0, 1], int32 ``[batch]``).

    Raises:
        DatasetError: ``batch_size`` is larger than the training set.
    """
    parts = {"num_shards": shard.ranks, "shard_id": shard.rank}
    train = ds.MnistDataset(str(folder), usage="train", shuffle=True, **parts)
    test = ds.MnistDataset(str(folder), usage="test", shuffle=False, **parts)
    _check_batch_size(batch_size, train.get_dataset_size())
    prepare = [vision.Pad(MNIST_PADDING), vision.Rescale(1 / 255, 0.0), vision.HWC2CHW()]
    to_int32 = transforms.TypeCast(ms.int32)

    def pipeline(dataset: ds.Dataset, training: bool) -> ds.Dataset:
        dataset = dataset.map(prepare, "image").map(to_int32, "label")
        return dataset.batch(batch_size, drop_remainder=training)

    return pipeline(train, True), pipeline(test, False)


def _find_idx(folder: Path, name: str) -> Path:
    """Returns the path of ``name`` or ``name.gz``, preferring the plain file."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DatasetError(
        f"{folder / name} is missing (also with .gz): put the four original MNIST files there"
    )


def _copy_idx(source: Path, target: Path) -> int:
    """Checks one idx file while it is copied (and unpacked); returns how many items it holds."""
    magic, shape = MNIST_ITEMS[target.name]
    opener = gzip.open if source.suffix == ".gz" else open
    try:
        with opener(source, "rb") as stream, target.open("wb") as copy:
            return _copy_checked(cast(BinaryIO, stream), copy, magic, shape)
    except (OSError, EOFError, zlib.error, _IdxFault) as error:
        raise DatasetError(
            f"{source} cannot be used ({_reason(error)}): download the file again"
        ) from error


class _IdxFault(Exception):
    """What is wrong with an idx file, without its name."""


def _copy_checked(stream: BinaryIO, copy: BinaryIO, magic: int, shape: tuple[int, ...]) -> int:
    """Copies an idx file of items of ``shape``: header of big-endian int32, then one byte each."""
    form = f">{2 + len(shape)}i"
    header = stream.read(struct.calcsize(form))
    if len(header) < struct.calcsize(form):
        raise _IdxFault(f"truncated: {len(header)} bytes are no idx header")
    found, count, *dimensions = (int(number) for number in struct.unpack(form, header))
    if found != magic:
        raise _IdxFault(f"not this kind of idx file: magic number {found}, expected {magic}")
    if not 1 <= count <= MNIST_MAX_ITEMS:
        raise _IdxFault(f"announces {count} items, expected 1 to {MNIST_MAX_ITEMS}")
    if tuple(dimensions) != shape:
        raise _IdxFault(f"image size {'x'.join(map(str, dimensions))}, expected 28x28")
    copy.write(header)
    missing = count * math.prod(shape)
    while missing and (block := stream.read(min(missing, _BLOCK))):
        copy.write(block)
        missing -= len(block)
    if missing:
        raise _IdxFault(f"truncated: {missing} bytes short of the {count} items announced")
    if stream.read(1):
        raise _IdxFault(f"longer than the {count} items announced")
    return count


# --------------------------------------------------------------------------------------- helpers


def _check_batch_size(batch_size: int, available: int) -> None:
    """Refuses a batch larger than the training set: every epoch would be empty."""
    if batch_size > available:
        raise DatasetError(
            f"batch size must be at most {available}, the number of training images, "
            f"got {batch_size}"
        )


def _reason(error: Exception) -> str:
    """Returns what went wrong without the file name, which the caller's message carries."""
    return getattr(error, "strerror", None) or str(error)
