"""Recipes: plain JSON that is valid, acts where it should, and leaves other networks alone."""

from __future__ import annotations

import json
import os

import mindspore as ms
import nets
import numpy as np
import pytest
import scripts
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import AutoBoost, BoostModel, recipe
from mindspore_boost_ext.bundled import LeNet5
from mindspore_boost_ext.recipes import NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 8])
def test_a_recipe_is_valid_json_in_which_all_has_an_effect(name, devices):
    settings = recipe(name, 4000, devices=devices)
    assert json.loads(json.dumps(settings)) == settings
    assert AutoBoost("O1", settings).config.notices() == ()
    assert devices % settings.get("common", {"device_number": devices})["device_number"] == 0


def test_each_call_makes_a_dict_of_its_own():
    recipe("fast", 4000)["boost"]["less_bn"] = True
    assert recipe("fast", 4000)["boost"]["less_bn"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("quick", 100),
            "recipe.name must be one of 'fast', 'fastest', 'large-batch', 'fp16', got 'quick'",
        ),
        (("fast", 0), "recipe.total_steps must be an int from 1 to 1073741824, got 0"),
        (("fast", 2.5), "recipe.total_steps must be an int"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        recipe(*arguments)


class Tokens(nn.Cell):
    """Predicts a class for each place of a sequence."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Dense(4, nets.CLASSES)

    def construct(self, x):
        return self.head(self.embedding(x)).reshape((-1, nets.CLASSES))


class EachPlace(nn.Cell):
    """Cross-entropy of all places."""

    def construct(self, logits, labels):
        return ms.ops.cross_entropy(logits, labels.reshape((-1,)))


IMAGES = np.random.default_rng(0).normal(size=(4, 1, 32, 32)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0], np.int32)
SEQUENCES = np.random.default_rng(0).integers(0, 5, (4, 16)).astype(np.int32)
SHORT, WARMUP, SMOOTHING = "short_schedule", "seq_length_warmup", "label_smoothing"
CHEAPER = "cheaper_operators"
FALLING = [0.1 - 0.004 * step for step in range(20)]


@pytest.mark.parametrize(
    ("net", "loss", "batch", "applied"),
    [
        (Tokens, EachPlace(), (SEQUENCES, SEQUENCES % nets.CLASSES), {WARMUP}),
        (Tokens, nets.loss_fn(), (SEQUENCES, SEQUENCES.ravel() % nets.CLASSES), {WARMUP}),
        (LeNet5, EachPlace(), (IMAGES, LABELS), {SHORT, CHEAPER}),
        (LeNet5, nets.loss_fn(), (IMAGES, LABELS), {SHORT, SMOOTHING, CHEAPER}),
    ],
)
def test_what_fast_does_to_which_network(mode, net, loss, batch, applied):
    net = net()
    step = ms.Model(
        net,
        loss,
        nn.Momentum(net.trainable_params(), FALLING, 0.9),
        boost_level="O1",
        boost_config_dict=recipe("fast", 20),
    ).train_network
    assert np.isfinite(step(*map(Tensor, batch)).asnumpy())
    rows = {one: step.report()[one].status for one in (SHORT, WARMUP, SMOOTHING, CHEAPER)}
    called = {CHEAPER} if mode == "graph" and isinstance(loss, EachPlace) else set()  # a function
    assert {one for one, status in rows.items() if status == "applied"} == applied | called


@pytest.mark.parametrize("parts", [1, 2])
def test_fast_ends_with_its_share_at_full_length(mode, parts):
    """Of the updates that are made: of 12, or of two of each of ten batches, at first."""
    net, settings = Tokens(), recipe("fast", 20)
    settings[SHORT]["parts"] = parts
    optimizer = nn.Momentum(net.trainable_params(), FALLING, 0.9)
    step = model_of(net, settings, optimizer).train_network
    words = "scale 0.125 until update {}, scale 0.25 until update {} of {}, then full size"
    at_first = words.format(2, 6, 12) if parts == 1 else words.format(4, 10, 20)
    unseen = "; in sink mode full size from the first update on"
    assert step.report()[WARMUP].reason == at_first + unseen
    made = {"updates": 12} if parts == 1 else {"updates": 20, "parts": 2}
    assert step.report()[SHORT].counts == made
    scales = []
    for _ in range(12):
        step(Tensor(SEQUENCES), Tensor(SEQUENCES.ravel() % nets.CLASSES))
        scales.append(step.observations()["seq_length_warmup_scale"])  # of the next
    assert step.report()[SHORT].status == "skipped"
    assert step.report()[WARMUP].reason == words.format(4, 10, 20)
    assert scales == [0.125] * 3 + [0.25] * 6 + [1.0] * 3


@pytest.mark.parametrize("name", ["fast", "fastest"])
def test_a_network_that_cannot_be_helped_trains_as_plain(mode, name):
    """A constant rate cannot be shortened: neither are labels smoothed then, bit for bit."""
    net, plain = nets.MLP(), nets.MLP()
    step, reference = model_of(net, recipe(name, 20)).train_network, model_of(plain).train_network
    for x, y in nets.batches(4):
        found = step(Tensor(x), Tensor(y)).asnumpy()
        np.testing.assert_array_equal(found, reference(Tensor(x), Tensor(y)).asnumpy())
    nets.assert_same_weights(net, plain)
    rows = [row for row in step.report().rows if row.asked_by.startswith("section")]
    assert {row.algorithm for row in rows} >= {SHORT, SMOOTHING, CHEAPER}
    assert {row.status for row in rows} == {"skipped"}
    assert "this training is not shortened" in step.report()[SMOOTHING].reason


@pytest.mark.parametrize(
    ("rate", "status"), [([0.1 - 0.01 * one for one in range(8)], "applied"), (0.1, "skipped")]
)
def test_fastest_makes_half_of_the_updates_of_a_schedule(mode, rate, status):
    net = LeNet5()
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    model = model_of(net, recipe("fastest", 8), optimizer)
    data = ms.dataset.NumpySlicesDataset((IMAGES, LABELS), shuffle=False).batch(2)
    steps = []
    model.train(4, data, callbacks=ms.train.LambdaCallback(on_train_step_end=steps.append))
    assert len(steps) == (4 if status == "applied" else 8)
    assert model.train_network.report()["short_schedule"].status == status


def rows_of(count, net):
    """Return as many batches, of a class a sample or of one at each place of a sequence."""
    if net is nets.MLP:
        return nets.batches(count)
    tokens = np.random.default_rng(4).integers(0, 5, (count, *SEQUENCES.shape)).astype(np.int32)
    return [(one, one.ravel() % nets.CLASSES) for one in tokens]


@pytest.mark.parametrize("net", [nets.MLP, Tokens])
def test_large_batch_goes_through_the_whole_schedule(mode, net):
    """As accumulation alone does on every other rate, bit for bit: one for each update."""
    settings = recipe("large-batch", 20)
    alone = {name: section for name, section in settings.items() if name != SHORT}
    alone[SMOOTHING] = {**alone[SMOOTHING], "when": "always"}
    ends = []
    for config, rates in ((settings, FALLING), (alone, FALLING[::2])):
        one = nets.fill(net())
        optimizer = nn.Momentum(one.trainable_params(), rates, 0.9)
        step = model_of(one, config, optimizer).train_network
        for x, y in rows_of(20, net):
            step(Tensor(x), Tensor(y))
        ends.append(nets.weights(one))
    assert list(ends[0]) == list(ends[1])
    nets.assert_same(*ends)


@pytest.mark.parametrize(
    ("batches", "rate", "status"),
    [(8, FALLING[:8], "applied"), (10, FALLING[:10], "applied"), (8, 0.1, "skipped")],
)
def test_large_batch_trains_on_all_batches(batches, rate, status):
    net = nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    model = model_of(net, recipe("large-batch", batches), optimizer)
    steps = []
    count = ms.train.LambdaCallback(on_train_step_end=steps.append)
    model.train(2, nets.dataset(batches // 2), callbacks=count, dataset_sink_mode=False)
    assert len(steps) == batches
    assert model.train_network.report()[SHORT].status == status


@pytest.mark.parametrize("rate", [FALLING, 0.1])
def test_large_batch_makes_half_of_its_updates_at_full_length(rate):
    """Of ten updates five: at a constant rate, whose schedule is not shortened, too."""
    net = nets.fill(Tokens())
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    step = model_of(net, recipe("large-batch", 20), optimizer).train_network
    scales = []
    for x, y in rows_of(20, Tokens):
        step(Tensor(x), Tensor(y))
        scales.append(step.observations()["seq_length_warmup_scale"])
    # Of the next batch: two updates of two batches at an eighth, three at a quarter.
    assert scales == [0.125] * 3 + [0.25] * 6 + [1.0] * 11


@pytest.mark.parametrize("name", ["fast", "fastest", "large-batch"])
def test_what_nobody_has_looked_at_stays_at_full_size(graph_mode, name):
    """Rows of features would be cut as if they were sequences, and the layers not fit."""
    net = nets.fill(nets.MLP())
    optimizer = nn.Momentum(net.trainable_params(), FALLING, 0.9)
    step = model_of(net, recipe(name, 20), optimizer).train_network
    around = nets.Around(step).set_train()
    for row in (step.report()[one] for one in (WARMUP, "progressive_resizing")):
        assert row.status != "applied" or "in sink mode full size from the first" in row.reason
    before = nets.weights(net)
    for x, y in nets.batches(2):
        around(Tensor(x), Tensor(y))
    assert all((value != before[key]).any() for key, value in nets.weights(net).items())


@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_large_batch_is_valid_for_a_few_steps(total_steps):
    settings = recipe("large-batch", total_steps)
    assert AutoBoost("O1", settings).config.notices() == ()
    assert (SHORT in settings) == (total_steps > 1)


def launched(*words):
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    return scripts.run("-m", "mindspore_boost_ext", *words, env=environment)


def test_the_launcher_gives_a_script_a_recipe(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, mindspore as ms\n"
        "from mindspore import nn\n"
        "net = nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),\n"
        "                        nn.Dense(2, 2))\n"
        "x, y = np.ones((8, 1, 8, 8), 'f'), np.zeros((8, 2), 'f')\n"
        "data = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)\n"
        "optimizer = nn.SGD(net.trainable_params(), [0.1, 0.08, 0.05, 0.02])\n"
        "model = ms.Model(net, nn.MSELoss(), optimizer)\n"
        "model.train(1, data, dataset_sink_mode=False)\n",
        encoding="utf-8",
    )
    done = launched("--recipe", "fast", "--total-steps", 4, script)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stderr.splitlines() if line.startswith(SHORT))
    assert "applied" in row
    assert "the training ends after 2 of 4 updates" in row


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--recipe", "fast"], "--recipe needs --total-steps, the number of updates"),
        (["--total-steps", 4], "--total-steps needs --recipe, one of fast, fastest, large-batch"),
        (["--recipe", "fast", "--config", __file__], "cannot be combined with --config"),
    ],
)
def test_a_recipe_needs_the_number_of_steps(words, problem):
    done = launched(*words, __file__)
    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.filterwarnings("error")
def test_large_batch_of_an_odd_number_of_batches_ends_with_its_rates():
    net = nn.Dense(4, 3)
    optimizer = nn.SGD(net.trainable_params(), nn.cosine_decay_lr(0.0, 0.1, 9, 1, 9))
    config = recipe("large-batch", 9)
    model = BoostModel(
        net, nn.CrossEntropyLoss(), optimizer, boost_level="O1", boost_config_dict=config
    )
    values = np.ones((24, 4), np.float32), np.zeros(24, np.int32)
    data = ms.dataset.NumpySlicesDataset(values, shuffle=False).batch(8)
    model.train(3, data, dataset_sink_mode=False)
    assert int(optimizer.global_step.asnumpy()[0]) >= 8  # the last rate of the list


def test_as_many_processes_as_msrun_has_started(monkeypatch):
    assert recipe("large-batch", 4000)["boost"]["adasum"] is False
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    assert recipe("large-batch", 4000) == recipe("large-batch", 4000, devices=4)
    for strange in ("two", "0", "-1", ""):
        monkeypatch.setenv("MS_WORKER_NUM", strange)
        assert recipe("large-batch", 4000) == recipe("large-batch", 4000, devices=1)
