"""Freezing inside the training step: with scales, windows and clipping, through ms.Model."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from models import loss_of, model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    BoostWarning,
    FreezeOpt,
    GroupLossScaleManager,
    NoEffectWarning,
    make_train_step,
)
from mindspore_boost_ext.grad_freeze.freezing import split_chunks

SCHEDULE = [0, 1, 2, 1, 0]


def config(accumulate=1, clip_norm=None, **settings):
    section = {"param_groups": 3, "schedule": SCHEDULE, **settings}
    boost = {"mode": "manual", "less_bn": False, "grad_accumulation": accumulate > 1}
    full = {"boost": boost, "grad_freeze": section, "gradients": {"clip_norm": clip_norm}}
    if accumulate > 1:
        full["grad_accumulation"] = {"grad_accumulation_step": accumulate}
    return full


def decaying(net, boost_config, optimizer=None, **kwargs):
    optimizer = optimizer or nets.momentum(net.trainable_params(), weight_decay=1e-3)
    return model_of(net, boost_config, optimizer, **kwargs)


def trained_in(optimizer, update):
    """Return the names trained in an update, by the schedule as it was given."""
    group = SCHEDULE[update % len(SCHEDULE)]
    return {parameter.name for parameter in optimizer.train_parameter_groups[group]}


def put_back(net, optimizer, before, trained):
    """Undo an update of the plain optimizer outside ``trained``: weights and their moments."""
    for parameter in (*net.trainable_params(), *optimizer.moments):
        name = parameter.name.replace("moments.", "")
        if name not in trained:
            ms.ops.assign(parameter, Tensor(before[parameter.name]))


def state_of_both(net, optimizer):
    return {**nets.weights(net), **nets.weights(optimizer)}


SCALES = {
    "no scale": lambda net: {},
    "fixed": lambda net: {"loss_scale_manager": ms.FixedLossScaleManager(64.0)},
    "dynamic": lambda net: {"loss_scale_manager": ms.DynamicLossScaleManager(64, 2, 3)},
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scale", SCALES)
def test_frozen_parameters_stay_and_the_others_train_as_plain(mode, scale, accumulate):
    """Reference: the plain step on everything, then what the group leaves out is put back."""
    plain_net, net = nets.Deep(), nets.Deep()
    plain_optimizer = nets.momentum(plain_net.trainable_params(), weight_decay=1e-3)
    plain_config = config(accumulate)
    plain_config["boost"]["grad_freeze"] = False
    del plain_config["grad_freeze"]
    plain = decaying(plain_net, plain_config, plain_optimizer)
    model = decaying(net, config(accumulate), **SCALES[scale](net))
    optimizer = model.train_network.optimizer
    assert isinstance(optimizer, FreezeOpt)
    for update, start in enumerate(range(0, 7 * accumulate, accumulate)):
        before = state_of_both(plain_net, plain_optimizer)
        for x, y in nets.batches(7 * accumulate)[start : start + accumulate]:
            plain.train_network(Tensor(x), Tensor(y))
            model.train_network(Tensor(x), Tensor(y))
        put_back(plain_net, plain_optimizer, before, trained_in(optimizer, update))
        nets.assert_same_weights(net, plain_net)
        assert int(optimizer.position.asnumpy()) == update + 1
    moments = {one.name: one.asnumpy() for one in plain_optimizer.moments}
    for one in optimizer.opt.moments:
        np.testing.assert_array_equal(one.asnumpy(), moments[one.name])
    assert int(optimizer.global_step.asnumpy()[0]) == 7


def test_only_groups_whose_turn_has_come_are_compiled(graph_mode):
    model = decaying(nets.Deep(hidden=1), config(param_groups=2, schedule=[0, 0, 1, 1]))
    counts = []
    for x, y in nets.batches(4):
        model.train_network(Tensor(x), Tensor(y))
        counts.append(sum(bool(one.compile_cache) for one in model.train_network.freeze_nets))
    assert counts == [1, 1, 2, 2]


def test_inside_another_graph_the_choice_is_made_in_the_graph(mode):
    """As in sink mode, where nothing on the host runs between two steps."""
    inner, outer = nets.Deep(), nets.Deep()
    step = decaying(inner, config()).train_network
    wrapped_step = decaying(outer, config()).train_network
    wrapped = nets.Outer(wrapped_step)
    for x, y in nets.batches(6):
        step(Tensor(x), Tensor(y))
        wrapped(Tensor(x), Tensor(y))
    nets.assert_same_weights(inner, outer)
    assert int(wrapped_step.optimizer.position.asnumpy()) == 6


@pytest.mark.parametrize("grouped", [False, True])
def test_a_skipped_step_does_not_move_the_schedule(mode, grouped):
    net, boost_config = nets.Deep(hidden=1), config(param_groups=2, schedule=[0, 1])
    if grouped:
        manager = GroupLossScaleManager(64.0, [])

        class Marked(nets.Deep):
            def construct(self, x):
                return manager(super().construct(manager(x, 0, 1)), 1, 2)

        net = Marked(hidden=1)
        manager.loss_scale_groups = [net.trainable_params()]
        boost_config["boost"]["loss_scale_group"] = True
    else:
        manager = ms.DynamicLossScaleManager(64, 2, 100)
    model = decaying(net, boost_config, loss_scale_manager=manager)
    optimizer = model.train_network.optimizer
    (x, y), (other, labels) = nets.batches(2)
    model.train_network(Tensor(x), Tensor(y))
    before = state_of_both(net, optimizer)
    _, overflow, _ = model.train_network(Tensor(np.full_like(x, np.inf)), Tensor(y))
    assert bool(overflow.asnumpy())
    np.testing.assert_equal(state_of_both(net, optimizer), before)
    assert int(optimizer.position.asnumpy()) == 1
    model.train_network(Tensor(other), Tensor(labels))
    changed = {name for name, value in nets.weights(net).items() if (value != before[name]).any()}
    assert changed == trained_in(optimizer, 1)


def test_group_scales_and_freezing(mode):
    """Two groups of scales, three of freezing: with scales that do not move, exact in float32."""

    def marked(manager):
        class Marked(nets.Deep):
            def construct(self, x):
                x = self.first(x if manager is None else manager(x, 0, 1))
                for index, layer in enumerate(self.hidden):
                    if index == 2 and manager is not None:
                        x = manager(x, 1, 2)
                    x = x + layer(x)
                x = self.last(x)
                return x if manager is None else manager(x, 2, 3)

        return Marked()

    plain = marked(None)
    decaying(plain, config()).train(1, nets.dataset(5), dataset_sink_mode=False)
    manager = GroupLossScaleManager([64.0, 4.0], [], growth_factor=1.0)
    net = marked(manager)
    parameters = net.trainable_params()
    manager.loss_scale_groups = [parameters[:6], parameters[6:]]
    boost_config = config()
    boost_config["boost"]["loss_scale_group"] = True
    model = decaying(net, boost_config, loss_scale_manager=manager)
    model.train(1, nets.dataset(5), dataset_sink_mode=False)
    nets.assert_same_weights(net, plain)


def test_a_subclass_with_state_over_all_weights_works(mode):
    """As public projects write it: an average of all weights around upstream's freezing branch."""

    def copied(average, weight):
        return ms.ops.assign(average, weight * 1.0)

    class Averaged(BoostTrainOneStepCell):
        def __init__(self, network, optimizer):
            super().__init__(network, optimizer)
            self.hyper_map = ms.ops.HyperMap()
            self.average = self.weights.clone("average", "same")

        def plain(self, *inputs):
            return super().construct(*inputs)

        def construct(self, *inputs):
            frozen = self.freeze
            loss = self.gradient_freeze_process(*inputs) if frozen else self.plain(*inputs)
            moved = self.hyper_map(copied, self.average, self.weights)
            return ms.ops.depend(loss, moved)

    net, plain = nets.Deep(hidden=1), nets.Deep(hidden=1)
    settings = config(param_groups=2, schedule=[0, 1])
    with AutoBoost("O1", settings).building() as boost:
        _, optimizer = boost.network_auto_process_train(net, nets.momentum(net.trainable_params()))
        step = Averaged(nn.WithLossCell(net, nets.loss_fn()), optimizer)
    reference = decaying(plain, settings, nets.momentum(plain.trainable_params())).train_network
    for x, y in nets.batches(5):
        loss = step(Tensor(x), Tensor(y))
        assert float(loss.asnumpy()) == float(reference(Tensor(x), Tensor(y)).asnumpy())
    nets.assert_same_weights(net, plain)
    for weight, average in zip(step.weights, step.average):
        np.testing.assert_array_equal(weight.asnumpy(), average.asnumpy())


