"""One optimizer object in two Models, one after the other: a warm-up, then the main run."""

from __future__ import annotations

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
import residual_nets
from mindspore import Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import BoostWarning, FreezeOpt, OptimizerProcess
from mindspore_boost_ext.base.rebuild import rebuilt
from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn

LESS_BN = {
    **contract.switched(less_bn=True),
    "less_bn": {"fn_flag": True, "gc_flag": True, "heads": ["second"]},
}
OPTIMIZERS = {
    "Momentum": lambda params, rate: nn.Momentum(params, rate, 0.9),
    "Adam": lambda params, rate: nn.Adam(params, rate),
    "AdamWeightDecay": lambda params, rate: nn.AdamWeightDecay(params, rate, weight_decay=0.1),
}
LIST = [0.02, 0.03, 0.01, 0.04, 0.05, 0.02]
RATES = {
    "constant": lambda: 0.02,
    "list": lambda: LIST,
    "schedule": lambda: nn.ExponentialDecayLR(0.02, 0.5, 2),
}


def grouped(net, rate):
    """Return the first layer with a rate of its own, and the rest with the default."""
    first = list(net.first.trainable_params())
    rest = [one for one in net.trainable_params() if all(one is not other for other in first)]
    return [{"params": first, "lr": rate}, {"params": rest}]


class ByHand:
    """Plain MindSpore without a rebuilt optimizer: gradients centralized by NumPy."""

    centralized = ("first.weight",)  # not the weight of a normalised head

    def __init__(self, net, optimizer):
        self.optimizer, with_loss = optimizer, nn.WithLossCell(net, nets.loss_fn())
        self.gradients = ms.value_and_grad(with_loss, None, optimizer.parameters)

    def run(self, batches):
        for x, y in batches:
            _, gradients = self.gradients(Tensor(x), Tensor(y))
            found = []
            for weight, gradient in zip(self.optimizer.parameters, gradients):
                value = gradient.asnumpy().astype(np.float64)
                if weight.name in self.centralized:
                    value = value - value.mean(axis=1, keepdims=True)
                found.append(Tensor(value.astype(np.float32)))
            self.optimizer(tuple(found))


def assert_close(found, expected):
    """Demand equal names and, up to the roundings of six float32 steps, equal values."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def rates_of(optimizer):
    """Return the Parameters that hold learning rates, each once."""
    held = [optimizer.get_lr_parameter(one) for one in optimizer.parameters]
    return list({id(one): one for one in held if isinstance(one, ms.Parameter)}.values())


def halve(optimizer, in_place=False):
    """Halve every rate; MindSpore's own loop needs it in place, ours takes what is set."""
    for rate in rates_of(optimizer):
        half = Tensor(rate.asnumpy() * np.float32(0.5))
        ops.assign(rate, half) if in_place else rate.set_data(half)


CASES = [("Momentum", rate) for rate in (*RATES, "groups", "groups of lists")]
CASES += [(name, rate) for name in ("Adam", "AdamWeightDecay") for rate in ("constant", "groups")]


@pytest.mark.parametrize(("name", "rate"), CASES)
def test_moments_steps_and_rates_go_on_in_the_second_model(mode, name, rate):
    steps = nets.batches(6)
    by_hand, net = nets.MLP(), nets.MLP()
    less_bn(by_hand, True, heads=["second"])

    def optimizer_of(network):
        if rate == "groups":
            return OPTIMIZERS[name](grouped(network, 0.05), 0.02)
        if rate == "groups of lists":
            return OPTIMIZERS[name](grouped(network, LIST), 0.02)
        return OPTIMIZERS[name](network.trainable_params(), RATES[rate]())

    oracle = ByHand(by_hand, optimizer_of(by_hand))
    own = optimizer_of(net)
    oracle.run(steps[:2])
    contract.run(model_of(net, LESS_BN, own), steps[:2])
    assert int(own.global_step.asnumpy()[0]) == 2
    halve(oracle.optimizer, in_place=True)
    halve(own)
    second = model_of(net, LESS_BN, own)
    oracle.run(steps[2:4])
    contract.run(second, steps[2:4])
    halve(oracle.optimizer, in_place=True)  # while it trains
    halve(own)
    oracle.run(steps[4:])
    contract.run(second, steps[4:])
    found = {**nets.weights(own), **nets.weights(second.train_network)}
    assert_close(found, nets.weights(oracle.optimizer))


