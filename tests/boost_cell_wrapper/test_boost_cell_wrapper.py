"""The plain step cell: MindSpore's own step, bit for bit, with the loss returned."""

from __future__ import annotations

import re

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    BoostWarning,
    NoEffectWarning,
    make_train_step,
)
from mindspore_boost_ext._compat import differentiated_functions
from mindspore_boost_ext.boost_cell_wrapper import tensor_grad_scale


def train_cell(cell_class, optimizer, steps=20, seed=0, sens=None, **optimizer_settings):
    net = nets.MLP(seed)
    cell = cell_class(
        nn.WithLossCell(net, nets.loss_fn()),
        optimizer(net.trainable_params(), **optimizer_settings),
        sens,
    )
    cell.set_train()
    losses = [cell(Tensor(x), Tensor(y)).asnumpy() for x, y in nets.batches(steps)]
    return cell, losses


@pytest.mark.parametrize("name", nets.OPTIMIZERS)
def test_every_optimizer_gives_the_weights_of_the_plain_step(mode, name):
    plain, plain_losses = train_cell(nn.TrainOneStepCell, nets.OPTIMIZERS[name])
    boosted, losses = train_cell(BoostTrainOneStepCell, nets.OPTIMIZERS[name])
    nets.assert_same_weights(boosted, plain)  # moments and global step are among these
    np.testing.assert_array_equal(losses, plain_losses)
    assert losses[0] != losses[-1]


def test_statistics_and_random_numbers_are_those_of_the_plain_step(mode):
    def run(cell_class):
        ms.set_seed(5)
        net = nets.ConvNet()
        net.relu = nn.SequentialCell(nn.ReLU(), nn.Dropout(p=0.5))
        nets.fill(net)
        cell = cell_class(
            nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
        ).set_train()
        for x, y in nets.batches(5, image=True):
            cell(Tensor(x), Tensor(y))
        return cell

    nets.assert_same_weights(run(BoostTrainOneStepCell), run(nn.TrainOneStepCell))


@pytest.mark.parametrize("sens", [None, 1, 1.0, 8.0, 1024])
def test_loss_is_returned_unscaled_for_every_sens(mode, sens):
    settings = {"loss_scale": float(sens or 1.0)}
    _, plain = train_cell(nn.TrainOneStepCell, nets.momentum, steps=2, sens=None)
    _, losses = train_cell(BoostTrainOneStepCell, nets.momentum, steps=2, sens=sens, **settings)
    # A power of two scales fp32 without rounding, so even the second loss is bit-identical.
    np.testing.assert_array_equal(losses, plain)


@pytest.mark.parametrize("sens", ["1024", True, [1.0], Tensor(1.0)])
def test_sens_that_is_no_number_is_a_type_error(sens):
    net = nets.MLP()
    with pytest.raises(TypeError, match="sens must be a number or None, got"):
        BoostTrainOneStepCell(net, nets.momentum(net.trainable_params()), sens)


def test_sens_zero_is_a_value_error():
    net = nets.MLP()
    with pytest.raises(ValueError, match="sens"):
        BoostTrainOneStepCell(net, nets.momentum(net.trainable_params()), 0)


@pytest.mark.parametrize(("sens", "own"), [(1024.0, 1.0), (None, 512.0), (8, 16.0)])
def test_unequal_loss_scales_are_told_before_the_first_step(sens, own):
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params(), loss_scale=own)
    with pytest.warns(BoostWarning, match=rf"loss_scale={own}.*loss_scale={float(sens or 1)}"):
        BoostTrainOneStepCell(net, optimizer, sens)