def test_settings_given_after_the_build_reach_the_groups(graph_mode):
    net = nets.Deep()
    net.set_jit_config(ms.JitConfig(jit_level="O1"))
    net.set_inputs(Tensor(shape=[None, nets.FEATURES], dtype=ms.float32))
    loss = nets.loss_fn()
    loss.set_inputs(
        Tensor(shape=[None, nets.CLASSES], dtype=ms.float32), Tensor(shape=[None], dtype=ms.int32)
    )
    model = model_of(net, config(), loss_fn=loss)
    step = model.train_network
    for (x, y), size in zip(nets.batches(2), (8, 5)):
        step(Tensor(x[:size]), Tensor(y[:size]))
    for used in (step.freeze_nets[0], step.freeze_nets[1]):
        assert used.jit_config_dict == step.jit_config_dict != {}
        assert [one.shape for one in used.get_inputs()] == [one.shape for one in step.get_inputs()]


def test_a_flush_trains_the_group_whose_turn_it_is(pynative_mode):
    net = nets.Deep(hidden=1)
    settings = config(accumulate=2, param_groups=2, schedule=[0, 1])
    step = decaying(net, settings).train_network
    for x, y in nets.batches(3):  # an update of group 0, and half a window of group 1
        step(Tensor(x), Tensor(y))
    before = nets.weights(net)
    assert step.flush_accumulation()
    moved = {name for name, value in nets.weights(net).items() if (value != before[name]).any()}
    assert moved == {one.name for one in step.optimizer.train_parameter_groups[1]}
    assert len(moved) < len(before)


