"""One run of ``compare``, in a process of its own, so that memory and compilation are its own.

``python -m mindspore_boost_ext.cli.run TRIAL.json`` trains a bundled network with one algorithm,
or runs a user's script and sets level and settings of every ``ms.Model`` in it. A ``BoostMonitor``
writes ``history.jsonl`` beside ``TRIAL.json``; ``result.json`` also goes there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, RunContext

from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.callbacks.monitor import BoostMonitor
from mindspore_boost_ext.cli.launcher import run_script, when_threads_have_ended
from mindspore_boost_ext.cli.trial_settings import (
    LENET,
    NETWORKS,
    PLAIN,
    Setup,
    configuration,
    settings_of,
)
from mindspore_boost_ext.dim_reduce.sampler import TrajectorySampler
from mindspore_boost_ext.integration import install

HISTORY, RESULT, OUTPUT = "history.jsonl", "result.json", "output.txt"
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
_SNAPSHOTS = 40
_WATCHING: list[BoostMonitor] = []  # of the running call: a history has only one writer


@dataclass(frozen=True)
class Trial:
    """What one run is: an algorithm on the bundled network, or (with ``script``) a script."""

    name: str  # what the run is called; without a script the algorithm, or "plain"
    # Of the bundled run.
    network: str = LENET
    epochs: int = 10
    batch_size: int = 32
    seed: int = 0
    mode: str = "graph"
    # The user's script with its arguments; empty for the bundled run.
    script: str = ""
    args: list[str] = field(default_factory=list)
    # What every ``ms.Model`` of the script is given instead of its own.
    level: str = "O0"
    config: str | dict[str, Any] = ""  # the path of a file, or a dict
    # Where a training of the script is stopped; 0 for nowhere.
    most_steps: int = 0
    most_seconds: float = 0.0


def run(path: Path) -> None:
    """Do the run that a file describes; write the results into its folder."""
    started, report = time.perf_counter(), ""
    trial = Trial(**json.loads(path.read_text(encoding="utf-8")))
    bound = Bound(trial.most_steps, trial.most_seconds)
    try:
        if trial.script:
            with contextlib.suppress(_NoMore):
                _run_script(trial, path.parent, bound)
        else:
            report = _run_bundled(trial, path.parent)
    finally:
        when_threads_have_ended(lambda: _write_result(path.parent, started, report, bound))


def _write_result(folder: Path, started: float, report: str, bound: Bound) -> None:
    result = {"peak_mib": peak_mib(), "seconds": time.perf_counter() - started, "report": report}
    result.update(models=bound.models, replaced=bound.replaced)
    result.update(stopped=bound.stopped, ended=bound.ended)
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def _run_bundled(trial: Trial, folder: Path) -> str:
    ms.set_context(mode=MODES[trial.mode])
    train, test = digits_datasets(trial.batch_size)
    snapshots = folder / "snapshots"
    if settings_of(trial.name).snapshots:
        every = max(1, trial.epochs * train.get_dataset_size() // _SNAPSHOTS)
        sampler = TrajectorySampler(snapshots, every, "step")
        model = _model(trial, PLAIN, train.get_dataset_size(), "")
        # A dataset belongs to the Model that trains on it.
        model.train(trial.epochs, digits_datasets(trial.batch_size)[0], callbacks=[sampler])
    model = _model(trial, trial.name, train.get_dataset_size(), str(snapshots))
    monitor = BoostMonitor(folder / HISTORY, progress=False)
    model.fit(trial.epochs, train, test, callbacks=[monitor])
    return str(model.train_network.report())


def _model(trial: Trial, name: str, steps_per_epoch: int, snapshots: str) -> ms.Model:
    ms.set_seed(trial.seed)  # weights, and the order of the images
    steps, settings = trial.epochs * steps_per_epoch, settings_of(name)
    net, arguments = settings.parts(trial.network)
    plain = NETWORKS[trial.network]
    rates = plain.rate * settings.rate * plain.course(steps, trial.epochs)
    rates = rates[:: settings.window].tolist()  # one for each update, and so for each window
    level, config = configuration(name, Setup(trial.network, steps, snapshots))
    return ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), rates, 0.9, weight_decay=plain.weight_decay),
        metrics={"accuracy"},
        boost_level=level,
        boost_config_dict=config,
        **arguments,
    )


def _run_script(trial: Trial, folder: Path, bound: Bound) -> None:
    """Run a script; ``bound`` counts its Models, and may end its trainings."""
    install()
    # Else a script decides on its own Models; in this process, made for the run, the run does.
    ms.Model.__init__ = _with_settings(ms.Model.__init__, trial, bound)
    ms.set_seed(trial.seed)  # else each run would begin at other weights; a script may set its own
    for name in ("train", "fit", "eval"):
        setattr(ms.Model, name, _with_monitor(getattr(ms.Model, name), folder / HISTORY, bound))
    run_script(trial.script, trial.args)


def _with_settings(
    construct: Callable[..., None], trial: Trial, bound: Bound
) -> Callable[..., None]:
    """Return the constructor of ``ms.Model`` with the level and settings of the run."""
    named = list(inspect.signature(construct).parameters)  # "self" is the first

    @functools.wraps(construct)
    def constructor(model: ms.Model, *args: object, **kwargs: object) -> None:
        kwargs.update(zip(named[1:], args))  # the level may have come by position
        own = kwargs.pop("acc_level", None) or kwargs.get("boost_level", "O0")
        bound.replaced |= own != "O0" or bool(kwargs.get("boost_config_dict"))
        kwargs.update(boost_level=trial.level, boost_config_dict=trial.config)
        construct(model, **kwargs)

    return constructor


class _NoMore(BaseException):
    """Ends a script, past its own ``except Exception``."""


class Bound(Callback):
    """Stops after ``steps`` steps of all trainings, or ``seconds`` after the first began.

    0 is no bound. ``models`` counts the Models that it has seen train, by their step cells.
    ``replaced`` says whether one had a level or settings of its own, ``stopped`` whether the bound
    on the seconds has ended a training, ``measured`` whether the script has measured something
    since, and ``ended`` whether it was ended when it asked for more.
    """

    def __init__(self, steps: int, seconds: float) -> None:
        super().__init__()
        self.steps, self.seconds = steps, seconds
        self.done, self.began = 0, 0.0
        self.models, self.replaced, self.stopped = 0, False, False
        self.measured = self.ended = False
        self._known: WeakSet[nn.Cell] = WeakSet()

    def is_over(self) -> bool:
        """Return whether a bound is reached."""
        return self.stopped or 0 < self.steps <= self.done

    def on_train_begin(self, run_context: RunContext) -> None:
        """Count the Model, and look at the clock."""
        step = run_context.original_args().train_network
        self.models += step not in self._known
        self._known.add(step)
        self.began = self.began or time.perf_counter()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Stop if a bound is reached."""
        self.done += 1
        if 0 < self.steps <= self.done:
            run_context.request_stop()
        elif time.perf_counter() - self.began >= self.seconds > 0:
            self.stopped = True
            run_context.request_stop()


