"""A loop of one's own trains as ms.Model does, with every algorithm, and callbacks around it."""

from __future__ import annotations

import re

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
import residual_nets
from mindspore import Parameter, ParameterTuple, Tensor, experimental, nn, ops
from mindspore.train import Callback
from models import model_of

from mindspore_boost_ext import (
    BoostCheckpoint,
    BoostMonitor,
    FlushAccumulation,
    TrainStep,
    Update,
    make_train_step,
    read_history,
    restore,
    save_checkpoint,
)
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.base.learning_rate import read_learning_rate
from mindspore_boost_ext.report import NoEffectWarning


def make(algorithm):
    """Build what ``contract.build`` builds, as a step."""
    ms.set_seed(3)
    net = algorithm.net()
    arguments = {"optimizer": nets.momentum(net.trainable_params()), **algorithm.model(net)}
    return make_train_step(net, nets.loss_fn(), level="O1", config=algorithm.on, **arguments)


OFF = {"boost": {"mode": "disable_all"}}
IN_GRAPHS = ("nothing", "dynamic loss scale", "grad_freeze")  # compiling costs seconds each


@pytest.mark.parametrize(
    ("mode", "algorithm"),
    [
        pytest.param(mode, one, id=f"{mode}-{one.name}")
        for mode in ("graph", "pynative")
        for one in contract.ALGORITHMS
        if mode == "pynative" or one.name in IN_GRAPHS
    ],
    indirect=["mode"],
)
def test_it_trains_as_a_model_does(mode, algorithm):
    _, model = contract.switched_on(algorithm)
    losses = contract.run(model, algorithm.batches(4))
    step = make(algorithm)
    found = [float(step(Tensor(x), Tensor(y)).asnumpy()) for x, y in algorithm.batches(4)]
    assert found == losses
    nets.assert_same(nets.weights(step.train_network), nets.weights(model.train_network))
    reports = step.report(), model.train_network.report()
    rows = [[one for one in report.rows if one.algorithm != "first steps"] for report in reports]
    assert rows[0] == rows[1]  # how long the first steps took is never the same twice


def test_its_mode_can_be_set_as_that_of_a_train_one_step_cell(mode):
    step = make(contract.ALGORITHMS[0])
    assert step.set_train(False) is step
    assert not any(one.training for _, one in step.train_network.network.cells_and_names())
    assert step.set_train() is step
    assert all(one.training for _, one in step.train_network.network.cells_and_names())


def test_it_trains_as_a_loop_with_value_and_grad(mode):
    net, other = nets.MLP(), nets.MLP()
    loss_fn, optimizer = nets.loss_fn(), nets.momentum(other.trainable_params())

    def forward(x, y):
        return loss_fn(other(x), y)

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), level="O0")
    for x, y in nets.batches(5):
        loss, gradients = gradient(Tensor(x), Tensor(y))
        optimizer(gradients)
        # Two graphs of the same float32 operators: some roundings apart.
        np.testing.assert_allclose(step(Tensor(x), Tensor(y)).asnumpy(), loss.asnumpy(), rtol=1e-5)


@pytest.mark.parametrize("config", [None, OFF], ids=["O0", "O1"])
def test_an_experimental_optimizer_trains_as_by_hand(mode, config):
    """ms.Model and build_train_network of MindSpore refuse it; its schedulers work, too."""
    losses, rates = [], []
    for by_hand in (True, False):
        net = nets.MLP()
        optimizer = experimental.optim.Adam(net.trainable_params(), lr=0.25)
        scheduler = experimental.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        with_loss = nn.WithLossCell(net, nets.loss_fn())
        step = nn.TrainOneStepCell(with_loss, optimizer)
        if not by_hand:
            step = make_train_step(net, nets.loss_fn(), optimizer, config=config)
        for x, y in nets.batches(5):
            rates.append(read_learning_rate(optimizer))
            losses.append(float(step(Tensor(x), Tensor(y)).asnumpy()))
            scheduler.step()
    assert losses[:5] == losses[5:]
    assert rates == [0.25, 0.25, 0.125, 0.125, 0.0625] * 2


