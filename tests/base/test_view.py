"""Views of optimizers: only their parameters move, by the plain optimizer's own arithmetic.

The reference is the plain optimizer over copies of the parameters. It updates everything; then the
parameters outside the view, and their state, are put back. All optimizers here treat each parameter
by itself, so what is left is what a view must do, bit for bit.

Two facts about MindSpore on CPU shape these tests. Kernels such as RMSProp's try out ways to split
their work over threads while they run, and vector and scalar code round differently: the plain
optimizer, given the same state and gradient again, differs in the last bit at about its fifteenth
run. Tensors of fewer than eight elements are never vectorised, so these stay exact. And in
PYNATIVE_MODE an optimizer that has run before does not see ``Parameter.set_data``: ``ops.assign``
puts back.
"""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.view import optimizer_view, parameter_positions

SHAPES = [(2, 3), (3,), (3, 2), (2,), (1, 7)]
NAMES = ["conv.weight", "conv.bias", "norm.gamma", "norm.beta", "head.weight"]
EVERYTHING = (0, 1, 2, 3, 4)
# Parameters frozen from the first step on, then everything, a gap, and the first view again.
STEPS = [(2, 3, 4), EVERYTHING, (0, 4), (2, 3, 4), EVERYTHING]

PLAIN = {
    "SGD": lambda p: nn.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "Momentum": lambda p: nn.Momentum(p, 0.05, 0.9, weight_decay=1e-2, loss_scale=8.0),
    "Adam": lambda p: nn.Adam(p, 0.05, weight_decay=1e-2),
    "Adam amsgrad": lambda p: nn.Adam(p, 0.05, use_amsgrad=True),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.05, weight_decay=1e-2),
    "RMSProp": lambda p: nn.RMSProp(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "RMSProp centered": lambda p: nn.RMSProp(p, 0.05, momentum=0.9, centered=True),
    "Adagrad": lambda p: nn.Adagrad(p, learning_rate=0.05, weight_decay=1e-2),
    "FTRL": lambda p: nn.FTRL(p, learning_rate=0.05, weight_decay=1e-2),
    "LazyAdam": lambda p: nn.LazyAdam(p, 0.05, weight_decay=1e-2),
    "AdaFactor": lambda p: nn.AdaFactor(p, weight_decay=1e-2),
    "AdaFactor beta1=0": lambda p: nn.AdaFactor(p, beta1=0.0),
    "AdaMax": lambda p: nn.AdaMax(p, 0.05, weight_decay=1e-2),
    "Adadelta": lambda p: nn.Adadelta(p, 0.5, weight_decay=1e-2),
    "ASGD": lambda p: nn.ASGD(p, 0.05, weight_decay=1e-2, t0=2.0),
    "Rprop": lambda p: nn.Rprop(p, 0.05, weight_decay=1e-2),
    "ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.05, weight_decay=1e-2),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.05, weight_decay=1e-2),
}


class Decay(nn.Cell):
    """A weight decay that depends on the step."""

    def construct(self, global_step):
        return 0.01 / (global_step.astype(ms.float32) + 1.0)


def grouped(params, rate, weight_decay=0.02):
    """Three groups out of the network's order, put back into it by ``order_params``."""
    return [
        {"params": [params[4], params[1]], "lr": rate},
        {"params": [params[0]], "weight_decay": weight_decay, "grad_centralization": False},
        {"params": [params[3], params[2]]},
        {"order_params": params},
    ]


RATES = [0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.001]
GROUPED = {
    "fixed rates": lambda p: nn.Momentum(grouped(p, 0.2), 0.05, 0.9),
    "list rates": lambda p: nn.Momentum(grouped(p, RATES), RATES[::-1], 0.9),
    "one list rate": lambda p: nn.Adam(p, RATES),
    "schedules": lambda p: nn.AdamWeightDecay(
        grouped(p, nn.ExponentialDecayLR(0.1, 0.5, 2)), 0.05, weight_decay=0.01
    ),
    "one schedule": lambda p: nn.SGD(p, nn.ExponentialDecayLR(0.1, 0.5, 2), momentum=0.9),
    "schedule of decay": lambda p: nn.Momentum(grouped(p, 0.1, Decay()), 0.05, 0.9),
    "one schedule of decay": lambda p: nn.Momentum(p, 0.05, 0.9, weight_decay=Decay()),
    "groups, SGD": lambda p: nn.SGD(grouped(p, 0.1), 0.05, momentum=0.9),
    "groups, ASGD": lambda p: nn.ASGD(grouped(p, 0.1), 0.05),
    "groups, Rprop": lambda p: nn.Rprop(grouped(p, 0.1), 0.05),
    "a generator": lambda p: nn.Adam(filter(lambda one: one.requires_grad, p), 0.05),
}


def parameters(shapes=SHAPES, names=NAMES):
    generator = np.random.default_rng(0)
    return [
        Parameter(Tensor(generator.normal(size=shape).astype(np.float32)), name=name)
        for shape, name in zip(shapes, names)
    ]


