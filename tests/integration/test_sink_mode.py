"""Sink mode: MindSpore's own loop of it, with a stand-in for the queue of a device.

There, in GRAPH_MODE, a graph of MindSpore's around the step runs it, and the host sees no batch.
"""

from __future__ import annotations

import warnings

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import (
    BoostCheckpoint,
    BoostModel,
    BoostMonitor,
    BoostTrainOneStepCell,
    BoostWarning,
    GroupLossScaleManager,
    read_history,
    restore,
    save_checkpoint,
)

STEPS = 3  # of a call, which is an epoch
MANUAL = {"mode": "manual", "less_bn": False, "grad_freeze": False}


class Fed(nn.Cell):
    """Runs a step on a batch of its own, as MindSpore's ``_DataWrapper`` does."""

    def __init__(self, step, batch):
        super().__init__(auto_prefix=False, flags=step.get_flags())
        self.network, self.batch = step, tuple([Tensor(one) for one in batch])

    def construct(self):
        return self.network(*self.batch)


class Calls:
    """One call an epoch, as a ``DatasetHelper`` counts them."""

    def __iter__(self):
        return iter([()])

    def sink_size(self):
        return STEPS

    def __getattr__(self, name):
        return lambda *given, **more: None


@pytest.fixture
def sink(monkeypatch):
    """Return what trains a Model in sink mode."""

    feds = {}

    def open_data(model, *given, **more):
        step = model.train_network
        if id(step) not in feds:
            feds[id(step)] = Fed(step, nets.batches(1)[0])
        return Calls(), feds[id(step)].set_train()

    def train(model, epoch, data, callbacks, cb_params, initial_epoch=0, valid_infos=None):
        given = (epoch, data, callbacks, cb_params, -1, initial_epoch, valid_infos)
        return model._train_dataset_sink_process(*given)

    monkeypatch.setattr(ms.Model, "_exec_preprocess", open_data)
    monkeypatch.setattr(ms.Model, "_train_process", train)

    def run(model, epochs, *callbacks):
        data = nets.dataset(STEPS)
        model.train(epochs, data, callbacks=[*callbacks], dataset_sink_mode=True)

    return run


def clipped(norm):
    config = {"boost": MANUAL, "gradients": {"clip_norm": norm}}
    return model_of(nets.MLP(), config, kind=BoostModel)


def test_a_file_holds_settings_and_counts_epochs_on(mode, sink, tmp_path):
    path = tmp_path / "run.ckpt"
    model, callback = clipped(1.0), BoostCheckpoint(path)
    sink(model, 2, callback)
    sink(model, 1, callback)
    assert restore(clipped(1.0).train_network, path) == 3
    with pytest.raises(ValueError, match=r"gradients\.clip_norm was 1\.0 and is 0\.5"):
        restore(clipped(0.5).train_network, path)


class Around(nn.Cell):
    """A script's own Cell around a step, with state of its own."""

    def __init__(self, step):
        super().__init__()
        self.network, self.count = step, ms.Parameter(Tensor(0.0), name="count")

    def construct(self, x, y):
        return ops.depend(self.network(x, y), ops.assign_add(self.count, Tensor(1.0)))


def test_a_cell_around_a_step_is_saved_whole_and_goes_on(mode, tmp_path):
    """Where MindSpore sinks nothing, too."""

    def made():
        return ms.Model(Around(clipped(1.0).train_network))

    def train(model, epochs, *callbacks):
        model.train(epochs, nets.dataset(STEPS), [*callbacks], dataset_sink_mode=False)

    path, history = tmp_path / "run.ckpt", tmp_path / "history"
    whole, first, second = made(), made(), made()
    train(whole, 3)
    callback = BoostCheckpoint(path)
    train(first, 1, callback)
    train(first, 1, callback)
    done = restore(second.train_network, path)
    assert done == 2
    train(second, 1, BoostMonitor(history, progress=False))
    assert read_history(history)[-1]["epoch"] == 3
    nets.assert_same_weights(whole.train_network, second.train_network)


def test_a_step_in_another_cell_keeps_its_settings(tmp_path):
    """As what a callback of sink mode is given, or a Cell of one's own."""
    path = tmp_path / "run.ckpt"
    around = Fed(clipped(1.0).train_network, nets.batches(1)[0])
    save_checkpoint(around, path, append_dict={"epoch": 1})
    assert restore(Fed(clipped(1.0).train_network, nets.batches(1)[0]), path) == 1
    with pytest.raises(ValueError, match=r"gradients\.clip_norm was 1\.0 and is 0\.5"):
        restore(Fed(clipped(0.5).train_network, nets.batches(1)[0]), path)