# ---- Every algorithm: a second Model goes on as the first would have ----

BY_ALGORITHM = {one.name: one for one in contract.ALGORITHMS}
OF_THE_LOSS_SCALE = ("scale", "iterator_step")  # MindSpore's managers begin again with each Model
SCHEDULES = ("grad_freeze.position", "progressive_resizing.updates", "seq_length_warmup.updates")
HALF = 3  # divides the window of accumulation


def own_freezing(net):
    every = net.trainable_params()
    return FreezeOpt(nets.momentum(every), [every, every[2:]], [0, 1, 1, 0, 1])


def own_thor(net):
    return nn.thor(net, 0.05, Tensor([0.1]), 0.9, frequency=2)


# Configuration, network and optimizer beside those of the contract suite.
FURTHER = {
    "less_bn, FreezeOpt": (LESS_BN, nets.MLP, own_freezing),
    "FreezeOpt": (contract.switched(), nets.MLP, own_freezing),
    "THOR": (contract.switched(), nets.MLP, own_thor),
    "less_bn, thor": (
        {**LESS_BN, **contract.switched(less_bn=True, thor=True), "thor": {"frequency": 2}},
        nets.MLP,
        lambda net: nn.Momentum(net.trainable_params(), LIST, 0.9),
    ),
    "less_bn, grad_freeze": (
        {
            **LESS_BN,
            **contract.switched(less_bn=True, grad_freeze=True),
            "grad_freeze": {"param_groups": 2, "freeze_p": 0.5, "total_steps": 5},
        },
        nets.Normalised,
        lambda net: nn.Adam(net.trainable_params(), 0.01),
    ),
}


def parts(name):
    """Return a network, an optimizer and what gives a Model over them."""
    if name in FURTHER:
        config, make_net, make_optimizer = FURTHER[name]
        net = make_net()
        return net, make_optimizer(net), lambda own: model_of(net, config, own)
    algorithm = BY_ALGORITHM[name]
    net = algorithm.net()
    arguments = algorithm.model(net)
    own = arguments.pop("optimizer", None) or nn.Momentum(net.trainable_params(), 0.05, 0.9)
    return net, own, lambda own: model_of(net, algorithm.on, own, **arguments)


BEGIN_ANEW = ("grad_freeze, adaptive",)  # the looks at weights belong to a Model
# They compile two variants of the step in each of three Models; "thor" is quick enough.
SLOW = ("THOR", "less_bn, thor", "thor, trace rule, dynamic loss scale")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in (*BY_ALGORITHM, *FURTHER)
        if name not in BEGIN_ANEW
    ],
)
@pytest.mark.parametrize(
    "mode", ["pynative", pytest.param("graph", marks=pytest.mark.slow)], indirect=True
)
def test_a_second_model_goes_on_as_the_first_would_have(mode, name):
    """A schedule that the configuration makes begins anew, as a loss scale does.

    What one Model hands on to the next is decided before a step compiles: GRAPH_MODE, in which each
    case compiles for seconds, has the test of moments and rates above, and ``-m slow``.
    """
    inputs = BY_ALGORITHM.get(name, BY_ALGORITHM["nothing"])
    steps = inputs.batches(2 * HALF)
    ms.set_seed(3)
    _, own, model = parts(name)
    through = model(own)
    contract.run(through, steps[:HALF])
    for parameter in through.train_network.get_parameters():
        if parameter.name.endswith(SCHEDULES) and "FreezeOpt" not in name:  # the user's goes on
            parameter.set_data(Tensor(0, ms.int32))
    contract.run(through, steps[HALF:])
    ms.set_seed(3)
    _, own, model = parts(name)
    contract.run(model(own), steps[:HALF])
    second = model(own)
    contract.run(second, steps[HALF:])
    expected, found = nets.weights(through.train_network), nets.weights(second.train_network)
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        if not any(word in parameter for word in OF_THE_LOSS_SCALE):
            # Another graph of the same step: a rounding or two of float32 in each of six steps.
            np.testing.assert_allclose(
                found[parameter], value, rtol=1e-5, atol=1e-6, err_msg=parameter
            )