def test_names_that_public_subclasses_use_are_there(mode):
    """The construct that public subclasses of BoostTrainOneStepCell write, with clipping added."""

    class Clipped(BoostTrainOneStepCell):
        def construct(self, *inputs):
            if self.freeze:
                return self.gradient_freeze_process(*inputs)
            value = self.network(*inputs)
            factor = ops.fill(value.dtype, value.shape, self.sens)
            slopes = self.grad(self.network, self.weights)(*inputs, factor)
            slopes = self.grad_reducer(ops.clip_by_global_norm(slopes, 1e3))
            if self.use_grad_accumulation:
                return self.gradient_accumulation_process(value, slopes, factor, *inputs)
            if self.enable_dim_reduce:
                done = self.dim_reduce(
                    value, slopes, factor, self.weights, self.weights_clone, *inputs
                )
            elif self.enable_adasum:
                done = self.adasum_process(value, slopes)
            else:
                done = self.optimizer(slopes)
            return ops.depend(value, done)

    _, losses = train_cell(Clipped, nets.momentum, steps=3)
    _, plain = train_cell(nn.TrainOneStepCell, nets.momentum, steps=3)
    # The bound on the norm is never reached, but clipping may reorder one multiplication.
    np.testing.assert_allclose(losses, plain, rtol=1e-6)


@pytest.mark.parametrize("bad", [False, True])
def test_a_loss_scaled_step_of_ones_own_finds_the_operators_it_knows(mode, bad):
    """In the manner of public ports: gradients scaled by ``hyper_map``, a flag of its own."""

    def scaled(factor, gradient):
        return tensor_grad_scale(factor, gradient)

    class Own(BoostTrainOneStepWithLossScaleCell):
        def construct(self, *inputs):
            loss = self.network(*inputs)
            sens = self.scale_sense * ops.ones_like(loss)
            gradients = self.grad(self.network, self.weights)(*inputs, sens)
            gradients = self.hyper_map(ops.partial(scaled, self.scale_sense), gradients)
            gradients = self.grad_reducer(gradients)
            flags = ()
            for gradient in gradients:
                finite = ops.cast(ops.isfinite(gradient), ms.float32)
                flags += (self.reduce_sum(1.0 - finite),)
            flag = self.less_equal(self.base, ops.addn(flags))
            if self.logic_not(flag):
                loss = ops.depend(loss, self.optimizer(gradients))
            return loss, flag, self.scale_sense

    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    step = Own(nn.WithLossCell(net, nets.loss_fn()), optimizer, Tensor(8.0, ms.float32))
    before = nets.weights(net)
    ((x, y),) = nets.batches(1)
    x[0, 0] = np.inf if bad else x[0, 0]
    _, flag, _ = step(Tensor(x), Tensor(y))
    assert bool(flag.asnumpy()) == bad
    changed = any((value != before[name]).any() for name, value in nets.weights(net).items())
    assert changed != bad
    assert (int(step.step.asnumpy()), int(step.accumulation_step.asnumpy())) == (0, 0)
    assert [step.check_adasum_enable(), step.check_dim_reduce_enable()] == [False, False]


def test_clipping_may_be_switched_on_after_the_step_is_built(mode):
    net = nets.MLP()
    cell = BoostTrainOneStepCell(
        nn.WithLossCell(net, nets.loss_fn()), nn.SGD(net.trainable_params(), learning_rate=1.0)
    ).set_train()
    cell.clip_norm = 1e-3
    before = nets.weights(net)
    ((x, y),) = nets.batches(1)
    cell(Tensor(x), Tensor(y))
    moved = [value - before[name] for name, value in nets.weights(net).items()]
    # float32 differences of weights around 1 from steps of 1e-3: three digits are left.
    assert np.sqrt(sum((one**2).sum() for one in moved)) == pytest.approx(1e-3, rel=1e-2)


def test_gradients_of_other_losses_than_scalars(mode):
    net = nets.MLP()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True)  # one loss for each sample
    cell = BoostTrainOneStepCell(
        nn.WithLossCell(net, loss), nets.momentum(net.trainable_params())
    ).set_train()
    ((x, y),) = nets.batches(1)
    assert cell(Tensor(x), Tensor(y)).shape == (nets.BATCH,)


