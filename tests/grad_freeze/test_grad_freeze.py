"""Gradient freezing: groups, schedules, the optimizer around the plain one, the training steps."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import mindspore_boost_ext
from mindspore_boost_ext.grad_freeze.freezing import (
    FreezeOpt,
    FreezeSchedule,
    GradientFreeze,
    ScheduledSteps,
    freeze_cell,
    prefix_schedule,
    tabulate,
)
from mindspore_boost_ext.grad_freeze.optimizer import POSITION_NAME, prepare_first_step
from mindspore_boost_ext.report import BoostWarning, NoEffectWarning

WIDTH = 2


class Deep(nn.Cell):
    """Six small layers, three chunks of four parameters. Tensors too small to be vectorised."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(*[nn.Dense(WIDTH, WIDTH) for _ in range(6)])
        generator = np.random.default_rng(3)
        for one in self.trainable_params():
            one.set_data(Tensor(generator.normal(size=one.shape).astype(np.float32)))

    def construct(self, x):
        return self.layers(x)


class Convolutions(nn.Cell):
    """Convolutions with BatchNorm, as ResNets name them, and a classifier."""

    def __init__(self, blocks=4, bias=False, norm="bn"):
        super().__init__()
        for block in range(blocks):
            setattr(self, f"conv{block}", nn.Conv2d(2, 2, 3, has_bias=bias))
            setattr(self, f"{norm}{block}", nn.BatchNorm2d(2))
        self.fc = nn.Dense(2, 2)


def two_layers():
    """Return two layers with bias, for optimizers that take long in PYNATIVE_MODE."""
    return nets.fill(nn.SequentialCell(nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH)))


class Dense(nn.Cell):
    """Layers without bias: chunks of exactly three parameters."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.SequentialCell(*[nn.Dense(2, 2, has_bias=False) for _ in range(layers)])


def momentum(net, **kwargs):
    return nn.Momentum(net.trainable_params(), 0.05, 0.9, weight_decay=1e-2, **kwargs)


def with_loss(net):
    return nn.WithLossCell(net, nn.MSELoss())


def batch(step):
    generator = np.random.default_rng(50 + step)
    return tuple(Tensor(generator.normal(size=(3, WIDTH)).astype(np.float32)) for _ in range(2))


def train_steps(net, optimizer, sens=1.0):
    grad = ops.GradOperation(get_by_list=True, sens_param=True)
    return freeze_cell(False, with_loss(net), optimizer, sens, grad, False)


@pytest.fixture
def upstream():
    """MindSpore's own GradientFreeze."""
    from mindspore import boost

    mindspore_boost_ext.uninstall()
    try:
        yield boost.GradientFreeze(10, 0, 0.5, 100)
    finally:
        mindspore_boost_ext.install()


# --- sequences -----------------------------------------------------------------------------------


def test_type_0_equals_upstream_entry_by_entry(upstream):
    ours = GradientFreeze(10, 0, 0.5, 100)
    for groups in (1, 2, 3, 5, 10, 17):
        for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
            for steps in (1, 2, 7, 50, 99, 100, 1234):
                arguments = (groups, 0, share, steps)
                got = ours.generate_freeze_index_sequence(*arguments)
                assert got == upstream.generate_freeze_index_sequence(*arguments), arguments


def test_type_1_has_upstreams_pattern_of_zeros(upstream):
    """Which steps freeze is not drawn, so it is the same; only which group is."""
    ours = GradientFreeze(10, 1, 0.5, 100, seed=1)
    for groups in (1, 2, 5, 10):
        for share in (0.0, 0.3, 0.7, 0.95):
            got = ours.generate_freeze_index_sequence(groups, 1, share, 200)
            wanted = upstream.generate_freeze_index_sequence(groups, 1, share, 200)
            assert [k == 0 for k in got] == [k == 0 for k in wanted]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.7, 0.9])