def test_a_freeze_opt_of_the_users_own_is_taken_as_it_is():
    net = nets.Deep()
    every = net.trainable_params()
    own = FreezeOpt(nets.momentum(every), [every, every[4:]], [1, 0])
    assert decaying(net, config(), own).train_network.optimizer is own
    with pytest.warns(NoEffectWarning, match="boost_level O0 freezes nothing"):
        ms.Model(net, nets.loss_fn(), own)
    with pytest.raises(TypeError, match="opt is a FreezeOpt already"):
        FreezeOpt(own)


def test_dropout_between_frozen_layers_rests_when_asked(mode):
    """At rate 0 the loss of a batch repeats while everything random is frozen, and only then."""

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            layers = [nn.Dense(3, 3), nn.Dropout(p=0.5), nn.Dense(3, 3), nn.Dense(3, 3)]
            self.layers = nn.SequentialCell(layers)
            nets.fill(self)

        def construct(self, x):
            return self.layers(x)

    losses = {}
    for eval_frozen in (False, True):
        net = Net()
        settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=eval_frozen)
        model = decaying(net, settings, nn.SGD(net.trainable_params(), 0.0))
        ((x, y),) = nets.batches(1)
        losses[eval_frozen] = {
            float(model.train_network(Tensor(x), Tensor(y)).asnumpy()) for _ in range(4)
        }
    assert len(losses[True]) == 1
    assert len(losses[False]) > 1


