"""The history of a training run: JSON lines on disk, read back and drawn. Imports no MindSpore."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Union

from mindspore_boost_ext.report import LOGGER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike = Union[str, "os.PathLike[str]"]
Record = dict[str, Any]

PICTURES = (".png", ".pdf", ".svg")
_FIRST = b'{"event"'  # what every record begins with
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def without_arrays(value: object) -> object:
    """Return an array or a Tensor as a number or lists, and anything else as it is."""
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    return value.tolist() if hasattr(value, "tolist") else value


def strict_json(value: object) -> object:
    """Turn `value` into what strict JSON can hold: scalars, lists, dicts; arrays become lists."""
    value = without_arrays(value)
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # "nan", "inf" or "-inf"
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class HistoryWriter:
    """Appends records to a JSON-lines file, each line whole; a full disk never stops the training.

    An existing history is continued. If a killed process has left its last line incomplete, that
    line is removed first.

    Raises:
        ValueError: If `path` cannot be opened for appending, is no regular file, is written by
            another monitor now, or holds something else.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self._file: BinaryIO | None = None
        try:
            _check_regular(self.path)
            # Unbuffered: each record is one write, so no half line waits in this process.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
            _lock(self._file)
            _mend_tail(self.path)
        except ValueError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ValueError(
                f"history_path must name a file that can be written, got '{self.path}' "
                f"({error.strerror or error}); create the folder or choose another path"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record. The first failure is logged and ends the history, not the run."""
        if self._file is None:
            return
        line = json.dumps(strict_json(record), allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError("only a part of the line was written")
        except OSError as error:
            LOGGER.warning(
                "History '%s' ends here, training goes on: %s", self.path, error.strerror or error
            )
            self.close()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            _unlock(file)
            file.close()
        except OSError as error:
            LOGGER.warning("History '%s' could not be closed: %s", self.path, error)


def _check_regular(path: str) -> None:
    """Refuse pipes and devices: opening one waits for a reader, or throws away what is written."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(
            f"history_path must name a regular file, got '{path}', which is a pipe, a device or a "
            "link to one; choose another path"
        )


def _lock(file: BinaryIO) -> None:
    """Refuse a file that another monitor has open: the two would cut each other's lines."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"history_path must name a file of this run alone, got '{file.name}', which another "
            "BoostMonitor is writing now; choose another path"
        ) from error
    except OSError:  # a file system without locks
        return


def _unlock(file: BinaryIO) -> None:
    """Give the lock back, which workers that were forked meanwhile would keep."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def _mend_tail(path: str) -> None:
    """Make an existing history end in a whole line; refuse a file that is not a history."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return
    data = Path(path).read_bytes()
    if not _begins_as_history(data):
        raise ValueError(
            f"history_path must name a new file or an earlier history, got '{path}', "
            "which holds something else; choose another path"
        )
    if data.endswith(b"\n"):
        return
    whole = data.rfind(b"\n") + 1
    if _parse(data[whole:]) is not None:
        with open(path, "ab") as file:
            file.write(b"\n")
        return
    LOGGER.warning("History '%s': removed its last line, which was cut short.", path)
    os.truncate(path, whole)


def _begins_as_history(data: bytes) -> bool:
    first, newline, _ = data.partition(b"\n")
    if newline:
        return "event" in (_parse(first) or {})
    return first.startswith(_FIRST[: len(first)])  # one line, maybe cut short


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
        return _restore(record) if isinstance(record, dict) else None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        return None


def _restore(value: object) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item) for item in value]
    return value


def read_history(path: PathLike) -> list[Record]:
    r"""Read a history file.

    An incomplete last line, as a killed process leaves it, is left out silently.

    Args:
        path (Union[str, os.PathLike]): A file written by ``BoostMonitor``.

    Returns:
        list[dict], the records in the order of writing; ``"nan"``, ``"inf"`` and ``"-inf"`` are
        floats again.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no regular file; if a line is damaged: the message names file and line.

    Examples:
        >>> import os, tempfile
        >>> from mindspore_boost_ext import read_history
        >>> path = os.path.join(tempfile.mkdtemp(), "history.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"event": "step", "step": 1, "loss": "inf"}\n{"event": "st')
        >>> read_history(path)
        [{'event': 'step', 'step': 1, 'loss': inf}]
    """
    if Path(path).exists() and not os.path.isfile(path):  # "" is the current folder here
        raise ValueError(f"a history must be a regular file, got '{os.fspath(path)}'")
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):  # what follows the last newline is empty or was cut short
            raise ValueError(
                f"{os.fspath(path)}, line {number}: must be one JSON object, got {line[:60]!r}; "
                "remove the line"
            )
    return records


def new_figure(what: str) -> Figure:
    """Return a figure, independent of pyplot; ``what`` needs it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'{what} needs matplotlib: pip install "mindspore_boost_ext[plot]"'
        ) from error
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_history(
    history_path: PathLike | Mapping[str, PathLike] | Sequence[PathLike],
    output: PathLike | None = None,
) -> Figure:
    """Draw one history, or several over each other, on small panels.

    The panels show loss (steps thin, epoch means thick), learning rate, samples per second, each
    validation metric, and each number that the algorithms report, all over the global step. If a
    resumed run repeats steps, the later records count.

    Args:
        history_path (Union[str, os.PathLike, Mapping, Sequence]): A history file, several, or a
            mapping from label to file.
        output (Union[str, os.PathLike], optional): Where to save the picture; the suffix chooses
            the format (``.png``, ``.pdf``, ``.svg``). Default: ``None``, nothing is saved.

    Returns:
        matplotlib.figure.Figure, independent of pyplot.

    Raises:
        ImportError: If matplotlib is missing.
        FileNotFoundError: If a history file does not exist.
        ValueError: If no file is given, a line is damaged or a file holds no steps.
    """
    figure = new_figure("plot_history")
    runs = {label: _load_run(path) for label, path in _labelled(history_path).items()}
    panels = _panels(runs.values())
    columns = min(3, len(panels)) if len(panels) != 4 else 2
    rows = math.ceil(len(panels) / columns)
    figure.set_size_inches(4.2 * columns, 2.7 * rows + 0.3)
    for position, (group, key) in enumerate(panels, start=1):
        first = figure.axes[0] if figure.axes else None
        axes = figure.add_subplot(rows, columns, position, sharex=first)
        for index, (label, run) in enumerate(runs.items()):
            _draw(axes, run, group, key, color=f"C{index % 10}", label=label)
        _finish(axes, key, lowest=position > len(panels) - columns)
    if len(runs) > 1:
        named: dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels()):
                named.setdefault(label, handle)
        handles, labels = [*named.values()], [*named]
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)))
    if output is not None:
        figure.savefig(os.fspath(output), dpi=150)
    return figure