def test_a_network_may_return_its_loss(mode):
    net = nn.WithLossCell(nets.MLP(), nets.loss_fn())
    step = make_train_step(net, None, nets.momentum(net.trainable_params()), config=OFF)
    x, y = nets.batches(1)[0]
    assert step(Tensor(x), Tensor(y)).shape == ()


def test_overflow_and_scale_are_there_beside_the_loss(mode):
    step = make(next(one for one in contract.ALGORITHMS if one.name == "dynamic loss scale"))
    x, y = nets.batches(1)[0]
    assert (step.overflow, step.scale) == (None, None)
    step(Tensor(np.full_like(x, np.inf)), Tensor(y))
    assert bool(step.overflow.asnumpy())
    step(Tensor(x), Tensor(y))
    assert not bool(step.overflow.asnumpy())
    assert float(step.scale.asnumpy()) == 2**9
    assert step.observations()["skipped_steps"] == 1


def test_training_goes_on_in_training_mode_after_an_evaluation(mode):
    """BatchNorm keeps its statistics only while it trains."""
    net = nets.ConvNet()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), config=OFF)
    before = net.norm.moving_mean.asnumpy().copy()
    x, y = (Tensor(one) for one in nets.batches(1, image=True)[0])
    net.set_train(False)
    net(x)
    step(x, y)
    assert (net.norm.moving_mean.asnumpy() != before).any()


class HalvedUpdate(Update):
    """Takes half of the loss out of the report of the step, to be seen."""

    def construct(self, loss, gradients, *inputs):
        return super().construct(loss, gradients, *inputs) / 2


class HalvedReports(Algorithm):
    """An algorithm of the user's own."""

    switch = "halving"

    def join(self, step):
        step.update_part = HalvedUpdate(step.optimizer)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_algorithm_of_ones_own_joins(mode, level):
    config = OFF if level == "O1" else None
    losses = []
    for algorithms in ((), (HalvedReports(),)):
        net = nets.MLP()
        step = make_train_step(
            net,
            nets.loss_fn(),
            nets.momentum(net.trainable_params()),
            level=level,
            config=config,
            algorithms=algorithms,
        )
        x, y = nets.batches(1)[0]
        losses.append(float(step(Tensor(x), Tensor(y)).asnumpy()))
    assert losses[1] == losses[0] / 2


# ---- over: the loop with callbacks ----

WINDOW = {
    **contract.switched(grad_accumulation=True),
    "grad_accumulation": {"grad_accumulation_step": 2},
}


def accumulating():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    return make_train_step(net, nets.loss_fn(), optimizer, config=WINDOW)


def loop(step, epochs, callbacks=(), done=0, data=None):
    data = data or nets.dataset(3)
    losses = []
    for x, y in step.over(data, epochs, callbacks, initial_epoch=done):
        losses.append(float(step(x, y).asnumpy()))
    return losses


class WithItsLoss(nn.Cell):
    """Returns its loss, as a network of several inputs has to."""

    def __init__(self):
        super().__init__()
        self.body = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Dense(4, nets.CLASSES))
        self.loss = nets.loss_fn()

    def construct(self, first, second, label):
        return self.loss(self.body(first + second), label)


def test_training_goes_on_in_training_mode_after_an_evaluation_of_a_part(pynative_mode):
    """The network with its loss says all the time that it is in training mode."""
    net = WithItsLoss()
    step = make_train_step(net, None, nn.SGD(net.trainable_params(), 0.1), config=OFF)
    moving = []
    for x, y in nets.batches(3):
        step(Tensor(x), Tensor(x), Tensor(y))
        moving.append(net.body[1].moving_mean.asnumpy().copy())
        net.body.set_train(False)
        net.body(Tensor(x))
    assert not np.array_equal(moving[0], moving[1])
    assert not np.array_equal(moving[1], moving[2])