def test_amp_level_auto_keeps_a_frozen_dropout_at_rest(mode):
    """It sets a construct on the network, which the copy with the resting layers has of its own."""
    layers = [nn.Dense(3, 3), nn.Dropout(p=0.5), nn.Dense(3, 3), nn.Dense(3, 3)]
    net = nets.fill(nn.SequentialCell(layers))
    settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=True)
    model = model_of(net, settings, nn.SGD(net.trainable_params(), 0.0), amp_level="auto")
    ((x, y),) = nets.batches(1)
    losses = {loss_of(model.train_network(Tensor(x), Tensor(y))) for _ in range(4)}
    assert len(losses) == 1


def test_a_dropout_that_a_trained_layer_shares_stays_on_there(mode):
    """At rate 0 the loss of a batch varies by that dropout alone."""

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            drop = nn.Dropout(p=0.5)
            self.first = nn.SequentialCell(nn.Dense(3, 3), drop, nn.Dense(3, 3), drop)
            self.last = nn.SequentialCell(nn.Dense(3, 3), drop, nn.Dense(3, 3))
            nets.fill(self)

        def construct(self, x):
            return self.last(self.first(x))

    net = Net()
    settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=True)
    model = decaying(net, settings, nn.SGD(net.trainable_params(), 0.0))
    ((x, y),) = nets.batches(1)
    losses = {float(model.train_network(Tensor(x), Tensor(y)).asnumpy()) for _ in range(4)}
    assert len(losses) > 1


class Doubled(nn.Dense):
    """Calls the construct of the class that it derives from."""

    def construct(self, x):
        return 2 * super().construct(x)


@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
def test_a_frozen_layer_may_call_the_construct_of_its_base(mode):
    net = nets.fill(nn.SequentialCell(Doubled(3, 3), nn.Dropout(p=0.5), nn.Dense(3, 3)))
    net.append(nn.Dense(3, 3))
    settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=True)
    model = decaying(net, settings, nn.SGD(net.trainable_params(), 0.0))
    ((x, y),) = nets.batches(1)
    losses = {float(model.train_network(Tensor(x), Tensor(y)).asnumpy()) for _ in range(2)}
    assert len(losses) == 1


class Dropping(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.f2 = nn.Dense(3, 3), nn.Dropout(p=0.5), nn.Dense(3, 3)

    def construct(self, x):
        return self.f2(self.drop(self.fc(x)))


class Reaching(nn.Cell):
    """Calls the layers of its first part through an attribute next to it."""

    def __init__(self):
        super().__init__()
        self.a, self.head = Dropping(), nn.SequentialCell(nn.Dense(3, 3), nn.Dense(3, 3))
        self.way = self.made()
        nets.fill(self)

    def construct(self, x):
        return self.head(self.along(x))


class ByList(Reaching):
    def made(self):
        return [self.a.fc, self.a.drop, self.a.f2]

    def along(self, x):
        for layer in self.way:
            x = layer(x)
        return x


class ByPairs(ByList):
    def made(self):
        return [(self.a.fc, 0), (self.a.drop, 1), (self.a.f2, 2)]

    def along(self, x):
        for layer, _ in self.way:
            x = layer(x)
        return x


class ByDict(ByList):
    def made(self):
        return {"a": self.a}

    def along(self, x):
        return self.way["a"](x)


class ByMethod(Reaching):
    def made(self):
        return self.inner

    def inner(self, x):
        return self.a(x)

    def along(self, x):
        return self.way(x)


class ByMethodOfAnother(ByMethod):
    def made(self):
        return self.a.construct


class ByMethodInAList(ByMethod):
    def made(self):
        return [self.inner]

    def along(self, x):
        return self.way[0](x)


KINDS = [ByList, ByPairs, ByDict, ByMethod, ByMethodOfAnother, ByMethodInAList]


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_dropout_rests_however_it_is_reached(mode, kind):
    net = kind()
    settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=True)
    model = decaying(net, settings, nn.SGD(net.trainable_params(), 0.0))
    ((x, y),) = nets.batches(1)
    losses = {float(model.train_network(Tensor(x), Tensor(y)).asnumpy()) for _ in range(4)}
    assert len(losses) == 1


