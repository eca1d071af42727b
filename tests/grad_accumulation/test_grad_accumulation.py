"""Accumulation: equal to the big batch, in both modes, with every policy, and under MindCV."""

from __future__ import annotations

import warnings

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, experimental, nn, ops
from mindspore.train import CheckpointConfig, ModelCheckpoint
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostModel,
    BoostMonitor,
    BoostTrainOneStepCell,
    BoostWarning,
    FlushAccumulation,
    GradientAccumulation,
    NoEffectWarning,
    make_train_step,
    read_history,
)
from mindspore_boost_ext.grad_accumulation.window import gradient_accumulation_op, gradient_clear_op
from mindspore_boost_ext.integration.training import train_model
from mindspore_boost_ext.runtime import processes

WINDOW = 3
OPTIMIZERS = {
    "SGD": lambda params, rate: nn.SGD(params, rate, weight_decay=1e-3),
    "Momentum": lambda params, rate: nn.Momentum(params, rate, 0.9, weight_decay=1e-3),
    "Adam": lambda params, rate: nn.Adam(params, rate, weight_decay=1e-3),
    "AdamWeightDecay": lambda params, rate: nn.AdamWeightDecay(params, rate, weight_decay=1e-2),
}
RATES = {
    "constant": lambda: 0.01,
    "list": lambda: [0.02 / (1 + step) for step in range(60)],
    "schedule": lambda: nn.ExponentialDecayLR(0.02, 0.9, 5),
}


def config(**settings):
    section = {"grad_accumulation_step": WINDOW, **settings}
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True}
    return {"boost": switches, "grad_accumulation": section}


