"""Rebuilding optimizers, OptimizerProcess, ParameterProcess: nothing unasked for changes."""

from __future__ import annotations

from collections import defaultdict, namedtuple

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.nn.optim.optimizer import opt_init_args_register

from mindspore_boost_ext import (
    AutoBoost,
    BoostWarning,
    FreezeOpt,
    NoEffectWarning,
    OptimizerProcess,
    ParameterProcess,
)
from mindspore_boost_ext.base.centralization import installed_axes, output_axes
from mindspore_boost_ext.base.rebuild import rebuilt

NAMES = ["weight", "gamma", "bias", "extra"]


def parameters():
    """Four parameters; MindSpore decays all but gamma where they are not grouped."""
    return [
        Parameter(Tensor(np.random.default_rng(place).normal(size=shape).astype(np.float32)), name)
        for place, (name, shape) in enumerate(zip(NAMES, [(2, 3), (2,), (2,), (3, 2)]))
    ]


def update(optimizer, steps, start=0):
    """Give every parameter gradients that depend on its name and the step only."""
    for step in range(start, start + steps):
        gradients = [
            np.random.default_rng([step, *one.name.encode()]).normal(size=one.shape)
            for one in optimizer.parameters
        ]
        optimizer(tuple(Tensor(one.astype(np.float32)) for one in gradients))


def assert_same_state(one, two):
    first, second = nets.weights(one), nets.weights(two)
    assert sorted(first) == sorted(second)
    assert len(first) == len(list(two.get_parameters()))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


# ---- Every optimizer, plain ----

