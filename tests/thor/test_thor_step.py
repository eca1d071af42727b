"""THOR in the training step: loss scales, overflow, accumulation, freezing, graphs, Models."""

from __future__ import annotations

import json

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
import thor_oracle as oracle
from mindspore import Tensor, nn, ops
from models import model_of
from thor_cases import DAMPING, Weighted, pairs, reference, train_layer

from mindspore_boost_ext import (
    Algorithm,
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    BoostWarning,
    ConvertModelUtils,
    FreezeOpt,
    GroupLossScaleManager,
    make_train_step,
)
from mindspore_boost_ext.thor.algorithm import CAPTURING, ORDINARY
from mindspore_boost_ext.thor.optimizer import THOR, thor_of

OFF = contract.switched()
# Powers of two leave the float32 mantissa alone, so scaled runs meet the unscaled tolerance.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def weight_of(step):
    return next(one for one in step.network.trainable_params()).asnumpy()


def scaled(scale):
    return lambda net, optimizer: BoostTrainOneStepWithLossScaleCell(
        net, optimizer, Tensor(scale, ms.float32)
    )


def test_a_loss_scale_is_divided_out_of_the_factors(mode):
    steps = pairs(4)
    step, _ = train_layer(steps, step=scaled(2.0**10), frequency=2)
    np.testing.assert_allclose(weight_of(step), reference(steps, frequency=2), **TOLERANCE)
    expected = reference(steps, frequency=2, decay=0.1)
    for grouped in (False, True):
        net = Weighted(nn.Dense(3, 2, has_bias=False))
        group = {"params": net.trainable_params(), "weight_decay": 0.1}
        # MindSpore keeps it times the scale; that of groups is a tuple.
        decay = {"params": [group]} if grouped else {"weight_decay": 0.1}
        fixed, _ = train_layer(
            steps,
            net=net,
            step=lambda net, optimizer: BoostTrainOneStepCell(net, optimizer, 256.0),
            frequency=2,
            loss_scale=256.0,
            **decay,
        )
        np.testing.assert_allclose(weight_of(fixed), expected, **TOLERANCE)


@pytest.mark.parametrize("first", [2.0**38, 2.0**80])
def test_a_growing_scale_leaves_the_factors_finite(mode, first):
    """They carry its square, in float32; the momentum that would be left trains otherwise."""
    steps = pairs(6)
    step, optimizer = train_layer(
        steps,
        step=lambda net, optimizer: BoostTrainOneStepWithLossScaleCell(
            net, optimizer, nn.DynamicLossScaleUpdateCell(first, 2, 1)
        ),
        frequency=1,
    )
    np.testing.assert_allclose(weight_of(step), reference(steps, frequency=1), **TOLERANCE)
    assert optimizer.observations()["thor.inverses_kept"] == 0
    assert step.observations()["loss_scale"] == 2.0**40


class MarkedLayers(nn.Cell):
    """Two Dense layers, each in a group of its own where there is a manager."""

    def __init__(self, manager=None):
        super().__init__()
        self.manager = manager
        self.first, self.second = nn.Dense(3, 2, has_bias=False), nn.Dense(2, 2, has_bias=False)

    def construct(self, x, target):
        if self.manager is None:
            return (self.second(self.first(x)) * target).sum() / x.shape[0]
        x = self.first(self.manager(x, 0, 1))
        x = self.second(self.manager(x, 1, 2))
        return self.manager((x * target).sum() / target.shape[0], 2, 3)


@pytest.mark.parametrize("scales", [[64.0, 1024.0], [2.0**80, 2.0**90]])
def test_group_scales_are_divided_out_of_the_factors_layer_by_layer(graph_mode, scales):
    """Powers of two: the run without scales is met but for the order of float32 sums."""
    ms.set_context(mode=ms.PYNATIVE_MODE)  # need not be compiled
    plain, _ = train_layer(pairs(2), net=MarkedLayers(), frequency=1)
    ms.set_context(mode=ms.GRAPH_MODE)
    manager = GroupLossScaleManager(scales, [])
    net = MarkedLayers(manager)
    manager.loss_scale_groups = [[net.first.weight], [net.second.weight]]
    grouped, optimizer = train_layer(
        pairs(2),
        net=net,
        step=lambda net, opt: BoostTrainOneStepWithLossScaleCell(net, opt, manager),
        frequency=1,
    )
    assert optimizer.observations()["thor.refreshes"] == 2
    for one, other in zip(plain.weights, grouped.weights):
        np.testing.assert_allclose(other.asnumpy(), one.asnumpy(), rtol=1e-5, atol=1e-6)


