"""An algorithm of a user's own works with the others, without a change in any other file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import (
    Algorithm,
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
    FreezeOpt,
    Update,
    UpdateAround,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import lookahead

RATE, MOMENTUM, K, ALPHA = 0.1, 0.9, 2, 0.5
WINDOW, STEPS, OVERFLOW_AT = 2, 12, 5
SCHEDULE = [0, 1, 0, 0, 1]
OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False}


class Linear(nn.Cell):
    """Two layers side by side; the loss is linear in their weights, so gradients are the data."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(3, 2, has_bias=False)
        self.second = nn.Dense(3, 2, has_bias=False)
        nets.fill(self)

    def construct(self, x, one, two):
        return (self.first(x) * one + self.second(x) * two).sum() / x.shape[0]


def batches():
    random = np.random.default_rng(0)
    shapes = ((4, 3), (4, 2), (4, 2))
    return [[random.normal(size=one).astype(np.float32) for one in shapes] for _ in range(STEPS)]


def reference(features, times=1):
    """Return both weights by float64, from the formulas of momentum and Lookahead."""
    net = Linear()
    weights = [times * np.float64(one.asnumpy()) for one in net.trainable_params()]
    moments, slow = [0.0, 0.0], [one.copy() for one in weights]
    window, updates = [], 0
    for number, (x, one, two) in enumerate(batches()):
        if "scale" in features and number == OVERFLOW_AT:
            continue
        window.append([np.float64(target).T @ x / len(x) for target in (one, two)])
        if len(window) < (WINDOW if "accumulation" in features else 1):
            continue
        gradients = [sum(one) / len(window) for one in zip(*window)]
        window = []
        frozen = SCHEDULE[updates % len(SCHEDULE)] if "freezing" in features else 0
        for place in range(frozen, 2):
            moments[place] = MOMENTUM * moments[place] + gradients[place]
            weights[place] = weights[place] - RATE * moments[place]
        updates += 1
        if updates % K == 0:
            slow = [old + ALPHA * (new - old) for old, new in zip(slow, weights)]
            weights = [one.copy() for one in slow]
    return weights, updates


def build(features, algorithm=None, net=None):
    net = net or Linear()
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": "freezing" in features}}
    arguments = {}
    if "accumulation" in features:
        config["boost"]["grad_accumulation"] = True
        config["grad_accumulation"] = {"grad_accumulation_step": WINDOW}
    optimizer = nn.Momentum(net.trainable_params(), RATE, MOMENTUM)
    if "freezing" in features:
        every = net.trainable_params()
        optimizer = FreezeOpt(optimizer, [every, every[1:]], SCHEDULE)
    if "scale" in features:
        arguments["loss_scale_manager"] = ms.DynamicLossScaleManager(64, 2, 3)
    return BoostModel(
        net,
        optimizer=optimizer,
        boost_level="O1",
        boost_config_dict=config,
        algorithms=[algorithm or lookahead.Lookahead(K, ALPHA)],
        **arguments,
    ).train_network


def run(step, features, steps):
    for number, batch in enumerate(batches()):
        if number in steps:
            if "scale" in features and number == OVERFLOW_AT:
                batch[1] = batch[1] * np.float32(np.inf)
            step(*map(Tensor, batch))
    return step


FEATURES = ["", "accumulation", "freezing", "scale", "accumulation freezing scale"]


@pytest.mark.parametrize("features", FEATURES)
def test_it_follows_its_rule_together_with_the_others(mode, features):
    step = run(build(features), features, range(STEPS))
    expected, updates = reference(features)
    found = nets.weights(step)
    assert found["boost.lookahead.updates"] == updates
    for name, value in zip(("first.weight", "second.weight"), expected):
        # A dozen float32 updates of numbers around 1.
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert step.report()["lookahead"].status == "applied"


def test_it_begins_at_weights_that_are_loaded_after_it_is_made(mode):
    step = build("")
    for one in step.weights:
        one.set_data(one * 3)
    found = nets.weights(run(step, "", range(STEPS)))
    for name, value in zip(("first.weight", "second.weight"), reference("", 3)[0]):
        # A dozen float32 updates of numbers around 1.
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_it_resumes_bit_for_bit(mode, tmp_path):
    features = FEATURES[-1]
    whole = run(build(features), features, range(STEPS))
    first = run(build(features), features, range(5))
    path = str(tmp_path / "run.ckpt")
    ms.save_checkpoint(first, path)
    second = build(features)
    ms.load_param_into_net(second, ms.load_checkpoint(path), strict_load=True)
    nets.assert_same_weights(run(second, features, range(5, STEPS)), whole)