class Mean(nn.Cell):
    def construct(self, x):
        return x.mean()


def test_a_sequential_cell_that_ends_in_its_loss_may_have_layers_at_rest(mode):
    """Its set_grad returns None, where that of other Cells returns the Cell."""
    layers = [nn.Dense(3, 3), nn.Dropout(p=0.5), nn.Dense(3, 3), nn.Dense(3, 3), Mean()]
    net = nets.fill(nn.SequentialCell(*layers))
    settings = config(param_groups=2, schedule=[1, 1, 1, 1], eval_frozen=True)
    optimizer = nn.SGD(net.trainable_params(), 0.0)
    step = make_train_step(net, None, optimizer, level="O1", config=settings)
    assert len({loss_of(step(Tensor(nets.batches(1)[0][0]))) for _ in range(4)}) == 1


def test_a_step_that_chooses_no_group_is_warned_of(mode):
    net, (batch,) = nets.MLP(), nets.batches(1)
    every = net.trainable_params()
    groups = [every, every[2:]], [1]
    network = nn.WithLossCell(net, nets.loss_fn())
    step = nn.TrainOneStepCell(network, FreezeOpt(nets.momentum(every), *groups))
    with pytest.warns(NoEffectWarning, match="chooses no group, so nothing is frozen"):
        step(*map(Tensor, batch))