PLAIN = {
    **nets.OPTIMIZERS,
    "Adam lazy": lambda p: nn.Adam(p, 0.01, use_lazy=True, loss_scale=4.0),
    "Adam offload": lambda p: nn.Adam(p, 0.01, beta1=0.8, use_offload=True),
    "Adam amsgrad": lambda p: nn.Adam(p, 0.01, use_amsgrad=True),
    "AdaFactor relative": lambda p: nn.AdaFactor(p),
    "AdaFactor Tensor": lambda p: nn.AdaFactor(p, Tensor(0.05), relative_step=False),
    "AdamOffload decay": lambda p: nn.AdamOffload(
        p, 0.01, weight_decay=0.3, loss_scale=3.0, use_nesterov=True
    ),
    "Momentum list": lambda p: nn.Momentum(p, [0.1, 0.2, 0.3, 0.4], 0.9, weight_decay=0.1),
    "Momentum Tensor": lambda p: nn.Momentum(p, Tensor([0.1, 0.2, 0.3, 0.4]), 0.9),
    "Momentum generator": lambda p: nn.Momentum(p, (0.1 * k for k in range(1, 5)), 0.9),
    "SGD schedule": lambda p: nn.SGD(p, nn.ExponentialDecayLR(0.1, 0.5, 2), weight_decay=0.1),
    "AdamWeightDecay schedule": lambda p: nn.AdamWeightDecay(
        p, nn.ExponentialDecayLR(0.1, 0.5, 2), weight_decay=0.2
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_new_one_trains_as_one_made_by_hand(name, graph_mode):
    """From a used-up generator of parameters, and with the last parameter removed."""
    make = PLAIN[name]
    fresh = make(parameters()[:3])
    new = rebuilt(make(iter(parameters())), removed=["extra"])
    assert type(new) is type(fresh)
    assert [one.name for one in new.parameters] == NAMES[:3]
    assert new.loss_scale == fresh.loss_scale
    assert new.decay_flags == fresh.decay_flags
    assert new.exec_weight_decay == fresh.exec_weight_decay
    if hasattr(fresh, "init_args"):
        assert new.init_args == fresh.init_args
    update(fresh, 3)
    update(new, 3)
    assert_same_state(fresh, new)


@pytest.mark.parametrize("name", PLAIN)
def test_state_goes_on_when_asked(name, mode):
    make = PLAIN[name]
    through, first = make(parameters()), make(parameters())
    update(through, 3)
    update(first, 2)
    second = rebuilt(first, carry_state=True)
    assert int(second.global_step.asnumpy()[0]) == 2
    update(second, 1, start=2)
    assert_same_state(through, second)
    assert_same_state(through, first)  # one state
    assert int(rebuilt(first).global_step.asnumpy()[0]) == 0


Pair = namedtuple("Pair", "low high")


class HoldsAPair(nn.Optimizer):
    @opt_init_args_register
    def __init__(self, params, learning_rate=0.1):
        super().__init__(learning_rate, params)
        self.low = Parameter(Tensor(0.0), name="low")
        self.high = Parameter(Tensor(1.0), name="high")
        self.pair = Pair(self.low, self.high)
        self.held = defaultdict(dict, {"low": {"once": [self.low]}})

    def construct(self, gradients):
        return gradients


def test_state_in_a_named_tuple_and_in_a_dict_goes_on():
    first = HoldsAPair(parameters())
    second = rebuilt(first, carry_state=True)
    assert type(second.pair) is Pair
    assert (second.pair.low is first.low, second.pair.high is first.high) == (True, True)
    assert second.held["low"]["once"][0] is first.low
    assert second.held["new"] == {}


def test_without_its_state_the_old_one_is_left_alone():
    old = PLAIN["Adam"](parameters())
    update(old, 1)
    before = nets.weights(old)
    new = rebuilt(old, centralize=["weight"])
    update(new, 1)
    for name in ("moment1.weight", "global_step", "beta1_power"):
        np.testing.assert_array_equal(nets.weights(old)[name], before[name])


def test_a_rate_changed_by_hand_counts():
    old = nn.Momentum(parameters(), 0.1, 0.9)
    old.learning_rate.set_data(Tensor(0.025))
    assert float(rebuilt(old).learning_rate.asnumpy()) == np.float32(0.025)
    assert rebuilt(nn.Momentum(parameters(), 0.1, 0.9)).init_learning_rate == 0.1


def test_what_is_centralized_stays_so():
    """But not for another parameter of that name: it may be another kind of layer."""
    old = rebuilt(PLAIN["Momentum"](parameters()), centralize={"weight": 1, "extra": 0})
    other = Parameter(Tensor(np.zeros((3, 2), np.float32)), name="extra")
    new = rebuilt(old, removed=["extra"], added=[other])
    assert new.gradients_centralization.output_axes == (1, -1, -1, -1)
    assert rebuilt(new, centralize="extra").grad_centralization_flags == (True, False, False, True)


# ---- Groups ----


class Decay(nn.Cell):
    def construct(self, step):
        return 0.1 / (step + 1).astype(ms.float32)


def groups(kind):
    weight, gamma, bias, extra = parameters()
    return {
        "rates": [
            {"params": [gamma, bias], "weight_decay": 0.0},
            {"params": [weight, extra], "lr": 0.3},
        ],
        "schedules": [
            {"params": [gamma, bias], "lr": nn.ExponentialDecayLR(0.1, 0.5, 2)},
            {"params": [weight], "lr": 0.02, "weight_decay": 0.2},
            {"params": [extra]},
        ],
        "lists": [
            {"params": [gamma, bias], "lr": [0.1, 0.2, 0.3, 0.4]},
            {"params": [weight, extra], "lr": [0.4, 0.3, 0.2, 0.1]},
            {"order_params": [weight, gamma, bias, extra]},
        ],
        "decay schedule": [
            {"params": (gamma, bias), "weight_decay": Decay()},
            {"params": (weight,), "lr": 0.02},
            {"params": (extra,), "weight_decay": 0.0},
            {"order_params": [extra, bias, gamma, weight]},
        ],
    }[kind]


GROUPED = {
    "Momentum": lambda p: nn.Momentum(p, 0.05, 0.9, weight_decay=0.1, loss_scale=4.0),
    "Adam": lambda p: nn.Adam(p, 0.05, weight_decay=0.1),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.05, weight_decay=0.1),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.05, weight_decay=0.1, loss_scale=4.0),
}


