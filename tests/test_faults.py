"""A bad day: killed processes, full and read-only disks, hostile files, two Models in two threads.

Every algorithm of ``contract.ALGORITHMS`` is killed and resumed; a new one joins there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import logging
import os
import pathlib
import pickle
import random
import resource
import signal
import sys
import threading
import time
import zipfile

import contract
import fault_worker
import mindspore as ms
import nets
import numpy as np
import pytest
import scripts
from mindspore import Tensor, nn
from mindspore.dataset.engine import iterators
from models import loss_of

from mindspore_boost_ext import (
    BoostConfig,
    BoostConfigError,
    BoostMonitor,
    FlushAccumulation,
    plot_history,
    read_history,
    save_checkpoint,
)
from mindspore_boost_ext.callbacks import history
from mindspore_boost_ext.callbacks.history import HistoryWriter

WORKER = pathlib.Path(fault_worker.__file__)
SEED = "20"


def start(*words):
    return scripts.Script(WORKER, *words, cwd=words[-1] if len(words) == 2 else words[2])


# ---- killed at a random step, and resumed ----


EVERY = [pytest.param(f"every {mode}", marks=pytest.mark.slow) for mode in ("graph", "pynative")]


@pytest.fixture(scope="module", params=["graph", "pynative", *EVERY])
def resumed(request, tmp_path_factory):
    """Kill a run of all algorithms, resume it in a new process; return what that one found."""
    folder = tmp_path_factory.mktemp(request.param)
    killed = start("killed", request.param, folder, SEED).communicate(400)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    second = start("resumed", request.param, folder, SEED).communicate(400)
    assert second.returncode == 0, second.stderr[-2000:]
    expected = {one.name for one in fault_worker.algorithms(request.param)}
    found = json.loads((folder / "results.json").read_text())
    assert found.keys() == expected
    return found


def test_a_killed_and_resumed_run_is_bit_identical_in_all_its_state(resumed):
    """Weights, moments, scales, schedules and windows: every Parameter of the step cell."""
    assert {name: one["different"] for name, one in resumed.items() if one["different"]} == {}
    assert any(0 < one["resumed_at"] < fault_worker.STEPS for one in resumed.values())


def test_the_history_of_a_killed_and_resumed_run_is_that_of_one_run(resumed):
    for name, one in resumed.items():
        assert one["history"] == one["losses"], name


# ---- killed while writing ----


def killed_at_random(task, folder, kills, check):
    """Let a process write without end, and kill it at a random moment; several times."""
    draw = random.Random(int(SEED))
    for _ in range(kills):
        writing = start(task, folder)
        try:
            started = time.monotonic()
            while not os.listdir(folder) and time.monotonic() - started < 120:
                time.sleep(0.01)
            while not check() and time.monotonic() - started < 120:
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 0.5))
        finally:
            writing.process.kill()
            writing.communicate()
        assert check()


def test_killed_while_a_checkpoint_is_written_the_one_before_is_whole(tmp_path):
    def whole():
        if not (tmp_path / "run.ckpt").exists():
            return False
        values = ms.load_checkpoint(str(tmp_path / "run.ckpt"))["values"].asnumpy()
        return values.shape == (1_000_000,) and len(np.unique(values)) == 1

    killed_at_random("checkpoints", tmp_path, 3, whole)


def test_killed_while_a_history_is_written_its_whole_lines_are_there(tmp_path):
    def whole():
        path = tmp_path / "history.jsonl"
        records = read_history(path) if path.exists() else []
        return bool(records) and all(len(one["text"]) == 100_000 for one in records)

    killed_at_random("history", tmp_path, 2, whole)
    writer = HistoryWriter(tmp_path / "history.jsonl")
    writer.write({"event": "step", "step": 0, "text": "x" * 100_000})
    writer.close()
    assert read_history(tmp_path / "history.jsonl")[-1]["step"] == 0


def test_at_every_step_of_saving_the_file_at_the_path_is_whole(tmp_path, monkeypatch):
    """Whatever fails on the way, what was saved before is there, and no scrap is left."""
    path = tmp_path / "run.ckpt"
    save_checkpoint(nn.Dense(2, 2, weight_init="ones"), path)

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    for holder, name in ((ms, "save_checkpoint"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, fail)
            with pytest.raises(OSError, match=r"cannot save .*run\.ckpt.*Input/output error"):
                save_checkpoint(nn.Dense(2, 2, weight_init="zeros"), path)
        assert ms.load_checkpoint(str(path))["weight"].asnumpy().all()
        assert os.listdir(tmp_path) == ["run.ckpt"]


# ---- full disk, read-only folder ----


@contextlib.contextmanager
def largest_file(size):
    """Let no file grow beyond ``size`` bytes: writing then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_that_does_not_fit_is_a_clear_error_and_the_one_before_stays(tmp_path):
    path = tmp_path / "run.ckpt"
    save_checkpoint(nn.Dense(2, 2, weight_init="ones"), path)
    with (
        largest_file(100_000),
        pytest.raises(OSError, match="cannot save the checkpoint") as caught,
    ):
        save_checkpoint(nn.Dense(400, 400), path)
    assert str(path) in str(caught.value)
    assert "an earlier file is unchanged" in str(caught.value)
    assert ms.load_checkpoint(str(path))["weight"].shape == (2, 2)
    assert os.listdir(tmp_path) == ["run.ckpt"]