def _labelled(history_path: Any) -> dict[str, PathLike]:
    if isinstance(history_path, (str, os.PathLike)):
        history_path = [history_path]
    if not history_path:
        raise ValueError("history_path must name at least one history file, got none")
    if isinstance(history_path, Mapping):
        return {str(label): path for label, path in history_path.items()}
    stems = [Path(path).stem for path in history_path]
    unique = len(set(stems)) == len(stems)
    return dict(zip(stems if unique else [os.fspath(path) for path in history_path], history_path))


def _load_run(path: PathLike) -> list[Record]:
    """The step and epoch records of one file; a resumed run replaces what it repeats."""
    kept: list[Record] = []
    last = 0
    for record in read_history(path):
        if record.get("event") not in ("step", "epoch") or "step" not in record:
            continue
        step = record["step"]
        if not isinstance(step, int):
            raise ValueError(f"{os.fspath(path)}: step must be an int, got {str(step)[:60]!r}")
        if record["event"] == "step":
            if step <= last:
                kept = [old for old in kept if old["step"] < step]
            last = step
        kept.append(record)
    if not last:
        raise ValueError(f"{os.fspath(path)} holds no step records; nothing can be drawn")
    return kept


def _panels(runs: Iterable[list[Record]]) -> list[tuple[str, str]]:
    """The panels as pairs (group of a record, key in it), in the order of drawing."""
    panels = [("", "loss"), ("", "learning_rate"), ("", "samples_per_second")]
    found: dict[str, dict[str, None]] = {"metrics": {}, "boost": {}}
    for record in (record for run in runs for record in run):
        for group, keys in found.items():
            for key, value in (record.get(group) or {}).items():
                if isinstance(value, (bool, int, float)):
                    keys.setdefault(key)
    return panels + [(group, key) for group, keys in found.items() for key in keys]


def _draw(axes: Axes, run: list[Record], group: str, key: str, color: str, label: str) -> None:
    # Without a label of its own a thin line stays out of the legend.
    event = "epoch" if group == "metrics" else "step"
    marker = "o" if group == "metrics" else None
    with_means = key == "loss" and not group
    thin: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.45} if with_means else {"linewidth": 1.3}
    for index, (steps, values) in enumerate(_series(run, event, group, key)):
        name = label if index == 0 and not with_means else None
        style = ("-", "--", ":", "-.")[index % 4]
        axes.plot(steps, values, color=color, ls=style, marker=marker, ms=3, label=name, **thin)
    if with_means:
        for steps, values in _series(run, "epoch", group, key):
            axes.plot(steps, values, color=color, lw=2.2, marker="o", ms=3.5, label=label)


def _series(
    run: list[Record], event: str, group: str, key: str
) -> list[tuple[list[int], list[float]]]:
    """The lines of one quantity: one, or one for each learning rate of a grouped optimizer."""
    steps: list[int] = []
    rows: list[list[Any]] = []
    for record in run:
        holder = (record.get(group) or {}) if group else record
        if record["event"] == event and key in holder:
            steps.append(record["step"])
            rows.append(holder[key] if isinstance(holder[key], list) else [holder[key]])
    return [(steps, [_number(one) for one in line]) for line in itertools.zip_longest(*rows)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (bool, int, float)) else math.nan


def _finish(axes: Axes, key: str, lowest: bool) -> None:
    axes.set_title({"samples_per_second": "samples per second"}.get(key, key.replace("_", " ")))
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.margins(x=0.02)
    axes.tick_params(labelsize=8)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useOffset=False)
    if lowest:
        axes.set_xlabel("step", fontsize=9)