class SeveralOutputs(nn.Cell):
    """Two losses of one network, as a network with an auxiliary classifier has them."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.net, self.loss = nets.MLP(), nets.loss_fn()

    def construct(self, x, y):
        logits = self.net(x)
        return self.loss(logits, y), 0.5 * ops.square(logits).mean()


def test_several_outputs_train_by_their_sum_with_clipping_and_accumulation(mode):
    """As with MindSpore's plain step; the bound on the norm is never reached."""

    def train(cell_class, config, repeated):
        net = SeveralOutputs()
        optimizer = nets.momentum(net.trainable_params())
        if config:
            _, optimizer = AutoBoost("O1", config).network_auto_process_train(net, optimizer)
        cell = cell_class(net, optimizer).set_train()
        batches = [(Tensor(x), Tensor(y)) for x, y in nets.batches(3) for _ in range(repeated)]
        return cell, [[float(one.asnumpy()) for one in cell(*batch)] for batch in batches]

    config = {
        "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
        "grad_accumulation": {"grad_accumulation_step": 2},
        "gradients": {"clip_norm": 1e3},
    }
    config["boost"]["grad_accumulation"] = True
    plain, losses = train(nn.TrainOneStepCell, None, 1)
    boosted, found = train(BoostTrainOneStepCell, config, 2)
    np.testing.assert_allclose(found[::2], losses, rtol=1e-6)
    assert found[1::2] == found[::2]  # each batch twice, and then an update
    for ours, theirs in zip(boosted.weights, plain.weights):  # float32, divided by 2 and by 1
        np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-6, atol=1e-7)


def test_configuration_follows_the_optimizer_that_autoboost_processed():
    net = nets.MLP()
    boost = AutoBoost("O1", {"boost": {"mode": "disable_all"}})
    processed = boost.network_auto_process_train(net, nets.momentum(net.trainable_params()))
    assert BoostTrainOneStepCell(*processed).auto_boost is boost
    plain = BoostTrainOneStepCell(net, nets.momentum(net.trainable_params()))
    assert plain.auto_boost.level == "O0"
    assert plain.report()["less_bn"].status == "inactive"


@pytest.mark.parametrize("manager", [None, ms.FixedLossScaleManager(8.0)])
def test_the_report_says_how_long_the_first_step_took(mode, manager):
    """Also where the step has one variant; those of several have names of their own."""
    model = model_of(nets.MLP(), {"boost": {"mode": "disable_all"}}, loss_scale_manager=manager)
    for x, y in nets.batches(2):
        model.train_network(Tensor(x), Tensor(y))
    row = model.train_network.report()["first steps"]
    assert re.fullmatch(r"the step: \d+\.\d s", row.reason)


OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False}
ACCUMULATES = {**OFF, "grad_accumulation": True}
NEED_A_SHAPE = {
    "clip": {"gradients": {"clip_norm": 1.0}},
    "scale": {"loss_scale": {}},
    "window": {"boost": ACCUMULATES, "grad_accumulation": {"grad_accumulation_step": 2}},
}


@pytest.mark.filterwarnings("ignore:gradients of micro-batches do not add up")
@pytest.mark.parametrize("kind", NEED_A_SHAPE)
def test_losses_of_samples_of_an_open_number_are_refused_in_words(graph_mode, kind):
    """MindSpore's own error names no setting."""
    config = {"boost": OFF, **NEED_A_SHAPE[kind]}
    loss, (batch,) = nn.SoftmaxCrossEntropyWithLogits(sparse=True), nets.batches(1)
    step = model_of(nets.MLP(), config, loss_fn=loss).train_network
    x, y = map(Tensor, batch)
    features = Tensor(shape=[None, nets.FEATURES], dtype=x.dtype)
    step.set_inputs(features, Tensor(shape=[None], dtype=y.dtype))
    with pytest.raises(ValueError, match="one for each sample, and set_inputs leaves their number"):
        step(x, y)