def assert_close(one, two, tolerance=1e-6):
    for name, value in nets.weights(one).items():
        np.testing.assert_allclose(value, nets.weights(two)[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_updates_equal_those_of_the_big_batch(mode, name, rate):
    """The demand is 1e-6: sums of three float32 means instead of one mean, weights of size 1."""
    big, small = nets.MLP(), nets.MLP()
    plain = model_of(big, optimizer=OPTIMIZERS[name](big.trainable_params(), RATES[rate]()))
    model = model_of(small, config(), OPTIMIZERS[name](small.trainable_params(), RATES[rate]()))
    micro = nets.batches(50 * WINDOW)
    for start in range(0, len(micro), WINDOW):
        window = micro[start : start + WINDOW]
        x, y = (np.concatenate(part) for part in zip(*window))
        plain.train_network(Tensor(x), Tensor(y))
        for x, y in window:
            model.train_network(Tensor(x), Tensor(y))
    assert_close(small, big)
    assert int(model.train_network.optimizer.global_step.asnumpy()[0]) == 50


def test_weights_change_once_in_a_window_only(mode):
    net = nets.MLP()
    model = model_of(net, config())
    before, changed = nets.weights(net), []
    for x, y in nets.batches(2 * WINDOW):
        model.train_network(Tensor(x), Tensor(y))
        after = nets.weights(net)
        changed.append(any((before[name] != after[name]).any() for name in after))
        before = after
    assert changed == [False, False, True] * 2


@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_micro_batches_of_unequal_size(mode, weighting):
    """Sizes 32, 32, 20, 12 against one batch of 96: only weights by samples give its gradient."""
    sizes = (32, 32, 20, 12)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(sum(sizes), nets.FEATURES)).astype(np.float32)
    y = generator.integers(0, nets.CLASSES, sum(sizes)).astype(np.int32)
    big, small = nets.MLP(), nets.MLP()
    first = nets.weights(big)
    plain = model_of(big, optimizer=nn.SGD(big.trainable_params(), 1.0))
    settings = config(grad_accumulation_step=len(sizes), weighting=weighting)
    model = model_of(small, settings, nn.SGD(small.trainable_params(), 1.0))
    plain.train_network(Tensor(x), Tensor(y))
    edges = np.cumsum((0, *sizes))
    for start, end in zip(edges, edges[1:]):
        model.train_network(Tensor(x[start:end]), Tensor(y[start:end]))
    if weighting == "samples":
        assert_close(small, big)
        return
    means = {name: np.zeros_like(value, np.float64) for name, value in first.items()}
    for start, end in zip(edges, edges[1:]):
        part = nets.MLP()
        alone = model_of(part, optimizer=nn.SGD(part.trainable_params(), 1.0))
        alone.train_network(Tensor(x[start:end]), Tensor(y[start:end]))
        for name, value in nets.weights(part).items():
            means[name] += (first[name] - value) / len(sizes)
    for name, value in nets.weights(small).items():
        np.testing.assert_allclose(first[name] - value, means[name], atol=1e-6)


@pytest.mark.parametrize("flush", [False, True])
def test_last_window_of_an_epoch_carries_or_is_flushed(mode, flush):
    """4 micro-batches, windows of 3: the fourth waits, or makes an update of its own."""
    net, reference = nets.MLP(), nets.MLP()
    model = model_of(net, config(), nn.SGD(net.trainable_params(), 0.1))
    callbacks = [FlushAccumulation()] if flush else []
    model.train(1, nets.dataset(4), callbacks=callbacks, dataset_sink_mode=False)
    plain = model_of(reference, optimizer=nn.SGD(reference.trainable_params(), 0.1))
    micro = nets.batches(4)
    x, y = (np.concatenate(part) for part in zip(*micro[:3]))
    plain.train_network(Tensor(x), Tensor(y))
    if flush:
        plain.train_network(Tensor(micro[3][0]), Tensor(micro[3][1]))
    assert_close(net, reference)
    assert model.train_network.accumulation.micro_steps() == (0 if flush else 1)
    assert model.train_network.flush_accumulation() is not flush


def test_a_sink_size_closes_no_window_in_mid_epoch():
    """On CPU MindSpore sinks nothing, but calls ``sink_size`` the number of batches."""
    weights = []
    for sinking in ({"dataset_sink_mode": False}, {"dataset_sink_mode": True, "sink_size": 2}):
        net = nets.MLP()
        model = model_of(net, config(), nn.SGD(net.trainable_params(), 0.1))
        model.train(2, nets.dataset(4), [FlushAccumulation()], **sinking)
        weights.append(nets.weights(model.train_network))
    nets.assert_same(*weights)


class Uneven:
    """Epochs of 3, 6 and 4 batches; it says that they have 4."""

    def __init__(self):
        self.sizes = iter((3, 6, 4))

    def __len__(self):
        return 4

    def __iter__(self):
        return (tuple(map(Tensor, one)) for one in nets.batches(next(self.sizes)))


def test_epochs_of_other_lengths_close_no_window_but_where_they_end_or_should(pynative_mode):
    """Windows of 3. Looked at before the callback, which closes the window behind the batch."""
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config())
    done = []
    for batch in step.over(Uneven(), 3, FlushAccumulation()):
        step(*batch)
        done.append(int(optimizer.global_step.asnumpy().item()))
    # Full at the third of each epoch; closed behind the fourth, where the second should end, and
    # at its real end.
    assert done == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_the_window_is_flushed_before_a_checkpoint_and_a_validation_look(mode, tmp_path):
    net = nets.MLP()
    model = model_of(net, config(), nn.SGD(net.trainable_params(), 0.1), metrics={"loss"})
    monitor = BoostMonitor(tmp_path / "history.jsonl", progress=False)
    saving = ModelCheckpoint("run", str(tmp_path), CheckpointConfig(save_checkpoint_steps=4))
    callbacks = [FlushAccumulation(), saving, monitor]
    model.fit(1, nets.dataset(4), nets.dataset(4), callbacks=callbacks, dataset_sink_mode=False)
    (path,) = tmp_path.glob("*.ckpt")
    saved = ms.load_checkpoint(str(path))
    for name, value in nets.weights(net).items():
        np.testing.assert_array_equal(saved[name].asnumpy(), value)
    (epoch,) = [one for one in read_history(tmp_path / "history.jsonl") if one["event"] == "epoch"]
    assert epoch["metrics"] == model.eval(nets.dataset(4), dataset_sink_mode=False)


def test_flushing_behind_a_checkpoint_is_told(tmp_path):
    net = nets.MLP()
    model = model_of(net, config(), nn.SGD(net.trainable_params(), 0.1))
    callbacks = [ModelCheckpoint("run", str(tmp_path)), FlushAccumulation()]
    with pytest.warns(BoostWarning, match="after ModelCheckpoint.*put it first"):
        model.train(1, nets.dataset(4), callbacks=callbacks, dataset_sink_mode=False)


def test_parameters_may_be_called_like_the_counters():
    weight = ms.Parameter(Tensor(np.ones(2, np.float32)), name="total_weight")
    accumulation = GradientAccumulation(2, nn.SGD([weight], 0.1))
    names = [one.name for one in accumulation.get_parameters()]
    assert len(names) == len(set(names))