@pytest.mark.parametrize("kind", ["rates", "schedules", "lists", "decay schedule"])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_keep_their_settings(name, kind, graph_mode):
    """Also where neither the optimizer nor a generator remembers them; names of rates stay."""
    make = GROUPED[name]
    fresh = make(groups(kind))
    new = rebuilt(make(iter(groups(kind))))
    update(fresh, 3)
    update(new, 3)
    assert_same_state(fresh, new)


def test_a_default_rate_that_is_not_known_is_said_to_be_another_groups(recwarn):
    """MindSpore forgets a schedule that no group uses."""
    weight, gamma, bias, extra = parameters()
    given = [{"params": [weight, gamma], "lr": 0.2}, {"params": [bias], "lr": 0.3}]
    known = rebuilt(nn.Momentum(given, 0.1, 0.9), added=[extra])
    assert float(known.get_lr_parameter(extra).asnumpy()) == np.float32(0.1)
    lost = nn.Momentum(given, nn.ExponentialDecayLR(0.1, 0.5, 2), 0.9)
    rebuilt(lost, removed=["bias"])
    assert not recwarn.list  # nobody needs it
    with pytest.warns(BoostWarning, match=r"^extra: the learning_rate is 0.2 \(float\), taken"):
        rebuilt(lost, added=[extra])


def test_a_default_decay_that_is_not_known_is_said_to_be_another_groups(recwarn):
    """AdamWeightDecay does not keep its own; where all groups have one decay, that is taken."""
    weight, gamma, bias, extra = parameters()
    given = [{"params": [weight, gamma]}, {"params": [bias], "weight_decay": 0.1}]
    rebuilt(nn.AdamWeightDecay(given, weight_decay=0.1), added=[extra])
    assert not recwarn.list
    with pytest.warns(BoostWarning, match=r"^extra: the weight_decay is 0.2 \(float\), taken f"):
        rebuilt(nn.AdamWeightDecay(given, weight_decay=0.2), added=[extra])


@pytest.mark.parametrize("name", GROUPED)
def test_removing_a_whole_group_leaves_the_others(name, graph_mode):
    make = GROUPED[name]
    kept = [group for group in groups("schedules") if group["params"][0].name != "gamma"]
    fresh = make(kept)
    new = rebuilt(make(groups("schedules")), removed=["gamma", "bias"])
    assert [one.name for one in new.parameters] == ["weight", "extra"]
    update(fresh, 2)
    update(new, 2)
    for one, two in zip(fresh.parameters, new.parameters):
        np.testing.assert_array_equal(one.asnumpy(), two.asnumpy())


def test_parameters_without_decay_stay_without():
    """Upstream's way through groups gave every gamma and beta the default decay."""
    plain = nn.Momentum(parameters(), 0.1, 0.9, weight_decay=0.5)
    assert rebuilt(plain).decay_flags == (True, False, True, True)
    process = OptimizerProcess(plain)
    process.origin_params = ParameterProcess.generate_group_params(parameters(), parameters())
    optimizer = process.generate_new_optimizer()
    assert [one.name for one in optimizer.parameters] == NAMES
    assert optimizer.decay_flags == (True, False, True, True)


@pytest.mark.parametrize("kind", [nn.Adam, nn.FTRL])
def test_what_a_script_sets_for_sparse_gradients_stays(kind):
    """MindSpore's setter chooses other kernels even if it is given the device of all."""
    old = kind(parameters())
    old.unique, old.target = False, "CPU"
    new, fresh = rebuilt(old, removed=["extra"]), kind(parameters())
    assert not new.unique

    def placed(optimizer):
        return getattr(optimizer, "_is_device", None), optimizer.sparse_opt.name

    assert placed(new) == placed(old) != placed(fresh)


