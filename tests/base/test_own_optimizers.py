"""Optimizers of the user's own, and what a script sets on one that it has made."""

from __future__ import annotations

import dataclasses
import functools

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.nn.optim.optimizer import opt_init_args_register
from models import model_of

from mindspore_boost_ext import (
    BoostModel,
    BoostMonitor,
    FreezeOpt,
    NoEffectWarning,
    OptimizerProcess,
    make_train_step,
    restore,
    save_checkpoint,
)
from mindspore_boost_ext.base.arguments import construct_like
from mindspore_boost_ext.base.centralization import install_centralization
from mindspore_boost_ext.base.learning_rate import read_learning_rate
from mindspore_boost_ext.base.rebuild import rebuilt
from mindspore_boost_ext.base.state import list_hidden_parameters
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
    """Momentum, whose moments no Cell lists, and maybe a list of another network's Parameters."""

    @opt_init_args_register
    def __init__(self, params, learning_rate, teacher=()):
        super().__init__(learning_rate, params)
        self.teacher = list(teacher)
        self.scale = Parameter(Tensor(1.0), name="state.scale")
        self.others = [Parameter(Tensor(100.0), name="scale")]  # as the attribute's name
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


def test_what_has_no_name_of_its_own_in_a_list_is_not_listed():
    """Its number differs from run to run, so that no run could go on from a file."""
    net = nets.MLP()
    optimizer = ListOfMoments(net.trainable_params(), 0.1)
    optimizer.nameless = [Parameter(Tensor(1.0))]
    step = with_list({"boost": OFF}, net, optimizer).train_network
    assert [one.name for one in step.get_parameters() if "#" in one.name] == []


def test_what_has_a_name_of_the_networks_in_a_list_is_not_listed():
    """A checkpoint has each name once, and there it is the network's."""
    net, optimizer = nn.Dense(2, 2), nn.Cell(auto_prefix=False)
    optimizer.kept = [Parameter(Tensor(1.0), name=name) for name in ("weight", "slow.weight")]
    list_hidden_parameters(optimizer, net)
    assert [one.name for one in optimizer.get_parameters()] == ["slow.weight"]


def test_moments_in_a_list_under_another_optimizer_are_in_the_checkpoint(tmp_path):
    net = nets.MLP()
    optimizer = FreezeOpt(ListOfMoments(net.trainable_params(), 0.1), [net.trainable_params()], [0])
    step = model_of(net, {"boost": {**OFF, "grad_freeze": True}}, optimizer, BoostModel)
    save_checkpoint(step.train_network, tmp_path / "run.ckpt")
    assert "moments.first.weight" in ms.load_checkpoint(str(tmp_path / "run.ckpt"))


@pytest.mark.parametrize("config", [{"boost": OFF}, CENTRALIZED], ids=["off", "centralized"])
def test_parameters_of_another_network_are_not_listed(config):
    net, teacher = nets.MLP(), nets.MLP()
    optimizer = ListOfMoments(net.trainable_params(), 0.1, teacher.trainable_params())
    model = with_list(config, net, optimizer)
    before = nets.weights(teacher)
    trained(model)
    nets.assert_same(before, nets.weights(teacher))
    listed = [one.name for one in model.train_network.optimizer.get_parameters()]
    assert "state.scale" in listed
    assert "scale" not in listed
    assert model.train_network.optimizer.scale.asnumpy() == 1.0


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


def test_an_argument_for_each_parameter_goes_to_a_namesake():
    """It takes the place of the one that goes, as its group does."""
    params = nets.MLP().trainable_params()
    twin = Parameter(Tensor(np.ones(5, np.float32)), name=params[1].name)
    made = rebuilt(Aligned(params, 0.1, [1, 2, 3, 4]), removed=[params[1]], added=[twin])
    order = [one.name for one in params]
    assert made.factors == [1 + order.index(one.name) for one in made.parameters]


def test_an_argument_for_each_parameter_follows_another_order():
    params = nets.MLP().trainable_params()
    made = construct_like(Aligned(params, 0.1, [1, 2, 3, 4]), params[::-1])
    assert made.factors == [4, 3, 2, 1]