def test_flushing_without_accumulation_is_told():
    net = nets.MLP()
    model = model_of(net)
    with pytest.warns(NoEffectWarning, match="gradients are not accumulated"):
        model.train(1, nets.dataset(1), callbacks=[FlushAccumulation()], dataset_sink_mode=False)


@pytest.mark.parametrize("call", ["train", "fit"])
@pytest.mark.parametrize("kind", [ms.Model, BoostModel])
def test_a_window_longer_than_an_epoch_is_told_once_without_any_callback(kind, call):
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    model = kind(
        net, nets.loss_fn(), optimizer, {"loss"}, boost_level="O1", boost_config_dict=config()
    )
    data = [nets.dataset(2)] * (2 if call == "fit" else 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            getattr(model, call)(1, *data, dataset_sink_mode=False)
    told = [one for one in caught if issubclass(one.category, BoostWarning)]
    assert len(told) == 1
    assert "grad_accumulation_step=3 is more than the 2 steps" in str(told[0].message)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("held", "epochs", "words"),
    [
        (0, 1, "epoch: this call makes no update, and the window"),
        (0, 2, "epoch: the window carries over"),
        (1, 1, "epoch: the window carries over"),
    ],
)
def test_a_training_without_an_update_is_told(held, epochs, words):
    step = model_of(nets.MLP(), config()).train_network
    step.window_part.counter.set_data(Tensor(held, ms.int32))
    with pytest.warns(BoostWarning, match=words):
        step.expect_training(epochs, 2)


@pytest.mark.parametrize(
    ("device", "sunk", "words"),
    [("Ascend", 2, "than the 2 steps"), ("Ascend", -1, "than the 1 steps"), ("CPU", 2, "the 1 st")],
)
def test_an_epoch_is_as_long_as_what_is_sunk(monkeypatch, device, sunk, words):
    """A CPU sinks nothing."""
    model = model_of(nets.MLP(), config())
    monkeypatch.setattr(ms, "get_context", {"device_target": device}.get)
    with pytest.warns(BoostWarning, match=words):
        train_model(
            lambda model, epoch, train_dataset, callbacks=None, **others: None,
            model,
            1,
            nets.dataset(1),
            dataset_sink_mode=True,
            sink_size=sunk,
        )


def test_a_switch_that_is_off_leaves_a_window_of_one():
    settings = {**config(), "boost": {"mode": "disable_all"}}
    with pytest.warns(NoEffectWarning, match="grad_accumulation"):
        assert model_of(nets.MLP(), settings).train_network.max_accumulation_step == 1


def test_epochs_before_the_first_do_not_count(pynative_mode):
    with pytest.warns(BoostWarning, match="this call makes no update"):
        model_of(nets.MLP(), config()).train(
            4, nets.dataset(2), dataset_sink_mode=False, initial_epoch=3
        )


def test_a_window_that_fits_into_an_epoch_is_not_told():
    net = nets.MLP()
    model = model_of(net, config())
    model.train(epoch=1, train_dataset=nets.dataset(3), dataset_sink_mode=False)


@pytest.mark.parametrize("policy", ["drop_micro_batch", "drop_window"])
def test_overflow_drops_the_micro_batch_or_the_window(mode, policy):
    """Micro-batches 0, 1, inf, 2, 3, 4: the windows are (0 1 2) or (2 3 4)."""
    net, reference = nets.MLP(), nets.MLP()
    manager = ms.FixedLossScaleManager(64.0)
    model = model_of(
        net,
        config(on_overflow=policy),
        nn.SGD(net.trainable_params(), 0.1),
        loss_scale_manager=manager,
    )
    micro = nets.batches(5)
    bad = np.full_like(micro[0][0], np.inf), micro[0][1]
    for x, y in [*micro[:2], bad, *micro[2:]]:
        model.train_network(Tensor(x), Tensor(y))
    kept = micro[:3] if policy == "drop_micro_batch" else micro[2:]
    x, y = (np.concatenate(part) for part in zip(*kept))
    plain = model_of(reference, optimizer=nn.SGD(reference.trainable_params(), 0.1))
    plain.train_network(Tensor(x), Tensor(y))
    assert_close(net, reference)
    assert model.train_network.observations()["skipped_steps"] == 1


