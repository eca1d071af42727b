"""BoostMonitor: what a training run does, seen while it runs and kept for later."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Callable
from weakref import WeakKeyDictionary

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.train import Callback, RunContext

from mindspore_boost_ext._version import __version__
from mindspore_boost_ext.base.learning_rate import host_array, read_learning_rate
from mindspore_boost_ext.callbacks.checkpoint import step_in
from mindspore_boost_ext.callbacks.display import Display, PlainDisplay, make_display
from mindspore_boost_ext.callbacks.epoch import batches_of_epoch, is_last_of_epoch, restored_epochs
from mindspore_boost_ext.callbacks.history import HistoryWriter, PathLike, Record
from mindspore_boost_ext.callbacks.tensorboard import TensorBoardWriter
from mindspore_boost_ext.report import LOGGER
from mindspore_boost_ext.runtime.ranks import launched_rank

_SMOOTHING = 0.9


def _loss_value(outputs: object) -> float | None:
    """The loss in a step's outputs: the value, or the first of ``(loss, overflow, scale)``."""
    if isinstance(outputs, (tuple, list)):
        outputs = outputs[0] if outputs else None
    if isinstance(outputs, (Tensor, np.ndarray, np.number, int, float)):
        return float(np.mean(host_array(outputs)))
    return None


@dataclass
class _Throughput:
    """Samples per second: ratio of two running sums that fade by 0.9 a step."""

    started: bool = False
    samples: float = 0.0
    seconds: float = 0.0

    def update(self, samples: int | None, seconds: float) -> float | None:
        if not self.started or samples is None:
            self.started = True  # the first step holds the compilation: not counted
            return None
        self.samples = _SMOOTHING * self.samples + samples
        self.seconds = _SMOOTHING * self.seconds + seconds
        return _ratio(self.samples, self.seconds)


@dataclass
class _Epoch:
    """What is summed up over one epoch."""

    number: int
    began: float
    first_step: int
    ended: float
    losses: list[float] = field(default_factory=list)
    samples: int = 0  # of the steps whose time counts
    sampled_seconds: float = 0.0


@dataclass
class _Run:
    """The state of one call of ``model.train`` or ``model.fit`` on rank 0."""

    network: Any
    optimizer: Any
    batch_size: int | None
    last_step: int
    writers: list[HistoryWriter | TensorBoardWriter]
    display: Display | None
    throughput: _Throughput = field(default_factory=_Throughput)
    epoch: _Epoch | None = None
    last_epoch: int = 0  # 0 if the loop does not say it
    step_offset: int = 0
    epoch_offset: int = 0
    learning_rate: float | list[float] | None = None
    report: Any = None  # the last one that a record holds
    warned: set[str] = field(default_factory=set)

    def emit(self, record: Record) -> None:
        for writer in self.writers:
            writer.write(record)

    def named(self, epoch: int, of: str = "/") -> str:
        return f"epoch {epoch}" + (f"{of}{self.last_epoch}" if self.last_epoch else "")

    def guarded(self, what: str, read: Callable[[], Any]) -> Any:
        """Call `read`; a failure is logged once and gives ``None``: training must go on."""
        try:
            return read()
        except Exception as error:  # user-written schedules and cells may raise anything
            if what not in self.warned:
                self.warned.add(what)
                LOGGER.warning("BoostMonitor cannot read the %s: %s", what, error)
            return None


