"""Optimizers of the user's own, and what a script sets on one that it has made."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.optim.optimizer import opt_init_args_register
from models import model_of

from mindspore_boost_ext import BoostModel, BoostMonitor, restore, save_checkpoint
from mindspore_boost_ext.base.centralization import install_centralization
from mindspore_boost_ext.base.learning_rate import read_learning_rate
from mindspore_boost_ext.base.rebuild import rebuilt
from mindspore_boost_ext.base.view import optimizer_view

OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False}
ACCUMULATING = {
    "boost": {**OFF, "grad_accumulation": True},
    "grad_accumulation": {"grad_accumulation_step": 2},
}
CENTRALIZED = {"boost": OFF, "gradient_centralization": {}}


def trained(model, count=3, first=0):
    for x, y in nets.batches(first + count)[first:]:
        model.train_network(Tensor(x), Tensor(y))
    return nets.weights(model.train_network.network)


class OtherColumns(nn.AdamWeightDecay):
    """Has the constructor of MindSpore's, and maps over other columns."""

    def construct(self, gradients):
        update = ops.partial(ops.assign_sub)
        return self.hyper_map(update, self._parameters, gradients)


def test_an_update_with_columns_of_its_own_has_no_place_for_centralization():
    """Else parameters would be centralized in the place of gradients."""
    optimizer = OtherColumns(nets.MLP().trainable_params())
    with pytest.raises(ValueError, match="OtherColumns has no place for gradient centralization"):
        install_centralization(optimizer, [0, -1, 0, -1])


class ListOfMoments(nn.Optimizer):
    """Momentum, whose moments no Cell lists."""

    @opt_init_args_register
    def __init__(self, params, learning_rate):
        super().__init__(learning_rate, params)
        names = [f"moments.{one.name}" for one in self.parameters]
        zeros = [ops.zeros_like(one) for one in self.parameters]
        self.moments = [Parameter(zero, name=name) for zero, name in zip(zeros, names)]
        self.update = ops.ApplyMomentum()

    def construct(self, gradients):
        gradients = self.gradients_centralization(gradients)
        rate, done = self.get_lr(), None
        for weight, moment, gradient in zip(self.parameters, self.moments, gradients):
            done = self.update(weight, moment, rate, gradient, 0.9)
        return done


def with_list(config, net=None, optimizer=None):
    net = net or nets.MLP()
    optimizer = optimizer or ListOfMoments(net.trainable_params(), 0.1)
    return model_of(net, config, optimizer, BoostModel)


def test_moments_in_a_list_are_in_the_checkpoint(mode, tmp_path):
    path = tmp_path / "run.ckpt"
    whole = trained(with_list(ACCUMULATING), 6)
    first = with_list(ACCUMULATING)
    trained(first, 3)
    save_checkpoint(first.train_network, path, append_dict={"epoch": 1})
    second = with_list(ACCUMULATING)
    restore(second.train_network, path)
    nets.assert_same(whole, trained(second, 3, first=3))


def test_moments_in_a_list_go_on_in_a_second_model(mode):
    """Each has an optimizer of its own in the place of the user's."""
    whole = trained(with_list(CENTRALIZED), 6)
    net = nets.MLP()
    optimizer = ListOfMoments(net.trainable_params(), 0.1)
    trained(with_list(CENTRALIZED, net, optimizer), 3)
    assert np.abs(optimizer.moments[0].asnumpy()).max() > 0
    nets.assert_same(whole, trained(with_list(CENTRALIZED, net, optimizer), 3, first=3))


class OwnFactors(nn.Optimizer):
    """A factor for each parameter; of a subclass which say that it is one."""

    @opt_init_args_register
    def __init__(self, params, learning_rate, factors):
        super().__init__(learning_rate, params)
        self.factors = factors

    def construct(self, gradients):
        return gradients


class Aligned(OwnFactors):
    parameter_aligned = ("factors",)


class Free(OwnFactors):
    parameter_free = ("factors",)


KINDS = {
    "list": list,
    "array": lambda values: np.array(values, np.float32),
    "Tensor": lambda values: Tensor(values, ms.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_for_each_parameter_loses_those_that_go(kind):
    """Each of the others would have its neighbour's."""
    params = nets.MLP().trainable_params()
    made = rebuilt(Aligned(params, 0.1, KINDS[kind]([1, 2, 3, 4])), removed=[params[1]])
    assert [float(one) for one in made.factors] == [1, 3, 4]
    made = rebuilt(Free(params, 0.1, KINDS[kind]([1, 2, 3, 4])), removed=[params[1]])
    assert [float(one) for one in made.factors] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"OwnFactors\.factors has as many entries as there are"):
        rebuilt(OwnFactors(params, 0.1, KINDS[kind]([1, 2, 3, 4])), removed=[params[1]])


def test_an_argument_for_each_parameter_lacks_one_that_is_new():
    params = nets.MLP().trainable_params()
    new = Parameter(Tensor([1.0]), name="new")
    with pytest.raises(ValueError, match="no entry of factors for a parameter that the network"):
        rebuilt(Aligned(params, 0.1, [1, 2, 3, 4]), added=[new])


@pytest.mark.parametrize("kind", ["array", "Tensor"])
def test_a_view_has_the_entries_of_its_parameters(kind):
    params = nets.MLP().trainable_params()
    view = optimizer_view(Aligned(params, 0.1, KINDS[kind]([1, 2, 3, 4])), [1, 3])
    assert [float(one) for one in view.factors] == [2, 4]
    view = optimizer_view(Free(params, 0.1, KINDS[kind]([1, 2, 3, 4])), [1, 3])
    assert [float(one) for one in view.factors] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"OwnFactors\.factors has as many entries as there are"):
        optimizer_view(OwnFactors(params, 0.1, KINDS[kind]([1, 2, 3, 4])), [1, 3])


def test_what_a_script_says_of_decay_after_the_constructor_stays():
    net = nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, weight_decay=0.5)
    flags = tuple(one.name.endswith("weight") for one in optimizer.parameters)
    optimizer.decay_flags = flags
    step = model_of(net, CENTRALIZED, optimizer, BoostModel).train_network
    assert step.optimizer is not optimizer
    assert step.optimizer.decay_flags == flags


class CountsCalls(nn.learning_rate_schedule.LearningRateSchedule):
    """A rate that falls from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, ms.float32), name="calls")

    def construct(self, step):
        return 0.1 / ops.assign_add(self.calls, Tensor(1.0, ms.float32))


def test_to_read_a_rate_does_not_count_as_a_call(mode):
    net, rate = nets.MLP(), CountsCalls()
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    model = model_of(net, {"boost": OFF}, optimizer, BoostModel)
    model.train(2, nets.dataset(3), callbacks=BoostMonitor(), dataset_sink_mode=False)
    assert rate.calls.asnumpy() == 6
    assert read_learning_rate(optimizer) == pytest.approx(0.1 / 7, rel=1e-6)  # float32
    assert rate.calls.asnumpy() == 6
