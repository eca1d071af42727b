"""Datasets of the examples: MNIST and CIFAR-10 from the user's files, by name the bundled digits.

Plain functions from files to a MindSpore pipeline of ``(image, label)`` batches: image float32
``[batch, channels, height, width]`` in [0, 1], label int32 ``[batch]``. Every file is checked
before it is used; whatever is wrong with one is reported as a ``DatasetError`` that names the file,
the fault and the remedy in one line.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore.dataset import transforms, vision

from mindspore_boost_ext.bundled import (
    DIGITS_FILE,
    DIGITS_SHA256,
    WHOLE,
    DatasetError,
    EpochOrder,
    Labelled,
    Shard,
    array_dataset,
    check_batch_size,
    digits_datasets,
    enlarge,
    load_digits,
    reason_of,
    stratified_split,
)

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
CIFAR_CLASSES = 10
CIFAR_ITEMS = 10_000  # images in each of the binary files
CIFAR_RECORD = 1 + 3 * 32 * 32  # bytes of one image: its label, then red, green and blue
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
_BLOCK = 1 << 20  # bytes held in memory while a file is copied


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
    check_batch_size(batch_size, train.get_dataset_size())
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
            f"{source} cannot be used ({reason_of(error)}): download the file again"
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


# -------------------------------------------------------------------------------------- CIFAR-10


def cifar10_datasets(
    folder: Path,
    batch_size: int,
    order: Callable[[int], ds.Sampler],
    most: int | None = None,
) -> tuple[ds.Dataset, ds.Dataset]:
    """Builds the training and test pipelines of CIFAR-10's binary files.

    Args:
        folder (Path): Holds ``test_batch.bin`` and one or more of ``data_batch_1.bin`` to ``5``,
            as ``cifar-10-binary.tar.gz`` unpacks them. Read while the datasets are used.
        batch_size (int): Images per batch, at most the number of training images.
        order (Callable[[int], ds.Sampler]): From the number of training images to their order.
        most (int | None): Use this many images of each part at the most. Default: None, all.

    Returns:
        Two datasets of (float32 ``[batch, 3, 32, 32]`` in [0, 1], int32 ``[batch]``).

    Raises:
        DatasetError: A file is missing or damaged, or ``batch_size`` is too large.
    """
    found = _check_cifar10(folder)
    count = min(most or math.inf, CIFAR_ITEMS * (found - 1))
    check_batch_size(batch_size, int(count))
    prepare = [vision.Rescale(1 / 255, 0.0), vision.HWC2CHW()]

    def pipeline(part: str, training: bool, sampler: ds.Sampler) -> ds.Dataset:
        dataset = ds.Cifar10Dataset(str(folder), usage=part, sampler=sampler)
        dataset = dataset.map(prepare, "image").map(transforms.TypeCast(ms.int32), "label")
        return dataset.batch(batch_size, drop_remainder=training)

    in_order = ds.SequentialSampler(num_samples=min(most or CIFAR_ITEMS, CIFAR_ITEMS))
    return pipeline("train", True, order(int(count))), pipeline("test", False, in_order)


def _check_cifar10(folder: Path) -> int:
    """Checks the binary files; returns how many there are. MindSpore's loader takes whole ones."""
    if not folder.is_dir():
        raise DatasetError(
            f"{folder} is not a folder: --data-dir takes the folder that holds {CIFAR_TEST}"
        )
    train = [path for path in (folder / name for name in CIFAR_TRAIN) if path.is_file()]
    for path in (folder / CIFAR_TEST, train[0] if train else folder / CIFAR_TRAIN[0]):
        if not path.is_file():
            raise DatasetError(
                f"{path} is missing: unpack cifar-10-binary.tar.gz, the binary version, there"
            )
    for path in (folder / CIFAR_TEST, *train):
        size = path.stat().st_size
        if size != CIFAR_ITEMS * CIFAR_RECORD:
            raise DatasetError(
                f"{path} holds {size} bytes, {CIFAR_ITEMS} images have "
                f"{CIFAR_ITEMS * CIFAR_RECORD}: download the file again"
            )
        largest = int(np.memmap(path, np.uint8, "r")[::CIFAR_RECORD].max())
        if largest >= CIFAR_CLASSES:
            raise DatasetError(
                f"{path} holds the label {largest}, CIFAR-10 has 0 to 9: download the file again"
            )
    return 1 + len(train)


__all__ = [
    "DIGITS_FILE",
    "DIGITS_SHA256",
    "WHOLE",
    "DatasetError",
    "EpochOrder",
    "Labelled",
    "Shard",
    "array_dataset",
    "cifar10_datasets",
    "digits_datasets",
    "enlarge",
    "load_digits",
    "mnist_datasets",
    "stratified_split",
    "unpack_mnist",
]