class Grouped(nn.Cell):
    """Two groups; the marker between them is forgotten."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(nets.FEATURES, 4), nn.Dense(4, nets.CLASSES)
        groups = [self.first.trainable_params(), self.second.trainable_params()]
        self.manager = GroupLossScaleManager(64, groups)

    def construct(self, x):
        return self.manager(self.second(self.first(self.manager(x, 0, 1))), 2, 3)


def test_a_missing_marker_is_refused(mode, sink):
    """Else every step is skipped without a word."""
    net = Grouped()
    config = {"boost": {**MANUAL, "loss_scale_group": True}}
    model = model_of(net, config, kind=BoostModel, loss_scale_manager=net.manager)
    with pytest.raises(ValueError, match="no marker leads into some group"):
        sink(model, 1)


def reduced(seed=0):
    section = {"n_components": 7, "pca_mat_path": nets.basis_file(seed=seed)}
    config = {"boost": {**MANUAL, "dim_reduce": True}, "dim_reduce": section}
    return model_of(nets.MLP(), config, kind=BoostModel)


def test_a_step_that_has_run_in_pynative_mode_sinks(graph_mode, sink):
    """MindSpore would put a method that has run by itself in the place of a ``construct``."""
    model, expected = reduced(), reduced()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    start = nets.weights(model.train_network)
    model.train_network(*map(Tensor, nets.batches(1)[0]))
    nets.set_weights(model.train_network, start)
    ms.set_context(mode=ms.GRAPH_MODE)
    for one in (model, expected):
        sink(one, 2)
    nets.assert_same_weights(model.train_network, expected.train_network)


@pytest.fixture
def looks(monkeypatch):
    """Return a list of how many inputs each first look at a step has had."""
    found, look = [], BoostTrainOneStepCell.look_before_first
    monkeypatch.setattr(
        BoostTrainOneStepCell,
        "look_before_first",
        lambda self, *inputs: found.append(len(inputs)) or look(self, *inputs),
    )
    return found


def test_the_first_look_is_once(mode, sink, looks):
    """A step that has run by hand has looked at its batch, as one does that no graph runs."""
    by_hand, model = clipped(1.0), clipped(1.0)
    by_hand.train_network(*map(Tensor, nets.batches(1)[0]))
    assert looks == [2]
    for _ in range(2):
        sink(by_hand, 1)
        sink(model, 1)
    assert looks == ([2, 0] if mode == "graph" else [2, 2])


def test_where_nothing_sinks_the_first_look_is_at_the_batch(mode, looks):
    clipped(1.0).train(1, nets.dataset(STEPS), dataset_sink_mode=True)
    assert looks == [2]


def test_a_loaded_state_of_another_basis_is_refused(mode, sink, tmp_path):
    ms.save_checkpoint(reduced(0).train_network, str(tmp_path / "run.ckpt"))
    model = reduced(1)
    ms.load_param_into_net(model.train_network, ms.load_checkpoint(str(tmp_path / "run.ckpt")))
    before = nets.weights(model.train_network)
    with pytest.raises(ValueError, match="belongs to another basis"):
        sink(model, 1)
    nets.assert_same(before, nets.weights(model.train_network))


def test_what_is_restored_after_sink_calls_is_looked_at_before_the_next(
    mode, sink, looks, tmp_path
):
    path, model = tmp_path / "run.ckpt", clipped(1.0)
    sink(model, 1, BoostCheckpoint(path))
    restore(model.train_network, path)
    sink(model, 1)
    assert looks == ([0, 0] if mode == "graph" else [2, 2])


@pytest.mark.parametrize(("saved", "other"), [("equal", "samples"), ("samples", "equal")])
def test_a_window_of_the_other_weighting_is_refused(mode, sink, tmp_path, saved, other):
    def accumulating(weighting):
        section = {"grad_accumulation_step": 2, "weighting": weighting}
        config = {"boost": {**MANUAL, "grad_accumulation": True}, "grad_accumulation": section}
        return model_of(nets.MLP(), config, kind=BoostModel)

    path, models = tmp_path / "run.ckpt", [accumulating(one) for one in (saved, other, saved)]
    sink(models[0], 1, BoostCheckpoint(path))  # 3 micro-batches: one is left
    with pytest.warns(BoostWarning, match="weighting was"):
        restore(models[1].train_network, path, allow_other_settings=True)
    with pytest.raises(ValueError, match="were not weighted by"):
        sink(models[1], 1)
    restore(models[2].train_network, path)
    sink(models[2], 1)


def test_a_fixed_scale_that_always_overflows_is_warned_of(graph_mode, sink, monkeypatch):
    """The last step of a call is looked at."""
    net = nets.MLP()
    net.second.weight.set_data(Tensor(np.full(net.second.weight.shape, np.inf, np.float32)))
    manager = ms.amp.FixedLossScaleManager(2.0**20, drop_overflow_update=True)
    model = model_of(net, {"boost": MANUAL}, kind=BoostModel, loss_scale_manager=manager)
    model.train_network._look_every = 100  # as on the devices that sink
    monkeypatch.setattr(Calls, "sink_size", lambda self: 60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sink(model, 10)  # 600 steps: 6 looks of the 10 that it takes
        assert model.train_network._steps_run == 600
        assert not caught
    with pytest.warns(BoostWarning, match="overflowed at the fixed loss scale"):
        sink(model, 10)