# ---- Adding and removing ----


def test_an_added_parameter_takes_the_place_of_its_namesake():
    old = GROUPED["Momentum"](groups("lists"))
    update(old, 1)
    new_weight = Parameter(Tensor(np.zeros((2, 3), np.float32)), name="weight")
    other = Parameter(Tensor(np.zeros((5, 2), np.float32)), name="other")
    new = rebuilt(old, [old.parameters[0]], [new_weight, other], carry_state=True)
    assert [one.name for one in new.parameters] == [*NAMES, "other"]
    assert new.parameters[0] is new_weight
    assert new.get_lr_parameter(new_weight).asnumpy().tolist() == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )
    np.testing.assert_array_equal(new.moments[0].asnumpy(), old.moments[0].asnumpy())
    assert float(new.get_lr_parameter(other).asnumpy()) == pytest.approx(0.05)
    assert not new.moments[4].asnumpy().any()


def test_state_of_another_shape_starts_afresh():
    old = PLAIN["Momentum"](parameters())
    update(old, 1)
    wider = Parameter(Tensor(np.zeros((4, 3), np.float32)), name="weight")
    new = rebuilt(old, ["weight"], [wider], carry_state=True)
    assert new.moments[0].shape == (4, 3)
    assert not new.moments[0].asnumpy().any()
    assert new.moments[1].asnumpy().any()


def test_what_cannot_be_is_refused():
    old = PLAIN["Momentum"](parameters())
    with pytest.raises(ValueError, match="removed must leave the optimizer at least one"):
        rebuilt(old, removed=NAMES)
    with pytest.raises(ValueError, match=r"added must be parameters .* got 'bias'"):
        rebuilt(old, added=[parameters()[2]])
    with pytest.raises(TypeError, match=r"the optimizer must be an nn\.Optimizer, got"):
        rebuilt(nn.Dense(2, 2))
    with pytest.raises(TypeError, match="must not be wrapped in a FreezeOpt: give the inner opt"):
        rebuilt(FreezeOpt(old))


def test_unknown_removed_parameters_are_passed_over():
    old = PLAIN["Momentum"](parameters())
    assert [one.name for one in rebuilt(old, removed=["nothing"]).parameters] == NAMES


def test_state_that_the_source_lacks_is_one_for_all_that_go_on_with_its_state():
    old, more = PLAIN["Momentum"](parameters()), Parameter(Tensor(1.0), name="more")
    one, two = (rebuilt(old, added=[more], carry_state=True) for _ in range(2))
    assert [one.moments[-1] is two.moments[-1], one.moments[0] is old.moments[0]] == [True, True]


# ---- Classes of the user's own ----


class Noted(nn.Optimizer):
    @opt_init_args_register
    def __init__(self, params, learning_rate=0.1, strength=1.0):
        super().__init__(learning_rate, params)
        self.strength = strength


class Silent(nn.Momentum):
    """Notes the arguments of its base class, which are not its own."""

    def __init__(self, params, strength=1.0):
        super().__init__(params, 0.1, 0.9)
        self.strength = strength


class NotedTwice(nn.Adam):
    """Of two constructors that note their arguments, the base class writes last."""

    @opt_init_args_register
    def __init__(self, params, strength=1.0):
        super().__init__(params, 0.1 * strength)
        self.strength = strength


class Inherits(nn.Momentum):
    """Has the constructor of its base class."""


def test_own_classes():
    new = rebuilt(Noted(parameters(), strength=3.0), removed=["extra"])
    assert (type(new), new.strength, len(new.parameters)) == (Noted, 3.0, 3)
    assert type(rebuilt(Inherits(parameters(), 0.1, 0.9))) is Inherits
    with pytest.raises(TypeError, match=r"cannot rebuild NotedTwice, .* derive it from nn\.Opt"):
        rebuilt(NotedTwice(parameters(), strength=3.0))
    with pytest.raises(TypeError, match="cannot rebuild Silent, as its arguments are not known"):
        rebuilt(Silent(parameters()))