def test_a_step_that_fails_leaves_what_follows_as_it_was(mode):
    """In a notebook, say: MindSpore would go on recording, and computing in float16."""
    off = {"boost": {"mode": "disable_all"}}
    wrong = nn.Dense(nets.FEATURES + 1, nets.CLASSES).to_float(ms.float16)
    (x, y), *_ = nets.batches(1)
    with pytest.raises(ValueError, match=str(nets.FEATURES + 1)):
        model_of(wrong, off).train_network(Tensor(x), Tensor(y))

    net, before = nets.MLP(), differentiated_functions()
    step = model_of(net, off, nn.AdaMax(net.trainable_params())).train_network
    assert step(Tensor(x), Tensor(y)).dtype == ms.float32
    assert differentiated_functions() == before


class Own(nn.Momentum):
    """Compiles its construct, as several of MindCV's do."""

    @ms.jit
    def construct(self, gradients):
        return super().construct(gradients)


@pytest.mark.parametrize("kind", [nn.AdaMax, Own])
def test_a_plain_step_that_failed_is_no_reason_to_refuse_a_step_that_freezes(pynative_mode, kind):
    wrong = nn.Dense(nets.FEATURES + 1, nets.CLASSES)
    (x, y), *_ = nets.batches(1)
    with pytest.raises(ValueError, match=str(nets.FEATURES + 1)):
        ms.value_and_grad(wrong, 0)(Tensor(x))
    net = nets.fill(nn.SequentialCell([nn.Dense(nets.FEATURES, nets.FEATURES) for _ in range(4)]))
    boost = {"mode": "manual", "less_bn": False}
    freezes = {"boost": boost, "grad_freeze": {"param_groups": 2, "schedule": [1, 1]}}
    rates = () if kind is nn.AdaMax else (0.1, 0.9)
    step = model_of(net, freezes, kind(net.trainable_params(), *rates)).train_network
    try:
        step(Tensor(x), Tensor(y))
    finally:  # other tests would go on within the recording that failed
        nn.cell._pynative_executor.clear_res()


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_a_step_that_fails_within_a_recording_leaves_that(mode):
    """Somebody differentiates a function in which a step fails, and is caught."""
    step = model_of(nn.Dense(nets.FEATURES + 1, 1), {"boost": {"mode": "disable_all"}})
    (x, y), *_ = nets.batches(1)

    def cube(w):
        square = w * w
        with pytest.raises(ValueError, match=str(nets.FEATURES + 1)):
            step.train_network(Tensor(x), Tensor(y))
        return (square * w).sum()

    gradient = ms.grad(cube)(Tensor([2.0, 3.0]))
    np.testing.assert_allclose(gradient.asnumpy(), [12.0, 27.0], rtol=1e-6)


def test_an_optimizer_that_trains_nothing_here_is_told(pynative_mode):
    """MindSpore's defect, not ours: should the last line fail one day, the warning can go."""
    net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
    optimizer = mint.optim.SGD(net.trainable_params(), lr=0.1)
    config = {"boost": {"mode": "disable_all"}}
    step = make_train_step(net, nn.MSELoss(), optimizer, level="O1", config=config)
    with pytest.warns(NoEffectWarning, match="optim.SGD trains nothing on CPU in PYNATIVE_MODE"):
        step(Tensor(np.ones((3, 2), np.float32)), Tensor(np.zeros((3, 1), np.float32)))
    np.testing.assert_array_equal(net.weight.asnumpy(), 1.0)


class Named(nn.Cell):
    def __init__(self, name):
        super().__init__()
        self.own = Parameter(Tensor(2.0), name=name)

    def construct(self, x):
        return x.mean() * self.own


NAMES_OF_THE_STEP = ["clip_norm", "window_part", "base", "window", "update", "step", "accumulation"]
NAMES_OF_THE_STEP += ["surrounding_part", "freeze", "adasum"]


@pytest.mark.parametrize("name", NAMES_OF_THE_STEP)
def test_a_weight_with_a_name_of_the_step_is_refused(name):
    """The step's own would be taken for the weight, or the weight for it."""
    net = Named(name)
    with pytest.raises(ValueError, match=f"the Parameter '{name}' has a name that the training st"):
        BoostTrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.1), Tensor(4.0))
    for name in ("scale", "base"):
        net = Named(name)
        BoostTrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1))