def test_only_what_is_added_starts_afresh(graph_mode):
    """A plain warm-up first, then BatchNorms go and the head gains a multiplier."""
    net = residual_nets.ZooResNet()
    own = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    x, y = residual_nets.images()
    model_of(net, contract.switched(), own).train_network(x, y)
    before = nets.weights(own)
    config = {**contract.switched(less_bn=True), "less_bn": {"fn_flag": True}}
    with pytest.warns(BoostWarning, match="BatchNorms that were trained before"):
        second = model_of(net, config, own).train_network.optimizer
    names = {one.name for one in second.parameters}
    gained = names - {one.name for one in own.parameters}
    assert names == {one.name for one in net.trainable_params()}
    assert len(gained) == 1
    assert len(names) < len(own.parameters)
    for moment, weight in zip(second.moments, second.parameters):
        expected = 0.0 if weight.name in gained else before[f"moments.{weight.name}"]
        np.testing.assert_array_equal(moment.asnumpy(), expected, err_msg=weight.name)
    assert second.global_step is own.global_step
    assert second.learning_rate is own.learning_rate
    third = model_of(net, config, own).train_network.optimizer
    assert third is not second
    assert [id(one) for one in third.moments] == [id(one) for one in second.moments]


# Lamb and LARS have no CPU kernels: as far as construction goes.
WRAPPED = {
    "Lamb": lambda params: nn.Lamb(params, LIST),
    "LARS": lambda params: nn.LARS(nn.Momentum(params, 0.1, 0.9)),
    "LARS, clipping": lambda params: nn.LARS(nn.Momentum(params, LIST, 0.9), use_clip=True),
}


@pytest.mark.parametrize("name", [*nets.OPTIMIZERS, *WRAPPED])
def test_all_parameters_are_those_of_the_users_optimizer(name):
    net = nets.MLP()
    own = {**nets.OPTIMIZERS, **WRAPPED}[name](net.trainable_params())
    new = rebuilt(own, centralize=["first.weight"], carry_state=True)
    held = {id(one) for one in own.get_parameters()}
    # LARS holds two of its own that nothing reads.
    names = [one.name for one in new.get_parameters() if id(one) not in held]
    assert [one for one in names if not one.startswith("fake")] == []
    assert [one.name for one in new.get_parameters()] == [one.name for one in own.get_parameters()]


def test_the_process_alone_goes_on(mode):
    """In the steps of mindspore.boost: asked for the state, each new optimizer has the same."""
    steps, net, by_hand = nets.batches(4), nets.MLP(), nets.MLP()
    own = nn.Adam(net.trainable_params(), LIST)
    oracle = ByHand(by_hand, nn.Adam(by_hand.trainable_params(), LIST))
    oracle.centralized = ("first.weight", "second.weight")
    for part in (steps[:2], steps[2:]):
        process = OptimizerProcess(own)
        process.add_grad_centralization(net)
        new = process.generate_new_optimizer(carry_state=True)
        contract.run(model_of(net, contract.switched(), new), part)
        oracle.run(part)
        halve(own)
        halve(oracle.optimizer, in_place=True)
    assert_close(nets.weights(own), nets.weights(oracle.optimizer))


def test_a_rate_set_on_the_users_optimizer_reaches_thor(mode):
    net = nets.MLP()
    own = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    model = model_of(net, {**contract.switched(thor=True), "thor": {"damping": 0.1}}, own)
    contract.run(model, nets.batches(1))
    before = nets.weights(net)
    own.learning_rate.set_data(Tensor(0.0, ms.float32))
    contract.run(model, nets.batches(1))
    nets.assert_same(nets.weights(net), before)
    assert int(own.global_step.asnumpy()[0]) == 2


def test_thor_with_another_section_warns_that_it_begins_anew(graph_mode):
    net = nets.MLP()
    own = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    sections = [{"frequency": 1}, {"frequency": 100}]
    models = [{**contract.switched(thor=True), "thor": one} for one in sections]
    first = model_of(net, models[0], own).train_network.optimizer
    with pytest.warns(
        BoostWarning, match=r"thor starts anew, .* both Models one THOR\(net, \.\.\.\)"
    ):
        second = model_of(net, models[1], own).train_network.optimizer
    assert second is not first
    assert second.global_step is first.global_step is own.global_step
    assert model_of(net, models[1], own).train_network.optimizer is second