def test_a_skipped_step_leaves_curvature_and_weights_bit_identical(mode):
    steps = pairs(3)
    step, optimizer = train_layer(steps[:1], step=scaled(4.0), frequency=1)
    before = nets.weights(step)
    x, target = (one.copy() for one in steps[1])
    x[0, 0] = np.inf
    _, overflow, _ = step(Tensor(x), Tensor(target))
    assert bool(overflow.asnumpy())
    after = nets.weights(step)
    del before["boost.loss_scale.skipped_steps"], after["boost.loss_scale.skipped_steps"]
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    step(*map(Tensor, steps[2]))
    assert optimizer.observations()["thor.refreshes"] == 2


def boosted(net, optimizer, config, cell=BoostTrainOneStepCell):
    boost = AutoBoost(
        "O1", {"boost": {"mode": "manual", "less_bn": False, **config.pop("boost")}, **config}
    )
    with boost.building():
        net, optimizer = boost.network_auto_process_train(net, optimizer)
        return cell(net, optimizer)


def in_a_graph_of_another(net, optimizer):
    return nets.Outer(BoostTrainOneStepCell(net, optimizer))


@pytest.mark.parametrize(
    "make",
    [BoostTrainOneStepCell, scaled(8.0), in_a_graph_of_another],
    ids=["plain", "scaled", "in another graph"],
)
def test_accumulation_takes_the_factors_of_the_last_micro_batch(mode, make):
    steps = pairs(6)
    config = {
        "boost": {"grad_accumulation": True, "grad_freeze": False},
        "grad_accumulation": {"grad_accumulation_step": 2},
    }
    _, optimizer = train_layer(
        steps, step=lambda net, opt: boosted(net, opt, config, make), frequency=2, momentum=0.0
    )
    weight = nets.fill(nn.Dense(3, 2, has_bias=False)).weight.asnumpy().astype(np.float64)
    for window in range(3):
        (x0, t0), (x, t) = steps[2 * window : 2 * window + 2]
        if window % 2 == 0:
            a, g = oracle.second_moment(x), oracle.second_moment(np.float64(t))
        gradient = (np.float64(t0).T @ x0 + np.float64(t).T @ x) / 16
        weight -= 0.1 * oracle.kronecker_solve(gradient, a, g, np.sqrt(DAMPING))
    np.testing.assert_allclose(optimizer.parameters[0].asnumpy(), weight, **TOLERANCE)
    assert optimizer.observations()["thor.refreshes"] == 2


def test_frozen_layers_stay_and_their_factors_are_refreshed(mode):
    net = nets.MLP(hidden=4)
    optimizer = THOR(net, 0.1, DAMPING, 0.9, frequency=1)
    all_of, last = net.trainable_params(), net.second.trainable_params()
    freeze = FreezeOpt(optimizer, [all_of, last], [0, 1])
    step = BoostTrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), freeze)
    step.set_train()
    first, second = nets.batches(2)
    step(*map(Tensor, first))
    before = nets.weights(step)
    step(*map(Tensor, second))
    after = nets.weights(step)
    for name in ("first.weight", "moments.first.weight", "first.bias"):
        np.testing.assert_array_equal(before[name], after[name])
    assert not np.array_equal(before["second.weight"], after["second.weight"])
    assert not np.array_equal(
        before["boost.thor.first.weight.a"], after["boost.thor.first.weight.a"]
    )


@pytest.mark.parametrize("alone", [0, 2])
def test_inside_another_graph_the_refresh_is_chosen_there(mode, alone):
    """Also where the step has run by itself, at last without a refresh."""
    steps = pairs(4)
    step, optimizer = train_layer(steps[:alone], frequency=2)
    outer = nets.Outer(step)
    outer.set_train()
    for x, target in steps[alone:]:
        outer(Tensor(x), Tensor(target))
    np.testing.assert_allclose(weight_of(step), reference(steps, frequency=2), **TOLERANCE)
    assert optimizer.observations()["thor.refreshes"] == 2