# ---- LARS ----


@pytest.mark.parametrize("grouped", [False, True])
def test_lars(grouped):
    given = groups("rates") if grouped else parameters()
    inner = nn.Momentum(given, 0.1, 0.9, weight_decay=0.5, loss_scale=2.0)
    lars = nn.LARS(inner, epsilon=1e-3, coefficient=0.02)
    new = rebuilt(lars, removed=["extra"], centralize=["weight"])
    assert isinstance(new, nn.LARS)
    assert type(new.opt) is nn.Momentum
    assert new.init_args == lars.init_args
    names = [one.name for one in new.parameters]
    keep = [place for place, one in enumerate(lars.parameters) if one.name in names]
    assert "extra" not in names
    assert len(names) == 3
    # LARS takes decay and scale over from the optimizer; made again, it does so again.
    assert new.decay_flags == tuple(lars.decay_flags[place] for place in keep)
    assert not any(new.opt.decay_flags)
    assert new.loss_scale == 2.0
    flags = dict(zip(names, new.opt.grad_centralization_flags))
    assert flags == {"weight": True, "gamma": False, "bias": False}


# ---- Checkpoints between plain and centralized ----


@pytest.mark.parametrize("kind", [list, iter])
def test_what_is_to_be_centralized_may_come_one_after_the_other(kind):
    old = nets.momentum(parameters())
    wanted = [one for one in old.parameters if one.name in ("weight", "extra")]
    for given in (wanted, [one.name for one in wanted]):
        found = installed_axes(rebuilt(old, centralize=kind(given)))
        assert found == installed_axes(rebuilt(old, centralize=["weight", "extra"]))
        assert set(found) == {id(one) for one in wanted}


@pytest.mark.parametrize("name", ["Momentum", "Adam", "AdamWeightDecay", "AdaFactor"])
def test_centralized_state_has_the_plain_names(name, tmp_path):
    plain = PLAIN[name](parameters())
    centralized = rebuilt(PLAIN[name](parameters()), centralize=["weight", "extra"])
    update(plain, 1)
    update(centralized, 1)
    for source, target in ((plain, centralized), (centralized, plain)):
        ms.save_checkpoint(source, str(tmp_path / "one.ckpt"))
        missing, surplus = ms.load_param_into_net(
            target, ms.load_checkpoint(str(tmp_path / "one.ckpt"))
        )
        assert (missing, surplus) == ([], [])
        assert_same_state(source, target)


# ---- The classes of mindspore.boost ----


def conv_and_norm():
    net = nn.SequentialCell(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dense(8, 2))
    return nets.fill(net)


def test_params_dict_finds_the_cells():
    net = conv_and_norm()
    found = OptimizerProcess.build_params_dict(net)
    assert found[id(net[0].weight)] is net[0]
    assert found[id(net[1].moving_mean)] is net[1]
    assert found[id(net[3].bias)] is net[3]


def test_groups_are_split_for_centralization():
    net = conv_and_norm()
    conv, gamma, beta, weight, bias = net.trainable_params()
    order = {"order_params": net.trainable_params()}
    schedule = nn.ExponentialDecayLR(0.1, 0.5, 2)
    given = [{"params": [conv, gamma], "lr": schedule}, {"params": [beta, weight, bias]}, order]
    found = OptimizerProcess.build_gc_params_group(OptimizerProcess.build_params_dict(net), given)
    assert found == [
        {"params": [conv], "lr": schedule, "grad_centralization": True},
        {"params": [gamma], "lr": schedule},
        {"params": [weight], "grad_centralization": True},
        {"params": [beta, bias]},
        order,
    ]
    assert found[0]["lr"] is schedule
    assert "grad_centralization" not in given[0]


