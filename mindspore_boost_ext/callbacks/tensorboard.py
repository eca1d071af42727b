"""The records of a training run as scalars for TensorBoard, by the library tensorboardX."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mindspore_boost_ext.callbacks.history import without_arrays
from mindspore_boost_ext.report import LOGGER

_MEASURED = ("loss", "learning_rate", "samples_per_second", "seconds")
_FLUSHED_AFTER = 60.0  # seconds, in a long epoch
_NUMBERS = itertools.count()  # of the files of this process


class TensorBoardWriter:
    """Writes the same records as :class:`HistoryWriter`, into a folder.

    Scalars of a step are named after its keys, those of the accelerators ``boost/<name>``, those of
    an epoch ``epoch/<name>``, metrics ``metrics/<name>``. Values that are no numbers are left out.

    The folder is made if it is missing. Records before the first that names its own step get
    ``step``.

    Raises:
        ImportError: with the command that installs tensorboardX, if it is missing.
        ValueError: if the folder cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        path = os.fspath(folder)
        try:
            from tensorboardX import record_writer
        except ImportError as error:
            raise ImportError(
                f"tensorboard_dir={path!r} needs tensorboardX: "
                'pip install "mindspore_boost_ext[tensorboard]"'
            ) from error
        try:
            os.makedirs(path, exist_ok=True)
            # Not the library's SummaryWriter: it names files by the second; and if the disk is
            # full, its thread dies, and the training waits for it.
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
            name += f".{os.getpid()}.{next(_NUMBERS)}"
            self._file: Any = record_writer.RecordWriter(os.path.join(path, name))
        except OSError as error:
            raise ValueError(
                f"tensorboard_dir must name a folder that can be written, got {path!r} "
                f"({error.strerror or error})"
            ) from error
        self.path, self._step, self._flushed = path, step, time.monotonic()
        self._put(file_version="brain.Event:2")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of one record. The first failure is logged and ends the writing."""
        self._step = record.get("step", self._step)
        self._put(_scalars(record), step=self._step)
        if record["event"] != "step" or time.monotonic() - self._flushed > _FLUSHED_AFTER:
            self._flushed = time.monotonic()
            self._try(lambda file: file.flush())

    def close(self) -> None:
        """Write everything to the disk, and close the file."""
        self._try(lambda file: file.close())

    def _put(self, scalars: Iterable[tuple[str, float]] = (), **fields: object) -> None:
        """Write numbers, or other fields, in the form of TensorBoard."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        event = Event(wall_time=time.time(), **fields)
        for name, value in scalars:
            event.summary.value.extend(scalar(name, value).value)
        self._try(lambda file: file.write(event.SerializeToString()))

    def _try(self, do: Callable[[Any], object]) -> None:
        if self._file is None:
            return
        try:
            do(self._file)
        except OSError as error:
            file, self._file, why = self._file, None, error.strerror or error
            LOGGER.warning("Scalars in '%s' end here, training goes on: %s", self.path, why)
            with contextlib.suppress(OSError):  # closing tries the failed write again
                file.close()


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if record["event"] in ("step", "epoch"):
        prefix = "epoch/" if record["event"] == "epoch" else ""
        yield from _numbers(prefix, {name: record.get(name) for name in _MEASURED})
    yield from _numbers("boost/", record.get("boost") or {})
    yield from _numbers("metrics/", record.get("metrics") or {})


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the values that are numbers; items of a list by their index."""
    for name, given in values.items():
        value = without_arrays(given)
        if isinstance(value, (list, tuple)):
            yield from _numbers(f"{prefix}{name}/", {str(i): one for i, one in enumerate(value)})
        elif isinstance(value, (bool, int, float)):
            yield prefix + name, float(value)