def read_only(folder):
    """Return a folder in which this user can make no file (root can, wherever modes decide)."""
    folder.chmod(0o500)
    return pathlib.Path("/proc") if os.access(folder, os.W_OK) else folder


def test_a_read_only_folder_is_a_clear_error(tmp_path):
    folder = read_only(tmp_path)
    with pytest.raises(OSError, match=r"cannot save the checkpoint '.*/run\.ckpt' \("):
        save_checkpoint(nn.Dense(2, 2), folder / "run")
    with pytest.raises(ValueError, match="must name a file that can be written"):
        HistoryWriter(folder / "history.jsonl")


def test_async_saving_is_refused():
    with pytest.raises(TypeError, match="takes no async_save"):
        save_checkpoint(nn.Dense(2, 2), "run.ckpt", async_save=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_training_goes_on_when_the_disk_of_the_history_is_full(caplog, monkeypatch):
    def open_on_a_full_disk(path, mode, **settings):
        return open("/dev/full", mode, **settings)

    monkeypatch.setattr(history, "open", open_on_a_full_disk, raising=False)
    net = nets.MLP()
    model = ms.Model(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    before = nets.weights(net)
    logger = logging.getLogger("mindspore_boost_ext")
    propagate, logger.propagate = logger.propagate, True
    try:
        model.train(1, nets.dataset(3), callbacks=[BoostMonitor("run.jsonl", progress=False)])
    finally:
        logger.propagate = propagate
    told = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert told == ["History 'run.jsonl' ends here, training goes on: No space left on device"]
    assert any((before[name] != value).any() for name, value in nets.weights(net).items())


# ---- hostile files ----


class Payload:
    """Executes something when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def archive(content):
    """Return a zip file, as ``.npz`` and pickled checkpoints are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as entries:
        entries.writestr("data.pkl", content)
    return file.getvalue()


def hostile(folder):
    """Return contents by name; those that carry a payload would make ``folder/executed``."""
    payload = pickle.dumps(Payload(folder / "executed"))
    array = io.BytesIO()
    np.save(array, np.array([Payload(folder / "executed")], object), allow_pickle=True)
    return {
        "pickle": payload,
        "pickled array": array.getvalue(),
        "zip of a pickle": archive(payload),
        "zip bomb": gzip.compress(b"0" * 10_000_000),
        "deep nesting": b'{"a":' * 100_000,
        # Deeper than Python 3.12 reads; earlier releases stop at a thousand.
        "deep and closed": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "huge number": b'{"a": ' + b"9" * 10_000 + b"}",
        "huge header": b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f" + b"x" * 100,
        "zeros": b"\0" * 1000,
        "python": b"__import__('os').mkdir('executed')\n",
        "script path": b'{"boost": {"mode": "../../etc/passwd"}}',
    }


NAMES = list(hostile(pathlib.Path("folder")))


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_configuration_is_refused(tmp_path, name):
    path = tmp_path / "boost.json"
    path.write_bytes(hostile(tmp_path)[name])
    with pytest.raises(BoostConfigError):
        BoostConfig.parse("O1", str(path))
    assert os.listdir(tmp_path) == ["boost.json"]


# Releases of Python before 3.9.14 and 3.10.7 read any number.
HARMLESS = (
    {"script path"} if hasattr(sys, "get_int_max_str_digits") else {"script path", "huge number"}
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HARMLESS])
def test_a_hostile_history_is_refused(tmp_path, name):
    path = tmp_path / "history.jsonl"
    path.write_bytes(hostile(tmp_path)[name] + b"\n")
    with pytest.raises(ValueError, match="line 1: must be one JSON object"):
        read_history(path)
    assert os.listdir(tmp_path) == ["history.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_checkpoint_is_refused(tmp_path, name):
    """MindSpore reads checkpoints; nothing may be executed, and the error has to say something."""
    path = tmp_path / "run.ckpt"
    path.write_bytes(hostile(tmp_path)[name])
    with pytest.raises(ValueError, match=r"."):
        ms.load_checkpoint(str(path))
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_a_truncated_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    save_checkpoint(nn.Dense(100, 100), path)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"."):
        ms.load_checkpoint(str(path))


@pytest.mark.parametrize("kind", ["folder", "device", "pipe"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, kind):
    path = {"folder": tmp_path, "device": pathlib.Path("/dev/zero"), "pipe": tmp_path / "pipe"}[
        kind
    ]
    if kind == "pipe":
        os.mkfifo(path)
    what = {"folder": "a directory", "device": "a device", "pipe": "a FIFO"}[kind]
    with pytest.raises(ValueError, match=f"it is {what}"):
        BoostConfig.parse("O1", str(path))
    with pytest.raises(ValueError, match="must be a regular file"):
        read_history(path)


def test_a_history_whose_numbers_are_no_numbers_is_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "history.jsonl"
    path.write_text('{"event": "step", "step": "x", "loss": []}\n')
    with pytest.raises(ValueError, match="step must be an int, got 'x'"):
        plot_history(path)


# ---- two Models in two threads ----


class StepLosses(ms.train.Callback):
    """Keeps the loss of every step, and lets the other thread in."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_step_end(self, run_context):
        self.values.append(loss_of(run_context.original_args().net_outputs))
        time.sleep(0.001)


class Waits(ms.train.Callback):
    """Meets the other thread when both trainings have begun: no callback keeps others waiting."""

    def __init__(self, wait):
        super().__init__()
        self.wait = wait

    def on_train_begin(self, run_context):
        self.wait()


def side_by_side(*tasks):
    """Run functions in a thread each, to their ends; what they raise is raised."""
    together, failures = threading.Barrier(len(tasks)), []

    def run(task):
        try:
            task(lambda: together.wait(60))
        except BaseException as error:
            failures.append(error)
            together.abort()

    # Daemons, and bounded: where MindSpore hangs, the test shall not.
    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


class Two:
    """Two Models of different algorithms: alone first, then at once; keeps their losses."""

    def __init__(self):
        names = ("grad_accumulation", "dynamic loss scale")
        self.chosen = [one for one in contract.ALGORITHMS if one.name in names]
        self.losses = {}

    def train(self, index, wait=lambda: None):
        wait()
        _, model = contract.switched_on(self.chosen[index])
        wait()
        self.losses[index] = StepLosses()
        accumulates = self.chosen[index].name == "grad_accumulation"
        flush = [FlushAccumulation()] if accumulates else []  # of 7 steps one is left over
        callbacks = [self.losses[index], Waits(wait), *flush]
        model.train(3, nets.dataset(7), callbacks=callbacks, dataset_sink_mode=False)

    def alone(self):
        for index in range(2):
            self.train(index)
        return self.values()

    def values(self):
        return [self.losses[index].values for index in range(2)]


def test_two_models_in_two_threads_do_not_mix(mode):
    """Built and trained at once, each is as it is alone; MindSpore itself fails there (2.10)."""
    two = Two()
    alone = two.alone()
    side_by_side(*(functools.partial(two.train, index) for index in range(2)))
    assert two.values() == alone


def test_the_data_of_one_thread_outlives_a_look_at_the_size_of_anothers(mode, monkeypatch):
    """MindSpore ends iterators that are opened while another thread asks a dataset for its size."""
    two = Two()
    alone = two.alone()

    def slow(value):
        copied = copy.deepcopy(value)
        if value is iterators.ITERATORS_LIST:  # a size is asked for: let the other thread open data
            end = time.monotonic() + 0.2
            while len(value) <= len(copied) and time.monotonic() < end:
                time.sleep(0.01)
        return copied

    monkeypatch.setattr(iterators, "deepcopy", slow)
    side_by_side(*(functools.partial(two.train, index) for index in range(2)))
    assert two.values() == alone


def test_what_brings_the_data_may_use_the_model(mode):
    """MindSpore runs it in a thread of its own, and the training waits for the first example."""
    _, model = contract.switched_on(Two().chosen[0])
    asked = []

    def examples():
        asked.append(model.predict(Tensor(nets.batches(1)[0][0])))
        yield from nets.batches(2)

    data = ms.dataset.GeneratorDataset(examples, ["x", "y"], shuffle=False)
    side_by_side(lambda wait: model.train(1, data, dataset_sink_mode=False))
    assert asked


def test_configurations_under_construction_belong_to_their_threads():
    """No MindSpore work, hence no lock: both contexts are open at once."""
    from mindspore_boost_ext import AutoBoost

    found = {}

    def build(steps, wait):
        sections = {"grad_accumulation": {"grad_accumulation_step": steps}}
        config = {**contract.switched(grad_accumulation=True), **sections}
        with AutoBoost("O1", config).building():
            wait()
            found[steps] = AutoBoost().grad_accumulation_step
            wait()

    side_by_side(*(functools.partial(build, steps) for steps in (2, 3)))
    assert found == {2: 2, 3: 3}