def test_groups_leave_transposed_convolutions_alone():
    """MindSpore would centralize them over the inputs' axis, which groups cannot say."""
    net = nn.SequentialCell(nn.Conv2d(2, 3, 3), nn.Conv2dTranspose(3, 2, 3))
    weights = net.trainable_params()
    process = OptimizerProcess(nn.SGD(weights, 1.0))
    cells = process.build_params_dict(net)
    process.origin_params = process.build_gc_params_group(cells, process.origin_params)
    optimizer = process.generate_new_optimizer()
    generator = np.random.default_rng(0)
    gradients = [generator.normal(size=one.shape).astype(np.float32) for one in weights]
    before = [one.asnumpy().copy() for one in weights]
    optimizer(tuple(map(Tensor, gradients)))
    steps = [old - one.asnumpy() for old, one in zip(before, weights)]
    mean = gradients[0].astype(np.float64).mean((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(steps[0], gradients[0] - mean, atol=1e-6)  # float32, size 1
    np.testing.assert_allclose(steps[1], gradients[1], atol=1e-6)


class OwnOptimizer(OptimizerProcess):
    def generate_new_optimizer(self):
        return nn.SGD(self.origin_params, 0.1)


def test_a_process_with_an_optimizer_of_its_own_finds_the_marks_in_its_groups():
    net = conv_and_norm()
    conv, *rest = net.trainable_params()
    process = OwnOptimizer(nn.SGD([{"params": [conv], "lr": 0.5}, {"params": rest}], 0.1))
    process.add_grad_centralization(net, exclude=("3.*",))
    assert process.generate_new_optimizer().grad_centralization_flags == (True, *[False] * 4)


class Handed(OptimizerProcess):
    def generate_new_optimizer(self):
        return super().generate_new_optimizer()


def test_a_group_stays_whole_where_the_library_makes_the_optimizer():
    """Its learning rate is one Parameter then."""
    net = conv_and_norm()
    process = Handed(nn.SGD([{"params": net.trainable_params(), "lr": 0.5}], 0.1))
    process.add_grad_centralization(net)
    optimizer = process.generate_new_optimizer()
    assert len({id(one) for one in optimizer.learning_rate}) == 1
    assert any(optimizer.grad_centralization_flags)


@pytest.mark.parametrize("grouped", [False, True])
def test_process_centralizes(grouped, mode):
    net = conv_and_norm()
    params = net.trainable_params()
    given = [{"params": params[::-1], "lr": 0.1}, {"order_params": params}] if grouped else params
    process = OptimizerProcess(nn.SGD(given, 0.1))
    process.add_grad_centralization(net)
    optimizer = process.generate_new_optimizer()
    assert type(optimizer) is process.opt_class is nn.SGD
    assert optimizer.grad_centralization_flags == (True, False, False, True, False)
    before = nets.weights(net)
    update(optimizer, 2)
    after = nets.weights(net)
    for name in output_axes(net):
        axes = tuple(range(1, before[name].ndim))
        np.testing.assert_allclose(after[name].sum(axes), before[name].sum(axes), atol=1e-6)


def test_groups_that_ask_for_it_get_it_on_every_device():
    """MindSpore's own way has no CPU kernel, and passes over shapes that 16 does not divide."""
    weight, _, bias, _ = parameters()
    old = nn.SGD([{"params": [weight, bias], "grad_centralization": True}], 0.1)
    new = OptimizerProcess(old).generate_new_optimizer()
    before = weight.asnumpy().copy()
    update(new, 1)
    np.testing.assert_allclose(weight.asnumpy().sum(1), before.sum(1), atol=1e-6)
    assert (weight.asnumpy() != before).any()


def test_process_tells_when_nothing_is_centralized():
    net = nn.SequentialCell(nn.BatchNorm2d(2), nn.Dense(1, 2))
    process = OptimizerProcess(nn.SGD(net.trainable_params(), 0.1))
    with pytest.warns(NoEffectWarning, match="gradient centralization has no effect"):
        process.add_grad_centralization(net)


def test_process_refuses_parameters_it_cannot_read():
    process = OptimizerProcess(PLAIN["Momentum"](parameters()))
    process.origin_params = []
    with pytest.raises(ValueError, match="at least one parameter, got an empty list"):
        process.generate_new_optimizer()
    process.origin_params = [1, 2]
    with pytest.raises(TypeError, match="must be a list of Parameters, or a list of dicts"):
        process.generate_new_optimizer()


def test_group_params_for_other_parameters():
    weight, _, bias, extra = parameters()
    replacement = Parameter(Tensor(np.zeros(2, np.float32)), name="bias")
    new = Parameter(Tensor(1.0), name="new")
    origin = [
        {"params": [weight], "lr": 0.3},
        {"params": [bias], "weight_decay": 0.0},
        {"params": [extra]},
        {"order_params": [extra, weight, bias]},
    ]
    found = ParameterProcess.generate_group_params([weight, replacement, new], origin)
    assert [{**group, "params": None} for group in found[:2]] == [
        {"params": None, "lr": 0.3},
        {"params": None, "weight_decay": 0.0},
    ]
    assert found[1]["params"][0] is replacement
    assert [one.name for one in found[2]["order_params"]] == ["weight", "bias", "new"]
    assert [one.name for one in found[3]["params"]] == ["new"]
    assert len(found) == 4
    nn.Momentum(found, 0.1, 0.9)  # MindSpore takes them
    with pytest.raises(ValueError, match="must have at least one parameter"):
        ParameterProcess.generate_group_params([weight, bias], None)
    assert ParameterProcess.generate_group_params([weight, bias], iter([weight])) == [
        {"params": [weight, bias]}
    ]


def test_parameters_that_do_not_decay_have_no_empty_group_beside_theirs():
    gamma = Parameter(Tensor(np.ones(2, np.float32)), name="gamma")
    found = ParameterProcess.generate_group_params([gamma], [gamma])
    assert [list(group) for group in found] == [["params", "weight_decay"], ["order_params"]]
    nn.Momentum(found, 0.1, 0.9)  # MindSpore takes them


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (None, [1, 1, 2, 2]),
        ([], [1, 1, 2, 2]),
        (1, [1, 2, 2, 2]),
        ([1, 3], [1, 2, 2, 3]),
        ((3, 50), [1, 1, 1, 2]),
    ],
)
def test_fusion_groups(points, expected):
    given = parameters()
    assert ParameterProcess().assign_parameter_group(given, points) is given
    assert [one.comm_fusion for one in given] == expected