def test_parts_at_rest_stay_at_rest(pynative_mode):
    net = WithItsLoss()
    net.body[1].set_train(False)
    step = make_train_step(net, None, nn.SGD(net.trainable_params(), 0.1), config=OFF)
    net.body[1].set_train(False)  # building a step sets all that it holds to training
    for x, y in nets.batches(2):
        step(Tensor(x), Tensor(x), Tensor(y))
    np.testing.assert_array_equal(net.body[1].moving_mean.asnumpy(), 0)


class Weighted(nn.Cell):
    """Takes a third input away from the network."""

    def construct(self, x, y, weight):
        return x * weight, y


class Weighting(Algorithm):
    switch = "weighting"

    def join(self, step):
        step.batch_part = Weighted()


def test_an_algorithm_may_take_more_than_the_network(mode):
    net, (x, y) = nets.MLP(), nets.batches(1)[0]
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    step = make_train_step(net, nets.loss_fn(), optimizer, algorithms=[Weighting()], config=OFF)
    assert step(Tensor(x), Tensor(y), Tensor(2.0)).shape == ()


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_with_a_loss_takes_one_input_and_the_label(count):
    net = nets.MLP()
    step = make_train_step(net, nets.loss_fn(), nn.SGD(net.trainable_params(), 0.1), config=OFF)
    with pytest.raises(TypeError, match=f"one input and the label, got {count} arguments"):
        step(*[Tensor(nets.batches(1)[0][0])] * count)
    with pytest.raises(TypeError, match=r"got 1 arguments: write step\(\*batch\)"):
        step(nets.batches(1)[0])


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("kind", ["none", "two"])
def test_what_is_not_one_optimizer_is_refused(level, kind):
    net = nets.MLP()
    given = None if kind == "none" else [nn.SGD(net.trainable_params(), 0.1)] * 2
    with pytest.raises(TypeError, match="optimizer must be one optimizer"):
        make_train_step(net, nets.loss_fn(), given, level=level)


def test_callbacks_see_what_they_see_under_a_model(mode, tmp_path):
    """Progress, records, the flush of a window, a file an epoch: the very same records."""
    net = nets.MLP()
    model = model_of(net, WINDOW)
    paths = tmp_path / "model.jsonl", tmp_path / "loop.jsonl"
    callbacks = [[FlushAccumulation(), BoostMonitor(path, progress=False)] for path in paths]
    model.train(2, nets.dataset(3), callbacks[0], dataset_sink_mode=False)
    step = accumulating()
    loop(step, 2, callbacks[1])
    nets.assert_same(nets.weights(step.train_network), nets.weights(model.train_network))
    timed = ("seconds", "samples_per_second", "time")  # of their own

    def records(path):
        found = read_history(path)
        for one in found:
            for row in one.get("report", {}).get("rows", ()):
                if row["algorithm"] == "first steps":  # seconds of compilation, each run's own
                    row["reason"] = re.sub(r"\d+\.\d s", "seconds", row["reason"])
        return [{name: one[name] for name in one if name not in timed} for one in found]

    first, second = map(records, paths)
    assert first == second
    assert [one["event"] for one in second] == ["start", *(["step"] * 3 + ["epoch"]) * 2]


def test_each_epoch_is_shuffled_anew_as_under_a_model():
    """With a seed set, each new iterator over a dataset has the order of the first one."""
    ms.set_seed(3)
    model = model_of(nets.MLP(), OFF)
    model.train(3, nets.dataset(3).shuffle(3), dataset_sink_mode=False)
    net = nets.MLP()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), config=OFF)
    loop(step, 3, data=nets.dataset(3).shuffle(3))
    nets.assert_same(nets.weights(step.train_network), nets.weights(model.train_network))