def test_freeze_p_is_the_share_of_steps_that_train_everything(share):
    sequence = GradientFreeze(10, 1, share, 5000).generate_freeze_index_sequence(10, 1, share, 5000)
    assert len(sequence) == 5050
    # The sequence steers the running share: it is off by one step at most.
    assert abs(sequence.count(0) - share * len(sequence)) <= 1


def test_type_1_draws_early_groups_more_often():
    groups, steps = 5, 40000
    sequence = GradientFreeze(groups, 1, 0.0, steps).generate_freeze_index_sequence(
        groups, 1, 0.0, steps
    )
    drawn = np.array(sequence[1:])
    for group in range(1, groups):
        expected = (groups - group) / (groups * (groups - 1) / 2)
        # Five standard deviations of a share among n independent draws.
        tolerance = 5 * np.sqrt(expected * (1 - expected) / len(drawn))
        assert abs(np.mean(drawn == group) - expected) < tolerance


def test_type_1_depends_on_its_seed_alone():
    def draw(seed):
        np.random.seed(len(str(seed)))
        return GradientFreeze(5, 1, 0.3, 300, seed=seed).generate_freeze_index_sequence(
            5, 1, 0.3, 300
        )

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    np.random.seed(0)
    first = np.random.random()
    np.random.seed(0)
    GradientFreeze(5, 1, 0.3, 300).generate_freeze_index_sequence(5, 1, 0.3, 300)
    assert np.random.random() == first  # the global generator is left alone