class LossOfEach(nn.Cell):
    """Returns a loss for each sample, or their mean."""

    def __init__(self, reduces=False):
        super().__init__()
        self.backbone, self.loss = nets.MLP(), nn.CrossEntropyLoss(reduction="none")
        self.reduces = reduces

    def construct(self, x, y):
        losses = self.loss(self.backbone(x), y)
        return losses.mean() if self.reduces else losses


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_for_each_sample_is_warned_of_and_a_mean_of_them_is_not(mode, scaled):
    for reduces in (True, False):
        net = LossOfEach(reduces)
        settings = {**config(), **({"loss_scale": {"init": 8.0}} if scaled else {})}
        step = make_train_step(
            net, None, nn.SGD(net.trainable_params(), 0.1), level="O1", config=settings
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(*map(Tensor, nets.batches(1)[0]))
        found = [str(one.message) for one in seen if "returns several losses" in str(one.message)]
        assert len(found) == (0 if reduces else 1)


def test_a_rank_shows_the_updates_that_it_begins_also_after_a_flush(pynative_mode):
    """A rank that counts more than it makes waits for ranks that have ended well, and stops."""
    net = nets.MLP()
    step = model_of(net, config(), nn.SGD(net.trainable_params(), 0.1)).train_network
    batches = nets.batches(9)
    for x, y in batches[:WINDOW]:  # the first step compares the ranks, and here is one
        step(Tensor(x), Tensor(y))
    step.reducer_flag = True  # as one of several ranks
    shown, made = [], []
    for number, (x, y) in enumerate(batches[WINDOW:]):
        before = processes.PROGRESS.updates, int(step.optimizer.global_step.asnumpy()[0])
        step(Tensor(x), Tensor(y))
        if number == 1:
            step.flush_accumulation()
        shown.append(processes.PROGRESS.updates - before[0])
        made.append(int(step.optimizer.global_step.asnumpy()[0]) - before[1])
    assert shown == made == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(("weighting", "samples"), [("equal", 1.0), ("samples", 64.0)])
def test_buffers_of_low_precision_parameters_are_float32(mode, weighting, samples):
    """2048 + 1 is 2048 in float16: a buffer of that type would lose every further gradient.

    And 64 samples times 2048 are inf there.
    """
    weight = Parameter(Tensor([0.0], ms.float16), name="w")
    accumulation = GradientAccumulation(5, nn.SGD([weight], 1.0), weighting=weighting)
    for gradient in (2048.0, 1.0, 1.0, 1.0, 1.0):
        loss = accumulation(Tensor(3.0), (Tensor([gradient], ms.float16),), samples)
        assert float(loss.asnumpy()) == 3.0
    # (2048 + 4) / 5 = 410.4, to half a unit in the last place of float16 there (0.125)
    np.testing.assert_allclose(weight.asnumpy(), [-410.4], atol=0.125)


def test_a_window_that_was_longer_where_it_was_saved_closes_with_the_next_batch(mode):
    net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    long, short = (GradientAccumulation(n, nn.SGD(net.trainable_params(), 1.0)) for n in (4, 2))
    gradient = (Tensor([[1.0]], ms.float32),)
    for _ in range(3):
        long(Tensor(0.0), gradient)
    ms.load_param_into_net(short, {one.name: one for one in long.get_parameters()})
    short(Tensor(0.0), gradient)
    assert float(net.weight.asnumpy().reshape(())) == -1.0  # the mean of four
    assert short.micro_steps() == 0


def test_batches_of_one_sample_weigh_as_equal_ones_do():
    weight = Parameter(Tensor([0.0]), name="w")
    accumulation = GradientAccumulation(2, nn.SGD([weight], 1.0), weighting="samples")
    accumulation(Tensor(0.0), (Tensor([1.0]),), 1.0)
    accumulation.check_weighting(1.0)
    with pytest.raises(ValueError, match="1 micro-batches that were not weighted by"):
        accumulation.check_weighting(2.0)


def test_state_has_names_of_its_own():
    net = nets.MLP()
    accumulation = GradientAccumulation(2, nets.momentum(net.trainable_params()))
    own = {one.name for one in accumulation.get_parameters() if one.name.startswith("boost.")}
    assert own == {
        "boost.grad_accumulation.micro_steps",
        "boost.grad_accumulation.total_weight",
        *(f"boost.grad_accumulation.gradients.{one.name}" for one in net.trainable_params()),
    }
    assert [one.name for one in net.get_parameters()] == [
        one.name for one in nets.MLP().get_parameters()
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "max_accumulation_step must be an int from 1 to 16777216, got 0"),
        ((2.5,), "max_accumulation_step must be an int from 1 to 16777216, got 2.5"),
        (("4",), "max_accumulation_step must be an int from 1 to 16777216, got '4'"),
    ],
)
def test_wrong_windows_are_refused(arguments, message):
    net = nets.MLP()
    with pytest.raises(ValueError, match=message):
        GradientAccumulation(*arguments, nets.momentum(net.trainable_params()))