def test_a_loop_goes_on_from_a_file(mode, tmp_path):
    whole = loop(accumulating(), 3)
    loop(accumulating(), 1, [BoostCheckpoint(tmp_path / "run")])
    step = accumulating()
    done = restore(step.train_network, tmp_path / "run")
    assert loop(step, 3, done=done) == whole[3:]


def test_a_callback_may_stop_the_loop():
    class Stop(Callback):
        ended = False

        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 2:
                run_context.request_stop()

        def on_train_end(self, run_context):
            self.ended = run_context.original_args().stopped_in_step  # for BoostCheckpoint

    stop = Stop()
    assert len(loop(accumulating(), 5, [stop])) == 2
    assert stop.ended


class Over(Algorithm):
    switch = "over"

    def end_of_training(self, step):
        return lambda: True


def test_where_an_algorithm_has_ended_the_training_before_nothing_is_yielded():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    step = make_train_step(net, nets.loss_fn(), optimizer, algorithms=[Over()])
    with pytest.warns(NoEffectWarning, match="nothing was trained"):
        assert list(step.over([nets.batches(1)[0]], 2)) == []


def test_callbacks_count_epochs_on_from_the_first():
    seen = []

    class Epochs(Callback):
        def on_train_epoch_begin(self, run_context):
            state = run_context.original_args()
            seen.append((state.cur_epoch_num, state.epoch_num, state.cur_step_num))

    step = make_train_step(net := nets.MLP(), nets.loss_fn(), nets.momentum(net.trainable_params()))
    data = [tuple(Tensor(one) for one in pair) for pair in nets.batches(2)]
    for batch in step.over(data, 3, Epochs(), initial_epoch=1):
        step(*batch)
    assert seen == [(2, 2, 0), (3, 2, 2)]


def test_batches_may_come_from_a_list():
    data = [tuple(Tensor(one) for one in pair) for pair in nets.batches(3)]
    assert loop(accumulating(), 2, data=data) == loop(accumulating(), 2)


@pytest.mark.parametrize("batch", [{"x": 1, "y": 2}, Tensor(np.ones((2, 3), np.float32))])
def test_a_batch_that_is_no_tuple_is_refused(batch):
    """Keys would be taken for Tensors, or rows of one for the inputs."""
    step = make_train_step(net := nets.MLP(), nets.loss_fn(), nets.momentum(net.trainable_params()))
    with pytest.raises(TypeError, match="a batch must be a tuple of Tensors, got"):
        next(step.over([batch], 1))


def test_what_cannot_be_used_is_refused_before_the_loop():
    step = accumulating()
    with pytest.raises(TypeError, match=r"dataset must .*have a length.*for batch in dataset"):
        step.over(iter([]), 1)
    with pytest.raises(ValueError, match=r"over\.epochs must be an int from 1 "):
        step.over([], 0)
    net = nets.MLP()
    for level in ("O7", ""):
        with pytest.raises(ValueError, match="level must be one of O0, O1, O2"):
            make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), level=level)


def test_one_callback_need_not_stand_in_a_list():
    class Counts(ms.train.Callback):
        steps = 0

        def on_train_step_end(self, run_context):
            self.steps += 1

    step, count = accumulating(), Counts()
    for batch in step.over(
        [tuple(Tensor(one) for one in pair) for pair in nets.batches(2)], 1, count
    ):
        step(*batch)
    assert count.steps == 2


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_batch_that_the_loop_leaves_out_has_no_record(tmp_path, level):
    """As after a restore within an epoch; MindSpore's LossMonitor needs a loss."""
    net, path = nets.MLP(), tmp_path / "history.jsonl"
    config = None if level == "O0" else OFF
    step = make_train_step(net, nets.loss_fn(), nn.SGD(net.trainable_params()), config=config)
    data, losses = [tuple(map(Tensor, pair)) for pair in nets.batches(4)], []
    callbacks = [BoostMonitor(path, progress=False), ms.train.LossMonitor(1)]
    for number, batch in enumerate(step.over(data, 1, callbacks)):
        if number % 2:
            losses.append(float(step(*batch).asnumpy()))
    records = [one for one in read_history(path) if one["event"] == "step"]
    assert [(one["step"], one["loss"]) for one in records] == [(2, losses[0]), (4, losses[1])]