def test_it_is_on_at_level_o0_and_for_a_step_of_ones_own(mode):
    net = Linear()
    boost = AutoBoost(algorithms=[lookahead.Lookahead(K, ALPHA)])
    with boost.building():
        step = BoostTrainOneStepCell(net, nn.Momentum(net.trainable_params(), RATE, MOMENTUM))
    found = nets.weights(run(step, "", range(STEPS)))
    for name, value in zip(("first.weight", "second.weight"), reference("")[0]):
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class Elsewhere(Algorithm):
    switch = "elsewhere"

    def unavailable(self, config):
        return "no such device here"

    def build(self, build):
        raise AssertionError("it must not be built")

    def join(self, step):
        assert not self.is_on(step)


@pytest.mark.parametrize("model", [True, False])
def test_one_that_is_unavailable_is_left_out_with_the_reason(model):
    net = Linear()
    optimizer = nn.SGD(net.trainable_params(), RATE)
    if model:
        step = BoostModel(net, optimizer=optimizer, algorithms=[Elsewhere()]).train_network
    else:
        with AutoBoost(algorithms=[Elsewhere()]).building():
            step = BoostTrainOneStepCell(net, optimizer)
    row = step.report()["elsewhere"]
    assert (row.status, row.reason) == ("skipped", "no such device here")


class Counting(Update):
    """Counts updates, with a constructor of its own."""

    def __init__(self, optimizer, start):
        super().__init__(optimizer)
        self.count = ms.Parameter(Tensor(start, ms.int32), name="boost.counting.count")

    def construct(self, loss, gradients, *inputs):
        loss = super().construct(loss, gradients, *inputs)
        return ms.ops.depend(loss, ms.ops.assign_add(self.count, 1))


class CountingAlgorithm(Algorithm):
    switch = "counting"

    def join(self, step):
        step.update_part = Counting(step.optimizer, 7)


def test_variants_of_the_step_share_the_state_of_a_part(mode):
    net = Linear()
    every = net.trainable_params()
    optimizer = FreezeOpt(nn.SGD(every, RATE), [every, every[1:]], [0, 1])
    step = BoostModel(
        net,
        optimizer=optimizer,
        boost_level="O1",
        algorithms=[CountingAlgorithm()],
        boost_config_dict={"boost": {"mode": "manual", "less_bn": False}},
    ).train_network
    run(step, "", range(3))
    assert nets.weights(step)["boost.counting.count"] == 10
    names = [one.name for one in step.get_parameters()]
    assert len(names) == len(set(names))


class Seeing(UpdateAround):
    """Runs Python of its own, and asks for the batch."""

    takes_inputs = True
    seen = ()

    def construct(self, loss, gradients, *inputs):
        Seeing.seen += ((float(loss.asnumpy()), len(inputs)),)
        return super().construct(loss, gradients, *inputs)


class SeeingAlgorithm(Algorithm):
    switch = "seeing"

    def join(self, step):
        step.update_part = Seeing(step.update_part)


@pytest.mark.parametrize("features", ["", "scale", "accumulation scale"])
def test_a_part_is_not_compiled_in_pynative_mode_and_gets_the_batch(features):
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        Seeing.seen = ()
        run(build(features, SeeingAlgorithm()), features, range(4))
    finally:
        ms.set_context(mode=before)
    assert [count for _, count in Seeing.seen] == [3] * (2 if "accumulation" in features else 4)


class SignUpdate(UpdateAround):
    def construct(self, loss, gradients, *inputs):
        return self.inner(loss, tuple([ops.sign(one) for one in gradients]), *inputs)


class Signs(Algorithm):
    switch = "signs"

    def join(self, step):
        step.update_part = SignUpdate(step.update_part)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_part_of_the_users_sees_gradients_without_the_scale(mode, scale):
    """The optimizer, which divides by its loss_scale, gets them with it."""
    net = Linear()
    optimizer = nn.SGD(net.trainable_params(), 0.5, loss_scale=scale)
    boost = AutoBoost("O1", {"boost": OFF}, algorithms=[Signs()])
    step = BoostTrainOneStepCell(*boost.network_auto_process_train(net, optimizer), scale)
    before = nets.weights(net)
    step(*map(Tensor, batches()[0]))
    for name, value in nets.weights(net).items():
        # 0.5, to the rounding of weights of up to 1.
        np.testing.assert_allclose(np.abs(value - before[name]), 0.5, rtol=0, atol=2e-7)


