"""The algorithms together: every one with every loss scale, window and clipping, in both modes."""

from __future__ import annotations

import functools
import itertools

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from models import loss_of, model_of

from mindspore_boost_ext import AutoBoost, FreezeOpt, GroupLossScaleManager, LessBN, NoEffectWarning
from mindspore_boost_ext._compat import COMPILES_END_OF_STEP, compiled_graphs
from mindspore_boost_ext.thor.optimizer import THOR

OFF = dict.fromkeys(AutoBoost().boost_config, False)
UPDATES, OVERFLOWS, ROLLED_BACK = 5, (2, 3), 2


class Layered(nn.Cell):
    """Three Dense layers, two parts for freezing; what is not finite goes through to the loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(nets.FEATURES, nets.HIDDEN)
        self.second = nn.Dense(nets.HIDDEN, nets.HIDDEN, activation="tanh")
        self.third = nn.Dense(nets.HIDDEN, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        x = self.first(x)
        return self.third(x + self.second(x))


def grouped():
    """The same with markers, and a manager whose scales stay powers of two."""
    manager = GroupLossScaleManager([256.0, 16.0], [], growth_factor=1.0, shrink_factor=0.5)

    class Marked(Layered):
        def construct(self, x):
            x = self.first(manager(x, 0, 1))
            return manager(self.third(manager(x + self.second(x), 1, 2)), 2, 3)

    net = Marked()
    parameters = net.trainable_params()
    manager.loss_scale_groups = [parameters[:4], parameters[4:]]
    return net, {"loss_scale_manager": manager}


def dim_reduce(method):
    section = {"method": method, "n_components": 4, "pca_mat_path": nets.basis_file(Layered, 4)}
    return {"dim_reduce": True}, {"dim_reduce": section}


LESS_BN = {"less_bn": {"multiplier": 4.0, "heads": ["third"]}}
FREEZE = {"grad_freeze": {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}}
RESTING = {"grad_freeze": {**FREEZE["grad_freeze"], "eval_frozen": True}}
# What is switched on, and the sections; later algorithms add a line.
ALGORITHMS = {
    "none": ({}, {}),
    "less_bn": ({"less_bn": True}, LESS_BN),
    "grad_freeze": ({"grad_freeze": True}, FREEZE),
    "thor": ({"thor": True}, {"thor": {"damping": 0.1, "frequency": 2}}),
    "all three": (
        {"less_bn": True, "grad_freeze": True, "thor": True},
        {**LESS_BN, **RESTING, "thor": {"damping": 0.1, "frequency": 3, "moving_average": 0.5}},
    ),
    "p-bfgs": dim_reduce("p-bfgs"),
    "p-sgd": dim_reduce("p-sgd"),
}
SCALES = {
    "no scale": lambda: (Layered(), {}),
    "dynamic": lambda: (Layered(), {"loss_scale_manager": ms.DynamicLossScaleManager(256, 2, 100)}),
    "grouped": grouped,
}


def combined(algorithm, scale="no scale", window=1, clip_norm=None):
    switches, sections = ALGORITHMS[algorithm]
    switches = {**OFF, **switches, "loss_scale_group": scale == "grouped"}
    config = {"boost": {"mode": "manual", **switches, "grad_accumulation": window > 1}, **sections}
    config["gradients"] = {"clip_norm": clip_norm}
    if window > 1:
        config["grad_accumulation"] = {"grad_accumulation_step": window}
    net, arguments = SCALES[scale]()
    return model_of(net, config, **arguments).train_network


def batch(number):
    """Return one of two batches whose labels can be learned."""
    x = nets.batches(2)[number % 2][0]
    return Tensor(x), Tensor(x.argmax(axis=1).astype(np.int32))


def state_that_must_agree(step):
    """Return all that training changes, but for the scales and what the window holds."""
    passing = ("boost.loss_scale", "boost.grad_accumulation", "current_it", "last_overflow_it")
    return {name: one for name, one in nets.weights(step).items() if not name.startswith(passing)}


def assert_overflow_changes_nothing(step):
    """Run a step that overflows: all stays bit-identical, but for scales and their counters."""
    own = ("boost.loss_scale", "current_iterator_step", "last_overflow_iterator_step")
    before = nets.weights(step)
    x, y = batch(0)
    _, overflow, _ = step(Tensor(np.full_like(x.asnumpy(), np.inf)), y)
    assert bool(overflow.asnumpy())
    for name, value in nets.weights(step).items():
        if not name.startswith(own):
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def roll_back(step, saved, window, losses):
    """Set the first state, and see the step go the same way again, whichever branch reads it."""
    nets.set_weights(step, saved)
    again = [[loss_of(step(*batch(one))) for _ in range(window)][-1] for one in range(len(losses))]
    assert again == losses


@functools.cache
def trained(mode, algorithm, scale, window, clip_norm):
    """Train; return the loss of each update and the state at the end.

    The micro-batches of a window are equal, so that any window and any scale by a power of two
    must give the very bits of the run without.
    """
    step, losses = combined(algorithm, scale, window, clip_norm), []
    saved = nets.weights(step)
    for update in range(UPDATES):
        graphs = compiled_graphs()
        if update == ROLLED_BACK:
            roll_back(step, saved, window, losses)
        for micro in range(window):
            if scale != "no scale" and update in OVERFLOWS and micro == window - 1:
                assert_overflow_changes_nothing(step)
            loss = loss_of(step(*batch(update)))
        losses.append(loss)
    assert compiled_graphs() == graphs  # every group and variant has run by then
    return losses, state_that_must_agree(step)


# Scale, window and clipping of each run, which all say what the runs without scale and window do.
CASES = [("dynamic", 2, 0.1), ("grouped", 2, None)]
# Compiling takes seconds: in GRAPH_MODE everything at once, and the algorithms with most variants.
COMPILED = {
    "thor": ("dynamic", 2, 0.1),
    "p-bfgs": ("dynamic", 2, 0.1),
    "all three": ("grouped", 2, 0.1),
}
TABLE = [
    ("pynative", (algorithm, *case))
    for algorithm, case in itertools.product(ALGORITHMS, CASES)
    if not (algorithm.startswith("p-") and case[0] == "grouped")
]
TABLE += [("graph", (algorithm, *case)) for algorithm, case in COMPILED.items()]


@pytest.mark.parametrize(("mode", "combination"), TABLE, ids=str, indirect=["mode"])
def test_table_of_combinations(mode, combination):
    algorithm, _, _, clip_norm = combination
    losses, found = trained(mode, *combination)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]  # the same batch
    plain_losses, plain = trained(mode, algorithm, "no scale", 1, clip_norm)
    assert losses == plain_losses
    assert found.keys() == plain.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, plain[name], err_msg=name)
    if clip_norm is not None and mode == "pynative":
        _, unclipped = trained(mode, algorithm, "no scale", 1, None)
        assert (found["third.weight"] != unclipped["third.weight"]).any()


def test_what_dim_reduce_excludes_is_told():
    switches = {"less_bn": True, "grad_freeze": True, "loss_scale_group": True, "thor": True}
    config = {"boost": {"mode": "manual", **OFF, **switches, "dim_reduce": True}}
    config["dim_reduce"] = ALGORITHMS["p-sgd"][1]["dim_reduce"]
    with pytest.warns(NoEffectWarning, match="boost.thor=True has no effect: dim_reduce excl"):
        boost = AutoBoost("O1", config)
    for name in switches:
        row = boost.report()[name]
        assert (row.status, row.reason) == ("skipped", "dim_reduce excludes this algorithm")
    net, arguments = grouped()
    with (
        pytest.warns(NoEffectWarning),
        pytest.raises(ValueError, match="dim_reduce excludes it, so give another manager"),
    ):
        model_of(net, config, **arguments)
    del config["boost"]["loss_scale_group"]
    net, arguments = grouped()
    with (
        pytest.warns(NoEffectWarning),
        pytest.raises(ValueError, match="dim_reduce excludes it, so give another manager"),
    ):
        model_of(net, config, **arguments)
    net = Layered()
    own = FreezeOpt(nets.momentum(net.trainable_params()))
    with pytest.warns(NoEffectWarning), pytest.raises(ValueError, match="optimizer is a FreezeOpt"):
        model_of(net, config, own)


# ---- In the middle of a window, and in a graph around the step ----


@pytest.mark.parametrize("combination", [("all three", "dynamic"), ("p-bfgs", "dynamic")], ids=str)
def test_a_combination_resumes_in_the_middle_of_a_window(mode, combination, tmp_path):
    whole, second = (combined(*combination, 2, 0.1) for _ in range(2))
    for number in range(5):
        whole(*batch(number))
    path = str(tmp_path / "run.ckpt")
    ms.save_checkpoint(whole, path)
    expected = [loss_of(whole(*batch(number))) for number in range(5, 9)]
    assert ms.load_param_into_net(second, ms.load_checkpoint(path))[0] == []
    assert [loss_of(second(*batch(number))) for number in range(5, 9)] == expected
    nets.assert_same_weights(second, whole)


def test_in_a_graph_around_the_step_the_choices_are_the_same(graph_mode):
    step, inner = (combined("all three", "dynamic", 2) for _ in range(2))
    outer = nets.Outer(inner).set_train()
    saved = nets.weights(inner)
    for number in range(8):
        step(*batch(number))
        outer(*batch(number))
    nets.assert_same_weights(step, inner)
    nets.set_weights(inner, saved)
    for number in range(8):
        outer(*batch(number))
    nets.assert_same_weights(step, inner)


# ---- Pairs ----


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_frozen_layers_at_rest_bring_thor_their_factors(mode):
    """Without BatchNorm and dropout nothing rests, so that eval_frozen must not change a bit."""
    runs = []
    for freezing in (FREEZE, RESTING):
        switches = {**OFF, "grad_freeze": True, "thor": True}
        config = {"boost": {"mode": "manual", **switches}, **freezing, "thor": {"frequency": 1}}
        step = model_of(Layered(), config).train_network
        for number in range(3):
            step(*batch(number))
        runs.append(nets.weights(step))
    assert runs[0]["boost.thor.first.weight.a"].any()
    np.testing.assert_equal(runs[1], runs[0])


def test_less_bn_lets_a_frozen_thor_be():
    config = {"boost": {"mode": "enable_all"}, "less_bn": {"gc_flag": True, "heads": ["third"]}}
    net = Layered()
    own = FreezeOpt(THOR(net, 0.1, 0.1, 0.9))
    with pytest.raises(ValueError, match="less_bn has changed the network for which THOR was"):
        model_of(net, config, own)
    net = Layered()
    LessBN(net, fn_flag=True)
    every = net.trainable_params()
    thor = THOR(net, 0.1, 0.1, 0.9, split_indices=list(range(len(every))))
    own = FreezeOpt(thor, [every, every[4:]])
    step = model_of(net, config, own).train_network
    assert step.optimizer is own
    report = step.report()
    assert report["gradient centralization"].reason == "THOR has its own rule for each weight"
    assert (report["thor"].status, report["thor"].asked_by) == ("applied", "the optimizer is THOR")
    assert report["grad_freeze"].counts["groups"] == 2


def test_a_rebuilt_freeze_opt_goes_on_where_it_was():
    net = Layered()
    every = net.trainable_params()
    own = FreezeOpt(nets.momentum(every), [every, every[4:]], [0, 1, 1])
    ms.ops.assign(own.position, Tensor(2, ms.int32))
    ms.ops.assign(own.global_step, Tensor([2], ms.int32))
    config = {"boost": {"mode": "manual", **OFF, "less_bn": True}, **LESS_BN}
    optimizer = model_of(net, config, own).train_network.optimizer
    assert optimizer is not own
    assert (int(optimizer.position.asnumpy()), int(optimizer.global_step.asnumpy()[0])) == (2, 2)


def test_thor_goes_on_with_the_schedule_of_the_optimizer():
    net = Layered()
    plain = nn.Momentum(net.trainable_params(), [0.4, 0.2, 0.1], 0.9)
    ms.ops.assign(plain.global_step, Tensor([2], ms.int32))
    config = {"boost": {"mode": "manual", **OFF, "thor": True}}
    thor = model_of(net, config, plain).train_network.optimizer
    assert float(thor.get_lr().asnumpy().reshape(())) == pytest.approx(0.1)


def test_p_sgd_hands_the_gradient_to_thor(mode):
    switches, sections = dim_reduce("p-sgd")
    config = {"boost": {"mode": "manual", **OFF, **switches}, **sections}
    net = Layered()
    thor = THOR(net, 0.05, 0.1, 0.9, frequency=2)
    manager = ms.DynamicLossScaleManager(256, 2, 100)
    step = model_of(net, config, thor, loss_scale_manager=manager).train_network
    losses = [loss_of(step(*batch(0))) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert thor.observations()["thor.refreshes"] == 2


def test_only_known_optimizers_are_compiled_with_the_end_of_the_step():
    """In PYNATIVE_MODE; one of a user's own need not compile, even around an operator ``opt``."""

    class Own(nn.Momentum):
        pass

    makers = {
        Own: lambda net: Own(net.trainable_params(), 0.05, 0.9),
        nn.Momentum: lambda net: FreezeOpt(nets.momentum(net.trainable_params())),
        THOR: lambda net: FreezeOpt(THOR(net, 0.1, 0.1, 0.9)),
    }
    for kind, make in makers.items():
        net = Layered()
        step = model_of(
            net,
            {"boost": {"mode": "manual", **OFF}},
            make(net),
            loss_scale_manager=ms.DynamicLossScaleManager(256, 2, 100),
        ).train_network
        assert step.compiles_end == (kind is not Own and COMPILES_END_OF_STEP)


def test_levels_on_one_process_leave_adasum_out(graph_mode):
    sections = {**LESS_BN, **FREEZE, "grad_accumulation": {"grad_accumulation_step": 2}}
    boosts = [({"boost": {"mode": "enable_all"}, **sections}, True), ({**LESS_BN, **FREEZE}, False)]
    for config, everything in boosts:
        step = model_of(Layered(), config, boost_level="O2").train_network
        status = {row.algorithm: row.status for row in step.report().rows}
        assert [status[name] for name in ("less_bn", "grad_freeze")] == ["applied"] * 2
        assert status["adasum"] == "skipped"
        others = ("grad_accumulation", "dim_reduce", "loss_scale_group", "thor")
        expected = ["applied"] + ["skipped"] * 3 if everything else ["inactive"] * 4
        assert [status[name] for name in others] == expected
    assert np.isfinite([loss_of(step(*batch(0))) for _ in range(2)]).all()