# Worked by hand from the formulas in the docstring, 12 steps, 4 groups (K = 3 frozen parts).
PREFIXES = {
    "linear": ({"start": 0.25}, [3, 6, 9]),
    "cubic": ({"kind": "cubic", "start": 0.125}, [2, 4, 7]),  # 1.5, 3.56, 6.94
    "step": ({"kind": "step", "start": 0.5}, [6, 6, 6]),
    "part": ({"start": 0.5, "fraction": 0.67}, [6, 9]),
    "at once": ({"kind": "step", "start": 0.0}, [0, 0, 0]),
    "nothing": ({"fraction": 0.0}, []),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefix_schedules_freeze_for_good(name):
    arguments, first_steps = PREFIXES[name]
    schedule = prefix_schedule(4, 12, **arguments)
    wanted = [sum(first <= step for first in first_steps) for step in range(12)]
    assert list(schedule.groups) == wanted
    assert schedule.at(10**6) == wanted[-1]


def test_errors_of_binary_fractions_move_no_step_and_no_group():
    """0.55 * 100 is a little above 55, and 0.29 * 100 a little below 29."""
    assert prefix_schedule(2, 100, start=0.55).groups[54:56] == (0, 1)
    assert prefix_schedule(101, 100, "step", fraction=0.29, start=0.0).groups[0] == 29


def test_schedules_wrap_or_hold_at_their_end():
    assert [FreezeSchedule((0, 1, 2)).at(step) for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    held = FreezeSchedule((0, 1, 2), "hold")
    assert [held.at(step) for step in range(5)] == [0, 1, 2, 2, 2]
    assert tabulate(lambda step: step // 2, 6).groups == (0, 0, 1, 1, 2, 2)


# --- groups --------------------------------------------------------------------------------------


NETS = {
    "dense": (lambda: Dense(16), (1, 2, 3, 5)),
    "with bias": (Deep, (1, 2, 3)),
    "conv bn": (Convolutions, (1, 2, 4)),
    "conv bias bn": (lambda: Convolutions(6, bias=True), (1, 2, 3, 5, 6)),
    "norm without bn in its name": (lambda: Convolutions(5, norm="norm"), (1, 2, 4, 5)),
}


@pytest.mark.parametrize("name", NETS)
def test_groups_equal_upstreams_where_it_has_as_many(name, upstream):
    make, numbers = NETS[name]
    net = make()
    for number in numbers:
        got = GradientFreeze(number, 0, 0.5, 10).split_parameters_groups(net, number)
        wanted = upstream.split_parameters_groups(net, number)
        assert [[one.name for one in group] for group in got] == [
            [one.name for one in group] for group in wanted
        ]


def test_no_more_groups_than_the_network_has_chunks():
    net = Deep()
    groups = GradientFreeze(10, 0, 0.5, 10).split_parameters_groups(net, 10)
    assert [len(group) for group in groups] == [12, 8, 4]
    network, optimizer = GradientFreeze(10, 1, 0.5, 10).freeze_generate(net, momentum(net))
    assert network is net
    assert optimizer.counts() == {
        "groups": 3,
        "distinct_groups": 3,
        "steps_training_everything_percent": 50,
    }


def test_one_group_only_is_told_as_having_no_effect():
    net = Dense(2)
    with pytest.warns(NoEffectWarning, match="param_groups=4 and this network give only one group"):
        _, optimizer = GradientFreeze(4, 0, 0.5, 10).freeze_generate(net, momentum(net))
    assert set(optimizer.train_strategy) == {0}


def test_a_first_part_that_is_never_trained_is_warned_of():
    """Upstream's continuous sequence cuts the steps of group 0 off where freeze_p is small."""
    net = Dense(6)
    with pytest.warns(BoostWarning, match=r"type=0, freeze_p=0.4 and 2 groups no update trains"):
        _, optimizer = GradientFreeze(2, 0, 0.4, 1000).freeze_generate(net, momentum(net))
    assert set(optimizer.train_strategy) == {1}


def test_parameters_that_the_network_does_not_have_are_never_frozen():
    net = Deep()
    extra = Parameter(Tensor([1.0]), name="loss.temperature")
    plain = nn.SGD([extra, *net.trainable_params()[2:]], 0.1)
    _, optimizer = GradientFreeze(2, 0, 0.5, 10).freeze_generate(net, plain)
    assert optimizer.group_positions[0] == tuple(range(11))
    assert all(0 in group for group in optimizer.group_positions)


# --- the optimizer -------------------------------------------------------------------------------


def test_freeze_opt_reads_and_updates_as_the_plain_optimizer(mode):
    net, other = Deep(), Deep()
    plain, reference = momentum(net, loss_scale=4.0), momentum(other, loss_scale=4.0)
    optimizer = FreezeOpt(plain)
    assert isinstance(optimizer, nn.Optimizer)
    assert optimizer.opt is plain
    assert optimizer.parameters is plain.parameters
    assert optimizer.learning_rate is plain.learning_rate
    assert optimizer.global_step is plain.global_step
    assert optimizer.get_lr() is plain.get_lr()
    assert optimizer.get_lr_parameter(plain.parameters[1]) is plain.learning_rate
    assert (optimizer.loss_scale, optimizer.dynamic_lr, optimizer.unique) == (4.0, False, True)
    assert optimizer.moments is plain.moments
    with pytest.raises(AttributeError, match="no_such_thing"):
        optimizer.no_such_thing  # noqa: B018
    plain._inner = 1  # what is private to the plain optimizer stays there
    assert not hasattr(optimizer, "_inner")
    gradients = tuple(Tensor(np.full(one.shape, 0.5, np.float32)) for one in plain.parameters)
    optimizer(gradients)
    reference(gradients)
    nets.assert_same(nets.weights(plain), nets.weights(reference))
    optimizer.learning_rate = Tensor(0.5, ms.float32)
    assert float(plain.learning_rate.asnumpy()) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda params: nn.Adam(filter(lambda one: True, params), 0.1),
        lambda params: nn.Momentum(
            [{"params": params[:5], "lr": 0.2}, {"params": params[5:]}], 1, 0.9
        ),
        lambda params: nn.LARS(nn.Adam(params, 0.1)),
        lambda params: nn.Lamb(params, 0.1),
    ],
)
@pytest.mark.parametrize("groups", [1, 3, 20])
def test_the_state_is_the_plain_optimizers_whatever_the_number_of_groups(make, groups):
    net = Deep()
    names = [one.name for one in net.get_parameters()]
    plain = make(net.trainable_params())
    plain_state = {id(one): one for one in plain.get_parameters()}
    positions = [list(plain.parameters)[k % 12 :] for k in range(groups)]
    optimizer = FreezeOpt(plain, positions)
    cells = [optimizer, *optimizer.opts]
    reached = {id(one): one for cell in cells for one in cell.get_parameters()}
    extra = [reached[key] for key in reached.keys() - plain_state.keys()]
    assert [(one.name, one.dtype, one.shape) for one in extra] == [(POSITION_NAME, ms.int32, ())]
    assert [one.name for one in net.get_parameters()] == names
    assert len({id(view) for view in optimizer.opts}) == min(groups, 12)


def test_groups_may_be_dicts_and_come_in_any_order():
    net = Deep()
    params = net.trainable_params()
    optimizer = FreezeOpt(
        momentum(net),
        [[{"params": params}, {"order_params": params}], (params[5], params[2])],
        Tensor([0, 1, 1], ms.int32),
    )
    assert optimizer.train_strategy == (0, 1, 1)
    assert [one.name for one in optimizer.train_parameter_groups[1]] == [
        params[2].name,
        params[5].name,
    ]
    assert optimizer.view(0) is optimizer.opt
    assert optimizer.view(1) is optimizer.view(1)


# --- training ------------------------------------------------------------------------------------


def reference_step(plain, step_cell, positions, step):
    """The plain training step with the parameters outside ``positions`` put back afterwards."""
    trained = [plain.parameters[place].name for place in positions]
    frozen = [one.name for one in plain.parameters if one.name not in trained]
    before = nets.weights(plain)
    loss = step_cell(*batch(step))
    for one in plain.get_parameters():
        if any(one.name.endswith(name) for name in frozen):
            ops.assign(one, Tensor(before[one.name]))
    return loss.asnumpy()


RATES = [0.05, 0.04, 0.03, 0.02, 0.01, 0.005, 0.001, 0.0005]
TRAINED = {
    "Momentum": momentum,
    "Adam": lambda net: nn.Adam(net.trainable_params(), RATES, weight_decay=1e-2),
    "groups": lambda net: nn.AdamWeightDecay(
        [
            {"params": net.trainable_params()[:5], "lr": nn.ExponentialDecayLR(0.1, 0.5, 2)},
            {"params": net.trainable_params()[5:], "weight_decay": 0.1},
        ],
        0.05,
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_by_the_schedule_is_plain_training_with_the_frozen_put_back(name, mode):
    net, other = Deep(), Deep()
    plain, reference = TRAINED[name](net), TRAINED[name](other)
    _, optimizer = GradientFreeze(3, 0, 0.5, 4).freeze_generate(net, plain)
    assert optimizer.train_strategy == (0, 0, 1, 2)
    steps = ScheduledSteps(train_steps(net, optimizer), optimizer)
    reference_cell = nn.TrainOneStepCell(with_loss(other), reference, 1.0)
    for step in range(6):
        positions = optimizer.group_positions[optimizer.schedule.at(step)]
        expected = reference_step(reference, reference_cell, positions, step)
        np.testing.assert_array_equal(steps(*batch(step)).asnumpy(), expected)
        nets.assert_same(nets.weights(plain), nets.weights(reference))
        assert int(optimizer.position.asnumpy()) == step + 1
        assert int(plain.global_step.asnumpy()[0]) == step + 1
    assert [one.name for one in net.get_parameters()] == [
        one.name for one in other.get_parameters()
    ]


@pytest.mark.parametrize(("kind", "moved"), [(nn.Rprop, 0.05), (nn.ASGD, 0.025)])
def test_state_set_up_in_the_first_step_reaches_parameters_frozen_then(kind, moved, mode):
    """Else Rprop's step size would start at its minimum, 1e-6, and ASGD's rate at 0.

    Those that the optimizer lists first have another rate.
    """
    net = two_layers()
    every = tuple(net.trainable_params())
    plain = kind([{"params": every[2:], "lr": 0.2}, {"params": every[:2]}], 0.05)
    optimizer = FreezeOpt(plain, [every, every[2:]], [1, 0])
    gradients = tuple(Tensor(np.full(one.shape, 0.5, np.float32)) for one in plain.parameters)
    optimizer.view(1)(gradients[:2])
    before = every[0].asnumpy().copy()
    optimizer.view(0)(gradients)
    # ASGD also shrinks the weights, by 1e-4 times the rate.
    np.testing.assert_allclose(before - every[0].asnumpy(), moved, atol=5e-5)


@pytest.mark.parametrize("kind", [nn.Rprop, nn.ASGD])
def test_state_set_up_in_the_first_step_changes_nothing_for_those_trained_then(kind):
    net, other = two_layers(), two_layers()
    plain, prepared = kind(net.trainable_params(), 0.05), kind(other.trainable_params(), 0.05)
    prepare_first_step(prepared)
    gradients = tuple(Tensor(np.full(one.shape, 0.5, np.float32)) for one in plain.parameters)
    plain(gradients)
    prepared(gradients)
    nets.assert_same(nets.weights(prepared), nets.weights(plain))
    after = nets.weights(plain)
    prepare_first_step(plain)
    nets.assert_same(nets.weights(plain), after)


def test_a_resumed_training_goes_on_bit_for_bit(mode, tmp_path):
    def build():
        net = Deep()
        _, optimizer = GradientFreeze(3, 1, 0.4, 20, seed=5).freeze_generate(net, momentum(net))
        return ScheduledSteps(train_steps(net, optimizer), optimizer)

    whole = build()
    for step in range(3):
        whole(*batch(step))
    ms.save_checkpoint(whole, str(tmp_path / "half.ckpt"))
    resumed = build()
    missing = ms.load_param_into_net(resumed, ms.load_checkpoint(str(tmp_path / "half.ckpt")))
    assert missing == ([], [])
    for step in range(3, 6):
        whole(*batch(step))
        resumed(*batch(step))
    nets.assert_same(nets.weights(resumed), nets.weights(whole))


def test_checkpoints_of_plain_and_frozen_training_load_into_each_other(tmp_path):
    net, other = Deep(), Deep()
    plain = nn.TrainOneStepCell(with_loss(net), momentum(net), 1.0)
    _, optimizer = GradientFreeze(3, 0, 0.5, 4).freeze_generate(other, momentum(other))
    frozen = ScheduledSteps(train_steps(other, optimizer), optimizer)
    paths = [str(tmp_path / name) for name in ("plain.ckpt", "frozen.ckpt")]
    for cell, path in zip((plain, frozen), paths):
        ms.save_checkpoint(cell, path)
    assert ms.load_param_into_net(frozen, ms.load_checkpoint(paths[0])) == ([POSITION_NAME], [])
    assert ms.load_param_into_net(plain, ms.load_checkpoint(paths[1])) == ([], [POSITION_NAME])


def test_a_held_schedule_stays_and_equal_groups_share_a_step(mode):
    net = Deep()
    every = net.trainable_params()
    groups = [every, every[4:], every[4:], every]
    optimizer = FreezeOpt(momentum(net), groups, FreezeSchedule((0, 2), "hold"))
    steps = train_steps(net, optimizer)
    assert (steps[1], steps[3]) == (steps[2], steps[0])
    scheduled = ScheduledSteps(steps, optimizer)
    assert len(scheduled.steps) == 2
    for step in range(4):
        before = every[0].asnumpy().copy()
        scheduled(*batch(step))
        assert np.array_equal(before, every[0].asnumpy()) == (step > 0)


def test_without_a_strategy_the_groups_take_turns(mode):
    net = Deep()
    every = net.trainable_params()
    optimizer = FreezeOpt(momentum(net), [every, every[8:]])
    assert optimizer.train_strategy is None
    scheduled = ScheduledSteps(train_steps(net, optimizer), optimizer)
    moved = []
    for step in range(4):
        before = every[0].asnumpy().copy()
        scheduled(*batch(step))
        moved.append(not np.array_equal(before, every[0].asnumpy()))
    assert moved == [True, False, True, False]


def test_a_fixed_loss_scale_is_divided_out(mode):
    """A power of two changes no bit."""
    results = []
    for scale in (1.0, 1024.0):
        net = Deep()
        plain = nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=scale)
        every = net.trainable_params()
        optimizer = FreezeOpt(plain, [every, every[4:]], [1])
        step = train_steps(net, optimizer, scale)[1]
        for number in range(2):
            step(*batch(number))
        results.append(nets.weights(net))
    nets.assert_same(*results)


# --- the user's own schedules --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ([0, 2, 1], [0, 2, 1, 0, 2, 1]),
        (lambda step: min(step, 2), [0, 1, 2, 2, 2, 2]),
        ("linear", [0, 0, 0, 1, 1, 2]),
        (FreezeSchedule((0, 1), "hold"), [0, 1, 1, 1, 1, 1]),
    ],
)
def test_a_schedule_of_ones_own(schedule, wanted):
    net = Deep()
    freeze = GradientFreeze(3, 1, 0.5, 6, schedule=schedule)
    _, optimizer = freeze.freeze_generate(net, momentum(net))
    assert [optimizer.schedule.at(step) for step in range(6)] == wanted