def _with_monitor(method: Callable[..., Any], history: Path, bound: Bound) -> Callable[..., Any]:
    """Return a method of ``ms.Model`` with our callbacks after the script's own."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def monitored(*args: object, **kwargs: object) -> object:
        writing = [one for one in _WATCHING if one.is_writing()]
        if writing and method.__name__ == "eval":  # called by a callback, during a training
            result = method(*args, **kwargs)
            writing[0].write_metrics(result)
            bound.measured = bound.is_over()
            return result
        if method.__name__ != "eval" and bound.measured:  # a loop might never end
            bound.ended = True
            raise _NoMore
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("callbacks") or []
        own = given if isinstance(given, Iterable) else [given]
        monitor = BoostMonitor(history, progress=False)
        call.arguments["callbacks"] = [*own, *([] if writing else [monitor]), bound]
        _WATCHING.append(monitor)
        try:
            result = method(*call.args, **call.kwargs)
        finally:
            _WATCHING.remove(monitor)
        bound.measured = bound.measured or (bound.is_over() and method.__name__ != "train")
        return result

    return monitored


def peak_mib() -> float | None:
    """Return the peak of this process's resident memory in MiB; None where it cannot be read."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Not ru_maxrss: on Linux that begins at the size of the process that started this one.
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


if __name__ == "__main__":
    run(Path(os.path.abspath(sys.argv[1])))