def test_a_factor_that_is_not_positive_definite_raises_the_damping(mode):
    """Averaged with a broken old factor; the damping is raised, told once, and nothing is NaN."""
    steps = pairs(3)
    step, optimizer = train_layer(steps[:1], frequency=1, moving_average=0.5, damping=1e-6)
    ms.ops.assign(optimizer.factors[0], Tensor(np.diag([-9.0, 1.0, 1.0]).astype(np.float32)))
    with pytest.warns(BoostWarning, match="weight: its damping was raised: a factor was not pos"):
        step(*map(Tensor, steps[1]))
    assert np.isfinite(weight_of(step)).all()
    inverse = optimizer.curvature.layers[0].a_inverse.asnumpy()
    assert np.linalg.eigvalsh(np.float64(inverse)).min() > 0
    assert optimizer.observations()["thor.dampings_raised"] == 1


def test_a_factor_that_is_not_finite_keeps_the_old_inverse(mode):
    steps = pairs(2)
    step, optimizer = train_layer(steps[:1], frequency=1)
    before = nets.weights(optimizer.curvature)
    x, target = steps[1][0] * 1e25, steps[1][1] * 1e-20  # squares of x leave float32
    with pytest.warns(BoostWarning, match="keeps its last inverse: a factor was not finite"):
        step(Tensor(x), Tensor(target))
    for name, value in nets.weights(optimizer.curvature).items():
        if "inverse" in name or name.endswith((".a", ".g")):
            np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert np.isfinite(weight_of(step)).all()
    assert optimizer.observations()["thor.change.layer.weight"] == 0.0


# ---- Models ----


def lenet_like():
    return nets.fill(
        nn.SequentialCell(
            nn.Conv2d(1, 2, 3),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dense(72, nets.CLASSES),
        )
    )


class PastTheLayer(nn.Cell):
    """Reads the weight of a layer that it does not call; one that it calls gets a named input."""

    def __init__(self):
        super().__init__()
        self.words, self.passed, self.last = nn.Embedding(5, 4), nn.Dense(4, 4), nn.Dense(4, 2)

    def construct(self, ids):
        hidden = ops.matmul(self.words(ids=ids), self.passed.weight.T)
        return self.last(hidden).mean()


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_a_layer_passed_by_keeps_its_plain_gradient_and_is_named(mode, average):
    net = nets.fill(PastTheLayer())
    ids = Tensor(np.array([0, 1, 2]), ms.int32)
    weights = net.trainable_params()
    gradients = ms.value_and_grad(net, None, weights)(ids)[1]
    (gradient,) = [
        one.asnumpy() for one, weight in zip(gradients, weights) if weight.name == "passed.weight"
    ]
    before = net.passed.weight.asnumpy().copy()
    optimizer = THOR(net, 0.5, DAMPING, 0.0, frequency=1, moving_average=average)
    step = BoostTrainOneStepCell(net, optimizer).set_train()
    with pytest.warns(BoostWarning, match=r"passed\.weight: it keeps .* plain gradient"):
        step(ids)
    # The difference of weights of size 1 holds their rounding, 6e-8.
    np.testing.assert_allclose(
        before - net.passed.weight.asnumpy(), 0.5 * gradient, rtol=1e-5, atol=1e-7
    )
    observed = optimizer.observations()
    assert (observed["thor.inversions"], observed["thor.layers_passed_by"]) == (2, 1)
    assert observed["thor.inverses_kept"] == 0
    rows = {row.algorithm: row.status for row in step.report()}
    assert (rows["passed.weight"], rows["last.weight"]) == ("plain", "preconditioned")