def gradients(step, shapes=SHAPES):
    generator = np.random.default_rng(100 + step)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def tensors(arrays):
    return tuple(Tensor(array) for array in arrays)


def put_back(optimizer, frozen, before):
    """Give the parameters called ``frozen``, and whatever is named after them, their old values."""
    for one in optimizer.get_parameters():
        if any(one.name.endswith(name) for name in frozen):
            ops.assign(one, Tensor(before[one.name]))


def compare(make, steps=STEPS):
    """Run views of one optimizer beside the plain optimizer that is put back after each step."""
    optimizer, reference = make(parameters()), make(parameters())
    names = [one.name for one in optimizer.get_parameters()]
    views = {positions: optimizer_view(optimizer, positions) for positions in set(steps)}
    views[EVERYTHING] = optimizer
    for step, positions in enumerate(steps):
        every, before = gradients(step), nets.weights(reference)
        reference(tensors(every))
        put_back(reference, [NAMES[i] for i in EVERYTHING if i not in positions], before)
        views[positions](tensors(every[i] for i in positions))
        nets.assert_same(nets.weights(optimizer), nets.weights(reference))
        assert int(optimizer.global_step.asnumpy()[0]) == step + 1
    assert [one.name for one in optimizer.get_parameters()] == names


@pytest.mark.parametrize("name", PLAIN)
def test_a_view_does_what_the_plain_optimizer_does_to_its_parameters(name, mode):
    compare(PLAIN[name])


@pytest.mark.parametrize("name", GROUPED)
def test_rates_decay_and_order_of_groups_stay_with_their_parameters(name, mode):
    compare(GROUPED[name], [(2, 3, 4), (0, 4), EVERYTHING])


def test_a_view_of_everything_is_the_plain_optimizer(mode):
    optimizer, reference = PLAIN["Adam"](parameters()), PLAIN["Adam"](parameters())
    view = optimizer_view(optimizer, EVERYTHING)
    for step in range(2):
        view(tensors(gradients(step)))
        reference(tensors(gradients(step)))
    nets.assert_same(nets.weights(optimizer), nets.weights(reference))


def test_a_view_is_compiled_once_beside_the_plain_optimizer():
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    optimizer = PLAIN["Momentum"](parameters())
    view = optimizer_view(optimizer, (2, 3, 4))
    for step in range(3):
        optimizer(tensors(gradients(step)))
        view(tensors(gradients(step)[2:]))
    ms.set_context(mode=before)
    assert (len(optimizer.compile_cache), len(view.compile_cache)) == (1, 1)


def lars(inner):
    """LARS with its kernel, which no CPU has, replaced by plain operators."""

    def update(weight, gradient, weight_square, gradient_square, decay, rate):
        norm, gradient_norm = ops.sqrt(weight_square), ops.sqrt(gradient_square)
        ratio = 0.001 * norm / (gradient_norm + decay * norm + 1e-5)
        return (gradient + decay * weight) * ratio

    optimizer = nn.LARS(inner)
    object.__setattr__(optimizer, "lars", update)
    return optimizer


LARS_OVER = {
    "Momentum": lambda p: lars(nn.Momentum(p, 0.5, 0.9, weight_decay=1e-2)),
    "SGD, groups": lambda p: lars(nn.SGD(grouped(p, 0.2), 0.5, momentum=0.9)),
    "Adam, list rate": lambda p: lars(nn.Adam(p, RATES, weight_decay=1e-2)),
}


@pytest.mark.parametrize("name", LARS_OVER)
def test_a_view_of_lars_is_lars_over_a_view(name, mode):
    compare(LARS_OVER[name], [(2, 3, 4), (0, 4), EVERYTHING])
    optimizer = LARS_OVER[name](parameters())
    view = optimizer_view(optimizer, (1, 4))
    assert isinstance(view, nn.LARS)
    assert type(view.opt) is type(optimizer.opt)
    assert view.lars_flag == (False, True)  # the bias is not scaled
    assert [one.name for one in view.opt.parameters] == ["conv.bias", "head.weight"]


@pytest.mark.parametrize("make", [lambda p: nn.Lamb(p, 0.1), lambda p: nn.LARS(nn.SGD(p, 0.1))])
def test_lamb_and_lars_compile_as_far_as_the_plain_optimizer_does_on_cpu(make, mode):
    optimizer = make(parameters())
    for positions, one in ((EVERYTHING, optimizer), ((0, 4), optimizer_view(optimizer, (0, 4)))):
        with pytest.raises(
            (RuntimeError, TypeError), match=r"Unsupported op \[(Lamb|LARSUpdate)\]"
        ):
            one(tensors(gradients(0)[i] for i in positions))


ALL = {**PLAIN, **GROUPED, "Lamb": lambda p: nn.Lamb(grouped(p, 0.1), 0.2), **LARS_OVER}