class Upstreams(GradientAccumulation):
    """A subclass as public projects write it: only the names that upstream gives are used."""

    def construct(self, loss, grads):
        loss = ops.depend(
            loss,
            self.hyper_map(
                ops.partial(gradient_accumulation_op, self._max_accumulation_step),
                self._grad_accumulation,
                grads,
            ),
        )
        self._accumulation_step += 1
        if self._accumulation_step >= self._max_accumulation_step:
            loss = ops.depend(loss, self.optimizer(self._grad_accumulation))
            loss = ops.depend(
                loss, self.hyper_map(ops.partial(gradient_clear_op), self._grad_accumulation)
            )
            self._accumulation_step = 0
        return loss


def test_subclasses_with_upstreams_names_work(mode):
    net, reference = nets.MLP(), nets.MLP()
    own = GradientAccumulation(2, nn.SGD(reference.trainable_params(), 0.5))
    theirs = Upstreams(2, nn.SGD(net.trainable_params(), 0.5))
    generator = np.random.default_rng(0)
    for _ in range(4):
        gradients = tuple(
            Tensor(generator.normal(size=one.shape).astype(np.float32))
            for one in net.trainable_params()
        )
        own(Tensor(0.0), gradients)
        theirs(Tensor(0.0), gradients)
    assert_close(net, reference)


def test_mindcvs_own_subclass_in_its_training_step(graph_mode):
    """MindCV's TrainStep subclasses GradientAccumulation and equals the big batch."""
    train_step = pytest.importorskip("mindcv.utils.train_step")
    assert issubclass(train_step.GradientAccumulation, GradientAccumulation)
    net, reference = nets.MLP(), nets.MLP()
    step = train_step.TrainStep(
        nn.WithLossCell(net, nets.loss_fn()),
        nn.SGD(net.trainable_params(), 0.1),
        scale_sense=Tensor(1.0),
        gradient_accumulation_steps=WINDOW,
    ).set_train()
    plain = model_of(reference, optimizer=nn.SGD(reference.trainable_params(), 0.1))
    micro = nets.batches(2 * WINDOW)
    for start in (0, WINDOW):
        x, y = (np.concatenate(part) for part in zip(*micro[start : start + WINDOW]))
        plain.train_network(Tensor(x), Tensor(y))
    for x, y in micro:
        step(Tensor(x), Tensor(y))
    assert_close(net, reference)


class Heated(nn.Cell):
    """Takes a number before its samples."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()

    def construct(self, temperature, x):
        return (self.net(x) / temperature).mean()


def test_samples_that_cannot_be_counted_are_refused():
    net = Heated()
    config = {
        "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
        "grad_accumulation": {"grad_accumulation_step": 2, "weighting": "samples"},
    }
    config["boost"]["grad_accumulation"] = True
    step = model_of(net, config, loss_fn=None).train_network
    with pytest.raises(ValueError, match=r"weighting='samples' counts .* got .*: make samples the"):
        step(Tensor(2.0), Tensor(np.ones((2, nets.FEATURES), np.float32)))


def test_what_is_no_network_or_optimizer_is_refused():
    with pytest.raises(TypeError, match="network must be a Cell, got 3"):
        BoostTrainOneStepCell(3, nn.SGD(nets.MLP().trainable_params()))
    with pytest.raises(TypeError, match="network must be a Cell, got 3"):
        AutoBoost("O1").network_auto_process_train(3, nn.SGD(nets.MLP().trainable_params()))
    with pytest.raises(TypeError, match="optimizer must be a MindSpore optimizer, got 'x'"):
        GradientAccumulation(2, "x")


def test_a_flush_takes_the_rate_that_was_set_last(mode):
    net = nn.Dense(3, 1, has_bias=False)
    optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.1)
    step = make_train_step(net, nn.MSELoss(), optimizer, level="O1", config=config())
    batch = Tensor(np.ones((2, 3), np.float32)), Tensor(np.zeros((2, 1), np.float32))
    seen = []
    for rate in (0.1, 0.0, 0.1):  # the first flush compiles
        step(*batch)
        before = net.weight.asnumpy().copy()
        optimizer.param_groups[0]["lr"] = rate
        assert step.train_network.flush_accumulation()
        seen.append(bool((net.weight.asnumpy() != before).any()))
    assert seen == [True, False, True]