def test_the_articles_four_lines(mode, tmp_path):
    net = lenet_like()
    opt = THOR(net, 0.05, Tensor([0.1, 0.05]), 0.9, 1e-4, 1.0, nets.BATCH, split_indices=[0, 1])
    model = ms.Model(net, loss_fn=nets.loss_fn(), optimizer=opt, metrics={"acc"})
    model = ConvertModelUtils().convert_to_thor_model(
        model=model,
        network=net,
        loss_fn=nets.loss_fn(),
        optimizer=opt,
        metrics={"acc"},
        loss_scale_manager=ms.DynamicLossScaleManager(2**4, 2, 100),
        amp_level="O2",
        keep_batchnorm_fp32=False,
        frequency=2,
    )
    data = nets.dataset(4, image=True)
    model.train(2, data, callbacks=[ms.train.LossMonitor(4)], dataset_sink_mode=False)
    assert opt.observations()["thor.refreshes"] == 4
    assert [type(cell).__name__ for cell in net] == [
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "Flatten",
        "Dense",
    ]
    # A checkpoint of the converted network loads into the original one, and the other way round.
    path = str(tmp_path / "net.ckpt")
    ms.save_checkpoint(net, path)
    fresh = lenet_like()
    assert ms.load_param_into_net(fresh, ms.load_checkpoint(path)) == ([], [])
    ms.save_checkpoint(fresh, path)
    assert ms.load_param_into_net(net, ms.load_checkpoint(path)) == ([], [])
    nets.assert_same_weights(net, fresh)


def test_outputs_are_those_of_the_plain_network(mode):
    net, plain = lenet_like(), lenet_like()
    THOR(net, 0.1, DAMPING, 0.9).taps.attach()
    x = Tensor(nets.batches(1, image=True)[0][0])
    for training in (True, False):
        np.testing.assert_array_equal(
            net.set_train(training)(x).asnumpy(), plain.set_train(training)(x).asnumpy()
        )


@pytest.mark.parametrize(("variant", "tapped"), [(ORDINARY, False), (CAPTURING, True)])
def test_only_a_capturing_step_has_taps_to_compile(mode, variant, tapped):
    step, _ = train_layer(pairs(1))
    layer = step.network.layer
    with step.choice_part.chooser.running(variant):
        assert (layer.construct.__func__ is not nn.Dense.construct) == tapped


def test_a_section_is_all_it_takes(graph_mode):
    net = nets.MLP()
    config = {
        "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
        "thor": {"frequency": 2},
    }
    optimizer = nn.Momentum(net.trainable_params(), [0.1, 0.1, 0.05], 0.8, weight_decay=0.01)
    model = model_of(net, config, optimizer, BoostModel)
    thor = model.train_network.optimizer
    assert isinstance(thor, THOR)
    assert float(thor.momentum.asnumpy()) == pytest.approx(0.8)
    for x, y in nets.batches(2):
        model.train_network(Tensor(x), Tensor(y))
    assert float(np.reshape(thor.get_lr().asnumpy(), ())) == pytest.approx(0.05)
    report = model.train_network.report()
    assert report["thor"].status == "applied"
    assert report["thor"].asked_by == "section thor"
    assert report["thor"].reason.startswith("replaces Momentum, with its parameters")
    held = sum(one.nbytes for one in thor.curvature.get_parameters())
    assert report["thor"].counts["bytes"] == held
    assert report["first.weight"].status == "preconditioned"


class Decay(nn.learning_rate_schedule.LearningRateSchedule):
    """The weight decay of each step."""

    def construct(self, step):
        return 0.1 / (1 + step)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_weight_decay_that_changes_is_taken_over(mode, grouped):
    """Against one that THOR is given itself."""

    def trained(settings, make):
        net = nets.MLP()
        weights = net.trainable_params()
        groups = [{"params": weights[:2], "weight_decay": Decay()}, {"params": weights[2:]}]
        step = make_train_step(
            *(net, nets.loss_fn(), make(net, groups if grouped else weights)),
            level="O1",
            config=settings,
        )
        for x, y in nets.batches(3):
            step(Tensor(x), Tensor(y))
        return nets.weights(net)

    decay = 0.0 if grouped else Decay()
    given = trained(
        OFF,
        lambda net, params: THOR(
            *(net, 0.1, 0.03, 0.9), params=params, weight_decay=decay, frequency=1
        ),
    )
    taken = trained(
        {**contract.switched(thor=True), "thor": {"damping": 0.03, "frequency": 1}},
        lambda net, params: nn.Momentum(params, 0.1, 0.9, weight_decay=decay),
    )
    for name, value in given.items():
        np.testing.assert_array_equal(taken[name], value)


