"""A Model that is refused leaves everything as it was; level O0 goes with the same script."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
import residual_nets as zoo
from mindspore import Tensor, nn
from mindspore.experimental import optim
from models import model_of

from mindspore_boost_ext import AutoBoost, FreezeOpt, NoEffectWarning
from mindspore_boost_ext.stages.gradients import check_dense

REFUSED = {
    "schedule of too many groups": {"boost_config_dict": {"grad_freeze": {"schedule": [0, 99]}}},
    "schedule that gives no group": {
        "boost_config_dict": {"grad_freeze": {"schedule": lambda step: -1, "total_steps": 3}}
    },
    "unknown amp level": {"amp_level": "O9", "boost_config_dict": None},
    "optimizer of another kind": {"optimizer": optim.Adam, "boost_config_dict": None},
}


def kinds(net):
    return {name: type(cell) for name, cell in net.cells_and_names()}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::mindspore_boost_ext.NoEffectWarning")
def test_a_refused_model_leaves_the_network_as_it_was(mode, name):
    net = zoo.ZooResNet()
    before, weights, answer = kinds(net), list(nets.weights(net)), net(zoo.images()[0])
    settings = dict(REFUSED[name])
    optimizer = settings.pop("optimizer", nets.momentum)(net.trainable_params())
    with pytest.raises((TypeError, ValueError)):
        ms.Model(net, nets.loss_fn(), optimizer, boost_level="O1", **settings)
    assert kinds(net) == before
    assert list(nets.weights(net)) == weights
    np.testing.assert_array_equal(net(zoo.images()[0]).asnumpy(), answer.asnumpy())


def test_a_refused_optimizer_leaves_the_network_of_auto_boost_as_it_was():
    net = zoo.ZooResNet()
    before = kinds(net)
    with pytest.raises(TypeError, match=r"nn\.Optimizer, got mindspore\.exp.*\.Adam: give"):
        AutoBoost("O1").network_auto_process_train(net, optim.Adam(net.trainable_params()))
    assert kinds(net) == before


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_experimental_optimizer_is_refused_as_by_mindspore(level):
    net = nets.MLP()
    optimizer = optim.SGD(net.trainable_params(), lr=0.1)
    config = {"boost": {"mode": "disable_all"}} if level == "O1" else None
    with pytest.raises(TypeError, match="type of 'optimizer' should be one of"):
        model_of(net, config, optimizer)


def test_an_optimizer_that_trains_nothing_is_refused():
    net = nets.MLP()
    optimizer = nn.AdamWeightDecay([{"params": iter(net.trainable_params())}])
    with pytest.raises(ValueError, match="AdamWeightDecay trains nothing: give it lists of param"):
        model_of(net, {"boost": {"mode": "disable_all"}}, optimizer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_groups_that_mindspore_has_used_up_are_refused(wrapped):
    """It trains nothing of them, and says nothing."""
    net = nets.MLP()
    weights = (one for one in net.trainable_params() if "weight" in one.name)
    optimizer = nn.SGD([{"params": weights, "lr": 0.1}, {"params": [net.first.bias]}], 0.1)
    if wrapped:
        optimizer = FreezeOpt(optimizer)
    with pytest.raises(ValueError, match="not train a group whose params are a generator"):
        model_of(net, {"boost": {"mode": "disable_all"}}, optimizer)


@pytest.mark.parametrize("how", ["Model", "build_train_network"])
def test_the_plain_step_of_level_zero_has_a_report_too(mode, how):
    net = nets.MLP()
    parts = net, nets.loss_fn(), nets.momentum(net.trainable_params())
    if how == "Model":
        step = ms.Model(*parts).train_network
    else:
        step = ms.amp.build_train_network(net, parts[2], parts[1])
    assert type(step).__module__.startswith("mindspore.nn")
    assert step.report()["less_bn"].reason == "level O0 switches nothing on"
    x, y = nets.batches(1)[0]
    before = nets.weights(net)
    step(Tensor(x), Tensor(y))
    assert any((before[name] != value).any() for name, value in nets.weights(net).items())


def lookup(name):
    table = nn.EmbeddingLookup(6, 2, target="CPU")
    return nn.SequentialCell(table, nn.Dense(2, 2)) if name == "inside" else table


@pytest.mark.parametrize("name", ["inside", "itself"])
@pytest.mark.parametrize("section", ["clip_norm", "grad_accumulation"])
def test_row_sparse_gradients_are_refused_where_they_cannot_be_used(mode, name, section):
    net = lookup(name)
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    config = {"boost": switches, "gradients": {"clip_norm": 1.0}}
    if section == "grad_accumulation":
        switches[section] = True
        config = {"boost": switches, section: {"grad_accumulation_step": 2}}
    optimizer = nn.LazyAdam(net.trainable_params())
    with pytest.raises(ValueError, match=rf"{section} needs dense gradients, but .*Lookup"):
        ms.Model(net, nn.MSELoss(), optimizer, boost_level="O1", boost_config_dict=config)


def test_dense_networks_are_not_refused():
    check_dense(nn.SequentialCell(nn.Embedding(6, 2), nn.Dense(2, 2)), "x")


def late_freezing():
    """Return a Model whose schedule freezes nothing in its first updates."""
    net = nets.Deep()
    switches = {"mode": "manual", "less_bn": False}
    config = {"boost": switches, "grad_freeze": {"schedule": "cubic", "param_groups": 3}}
    return model_of(net, config, metrics={"loss"})


@pytest.mark.parametrize("call", ["train", "fit"])
def test_a_schedule_that_freezes_after_the_training_is_told(call):
    data = [nets.dataset(2)] * (2 if call == "fit" else 1)
    with pytest.warns(NoEffectWarning, match=r"nothing is frozen in the 6 updates .*total_steps"):
        getattr(late_freezing(), call)(3, *data, dataset_sink_mode=False)


@pytest.mark.parametrize("named", [True, False])
def test_only_epochs_that_are_trained_count(named):
    sink = {"dataset_sink_mode": False, "initial_epoch": 2} if named else {}
    places = () if named else (None, False, -1, 2)  # callbacks, sink mode and size, first epoch
    with pytest.warns(NoEffectWarning, match=r"nothing is frozen in the 2 updates "):
        late_freezing().train(3, nets.dataset(2), *places, **sink)


def test_a_schedule_that_freezes_within_the_training_is_not_told():
    net = nets.Deep()
    switches = {"mode": "manual", "less_bn": False}
    freeze = {"schedule": "step", "prefix_start": 0.5, "total_steps": 4, "param_groups": 3}
    config = {"boost": switches, "grad_freeze": freeze}
    optimizer = nets.momentum(net.trainable_params())
    model = ms.Model(net, nets.loss_fn(), optimizer, boost_level="O1", boost_config_dict=config)
    model.train(2, nets.dataset(2), dataset_sink_mode=False)  # warnings are errors
    assert int(model.train_network.optimizer.position.asnumpy()) == 4