def test_arguments_stay_where_parameters_do():
    """Whatever their length: nothing is cut."""
    optimizer = OwnFactors(nets.MLP().trainable_params(), 0.1, [1, 2, 3, 4])
    made = rebuilt(optimizer)
    assert made is not optimizer
    assert made.factors == [1, 2, 3, 4]


def test_a_flag_for_each_parameter_is_recognised_by_itself():
    params = nets.MLP().trainable_params()
    made = rebuilt(OwnFactors(params, 0.1, [True, False, True, False]), removed=[params[1]])
    assert made.factors == [True, True, False]


def test_an_argument_for_each_parameter_lacks_one_that_is_new():
    params = nets.MLP().trainable_params()
    new = Parameter(Tensor([1.0]), name="new")
    with pytest.raises(ValueError, match="no entry of factors for new, which was added"):
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
    view = optimizer_view(OwnFactors(params[:1], 0.1, KINDS[kind]([5])), [0])
    assert [float(one) for one in view.factors] == [5]  # nothing is left out


def test_what_a_script_says_of_decay_after_the_constructor_stays():
    net = nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, weight_decay=0.5)
    flags = tuple(one.name.endswith("weight") for one in optimizer.parameters)
    optimizer.decay_flags = flags
    step = model_of(net, CENTRALIZED, optimizer, BoostModel).train_network
    assert step.optimizer is not optimizer
    assert step.optimizer.decay_flags == flags


def test_a_new_groups_decay_counts():
    """What the constructor has made of the old groups is nothing that a script has said."""
    net = nets.MLP()
    first, second = net.first.trainable_params(), net.second.trainable_params()
    groups = [{"params": first, "weight_decay": 0.0}, {"params": second}]
    optimizer = nn.Momentum(groups, 0.1, 0.9, weight_decay=0.5)
    optimizer.decay_flags = (*optimizer.decay_flags[:3], False)  # of the last bias
    again = [{"params": first, "weight_decay": 0.5}, {"params": second}]
    made = construct_like(optimizer, again)
    assert made.decay_flags == (True, True, True, False)
    # Without groups the constructor has made gamma and beta go without.
    params = nn.SequentialCell(nn.Dense(2, 2), nn.BatchNorm1d(2)).trainable_params()
    plain = nn.Momentum(params, 0.1, 0.9, weight_decay=0.5)
    made = construct_like(plain, [{"params": params, "weight_decay": 0.5}])
    assert made.decay_flags == (True, True, True, True)