@pytest.mark.filterwarnings("ignore::mindspore_boost_ext.NoEffectWarning")
def test_the_level_comes_from_outside_if_the_call_gives_none(monkeypatch):
    monkeypatch.setenv("MINDSPORE_BOOST_EXT_LEVEL", "O1")
    net = nets.Deep()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    assert step.report()["grad_freeze"].status == "applied"
    assert isinstance(step, TrainStep)
    net = nets.Deep()
    own = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), level="O0")
    assert own.report()["grad_freeze"].status == "inactive"
    monkeypatch.setenv("MINDSPORE_BOOST_EXT_CONFIG", '{"boost": {"mode": "disable_all"}}')
    net = nets.Deep()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    assert step.report()["grad_freeze"].status == "inactive"


class Pupil(nn.Cell):
    def __init__(self):
        super().__init__()
        self.teacher = nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3))
        self.student = nn.SequentialCell(nn.Dense(4, 3), nn.BatchNorm1d(3))
        for one in self.teacher.get_parameters():
            one.requires_grad = False

    def construct(self, x):
        return ((self.teacher(x) - self.student(x)) ** 2).mean()


def test_what_rested_in_training_rests_after_an_evaluation(mode):
    net = Pupil()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    config = {"boost": {"mode": "disable_all"}}
    step = make_train_step(net, None, optimizer, level="O1", config=config)
    net.teacher.set_train(False)
    before = [one.asnumpy().copy() for one in net.teacher.get_parameters()]
    x = Tensor(np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32) + 3)
    step(x)
    net.set_train(False)
    net(x)
    step(x)
    assert (net.student[1].training, net.teacher[1].training) == (True, False)
    assert (net.student.training, net.teacher.training) == (True, False)
    for one, old in zip(net.teacher.get_parameters(), before):
        np.testing.assert_array_equal(one.asnumpy(), old)


def test_what_rested_before_the_step_was_made_rests_after_a_first_evaluation(pynative_mode):
    net = Pupil().set_train()
    net.teacher.set_train(False)
    step = make_train_step(net, None, nn.SGD(net.trainable_params(), 0.1), config=OFF)
    net.set_train(False)
    step(Tensor(np.ones((8, 4), np.float32)))
    assert (net.training, net.student[1].training, net.teacher[1].training) == (True, True, False)


def test_layers_of_two_networks_train_again_after_both_were_evaluated(pynative_mode):
    """The first step wakes the layers that they share; the others of the second still rest."""
    body, networks, steps = nn.Dense(4, 3), [], []
    for _ in range(2):
        networks.append(nn.SequentialCell(body, nn.Dense(3, 3), nn.BatchNorm1d(3)))
        optimizer = nn.SGD(networks[-1].trainable_params(), 0.1)
        steps.append(make_train_step(networks[-1], None, optimizer, config=OFF))
    for _ in range(2):
        for net in networks:
            net.set_train(False)
        for net, step in zip(networks, steps):
            step(Tensor(np.ones((8, 4), np.float32)))
            assert all(one.training for _, one in net.cells_and_names())


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_parts_at_rest_in_a_network_that_trains_stay_at_rest_in_its_step(mode, level):
    """As in ``net.set_train(); net.backbone.set_train(False)`` before the step is built."""
    net = residual_nets.ZooResNet()
    net.set_train()
    block = net.layer1[0]
    block.set_train(False)
    before = nets.weights(block)
    switches = {"mode": "manual", "grad_freeze": False, "cheaper_operators": True}
    config = None if level == "O0" else {"boost": switches}
    params = [one for one in net.trainable_params() if "layer1" not in one.name]
    step = make_train_step(net, nets.loss_fn(), nets.momentum(params), level=level, config=config)
    step(*residual_nets.images())
    assert (net.training, block.training, block.bn1.training) == (True, False, False)
    assert isinstance(block.bn1, nn.BatchNorm2d)
    nets.assert_same(nets.weights(block), before)


