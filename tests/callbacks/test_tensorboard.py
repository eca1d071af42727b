"""What BoostMonitor writes for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import os
import resource
import signal
import sys
from types import SimpleNamespace

import contract
import mindspore as ms
import nets
import numpy as np
import pytest

from mindspore_boost_ext import BoostMonitor, read_history
from mindspore_boost_ext.callbacks.tensorboard import TensorBoardWriter

pytest.importorskip("tensorboardX")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    """Return the scalars that TensorBoard finds: name -> [(step, value)]."""
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    names = found.Tags()["scalars"]
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in names}


def test_a_run_is_read_back_by_tensorboard(tmp_path):
    dynamic = next(one for one in contract.ALGORITHMS if one.name == "dynamic loss scale")
    _, model = contract.switched_on(dynamic)
    history, board = tmp_path / "history.jsonl", tmp_path / "new" / "board"
    monitor = BoostMonitor(history, progress=False, tensorboard_dir=board)
    model.train(2, nets.dataset(3), [monitor], dataset_sink_mode=False)
    found, records = scalars(board), read_history(history)
    steps = [one for one in records if one["event"] == "step"]
    # TensorBoard keeps float32.
    assert found["loss"] == [(one["step"], pytest.approx(one["loss"], rel=1e-6)) for one in steps]
    assert found["learning_rate"] == [(n, pytest.approx(0.05)) for n in range(1, 7)]
    assert found["boost/skipped_steps"] == [(n, 0.0) for n in range(1, 7)]
    epochs = [one for one in records if one["event"] == "epoch"]
    assert found["epoch/loss"] == [
        (one["step"], pytest.approx(one["loss"], rel=1e-6)) for one in epochs
    ]


def test_metrics_lists_and_what_is_no_number(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write({"event": "start", "time": "now"})
    rates = [0.1, 0.2]
    writer.write({"event": "step", "step": 3, "loss": None, "learning_rate": rates, "boost": None})
    metrics = {"accuracy": np.float32(0.5), "classes": np.array([1, 2]), "text": "x"}
    writer.write({"event": "epoch", "step": 3, "loss": 1.0, "metrics": metrics})
    writer.write({"event": "eval", "metrics": {"accuracy": ms.Tensor(0.75)}})
    writer.close()
    assert {name: values[-1] for name, values in scalars(tmp_path).items()} == {
        "learning_rate/0": (3, pytest.approx(0.1)),
        "learning_rate/1": (3, pytest.approx(0.2)),
        "epoch/loss": (3, 1.0),
        "metrics/accuracy": (3, 0.75),
        "metrics/classes/0": (3, 1.0),
        "metrics/classes/1": (3, 2.0),
    }


def test_without_the_library_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r'pip install "mindspore_boost_ext\[tensorboard\]"'):
        TensorBoardWriter(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"tensorboard_dir must name a folder .*file"):
        TensorBoardWriter(os.path.join(tmp_path, "file", "board"))
    for value, kind in ((3, TypeError), ("", ValueError)):
        with pytest.raises(kind, match="BoostMonitor: tensorboard_dir must"):
            BoostMonitor(tensorboard_dir=value)


def test_a_full_disk_ends_the_scalars_and_not_the_training(tmp_path, caplog):
    """A limit of the process stands in for the full disk."""
    writer = TensorBoardWriter(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for step in range(1, 1000):
            writer.write({"event": "step", "step": step, "loss": 1.0})
        writer.write({"event": "epoch", "step": 999, "loss": 1.0})
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    (message,) = [one.message for one in caplog.records if "Scalars" in one.message]
    assert "training goes on: File too large" in message


def test_runs_of_one_second_have_a_file_each(tmp_path):
    for _ in range(3):
        TensorBoardWriter(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_metrics_of_an_evaluation_are_written_behind_the_training(tmp_path):
    _, model = contract.switched_on(next(iter(contract.ALGORITHMS)))
    monitor = BoostMonitor(None, progress=False, tensorboard_dir=tmp_path)
    model.train(1, nets.dataset(3), [monitor], dataset_sink_mode=False)
    monitor.on_eval_end(SimpleNamespace(original_args=lambda: {"metrics": {"accuracy": 0.75}}))
    assert scalars(tmp_path)["metrics/accuracy"] == [(3, 0.75)]