def test_fusion_groups_go_on_counting():
    process = ParameterProcess()
    first, second = parameters(), parameters()
    process.assign_parameter_group(first, 2)
    process.assign_parameter_group(second, 2)
    assert [one.comm_fusion for one in second] == [2, 2, 3, 3]
    assert process.assign_parameter_group(None) is None


@pytest.mark.parametrize(
    ("points", "error"), [("2", TypeError), ([1.5], TypeError), (True, TypeError), (-1, ValueError)]
)
def test_wrong_split_points_are_refused(points, error):
    with pytest.raises(error, match="split_point must be"):
        ParameterProcess().assign_parameter_group(parameters(), points)


@pytest.mark.parametrize("points", [3, [3], (3,)])
def test_less_bn_splits_reductions_where_the_configuration_says(points):
    switches = {"mode": "manual", "less_bn": True, "grad_freeze": False}
    settings = {"boost": switches, "common": {"gradient_split_groups": points}}
    settings["less_bn"] = {"heads": ["second"]}
    net = nets.MLP()
    auto = AutoBoost("O1", settings)
    network, _ = auto.network_auto_process_train(net, nets.momentum(net.trainable_params()))
    # Two weights, two biases, and the multiplier of the normalised head.
    assert [one.comm_fusion for one in network.trainable_params()] == [1, 1, 1, 2, 2]