def test_a_schedule_may_have_one_step():
    assert tabulate(lambda step: step + 1, 1).at(5) == 1


# --- errors --------------------------------------------------------------------------------------


def test_all_wrong_arguments_are_told_at_once():
    with pytest.raises(ValueError, match="param_groups") as error:
        GradientFreeze(0, 2, 1.5, -5, seed=-1)
    assert str(error.value) == (
        "grad_freeze.param_groups must be an int from 1 to 2147483647, got 0 (int); "
        "grad_freeze.freeze_type must be one of 0, 1, got 2 (int); "
        "grad_freeze.freeze_p must be a number in [0, 1), got 1.5 (float); "
        "grad_freeze.total_steps must be an int from 1 to 2147483647, got -5 (int); "
        "grad_freeze.seed must be an int from 0 to 4294967295, got -1 (int)"
    )
    with pytest.raises(ValueError, match="freeze_strategy must be one of 0, 1, got 5"):
        GradientFreeze(2, 0, 0.5, 5).generate_freeze_index_sequence(2, 5, 0.5, 5)
    with pytest.raises(ValueError, match=r"kind must be one of 'linear', .* got 'sine'"):
        prefix_schedule(3, 5, "sine")


def wrong(*arguments):
    net = Deep()
    every = net.trainable_params()
    return FreezeOpt(*(one(net, every) if callable(one) else one for one in arguments))