@pytest.mark.parametrize("name", ALL)
def test_a_view_shares_every_parameter_and_renames_none(name):
    optimizer = ALL[name](parameters())
    before = {id(one): one.name for one in optimizer.get_parameters()}
    view = optimizer_view(optimizer, (1, 3))
    after = {id(one): one.name for one in optimizer.get_parameters()}
    assert after == before
    mine = {id(one): one.name for one in view.get_parameters()}
    assert mine.items() <= before.items()
    assert not any(name.endswith(("conv.weight", "norm.gamma")) for name in mine.values())
    assert [one.name for one in view.parameters] == ["conv.bias", "norm.beta"]


class TwoBetas(nn.Optimizer):
    """Momentum of the user's own, with as many numbers in a sequence as there are parameters."""

    parameter_aligned = ("factors",)
    parameter_free = ("betas",)

    def __init__(self, params):
        super().__init__(0.1, params)
        self.betas = (0.5, 0.25)
        self.factors = (1.0, 3.0)
        self.moments = self.parameters.clone(prefix="moments", init="zeros")

    def construct(self, gradients):
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        for i in range(len(self.factors)):
            moment = self.betas[0] * self.moments[i] + self.betas[1] * gradients[i]
            ops.assign(self.moments[i], moment)
            ops.assign_sub(self.parameters[i], self.factors[i] * moment)
        return True


def test_an_optimizer_of_the_users_own_with_numbers_that_look_aligned(mode):
    one, two = parameters([(2,), (3,)], ["one", "two"])
    before = one.asnumpy().copy(), two.asnumpy().copy()
    view = optimizer_view(TwoBetas([one, two]), [1])
    assert (view.betas, view.factors) == ((0.5, 0.25), (3.0,))
    view((Tensor(np.ones(3, np.float32)),))
    np.testing.assert_array_equal(one.asnumpy(), before[0])
    # Moment 0.25, times factor 3; exact in float32 but for the subtraction.
    np.testing.assert_allclose(two.asnumpy(), before[1] - 0.75, rtol=1e-6)


def test_numbers_of_which_nobody_says_whose_they_are_are_refused():
    """A guess would give some parameters the numbers of others, without a word."""

    class Unsaid(TwoBetas):
        parameter_free = ()

    with pytest.raises(ValueError, match=r"Unsaid\.betas has as many entries as there are param"):
        optimizer_view(Unsaid(parameters([(2,), (3,)], ["one", "two"])), [1])


def test_a_new_rate_and_a_loaded_checkpoint_reach_the_view(mode, tmp_path):
    source, optimizer = PLAIN["Momentum"](parameters()), PLAIN["Momentum"](parameters())
    for step in range(2):
        source(tensors(gradients(step)))
    view = optimizer_view(optimizer, (2, 3, 4))
    ms.save_checkpoint(source, str(tmp_path / "source.ckpt"))
    ms.load_param_into_net(optimizer, ms.load_checkpoint(str(tmp_path / "source.ckpt")))
    ops.assign(optimizer.learning_rate, Tensor(0.25, ms.float32))
    ops.assign(source.learning_rate, Tensor(0.25, ms.float32))
    before = nets.weights(source)
    source(tensors(gradients(5)))
    put_back(source, NAMES[:2], before)
    view(tensors(gradients(5)[2:]))
    nets.assert_same(nets.weights(optimizer), nets.weights(source))


def test_positions_of_parameters_rise_and_count_once():
    params = parameters()
    optimizer = PLAIN["SGD"](params)
    assert parameter_positions(optimizer, [params[3], params[1], params[3]]) == (1, 3)
    with pytest.raises(
        ValueError, match=r"that the optimizer trains, got 'other' \(str\): leave it"
    ):
        parameter_positions(optimizer, [Parameter(Tensor([1.0]), name="other")])


@pytest.mark.parametrize("bad", [(), (0, 0), (2, 1), (-1, 2), (0, 5)])
def test_positions_out_of_order_or_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"at least one position from 0 to 4 .* in rising order"):
        optimizer_view(PLAIN["SGD"](parameters()), bad)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"optimizer must be an nn.Optimizer, got 3 \(int\)"):
        optimizer_view(3, (0,))
    with pytest.raises(TypeError, match=r"indices must be ints, got True \(bool\)"):
        optimizer_view(PLAIN["SGD"](parameters()), (True,))


@pytest.mark.parametrize("kind", [type("Own", (nn.Momentum,), {}), nn.Momentum])
def test_a_list_with_as_many_rates_as_parameters_is_one_of_steps(kind):
    """MindSpore's base class keeps it under a name of its own."""
    weights = nets.MLP().trainable_params()
    optimizer = kind(weights, [0.1, 0.2, 0.3, 0.4], 0.9)
    view = optimizer_view(optimizer, [0, 1])
    assert view.init_learning_rate == [0.1, 0.2, 0.3, 0.4]