class LossAndMore(nn.Cell):
    """Returns its loss, and something beside it."""

    def __init__(self, more):
        super().__init__()
        self.dense, self.more = nn.Dense(3, 2), more

    def construct(self, x):
        outputs = self.dense(x)
        loss = (outputs**2).mean()
        if self.more == "outputs":
            return loss, outputs
        if self.more == "stopped":
            return loss, ops.stop_gradient(outputs)
        if self.more == "nested":
            return loss, (outputs, 3)
        if self.more == "integers":
            return loss, ops.argmax(outputs, 1)
        if self.more == "tuple":
            return loss, (loss, 3)
        return loss, loss + 1


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_outputs_beside_the_loss_are_warned_of(mode, level):
    """MindSpore differentiates the sum of all; by value_and_grad(has_aux=True) it is the first."""
    net = LossAndMore("outputs")
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    config = OFF if level == "O1" else None
    step = make_train_step(net, None, optimizer, level=level, config=config)
    x = Tensor(nets.batches(1)[0][0])
    with pytest.warns(UserWarning, match="returns outputs beside the loss"):
        step(x)
    step(x)  # once


@pytest.mark.parametrize("more", ["integers", "tuple", "another loss"])
def test_outputs_that_are_no_results_are_not_warned_of(mode, more):
    net = LossAndMore(more)
    step = make_train_step(net, None, nn.SGD(net.trainable_params(), 0.1), level="O1", config=OFF)
    step(Tensor(nets.batches(1)[0][0]))


def test_nested_outputs_are_warned_of(mode):
    net = LossAndMore("nested")
    step = make_train_step(net, None, nn.SGD(net.trainable_params(), 0.1), level="O1", config=OFF)
    with pytest.warns(UserWarning, match="returns outputs beside the loss"):
        step(Tensor(nets.batches(1)[0][0]))


def test_the_remedy_for_outputs_beside_the_loss(mode):
    ends = []
    for remedied in (True, False):
        net = nets.fill(LossAndMore("stopped" if remedied else "outputs"))
        optimizer = nn.SGD(net.trainable_params(), 0.1)
        x = Tensor(nets.batches(1)[0][0])
        if remedied:
            with pytest.warns(UserWarning, match="stop_gradient"):
                make_train_step(net, None, optimizer, level="O1", config=OFF)(x)
        else:
            forward = ms.value_and_grad(net, None, optimizer.parameters, has_aux=True)
            optimizer(forward(x)[1])
        ends.append(nets.weights(net))
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], rtol=1e-6, err_msg=name)


def test_a_loop_that_does_not_call_the_step_is_warned_of(pynative_mode):
    data = [tuple(Tensor(one) for one in pair) for pair in nets.batches(2)]
    with pytest.warns(UserWarning, match="did not call the step"):
        assert len(list(accumulating().over(data, 1))) == 2


def test_functions_are_refused_with_the_remedy():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    with pytest.raises(TypeError, match=r"loss_fn must be a Cell or None, .* write it as a Cell"):
        make_train_step(net, lambda outputs, labels: outputs.mean(), optimizer)
    function = ms.value_and_grad(net, None, optimizer.parameters)
    with pytest.raises(TypeError, match="network must be a Cell, got"):
        make_train_step(function, None, optimizer)


def test_an_optimizer_over_another_network_is_told(pynative_mode):
    other = nets.MLP()
    for one in other.trainable_params():
        one.name = f"other.{one.name}"
    optimizer = nets.momentum(other.trainable_params())
    with pytest.warns(UserWarning, match="has none of the optimizer's Parameters"):
        make_train_step(nets.MLP(), nets.loss_fn(), optimizer, level="O1", config=OFF)