class Annealed(nn.Cell):
    """Its outputs have a factor, which scripts change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell([nn.Dense(3, 3) for _ in range(4)])
        self.factor, self.runs, self.last = 1.0, 0, None
        nets.fill(self)

    def construct(self, x):
        return self.layers(x) * self.factor


class Counting(Annealed):
    """Counts its runs, and keeps something of the last one."""

    def construct(self, x):
        self.runs += 1
        self.last = x * self.runs
        return super().construct(x)


def resting(net, schedule):
    """Return a step in which frozen layers are in evaluation mode, and that changes no weight."""
    settings = config(param_groups=2, schedule=schedule, eval_frozen=True)
    return decaying(net, settings, nn.SGD(net.trainable_params(), 0.0)).train_network


def test_steps_that_freeze_see_what_a_script_sets_before_the_first(mode):
    net, (batch,) = Annealed(), nets.batches(1)
    step = resting(net, [0, 1])
    net.factor = 0.0
    losses = [loss_of(step(*map(Tensor, batch))) for _ in range(2)]
    # Three classes, all logits 0: a float32 logarithm.
    assert losses == pytest.approx([np.log(3)] * 2, rel=1e-6)


def test_steps_that_freeze_see_what_a_script_sets_between_steps(pynative_mode):
    net, (batch,) = Annealed(), nets.batches(1)
    step, losses = resting(net, [0, 1]), []
    for net.factor in (1.0, 1.0, 0.0, 0.0, 1.0, 1.0):
        losses.append(loss_of(step(*map(Tensor, batch))))
    assert losses[0] != losses[2]
    assert losses == [one for one in losses[::2] for _ in range(2)]


def test_what_a_network_keeps_of_its_runs_is_there_after_steps_that_freeze(pynative_mode):
    net, (batch,) = Counting(), nets.batches(1)
    step = resting(net, [0, 1, 1])
    for run in range(1, 7):
        step(*map(Tensor, batch))
        assert net.runs == run
        np.testing.assert_array_equal(net.last.asnumpy(), batch[0] * np.float32(run))


def test_a_step_of_the_users_sees_what_a_script_sets_before_the_first(mode):
    class Own(BoostTrainOneStepCell):
        def construct(self, *inputs):
            return super().construct(*inputs) * 1.0

    net, (batch,) = Annealed(), nets.batches(1)
    network = nn.WithLossCell(net, nets.loss_fn())
    optimizer = nn.SGD(net.trainable_params(), 0.0)
    boost = AutoBoost("O1", config(param_groups=2, schedule=[1], eval_frozen=True))
    step = Own(*boost.network_auto_process_train(network, optimizer)).set_train()
    net.factor = 0.0
    assert loss_of(step(*map(Tensor, batch))) == pytest.approx(np.log(3), rel=1e-6)


@pytest.mark.parametrize("early", [True, False])
def test_hooks_run_in_steps_that_freeze(pynative_mode, early):
    net, (batch,), ran = Annealed(), nets.batches(1), []
    step = None if early else resting(net, [0, 1])
    net.register_forward_hook(lambda cell, inputs, outputs: ran.append("net"))
    handle = net.layers[0].register_forward_pre_hook(lambda cell, inputs: ran.append("first"))
    step = resting(net, [0, 1]) if early else step
    for _ in range(4):
        step(*map(Tensor, batch))
    assert ran == ["first", "net"] * 4
    handle.remove()
    for _ in range(2):
        step(*map(Tensor, batch))
    assert ran == ["first", "net"] * 4 + ["net"] * 2


def test_what_another_optimizer_trains_is_not_frozen(pynative_mode):
    """As a discriminator in the step of its generator, while all of the generator trains."""
    net = ByList()
    net.head.append(nn.Dense(3, 3))  # enough for two groups
    settings = config(param_groups=2, schedule=[0, 0, 0, 1], eval_frozen=True)
    model = decaying(net, settings, nn.SGD(net.head.trainable_params(), 0.0))
    ((x, y),) = nets.batches(1)
    losses = {float(model.train_network(Tensor(x), Tensor(y)).asnumpy()) for _ in range(3)}
    assert len(losses) > 1


@pytest.mark.parametrize(
    ("part", "chunks"),
    [("subnet", 3), ("layers", 3), ("bn1", 1), ("convbn", 1), ("down_bn", 1), ("net.bn", 1)],
)
def test_a_batch_norm_is_known_by_its_name_and_no_word_around_it(part, chunks):
    names = [f"{part}.{number}.weight" for number in range(9)]
    found = split_chunks([Parameter(Tensor([0.0]), name=name) for name in names])
    assert len(found) == chunks


def test_the_scale_of_a_normalised_head_stays_with_its_weight():
    names = ("first.weight", "first.bias", "fc.weight", "fc.bias", "fc.multiplier")
    found = split_chunks([Parameter(Tensor([0.0]), name=name) for name in names])
    assert [len(one) for one in found] == [5]


def test_settings_of_groups_of_a_freeze_opt_are_warned_of():
    every = nets.MLP().trainable_params()
    groups = [[{"params": every[:2], "lr": 0.0}, {"params": every[2:]}], every[2:]]
    with pytest.warns(BoostWarning, match="train_parameter_groups sets lr of some parameters"):
        FreezeOpt(nets.momentum(every), groups, [0, 1])


@pytest.mark.parametrize(
    "around", [lambda step: step, nets.Around], ids=["on the host", "in a graph"]
)
@pytest.mark.parametrize("eval_frozen", [False, True])
def test_statistics_of_frozen_layers_rest_when_asked(mode, eval_frozen, around):
    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.bn = nn.Dense(3, 3), nn.BatchNorm1d(3)

        def construct(self, x):
            return self.bn(self.dense(x))

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.blocks = nn.SequentialCell([Block() for _ in range(3)])
            nets.fill(self)

        def construct(self, x):
            return self.blocks(x)

    net = Net()
    model = decaying(net, config(schedule=[0, 2, 1], eval_frozen=eval_frozen))
    moved = []
    step = around(model.train_network)
    for x, y in nets.batches(3):
        before = nets.weights(net)
        step(Tensor(x), Tensor(y))
        after = nets.weights(net)
        means = [name for name in after if "moving_mean" in name]
        moved.append([bool((before[name] != after[name]).any()) for name in means])
    # Parts of at least 3 parameters: one block of 4 each; group k leaves out the first k blocks.
    rests = [[True, True, True], [False, False, True], [False, True, True]]
    assert moved == (rests if eval_frozen else [[True] * 3] * 3)
    assert all(cell.training for _, cell in net.cells_and_names())


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_layers_that_rest_keep_their_precision(mode, level):
    """Without BatchNorm and dropout nothing rests, so that eval_frozen must not change a bit."""
    runs = []
    for eval_frozen in (False, True):
        net = nets.Deep()
        model = decaying(net, config(schedule=[2, 1, 0], eval_frozen=eval_frozen), amp_level=level)
        runs.append([model.train_network(Tensor(x), Tensor(y)) for x, y in nets.batches(6)])
        runs[-1] = [float(loss[0] if isinstance(loss, tuple) else loss) for loss in runs[-1]]
        runs.append(nets.weights(net))
    assert runs[0] == runs[2]
    for name, value in runs[1].items():
        np.testing.assert_array_equal(value, runs[3][name])


def test_report_counts_groups():
    net = nets.Deep()
    row = decaying(net, config()).train_network.report()["grad_freeze"]
    assert row.counts["groups"] == 3
    assert row.counts["steps_training_everything_percent"] == 40  # 2 of 5
    assert row.asked_by == "level O1"


def test_both_cells_take_a_freeze_opt_directly(mode):
    """Without a configuration: FreezeOpt alone switches freezing on, as in upstream's step cell."""
    for cell in (BoostTrainOneStepCell, BoostTrainOneStepWithLossScaleCell):
        net = nets.Deep()
        every = net.trainable_params()
        optimizer = FreezeOpt(nets.momentum(every), [every, every[4:]], [1, 0])
        scale = (Tensor(64.0),) if cell is BoostTrainOneStepWithLossScaleCell else ()
        step = cell(nn.WithLossCell(net, nets.loss_fn()), optimizer, *scale).set_train()
        before = nets.weights(net)
        (x, y), *_ = nets.batches(1)
        step(Tensor(x), Tensor(y))
        after = nets.weights(net)
        changed = {name for name, value in after.items() if (value != before[name]).any()}
        assert changed == {one.name for one in every[4:]}


# ---- Functions of ms.jit in the network ----


class JittedDeep(nets.Deep):
    """The network as one function of ``ms.jit``."""

    @ms.jit
    def construct(self, x):
        x = self.first(x)
        for layer in self.hidden:
            x = x + layer(x)
        return self.last(x)


def test_a_compiled_network_that_is_frozen_first_is_refused():
    """MindSpore leaves the gradients that were not asked for at first out for ever."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    net = JittedDeep()
    step = decaying(net, config(schedule=[1, 0])).train_network
    with pytest.raises(ValueError, match=r"construct.*test_freezing.*begin with a step that"):
        step(*map(Tensor, nets.batches(1)[0]))


@pytest.mark.parametrize("schedule", [[0, 1, 0, 2], [0, 2, 1, 0]])
def test_a_compiled_network_that_is_first_trained_as_a_whole_trains_as_the_other(mode, schedule):
    found = []
    for kind in (nets.Deep, JittedDeep):
        net = kind()
        step = decaying(net, config(schedule=schedule)).train_network
        for batch in nets.batches(8):
            step(*map(Tensor, batch))
        found.append(nets.weights(net))
    for name, value in found[0].items():
        # Fused sums are added in another order.
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