class DividesItself(SignUpdate):
    divides_sens = True

    def construct(self, loss, gradients, *inputs):
        bounded = tuple([ops.clamp(one / 1024.0, -0.25, 0.25) for one in gradients])
        return self.inner(loss, bounded, *inputs)


class Bounds(Algorithm):
    switch = "bounds"

    def join(self, step):
        step.update_part = DividesItself(step.update_part)


def test_a_part_that_divides_the_scale_itself_sees_it(mode):
    ways = []
    for scale in (1.0, 1024.0):
        net = Linear()
        boost = AutoBoost("O1", {"boost": OFF}, algorithms=[Bounds()] if scale > 1 else ())
        parts = boost.network_auto_process_train(net, nn.SGD(net.trainable_params(), 1.0))
        before = nets.weights(net)
        BoostTrainOneStepCell(*parts, scale)(*map(Tensor, batches()[0]))
        ways.append({name: one - before[name] for name, one in nets.weights(net).items()})
    for name, way in ways[0].items():
        # Differences of weights of up to 1, each rounded to 6e-8.
        np.testing.assert_allclose(ways[1][name], np.clip(way, -0.25, 0.25), rtol=0, atol=2e-7)


class Again(UpdateAround):
    takes_inputs = True


class SecondRun(Algorithm):
    switch = "second_run"

    def join(self, step):
        step.update_part = Again(step.update_part)


def test_a_second_run_of_the_network_beside_layers_in_evaluation_mode_is_refused(pynative_mode):
    for eval_frozen in (False, True):
        net = nets.Deep()
        section = {"param_groups": 2, "total_steps": 4, "eval_frozen": eval_frozen}
        settings = {"boost": {**OFF, "grad_freeze": True}, "grad_freeze": section}
        boost = AutoBoost("O1", settings, algorithms=[SecondRun()])
        parts = nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
        step = BoostTrainOneStepCell(*boost.network_auto_process_train(*parts))
        batch = [Tensor(one) for one in nets.batches(1)[0]]
        if eval_frozen:
            with pytest.raises(ValueError, match=r"grad_freeze\.eval_frozen must be false where"):
                step.set_train()(*batch)
        else:
            step.set_train()(*batch)


class Nameless(Algorithm):
    pass


class Taken(Algorithm):
    switch = "thor"


@pytest.mark.parametrize(
    ("algorithms", "error", "message"),
    [
        (["lookahead"], TypeError, "must contain Algorithm objects, got 'lookahead'"),
        ([Nameless()], ValueError, "the switch '' of Nameless is empty"),
        ([Taken()], ValueError, "the switch 'thor' of Taken is taken"),
        ([lookahead.Lookahead()] * 2, ValueError, "the switch 'lookahead' of Lookahead is taken"),
    ],
)
def test_what_is_no_algorithm_is_refused(algorithms, error, message):
    with pytest.raises(error, match=message):
        AutoBoost(algorithms=algorithms)


class Halved(nn.Cell):
    """A batch part: half of the inputs' size."""

    def __init__(self):
        super().__init__(auto_prefix=False)

    def construct(self, x, *targets):
        return (x * 0.5, *targets)


class HalvedInputs(Algorithm):
    switch = "halved"

    def join(self, step):
        step.batch_part = Halved()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_part_can_change_the_batch(mode, scaled):
    def train(batch, **arguments):
        net = Linear()
        optimizer = nn.SGD(net.trainable_params(), RATE)
        if scaled:
            arguments["loss_scale_manager"] = ms.DynamicLossScaleManager(64, 2, 3)
        step = BoostModel(net, optimizer=optimizer, boost_level="O1", **arguments).train_network
        step(*map(Tensor, batch))
        return nets.weights(net)

    off = {"boost": {"mode": "disable_all"}}
    (x, one, two), *_ = batches()
    found = train([x, one, two], algorithms=[HalvedInputs()], boost_config_dict=off)
    expected = train([x * np.float32(0.5), one, two], boost_config_dict=off)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class Cropped(nn.Cell):
    def construct(self, x, *rest):
        return (x[:, :, :6, :6], *rest)