class CountsCalls(nn.learning_rate_schedule.LearningRateSchedule):
    """A rate that falls from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0.0, ms.float32), name="calls")

    def construct(self, step):
        return 0.1 / ops.assign_add(self.calls, Tensor(1.0, ms.float32))


class CountsInAList(CountsCalls):
    """Counts in a list or tuple, too, and holds what CPU cannot assign to."""

    def __init__(self, kind=list):
        super().__init__()
        self.held = kind([Parameter(Tensor(0.0, ms.float32), name="held")])
        self.start = Parameter(Tensor(0.1, ms.bfloat16), name="start")

    def construct(self, step):
        calls = ops.assign_add(self.held[0], Tensor(1.0, ms.float32))
        return ops.depend(super().construct(step), calls)


@pytest.mark.parametrize(
    "schedule",
    [CountsCalls, lambda: CountsInAList(tuple), CountsInAList],
    ids=["calls", "in a tuple", "in a list"],
)
def test_to_read_a_rate_does_not_count_as_a_call(mode, schedule):
    net, rate = nets.MLP(), schedule()
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    model = model_of(net, {"boost": OFF}, optimizer, BoostModel)
    model.train(2, nets.dataset(3), callbacks=BoostMonitor(), dataset_sink_mode=False)
    counts = [rate.calls, *getattr(rate, "held", [])]
    assert [one.asnumpy() for one in counts] == [6] * len(counts)
    assert read_learning_rate(optimizer) == pytest.approx(0.1 / 7, rel=1e-6)  # float32
    assert [one.asnumpy() for one in counts] == [6] * len(counts)


class OneForAll(nn.Optimizer):
    """Keeps the factors of all parameters in one Parameter."""

    parameter_aligned = ("factors",)

    def __init__(self, params):
        super().__init__(0.1, params)
        self.factors = Parameter(Tensor(np.ones(len(self.parameters), np.float32)), name="factors")


def test_a_parameter_with_an_entry_for_each_of_them_cannot_be_divided():
    optimizer = OneForAll(nets.MLP().trainable_params())
    with pytest.raises(ValueError, match=r"OneForAll\.factors is one Parameter with .* a tuple"):
        optimizer_view(optimizer, (1, 2))


class HoldsSums(nn.Cell):
    """Keeps a Parameter for each weight, and maybe the weights."""

    def __init__(self, sums):
        super().__init__()
        self.sums = sums


@dataclasses.dataclass
class State:
    sums: list


class Deeper(nn.Optimizer):
    """Keeps a Parameter for each weight in what an attribute holds."""

    def __init__(self, params, hold):
        super().__init__(0.1, params)
        self.held = hold([Parameter(one * 0, name=f"sum.{one.name}") for one in params])


@pytest.mark.parametrize(
    ("hold", "key"),
    [
        (lambda sums: {"sums": sums}, "'sums'"),
        (lambda sums: {"inner": {"sums": tuple(sums)}}, "'sums'"),
        (lambda sums: (sums, sums), "0"),
        (lambda sums: [{"sums": sums}], "'sums'"),
        (lambda sums: HoldsSums(ParameterTuple(sums)), "'sums'"),
        (lambda sums: nn.SequentialCell(HoldsSums(sums)), "'sums'"),
        (lambda sums: {"sums": [(one,) for one in sums]}, "'sums'"),
        (lambda sums: HoldsSums(nn.CellList([HoldsSums(one) for one in sums])), "'sums'"),
        (lambda sums: dict(enumerate(sums)), "'held'"),
        (
            lambda sums: {"state": {place: {"sum": one} for place, one in enumerate(sums)}},
            "'state'",
        ),
        (State, "'sums'"),
        (lambda sums: functools.partial(print, sums), "0"),
        (lambda sums: functools.partial(print, sums=sums), "'sums'"),
    ],
)
def test_state_deeper_within_cannot_be_divided(monkeypatch, hold, key):
    """A group of weights would get the sums of the first ones."""
    optimizer = Deeper(nets.MLP().trainable_params(), hold)
    with pytest.raises(ValueError, match=rf"Deeper\.held has a Parameter .* under {key}, which"):
        optimizer_view(optimizer, (1, 2))
    monkeypatch.setattr(Deeper, "parameter_free", ("held",), raising=False)
    assert optimizer_view(optimizer, (1, 2)).held is optimizer.held


def test_a_cell_that_pairs_gradients_with_the_weights_cannot_be_divided():
    weights = nets.MLP().trainable_params()
    optimizer = Deeper(weights, lambda sums: HoldsSums(ParameterTuple(weights)))
    with pytest.raises(ValueError, match=r"Deeper\.held has all weights under 'sums', and a group"):
        optimizer_view(optimizer, (1, 2))


class HoldsSumsAndNetwork(HoldsSums):
    def __init__(self, sums, network):
        super().__init__(ParameterTuple(sums))
        self.network = network


def test_state_beside_the_network_cannot_be_divided():
    net = nets.MLP()
    optimizer = Deeper(net.trainable_params(), lambda sums: HoldsSumsAndNetwork(sums, net))
    with pytest.raises(ValueError, match=r"Deeper\.held has a Parameter .* under 'sums', which"):
        optimizer_view(optimizer, (1, 2))


class Frozen(nn.Cell):
    """Has as many blocks that are not trained as its head has weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2)])
        self.head = nn.Dense(2, 2)


def test_layers_that_are_not_trained_are_no_state():
    net = Frozen()
    optimizer = Deeper(net.head.trainable_params(), lambda sums: net)
    assert optimizer_view(optimizer, (1,)).held is net


class ListsItsWeights(nets.MLP):
    def __init__(self):
        super().__init__()
        self.all = ParameterTuple(self.trainable_params())


def test_a_network_in_an_optimizer_is_no_state():
    net = ListsItsWeights()
    optimizer = Deeper(net.trainable_params(), lambda sums: net)
    assert optimizer_view(optimizer, (1, 2)).held is net