def test_a_step_around_another_step_is_warned_of(mode):
    """Each batch would update the weights twice."""
    net = nn.WithLossCell(nets.MLP(), nets.loss_fn())
    optimizer = nets.momentum(net.trainable_params())
    inner = nn.TrainOneStepCell(net, optimizer)
    with pytest.warns(UserWarning, match="holds an optimizer, 'optimizer', over weights that this"):
        make_train_step(inner, None, optimizer, level="O1", config=OFF)


class Grouped(nn.Cell):
    """Has a method of the name by which optimizers of mindspore.experimental are known."""

    def __init__(self):
        super().__init__()
        self.net = nn.WithLossCell(nets.MLP(), nets.loss_fn())

    def param_groups(self):
        return [{"params": self.trainable_params()}]

    def parameters(self):
        return self.trainable_params()

    def construct(self, x, y):
        return self.net(x, y)


def test_a_network_with_groups_is_no_optimizer(pynative_mode):
    net = Grouped()
    optimizer = nets.momentum(net.param_groups())
    step = make_train_step(net, None, optimizer, level="O1", config=OFF)
    step(*map(Tensor, nets.batches(1)[0]))


def test_an_optimizer_over_another_network_of_the_same_names_is_refused(pynative_mode):
    optimizer = nets.momentum(nets.MLP().trainable_params())
    with (
        pytest.warns(UserWarning, match="has none of the optimizer's Parameters"),
        pytest.raises(ValueError, match="update_parameters_name"),
    ):
        make_train_step(nets.MLP(), nets.loss_fn(), optimizer, level="O1", config=OFF)


@pytest.mark.parametrize("kind", ["SGD", "ASGD", "NAdam"])
def test_a_loop_with_an_experimental_optimizer_goes_on_from_a_file(mode, kind, tmp_path):
    """Rates that a scheduler has changed, and moments that MindSpore keeps in lists, are in it."""

    def run(epochs, *callbacks, restored=False):
        net = nets.MLP()
        optimizer = getattr(experimental.optim, kind)(net.trainable_params(), lr=0.25)
        scheduler = experimental.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=OFF)
        done = 0
        if restored:
            if every > 1:
                scheduler.step()  # it counts in Python, as often as the first one had
            done = restore(step.train_network, path)
        losses = []
        data = [tuple(Tensor(one) for one in pair) for pair in nets.batches(2)]
        for number, batch in enumerate(step.over(data, epochs, callbacks, initial_epoch=done)):
            losses.append(float(step(*batch).asnumpy()))
            if number % 2:
                scheduler.step()
        return losses

    every = 1 if kind == "SGD" else 2  # with 1 the rate alone tells what follows
    path = tmp_path / "run"
    whole = run(4)
    run(1, BoostCheckpoint(path))
    assert run(4, restored=True) == whole[2:]