class CroppedImages(Algorithm):
    switch = "cropped"

    def join(self, step):
        step.batch_part = Cropped()


class OfImages(nn.Cell):
    """Notes the height that it sees."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(1.0), name="weight")
        self.__dict__["heights"] = []

    def construct(self, x):
        self.heights.append(x.shape[2])
        return x.mean() * self.weight


def test_a_part_changes_the_batch_before_it_is_made_smaller(pynative_mode):
    net, found = OfImages(), []
    optimizer = nn.SGD(net.trainable_params(), RATE)
    config = {"progressive_resizing": {"phases": [[0.5, 0.5]], "total_steps": 2}}
    config["boost"] = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    arguments = {"algorithms": [CroppedImages()], "boost_config_dict": config}
    step = BoostModel(net, optimizer=optimizer, boost_level="O1", **arguments).train_network
    for _ in range(2):
        step(Tensor(np.ones((2, 1, 8, 8), np.float32)))
        found.append(net.heights[-1])
    assert found == [3, 6]


class LastInputs(UpdateAround):
    """Keeps the sum of the batch that it is given."""

    takes_inputs = True

    def __init__(self, inner):
        super().__init__(inner)
        self.total = ms.Parameter(Tensor(0.0), name="boost.halved.total", requires_grad=False)

    def construct(self, loss, gradients, *inputs):
        loss = ms.ops.depend(loss, ms.ops.assign(self.total, inputs[0].sum()))
        return super().construct(loss, gradients, *inputs)


class HalvedAndKept(HalvedInputs):
    def join(self, step):
        super().join(step)
        step.update_part = LastInputs(step.update_part)


class OfOneInput(Linear):
    """Has no targets."""

    def construct(self, x):
        return super().construct(x, 1.0, 1.0)


@pytest.mark.parametrize("net", [Linear, OfOneInput])
def test_a_flush_sees_the_changed_batch_too(mode, net):
    step = build("accumulation", HalvedAndKept(), net())
    (x, *targets), *_ = batches()
    step(Tensor(x), *map(Tensor, targets if net is Linear else ()))
    assert step.flush_accumulation()
    found = float(step.update_part.total.asnumpy())
    # A float32 sum of twelve numbers around 1.
    assert found == pytest.approx(0.5 * np.float64(x).sum(), rel=1e-5)


def test_a_model_of_the_users_own_may_have_algorithms_that_are_none():
    class Own(ms.Model):
        def __init__(self, *args, **kwargs):
            self.algorithms = ["a", "b"]
            super().__init__(*args, **kwargs)

    net = Linear()
    Own(net, optimizer=nn.SGD(net.trainable_params(), RATE), boost_level="O0")


class TwoOptimizers(ms.Model):
    """A Model of the user's own, as for two networks that train against each other."""

    def _build_train_network(self):
        return self._network


def test_a_model_of_the_users_own_may_have_several_optimizers():
    net = Linear()
    both = [nn.SGD(net.trainable_params(), RATE) for _ in range(2)]
    assert TwoOptimizers(net, optimizer=both).train_network is net
    with pytest.raises(TypeError, match="boost_level O1 takes one optimizer, got"):
        TwoOptimizers(net, optimizer=both, boost_level="O1")


def test_a_window_that_is_switched_off_does_not_shorten_a_training():
    net = Linear()
    every = net.trainable_params()
    optimizer = FreezeOpt(nn.SGD(every, RATE), [every, every[1:]], [0] * 5 + [1] * 5)
    off = {"mode": "manual", "less_bn": False, "grad_accumulation": False}
    config = {"boost": off, "grad_accumulation": {"grad_accumulation_step": 8}}
    model = BoostModel(net, optimizer=optimizer, boost_level="O1", boost_config_dict=config)
    model.train_network.expect_training(1, 10)  # a warning would be an error here


def test_the_example_trains(graph_mode, capsys):
    lookahead.main()
    printed = capsys.readouterr().out
    assert re.search(r"^lookahead +algorithms +applied", printed, re.MULTILINE)
    # Labels that a line through the inputs decides: plain momentum reaches 0.98 as well.
    assert float(printed.rpartition("accuracy ")[2]) > 0.9
