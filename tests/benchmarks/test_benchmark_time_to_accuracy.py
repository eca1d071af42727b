"""The benchmark of the time to accuracy runs through, on a task of seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nets
import numpy as np
import pytest
from models import model_of

from mindspore_boost_ext import recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import tasks
import time_to_accuracy


def data():
    labels = np.arange(32, dtype=np.int32) % 2
    images = np.float32(np.ones((32, 1, 8, 8)) * labels[:, None, None, None])
    return (images, labels), (images, labels)


def test_it_prints_a_row_and_draws(graph_mode, monkeypatch, tmp_path, capsys):
    tiny = tasks.Task(data, lambda: nets.Pooled(4, 2), tasks.momentum(0.1), 8, 40)
    monkeypatch.setitem(tasks.TASKS, "tiny", tiny)
    monkeypatch.setattr(  # in this process: a task of the test's own is unknown to another one
        time_to_accuracy,
        "in_own_process",
        lambda name, run, seed, core: time_to_accuracy.course_of(tasks.TASKS[name], run, seed),
    )
    files = {name: str(tmp_path / f"race.{name}") for name in ("png", "json")}
    adam = '{"optimizer": {"adamw": 0.01}, "boost": {"mode": "disable_all"}}'
    words = ["--task", "tiny", "--run", "fast", "--run", adam, "--seeds", "1"]
    words += ["--run", "large-batch", "--run", "fp16", "--run", "plain:0.5"]
    words += ["--plot", files["png"], "--json", files["json"]]
    assert time_to_accuracy.main(words) == 0
    printed = capsys.readouterr()
    assert "| tiny | fast | " in printed.out
    assert f"| tiny | {adam} | " in printed.out
    assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")
    courses = json.loads(Path(files["json"]).read_text("utf-8"))
    assert {name: len(results) for name, (_, results) in courses.items()} == {
        f"tiny|{run}|10": 20 for run in ("plain", "fast", adam, "large-batch", "fp16", "plain:0.5")
    }
    assert time_to_accuracy.main(words) == 0  # goes on from the file: nothing is run again


@pytest.mark.parametrize(
    ("config", "batches"),
    [
        ({"short_schedule": {"total_steps": 40, "share": 0.5, "parts": 2}}, 20),
        (recipe("large-batch", 40), 40),
    ],
)
def test_batches_are_counted_and_not_the_updates_that_are_made_of_them(config, batches):
    """Forty updates of twenty batches, or twenty of all forty."""
    tiny = tasks.Task(data, lambda: nets.Pooled(4, 2), tasks.momentum(0.1), 8, 40)
    net = tiny.network()
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    optimizer = tiny.optimizer(net.trainable_params(), 40)
    model = model_of(net, {"boost": off} | config, optimizer)
    assert time_to_accuracy.batches_of(model.train_network, tiny) == batches


def test_a_transformer_takes_shorter_sequences(graph_mode):
    (tokens, targets), _ = tasks.text()
    task = tasks.TASKS["transformer, text"]
    logits = task.network()(tasks.Tensor(tokens[:2, :32]))
    assert logits.shape == (2 * 32, 128)
    assert (tokens[:, 1:] == targets[:, :-1]).all()