def test_layers_that_mixed_precision_makes_anew_are_preconditioned(mode):
    """O1 computes in float16 with layers of other classes, over the same Parameters.

    What it is compared with runs in PYNATIVE_MODE, where nothing is compiled.
    """
    ends = {}
    for amp_level, thor in (("O1", True), ("O0", True), ("O1", False)):
        net = nets.MLP()
        config = {**contract.switched(thor=thor), "thor": {"frequency": 2}} if thor else OFF
        step = model_of(net, config, amp_level=amp_level).train_network
        for x, y in nets.batches(4):
            step(Tensor(x), Tensor(y))
        ends[amp_level, thor] = net.first.weight.asnumpy()
        ms.set_context(mode=ms.PYNATIVE_MODE)
    # A rounding of float16 near 1 (seen: 1e-4); momentum ends 0.12 away.
    np.testing.assert_allclose(ends["O1", True], ends["O0", True], atol=2**-11)
    assert np.abs(ends["O1", True] - ends["O1", False]).max() > 5e-2


class Penalty(nn.LossBase):
    """A loss that holds a weight of the network, as layers do."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def construct(self, logits, labels):
        return ops.cross_entropy(logits, labels) + 0.1 * (self.weight**2).sum()


@pytest.mark.parametrize("amp_level", ["O0", "O1"])
def test_a_loss_may_hold_a_weight_of_a_layer(mode, amp_level):
    net = nets.MLP()
    config = {**contract.switched(thor=True), "thor": {"frequency": 1}}
    loss_fn = Penalty(net.first.weight)
    step = model_of(net, config, loss_fn=loss_fn, amp_level=amp_level).train_network
    for x, y in nets.batches(2):
        step(Tensor(x), Tensor(y))
    assert step.observations()["thor.inversions"] == 4  # two layers, two refreshes


def test_groups_of_parameters_keep_their_settings(graph_mode):
    net = nets.MLP()
    groups = [
        {"params": [net.second.weight], "lr": 0.5, "weight_decay": 0.1},
        {"params": [net.first.weight]},
    ]
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False, "thor": True}}
    optimizer = nn.Momentum(groups, 0.25, 0.0)
    model = model_of(net, config, optimizer, BoostModel)
    thor = model.train_network.optimizer
    rates = {one.name: float(rate.asnumpy()) for one, rate in zip(thor.parameters, thor.get_lr())}
    assert rates == {"first.weight": 0.25, "second.weight": 0.5}
    model.train_network(*map(Tensor, nets.batches(1)[0]))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"damping": -1.0}, ValueError, "THOR.damping must be finite and >= 0 in every step, got"),
        ({"damping": "x"}, TypeError, "THOR.damping must be a number, a list of numbers, a Tens"),
        ({"momentum": -0.1}, ValueError, r"THOR.momentum must be a number in \[0, inf\), got"),
        ({"frequency": 0}, ValueError, "THOR.frequency must be an int from 1 to 1073741824, got 0"),
        ({"trace_rule": (0, 1)}, ValueError, "THOR.trace_rule must be None or 2 numbers"),
        ({"split_indices": [2, 1]}, ValueError, "THOR.split_indices must be None or an int fr"),
        ({"net": 3}, TypeError, "THOR: net must be a Cell, got 3"),
    ],
)
def test_what_is_wrong_is_told(settings, error, message):
    good = {"net": nets.MLP(), "learning_rate": 0.1, "damping": 0.1, "momentum": 0.9}
    with pytest.raises(error, match=message):
        THOR(**{**good, **settings})


def test_a_step_of_its_own_is_refused():
    class Own(BoostTrainOneStepCell):
        def construct(self, *inputs):
            return self.network(*inputs)

    class Foreign(nn.TrainOneStepCell):
        def construct(self, *inputs):
            return self.network(*inputs)

    net = nets.MLP()
    optimizer = THOR(net, 0.1, 0.1, 0.9)
    with pytest.raises(ValueError, match="Own overrides construct, so THOR cannot see"):
        Own(Weighted(net), optimizer)
    every = net.trainable_params()
    with pytest.raises(ValueError, match="Own overrides construct, so THOR cannot see"):
        Own(Weighted(net), FreezeOpt(THOR(net, 0.1, 0.1, 0.9), [every, every[2:]], [0, 1]))
    foreign = Foreign(Weighted(net), optimizer)
    with pytest.raises(ValueError, match="network is a Foreign that overrides construct"):
        ConvertModelUtils().convert_to_thor_model(ms.Model(foreign), foreign)


class Own(Algorithm):
    switch = "own"


def test_level_and_settings_of_a_converted_model_stay_in_force():
    net = nets.MLP()
    thor = THOR(net, 0.1, 0.1, 0.9)
    own = Own()
    settings = {**OFF, "gradients": {"clip_norm": 1.0}}
    model = model_of(net, settings, thor, BoostModel, algorithms=[own])
    converted = ConvertModelUtils().convert_to_thor_model(
        model, net, nets.loss_fn(), thor, frequency=2
    )
    assert list(converted.train_network.auto_boost.own) == [own]
    assert converted.train_network.report()["gradient clipping"].status == "applied"
    assert converted.train_network.clip_norm == 1.0
    plain = ConvertModelUtils().convert_to_thor_model(
        ms.Model(net, nets.loss_fn(), thor), net, nets.loss_fn(), thor
    )
    assert plain.train_network.clip_norm is None


def test_a_step_cell_that_brings_no_factors_is_told(mode):
    net = nets.MLP()
    foreign = nn.TrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), THOR(net, 0.1, 0.1, 0.9))
    with pytest.warns(BoostWarning, match="THOR: the training step computes no factors, so this"):
        foreign(*map(Tensor, nets.batches(1)[0]))


def test_a_json_file_sets_every_argument(tmp_path):
    settings = {
        "damping": [0.2, 0.1],
        "momentum": 0.5,
        "split_indices": [0],
        "frequency": 5,
        "trace_rule": [0.1, 0.01],
        "moving_average": 0.5,
        "kl_clip": 0.01,
    }
    path = tmp_path / "boost.json"
    path.write_text(
        json.dumps(
            {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}, "thor": settings}
        )
    )
    net = nets.MLP()
    boost = AutoBoost("O1", str(path))
    _, optimizer = boost.network_auto_process_train(net, nets.momentum(net.trainable_params()))
    thor = thor_of(optimizer)
    np.testing.assert_array_equal(thor.damping.asnumpy(), np.float32([0.2, 0.1]))
    assert float(thor.momentum.asnumpy()) == 0.5
    assert (thor.split_indices, thor.frequency, thor.kl_clip) == ((0,), 5, 0.01)
    curvature = thor.curvature
    assert (curvature.trace_rule, curvature.pi_damping) == ((0.1, 0.01), False)
    assert curvature.moving_average == 0.5


def test_thor_does_not_take_the_place_of_a_wrapper():
    net = nets.MLP()
    config = {"boost": {"mode": "manual", "less_bn": False}, "thor": {"frequency": 2}}
    with pytest.raises(ValueError, match="thor replaces the optimizer, but FreezeOpt"):
        model_of(net, config, FreezeOpt(nets.momentum(net.trainable_params())), BoostModel)


def test_a_momentum_that_is_not_taken_over_is_said():
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    for nesterov in (False, True):
        net = nets.MLP()
        optimizer = nn.SGD(net.trainable_params(), 0.1, momentum=0.9, nesterov=True)
        config = {"boost": off, "thor": {"use_nesterov": nesterov}}
        report = model_of(net, config, optimizer, BoostModel).train_network.report()
        assert ("Nesterov's momentum is off" in report["thor"].reason) is not nesterov


def test_thor_takes_no_rate_over_that_the_optimizer_computes():
    net = nets.MLP()
    config = {"boost": {"mode": "manual", "less_bn": False}, "thor": {"frequency": 2}}
    with pytest.raises(ValueError, match="AdaFactor computes its own"):
        model_of(net, config, nn.AdaFactor(net.trainable_params()), BoostModel)


class Alone(nn.Cell):
    """One Dense layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(nets.FEATURES, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.layer(x)


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
@pytest.mark.parametrize("grouped", [False, True])
def test_thor_decays_as_adafactor(mode, loss_scale, grouped):
    """As it does with another optimizer's numbers; MindSpore's AdaFactor holds its own anew."""
    net, other = Alone(), Alone()
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    config = {"boost": off, "thor": {"frequency": 1, "momentum": 0.9}}  # one variant to compile
    steps = []
    for each, kind in ((net, nn.AdaFactor), (other, nn.SGD)):
        params = each.trainable_params()
        params = [{"params": params[:1]}, {"params": params[1:]}] if grouped else params
        own = {"relative_step": False} if kind is nn.AdaFactor else {}
        decays = {"weight_decay": 0.1, "loss_scale": loss_scale}
        optimizer = kind(params, learning_rate=0.05, **decays, **own)
        manager = ms.FixedLossScaleManager(loss_scale, drop_overflow_update=False)
        model = model_of(each, config, optimizer, BoostModel, loss_scale_manager=manager)
        steps.append(model.train_network)
    for batch in nets.batches(3):
        losses = [step(*map(Tensor, batch)).asnumpy() for step in steps]
        np.testing.assert_array_equal(*losses)  # the same THOR twice
    nets.assert_same(nets.weights(net), nets.weights(other))


def test_shapes_that_are_left_open_are_refused_in_a_graph(graph_mode):
    net = nets.MLP()
    step = model_of(net, {"boost": {"mode": "disable_all"}}, THOR(net, 0.1, 0.1, 0.9)).train_network
    x, y = nets.batches(1)[0]
    step.set_inputs(Tensor(shape=[None, nets.FEATURES], dtype=ms.float32), Tensor(y))
    with pytest.raises(ValueError, match=r"set_inputs leaves it open \(\(-1, 3\)\)"):
        step(Tensor(x), Tensor(y))


class JittedMLP(nets.MLP):
    """The network as one function of ``ms.jit``."""

    @ms.jit
    def construct(self, x):
        return self.second(self.relu(self.first(x)))


def test_a_compiled_network_that_goes_on_between_two_refreshes_is_refused():
    """MindSpore would leave the gradients of the taps, not asked for at first, out for ever."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}, "thor": {}}

    first, second = (model_of(JittedMLP(), config).train_network for _ in range(2))
    batches = [tuple(map(Tensor, one)) for one in nets.batches(3)]
    for batch in batches:  # begins with a refresh
        first(*batch)
    state = {one.name: one for one in first.get_parameters()}
    assert ms.load_param_into_net(second, state) == ([], [])
    with pytest.raises(ValueError, match=r"the first step that .* refreshes no factors of THOR"):
        second(*batches[0])


@pytest.mark.parametrize("wrap", [lambda step: step, nets.Outer], ids=["step", "within a graph"])
def test_a_refresh_that_a_window_closed_early_has_missed_comes_next(mode, wrap):
    """Windows of four that a flush closes after three, as at the end of each epoch."""
    steps = pairs(6)
    config = {
        "boost": {"grad_accumulation": True, "grad_freeze": False},
        "grad_accumulation": {"grad_accumulation_step": 4},
    }
    made = []

    def make(net, own):
        made.append(boosted(net, own, config))
        return wrap(made[0])

    outer, optimizer = train_layer(steps[:3], step=make, frequency=1, momentum=0.0)
    (step,) = made
    weight = nets.fill(nn.Dense(3, 2, has_bias=False)).weight.asnumpy().astype(np.float64)
    for has_factors, window in enumerate((steps[:3], steps[3:])):
        gradient = sum(np.float64(t).T @ x for x, t in window) / 8 / 3
        if not has_factors:
            weight -= 0.1 * gradient
        else:
            for x, t in window:
                outer(Tensor(x), Tensor(t))
            a, g = oracle.second_moment(window[0][0]), oracle.second_moment(window[0][1])
            weight -= 0.1 * oracle.kronecker_solve(gradient, a, g, np.sqrt(DAMPING))
        assert step.flush_accumulation()
        np.testing.assert_allclose(weight_of(step), weight, **TOLERANCE)
    assert optimizer.observations()["thor.refreshes"] == 1