class CallsByAttribute(nn.Optimizer):
    """Gradient descent by a method that it holds."""

    def __init__(self, params, hold):
        super().__init__(0.1, params)
        self.apply_all = hold(self.subtract)

    def subtract(self, gradients):
        return [ops.assign_sub(*pair) for pair in zip(self.parameters, gradients)]

    def construct(self, gradients):
        held = self.apply_all
        return held[0](gradients) if isinstance(held, (list, dict)) else held(gradients)


HELD = {
    "method": lambda method: method,
    "partial": functools.partial,
    "list": lambda method: [method],
    "dict": lambda method: {0: functools.partial(method)},
}


@pytest.mark.parametrize("name", HELD)
def test_a_method_that_an_optimizer_holds_updates_the_weights_of_a_view(mode, name):
    first, second = (Parameter(Tensor(np.zeros(2, np.float32)), name=name) for name in "ab")
    view = optimizer_view(CallsByAttribute([first, second], HELD[name]), [1])
    view((Tensor(np.ones(2, np.float32)),))
    assert (first.asnumpy().tolist(), second.asnumpy().tolist()) == ([0, 0], [-1, -1])


def over(method):
    return lambda gradients: method(gradients)


def test_a_function_over_a_method_cannot_be_divided(monkeypatch):
    optimizer = CallsByAttribute(nets.MLP().trainable_params(), over)
    with pytest.raises(
        ValueError, match=r"ByAttribute\.apply_all is a function that refers to the"
    ):
        optimizer_view(optimizer, (1, 2))
    monkeypatch.setattr(CallsByAttribute, "parameter_free", ("apply_all",), raising=False)
    assert optimizer_view(optimizer, (1, 2)).apply_all is optimizer.apply_all


@pytest.mark.parametrize("name", ["learning_rate", "opt_class", "is_lars", "single_opt"])
def test_what_an_optimizer_process_has_read_is_not_set_anew(name):
    process = OptimizerProcess(nets.momentum(nets.MLP().trainable_params()))
    with pytest.warns(NoEffectWarning, match=f"OptimizerProcess.{name} has no effect on the new"):
        setattr(process, name, 0.5)


class Falls(nn.learning_rate_schedule.LearningRateSchedule):
    """Returns the Parameter in which it keeps its rate."""

    def __init__(self):
        super().__init__()
        self.rate = Parameter(Tensor(0.5, ms.float32), name="rate")

    def construct(self, step):
        ops.assign_sub(self.rate, Tensor(0.25, ms.float32))
        return self.rate


def test_a_rate_is_read_before_its_schedule_is_put_back(mode):
    schedule = Falls()
    assert read_learning_rate(nn.SGD(nets.MLP().trainable_params(), schedule)) == 0.25
    assert schedule.rate.asnumpy() == 0.5


def test_the_rate_of_mints_sgd_is_the_number_it_computes_with():
    """A scheduler changes the other one, which it does not read."""
    optimizer = mint.optim.SGD(nets.MLP().trainable_params(), lr=0.5)
    ops.assign(optimizer.param_groups[0]["lr"], 0.25)
    assert read_learning_rate(optimizer) == 0.5


class Around(nn.Optimizer):
    """Holds another optimizer over the same weights."""

    def __init__(self, inner):
        super().__init__(0.1, list(inner.parameters))
        self.inner = inner

    def construct(self, gradients):
        return self.inner(gradients)


def test_an_optimizer_that_holds_another_one_is_asked_for_other_names():
    """A checkpoint can hold only one global_step."""
    net = nets.MLP()
    inner, off = nets.momentum(net.trainable_params()), {"level": "O1", "config": {"boost": OFF}}
    with pytest.raises(ValueError, match=r"named '\w+': an optimizer that holds .* must rename"):
        make_train_step(net, nets.loss_fn(), Around(inner), **off)
    for name in ("global_step", "learning_rate"):
        getattr(inner, name).name = f"inner.{name}"
    step = make_train_step(net, nets.loss_fn(), Around(inner), **off)
    assert {"global_step", "inner.global_step"} <= step.train_network.parameters_dict().keys()