class BoostMonitor(Callback):
    """Shows the progress of a training run and writes its history.

    Only rank 0 shows progress and writes; on the other ranks the callback does nothing. Loss,
    metrics and samples per second are those of this process, not of the whole cluster.

    - **learning rate**: read just before a step, so it is the one that the step used (in sink mode,
      the first step of the sink call). Put a callback that changes it in ``on_train_step_begin``
      before the monitor.
    - **seconds** of a step: from the end of the previous step (or the start of the epoch) until the
      loss is on the host. Data loading is included, validation is not.
    - **samples per second**: the ratio of two running sums, of samples and of seconds, which fade
      by the factor 0.9 in each step. The first step of a run, which compiles, counts in neither.
      Its value, and that of an epoch without another step, is null.
    - **step** counts over all epochs. With ``initial_epoch``, or in a restored run, the skipped
      epochs count as done. In a second call of ``train`` or ``fit`` of the same Model with the same
      monitor, the epochs of the first call also count.

    Args:
        history_path (Union[str, os.PathLike], optional): The JSON-lines file, see
            ``callbacks.history``. An earlier history is continued. If writing fails during the
            training, this is logged once and training goes on. Default: ``None``, no history.
        progress (bool): Whether to show progress on standard error: a bar when rich is installed
            and standard error is a terminal, else plain lines. Default: ``True``.
        log_interval (int, optional): Steps between two plain lines, at least 1. Default: ``None``,
            one line an epoch.
        tensorboard_dir (Union[str, os.PathLike], optional): The folder for TensorBoard. It gets the
            numbers of every record, in one file for each run. Needs tensorboardX,
            ``pip install "mindspore_boost_ext[tensorboard]"``. Default: ``None``.

    Raises:
        TypeError: If an argument has a wrong type.
        ImportError: When training begins, if `tensorboard_dir` is given and tensorboardX missing.
        ValueError: If `log_interval` is below 1, or a path is empty. When training begins, if the
            file at `history_path`, or the folder `tensorboard_dir`, cannot be written.

    Examples:
        >>> import os, tempfile
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from mindspore_boost_ext import BoostMonitor, read_history
        >>> net = nn.Dense(4, 1)
        >>> model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
        >>> data = ms.dataset.NumpySlicesDataset(
        ...     (np.ones((6, 4), np.float32), np.ones((6, 1), np.float32)), shuffle=False)
        >>> path = os.path.join(tempfile.mkdtemp(), "history.jsonl")
        >>> model.train(1, data.batch(2), callbacks=BoostMonitor(path, progress=False))
        >>> [record["event"] for record in read_history(path)]
        ['start', 'step', 'step', 'step', 'epoch']
    """

    def __init__(
        self,
        history_path: PathLike | None = None,
        progress: bool = True,
        log_interval: int | None = None,
        tensorboard_dir: PathLike | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(history_path, progress, log_interval, tensorboard_dir)
        self._tensorboard_dir = None if tensorboard_dir is None else os.fspath(tensorboard_dir)
        self._history_path = None if history_path is None else os.fspath(history_path)
        self._progress = progress
        self._log_interval = log_interval
        self._depth = 0
        self._run: _Run | None = None
        # Steps and epochs of earlier calls, by step cell.
        self._done: WeakKeyDictionary[Any, tuple[int, int, int]] = WeakKeyDictionary()
        self._last_step = 0  # of the training that was watched last

    def __enter__(self) -> BoostMonitor:
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        # model.fit enters its callbacks once more for each validation: only the outermost counts.
        self._depth -= 1
        if self._depth <= 0:
            self._close()

    def on_train_begin(self, run_context: RunContext) -> None:
        """Open history and display; raises ValueError if the history cannot be written."""
        self._close()
        if launched_rank() != 0 or not (
            self._progress or self._history_path or self._tensorboard_dir
        ):
            return
        params = run_context.original_args()
        # Sink mode replaces cb_params.train_network by a wrapper later: the cell is taken now.
        network = params.train_network
        optimizer = getattr(network, "optimizer", None)
        batch_size = getattr(params.get("train_dataset"), "get_batch_size", None)
        self._run = _Run(
            network=network,
            optimizer=params.get("optimizer") if optimizer is None else optimizer,
            batch_size=batch_size() if callable(batch_size) else None,
            last_step=params.cur_step_num,
            writers=list(self._open_writers()),
            display=make_display(self._log_interval) if self._progress else None,
        )
        self._run.emit(_start_record(params, self._run))

    def _open_writers(self) -> Iterator[HistoryWriter | TensorBoardWriter]:
        if self._tensorboard_dir:
            yield TensorBoardWriter(self._tensorboard_dir, self._last_step)
        if self._history_path:
            yield HistoryWriter(self._history_path)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Start the epoch's clock and bar."""
        if self._run is None:
            return
        run, params = self._run, run_context.original_args()
        number = params.cur_epoch_num
        if run.epoch is None:
            # A loop of a subclass of Model may have no number of epochs.
            asked = params.get("epoch_num")
            run.last_epoch = number - 1 + asked if asked else 0
            restored, restores = restored_epochs(step_in(run.network))
            steps, epochs, then = self._done.get(run.network, (0, 0, -1))
            if then != restores and epochs != restored:  # new to this monitor, or back to a file
                steps, epochs = restored * batches_of_epoch(params), restored
            if run.last_step == 0:
                run.step_offset = (number - 1) * batches_of_epoch(params)
            if number == 1 and epochs:
                run.step_offset, run.epoch_offset = steps, epochs
                run.last_epoch += epochs if run.last_epoch else 0
            elif number == epochs + 1:  # it goes on from there; epochs may differ in length
                run.step_offset = steps
        number += run.epoch_offset
        now = time.perf_counter()
        run.epoch = _Epoch(number, began=now, first_step=params.cur_step_num, ended=now)
        if run.display is not None:
            run.display.begin_epoch(run.named(number), batches_of_epoch(params))

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Read the learning rate this step is going to use."""
        run = self._run
        if run is not None:
            run.learning_rate = run.guarded(
                "learning rate", lambda: read_learning_rate(run.optimizer)
            )

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Write the step's record and move the bar."""
        run = self._run
        if run is None or run.epoch is None:
            return
        params, epoch = run_context.original_args(), run.epoch
        record = _step_record(params, run, epoch)
        run.emit(record)
        if run.display is not None:
            run.display.step(params.cur_step_num - epoch.first_step, _text(record))

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Write the epoch's record, with the metrics if ``model.fit`` validated."""
        run = self._run
        if run is None or run.epoch is None:
            return
        epoch = run.epoch
        record: Record = {
            "event": "epoch",
            "epoch": epoch.number,
            "step": run.last_step + run.step_offset,
            "loss": _ratio(sum(epoch.losses), len(epoch.losses)),
            "seconds": epoch.ended - epoch.began,
            "samples_per_second": _ratio(epoch.samples, epoch.sampled_seconds) or None,
            "metrics": dict(run_context.original_args().get("metrics") or {}),
            **_new_report(run),
        }
        run.emit(record)
        if run.display is not None:
            run.display.line(f"{run.named(epoch.number)}  {_text(record)}")

    def on_eval_end(self, run_context: RunContext) -> None:
        """Write the metrics of a ``model.eval``; those of ``model.fit`` go to the epoch."""
        if self._run is not None or launched_rank() != 0:
            return
        metrics = dict(run_context.original_args().get("metrics") or {})
        record: Record = {"event": "eval", "metrics": metrics}
        if self._progress:
            PlainDisplay(None).line(f"eval  {_text(record)}")
        try:
            for writer in self._open_writers():
                writer.write(record)
                writer.close()
        except (OSError, ValueError) as error:  # it must not cost what was evaluated
            LOGGER.warning("the metrics of this evaluation are not in the history: %s", error)

    def is_writing(self) -> bool:
        """Return whether a training is watched now."""
        return self._run is not None

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a ``model.eval`` that a callback calls in the watched training."""
        if self._run is not None:
            self._run.emit({"event": "eval", "metrics": dict(metrics or {})})

    def on_train_end(self, run_context: RunContext) -> None:
        """Close history and display; if an algorithm has ended the training, say so."""
        run = self._run
        if run is not None and run.epoch is not None and run.display is not None:
            params, number = run_context.original_args(), run.epoch.number
            early = number < run.last_epoch or not is_last_of_epoch(params, run.epoch.first_step)
            if early and "ended_by" in params:
                named = run.named(number, " of ")
                run.display.line(f"{params['ended_by']} ends the training, in {named}")
        self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            if run.display is not None:
                run.display.close()
            for writer in run.writers:
                writer.close()
            if run.epoch is not None:
                steps = run.last_step + run.step_offset
                _, restores = restored_epochs(step_in(run.network))
                self._done[run.network] = steps, run.epoch.number, restores
                self._last_step = steps


def _check_arguments(
    history_path: object, progress: object, log_interval: object, tensorboard_dir: object
) -> None:
    name = "BoostMonitor"
    for which, path in (("history_path", history_path), ("tensorboard_dir", tensorboard_dir)):
        if not (path is None or isinstance(path, (str, os.PathLike))):
            raise TypeError(f"{name}: {which} must be a path or None, got {path!r}")
        if path is not None and not os.fspath(path):
            raise ValueError(f"{name}: {which} must not be empty, got {path!r}")
    if not isinstance(progress, bool):
        raise TypeError(f"{name}: progress must be True or False, got {progress!r}")
    if log_interval is None:
        return
    if isinstance(log_interval, bool) or not isinstance(log_interval, int):
        raise TypeError(f"{name}: log_interval must be an int or None, got {log_interval!r}")
    if log_interval < 1:
        raise ValueError(f"{name}: log_interval must be at least 1, got {log_interval}")


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def versions() -> dict[str, str]:
    """Return what a run depends on: name -> version."""
    return {
        "mindspore_boost_ext": __version__,
        "mindspore": ms.__version__,
        "python": platform.python_version(),
    }


def _start_record(params: RunContext, run: _Run) -> Record:
    mode = ms.get_context("mode")
    return {
        "event": "start",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "mode": "GRAPH_MODE" if mode == ms.GRAPH_MODE else "PYNATIVE_MODE",
        "device": ms.get_context("device_target"),
        "batch_size": run.batch_size,
        "epochs": params.get("epoch_num"),
        "steps_per_epoch": batches_of_epoch(params),
        **_new_report(run),
    }


def _new_report(run: _Run) -> Record:
    """Return the report if it is new: a batch or a variant of the step may change it."""
    report = run.guarded("report", lambda: _report(run.network))
    if report is None or report == run.report:
        return {}
    run.report = report
    return {"report": report}


def _report(network: Any) -> Any:
    """What ``network.report()`` says, as a dict or rows; ``None`` if it has no report."""
    report = getattr(network, "report", None)
    report = report() if callable(report) else report
    for name in ("to_dict", "rows"):
        content = getattr(report, name, None)
        if content is not None:
            return content() if callable(content) else content
    return report


def _step_record(params: Any, run: _Run, epoch: _Epoch) -> Record:
    loss = run.guarded("loss", lambda: _loss_value(params.net_outputs))
    now = time.perf_counter()
    seconds, epoch.ended = now - epoch.ended, now
    steps, run.last_step = params.cur_step_num - run.last_step, params.cur_step_num
    samples = _samples(params, run.batch_size, steps)
    if loss is not None:
        epoch.losses.append(loss)
    if run.throughput.started and samples is not None:
        epoch.samples += samples
        epoch.sampled_seconds += seconds
    record: Record = {
        "event": "step",
        "epoch": epoch.number,
        "step": params.cur_step_num + run.step_offset,
        "loss": loss,
        "learning_rate": run.learning_rate,
        "samples_per_second": run.throughput.update(samples, seconds),
        "seconds": seconds,
    }
    observations = getattr(run.network, "observations", None)
    if callable(observations):
        record["boost"] = run.guarded("observations", observations)
    return record


def _samples(params: Any, batch_size: int | None, steps: int) -> int | None:
    """Samples in this record: the real size of the batch, since the last one may be smaller."""
    element = params.get("train_dataset_element")
    if not params.get("dataset_sink_mode") and isinstance(element, (tuple, list)) and element:
        shape = getattr(element[0], "shape", None)
        if shape:
            return int(shape[0])
    return None if batch_size is None else batch_size * steps


def _text(record: Record) -> str:
    """A record as one line for people."""
    rate = record.get("learning_rate")
    rates = rate if isinstance(rate, list) else [rate]
    parts = [f"loss {record['loss']:.4g}"] if record.get("loss") is not None else []
    parts += [f"lr {'/'.join(f'{value:.4g}' for value in rates)}"] if rate is not None else []
    for name, value in record.get("metrics", {}).items():
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    if record.get("samples_per_second") is not None:
        parts.append(f"{record['samples_per_second']:.4g} samples/s")
    if record["event"] == "epoch":
        parts.append(f"{record['seconds']:.1f} s")
    return "  ".join(parts)