class InDicts(experimental.optim.Optimizer):
    """Momentum with state where AdamW of mint has its own, and where the base class offers to."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.25})
        for group in self.param_groups:
            group["sums"] = ParameterTuple(group["params"]).clone(prefix="sum", init="zeros")
        self.state["count"]["steps"] = Parameter(Tensor(0.0), name="count.steps")

    def construct(self, gradients):
        rate = self.lrs[0] / (1 + self.state["count"]["steps"])
        ops.assign_add(self.state["count"]["steps"], Tensor(1.0))
        for place, one in enumerate(self.parameters):
            total = self.param_groups[0]["sums"][place] * 0.9 + gradients[place]
            ops.assign(self.param_groups[0]["sums"][place], total)
            ops.assign(one, one - total * rate)
        return True


def test_state_that_an_optimizer_keeps_in_dicts_is_in_the_file(mode, tmp_path):
    def run(epochs, *callbacks, restored=False):
        net = nets.MLP()
        optimizer = InDicts(net.trainable_params())
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=OFF)
        done = restore(step.train_network, path) if restored else 0
        data = [tuple(Tensor(one) for one in pair) for pair in nets.batches(2)]
        batches = step.over(data, epochs, callbacks, initial_epoch=done)
        return [float(step(*batch).asnumpy()) for batch in batches]

    path = tmp_path / "run"
    whole = run(3)
    run(1, BoostCheckpoint(path))
    assert run(3, restored=True) == whole[2:]


COMPILED = {
    "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
    "compiled_step": {},
}


@pytest.mark.parametrize("config", [OFF, COMPILED], ids=["plain step", "compiled step"])
@pytest.mark.parametrize("rate", [0.0, 1, np.float32(0.125), Tensor(0.125)])
def test_a_rate_that_a_script_sets_in_a_group(mode, config, rate, tmp_path):
    """Updates of SGD are in proportion to it, and a file has it."""

    def build():
        net = nets.MLP()
        optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.25)
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)
        return net, optimizer, step

    moved, batch = [], [Tensor(one) for one in nets.batches(1)[0]]
    for sets in (False, True):
        net, optimizer, step = build()
        step(*batch)
        if sets:
            optimizer.param_groups[0]["lr"] = rate
        before = nets.weights(net)
        step(*batch)
        moved.append({name: now - before[name] for name, now in nets.weights(net).items()})
    for name, movement in moved[1].items():
        # Differences of weights of about 1, each with the rounding of float32.
        np.testing.assert_allclose(movement, moved[0][name] * float(rate) / 0.25, atol=1e-6)
    optimizer.param_groups[0]["lr"] = 0.5
    save_checkpoint(step.train_network, tmp_path / "run.ckpt", append_dict={"epoch": 1})
    _, other, second = build()
    restore(second.train_network, tmp_path / "run.ckpt")
    assert read_learning_rate(other) == 0.5


def test_groups_and_rates_of_another_kind_are_an_optimizers_own(mode):
    """Names that MindSpore gave later than the user."""
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    optimizer.param_groups, optimizer.lrs = [{"lr": 0.5}, [1]], [0.25, 0.25]
    step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=OFF)
    step(*(Tensor(one) for one in nets.batches(1)[0]))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_parameter_that_a_script_puts_in_a_group_stays(mode):
    """An optimizer of one's own may read it there, each time anew."""
    net, own = nets.MLP(), Parameter(Tensor(0.5), name="own")
    optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.25)
    step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=OFF)
    optimizer.param_groups[0]["lr"] = own
    step(*(Tensor(one) for one in nets.batches(1)[0]))
    assert optimizer.param_groups[0]["lr"] is own


def test_a_weight_decay_that_a_script_changes_in_a_group(pynative_mode):
    """A compiled step is compiled again for it."""
    found = []
    for config in (OFF, COMPILED):
        net = nets.MLP()
        optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.25)
        step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)
        for decay in (0.0, np.float32(0.5)):
            optimizer.param_groups[0]["weight_decay"] = decay
            step(*(Tensor(one) for one in nets.batches(1)[0]))
        found.append(nets.weights(net))
    for name, value in found[0].items():
        # A graph rounds weights of about 1 differently.
        np.testing.assert_allclose(value, found[1][name], rtol=1e-5, atol=1e-6)


def test_a_file_from_before_rates_were_in_it_is_restored_with_a_warning(monkeypatch, tmp_path):
    def build():
        net = nets.MLP()
        optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.25)
        return make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=OFF)

    with monkeypatch.context() as before:
        before.setattr(
            "mindspore_boost_ext.stages.update.list_hidden_parameters", lambda *given: None
        )
        old = build()
    save_checkpoint(old.train_network, tmp_path / "old.ckpt", append_dict={"epoch": 2})
    with pytest.warns(UserWarning, match="holds no learning_rate_group_0: they keep the"):
        assert restore(build().train_network, tmp_path / "old.ckpt") == 2