def plain(net, every):
    return momentum(net)


MISTAKES = {
    "not an optimizer": ((3,), TypeError, r"opt must be an nn.Optimizer, got 3 \(int\)"),
    "strategy alone": (
        (plain, None, [0]),
        ValueError,
        "train_strategy needs train_parameter_groups",
    ),
    "groups of a type": ((plain, 3), TypeError, "train_parameter_groups must be a tuple or list"),
    "no groups": ((plain, []), ValueError, "must have at least one group: give None for one"),
    "empty group": ((plain, [[]]), ValueError, r"\[0\] must hold at least one parameter: leave"),
    "group of a type": ((plain, [3]), TypeError, "must be a list of Parameters, got 3"),
    "unknown group": (
        (plain, lambda net, every: [every], [0, 1]),
        ValueError,
        r"must name groups 0 to 0, got 1: the network has 1 groups",
    ),
    "negative": (
        (plain, lambda net, every: [every], [0, -1]),
        ValueError,
        "train_strategy must be an int from 0 to 2147483647, got -1",
    ),
    "empty strategy": (
        (plain, lambda net, every: [every], []),
        ValueError,
        "train_strategy must not be empty: give None",
    ),
    "a function": (
        (plain, lambda net, every: [every], lambda net, every: len),
        TypeError,
        r"tabulate\(function, total_steps\) makes one of a function",
    ),
    "a table": (
        (plain, lambda net, every: [every], Tensor([[0]], ms.int32)),
        ValueError,
        r"train_strategy must have one axis, got shape \(1, 1\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_rule(name):
    arguments, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        wrong(*arguments)


def test_freeze_cell_refuses_what_it_cannot_do():
    net = Deep()
    grad = ops.GradOperation(get_by_list=True, sens_param=True)
    with pytest.raises(TypeError, match="optimizer must be a FreezeOpt"):
        freeze_cell(False, net, momentum(net), 1.0, grad, False)
    with pytest.raises(
        ValueError, match="max_accumulation_step must be an int from 1 to 16777216, got 0"
    ):
        freeze_cell(False, net, FreezeOpt(momentum(net)), 1.0, grad, True, None, None, 0)
    with pytest.raises(
        TypeError,
        match=r"grad_freeze needs an nn.Optimizer, got NoneType: give one of mindspore.nn, or",
    ):
        GradientFreeze(2, 0, 0.5, 5).freeze_generate(net, None)


class LastAlone(GradientFreeze):
    """Has groups of its own."""

    def split_parameters_groups(self, net, freeze_para_groups_number):
        every = net.trainable_params()
        return [every, every[-1:]]


def test_groups_of_a_subclass_are_taken():
    net = nets.Deep()
    optimizer = nets.momentum(net.trainable_params())
    _, freezing = LastAlone(3, 0, 0.5, 8).freeze_generate(net, optimizer)
    last = net.trainable_params()[-1].name
    assert [one.name for one in freezing.train_parameter_groups[1]] == [last]


def test_groups_of_a_subclass_that_the_optimizer_does_not_train_go():
    net = nets.Deep()
    optimizer = nets.momentum(net.trainable_params()[:2])
    with pytest.warns(NoEffectWarning, match="give only one group"):
        _, freezing = LastAlone(3, 0, 0.5, 8).freeze_generate(net, optimizer)
    assert [len(one) for one in freezing.train_parameter_groups] == [2]


def test_a_schedule_is_not_set_anew():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    freezing = FreezeOpt(optimizer, [net.trainable_params()], [0])
    with pytest.warns(NoEffectWarning, match="train_strategy of a FreezeOpt that is made has no"):
        freezing.train_strategy = (0, 0)
    with pytest.raises(AttributeError, match="FreezeOpt"):
        _ = freezing.opt_index


@pytest.mark.parametrize(("fraction", "frozen"), [(1.0, 17), (0.5, 7)])
def test_a_prefix_is_a_share_of_all_parts_of_a_network(fraction, frozen):
    """19 chunks in 10 groups: with a stride of 1 the last group would have ten of them."""
    net = nn.SequentialCell(*[nn.Dense(2, 2) for _ in range(38)])
    made = GradientFreeze(
        10, 0, 0.7, 100, schedule="step", prefix_start=0.0, prefix_fraction=fraction
    )
    _, optimizer = made.freeze_generate(net, nets.momentum(net.trainable_params()))
    trained = optimizer.train_parameter_groups[optimizer.schedule.at(1000)]
    assert len(net.trainable_params()) - len(trained) == 4 * frozen
