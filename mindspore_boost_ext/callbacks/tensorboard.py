"""The records of a training run as scalars for TensorBoard, by the library tensorboardX."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

_MEASURED = ("loss", "learning_rate", "samples_per_second", "seconds")
_NUMBERS = itertools.count()  # of the files of this process


class TensorBoardWriter:
    """Writes records, as :class:`HistoryWriter` takes them, into a folder.

    Scalars of a step are named after its keys, those of the accelerators ``boost/<name>``, those of
    an epoch ``epoch/<name>``, metrics ``metrics/<name>``. What is no number is left out.

    The folder is made if it is not there; ``step`` is that of records in front of the first that
    names its own.

    Raises:
        ImportError: with the command that installs tensorboardX, if it is missing.
        ValueError: if the folder cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        path = os.fspath(folder)
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"tensorboard_dir={path!r} needs tensorboardX: "
                'pip install "mindspore_boost_ext[tensorboard]"'
            ) from error
        try:
            os.makedirs(path, exist_ok=True)
            # The library names files by the second, and writes over one of that name.
            ending = f".{os.getpid()}.{next(_NUMBERS)}"
            self._writer: Any = SummaryWriter(path, filename_suffix=ending)
        except OSError as error:
            raise ValueError(
                f"tensorboard_dir must name a folder that can be written, got {path!r} "
                f"({error.strerror or error})"
            ) from error
        self._step = step

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of one record."""
        self._step = record.get("step", self._step)
        for name, value in _scalars(record):
            self._writer.add_scalar(name, value, self._step)
        if record["event"] != "step":
            self._writer.flush()

    def close(self) -> None:
        """Bring everything to the disk."""
        self._writer.close()


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if record["event"] in ("step", "epoch"):
        prefix = "epoch/" if record["event"] == "epoch" else ""
        yield from _numbers(prefix, {name: record.get(name) for name in _MEASURED})
    yield from _numbers("boost/", record.get("boost") or {})
    yield from _numbers("metrics/", record.get("metrics") or {})


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the values that are numbers; of a list each one, with its place."""
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            yield from _numbers(f"{prefix}{name}/", {str(i): one for i, one in enumerate(value)})
        elif isinstance(value, (bool, int, float)):
            yield prefix + name, float(value)
