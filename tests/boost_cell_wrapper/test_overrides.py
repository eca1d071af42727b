"""Methods that a subclass of a step cell has of its own: called as upstream calls them, or told."""

import functools
import gc
import types
import warnings
import weakref

import mindspore as ms
import nets
import numpy as np
import override_helpers
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import (
    Algorithm,
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GroupLossScaleManager,
    NoEffectWarning,
    Update,
)
from mindspore_boost_ext.adasum.algorithm import AdaSumAlgorithm
from mindspore_boost_ext.boost_cell_wrapper.set_later import follow_parts

OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False}
WINDOW = {
    "boost": {**OFF, "grad_accumulation": True},
    "grad_accumulation": {"grad_accumulation_step": 2},
}


def counter(name):
    return Parameter(Tensor(0, ms.int32), name=name, requires_grad=False)


class OwnRule(BoostTrainOneStepWithLossScaleCell):
    """Every batch counts as an overflow."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = counter("asked")

    def _get_overflow_status(self, status, compute_output):
        overflow = ops.logical_not(super()._get_overflow_status(status, compute_output))
        return ops.depend(overflow, ops.assign_add(self.asked, 1))


def test_an_overflow_rule_of_a_subclass_decides(mode):
    net = nets.MLP()
    before = nets.weights(net)
    scale = nn.DynamicLossScaleUpdateCell(1024, 2, 1000)
    step = OwnRule(
        nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params()), scale
    )
    for x, y in nets.batches(3):
        _, overflow, _ = step.set_train()(Tensor(x), Tensor(y))
        assert bool(overflow.asnumpy())
    assert int(step.asked.asnumpy()) == 3
    assert float(step.scale_sense.asnumpy()) == 128
    for name, value in nets.weights(net).items():
        np.testing.assert_array_equal(value, before[name])


class OwnFreezing(BoostTrainOneStepCell):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = counter("asked")

    def gradient_freeze_process(self, *inputs):
        loss = super().gradient_freeze_process(*inputs)
        return ops.depend(loss, ops.assign_add(self.asked, 1))


def test_freezing_goes_through_the_method_of_a_subclass(mode):
    trained = {}
    for kind in (OwnFreezing, BoostTrainOneStepCell):
        net = nets.Deep()
        weights = net.trainable_params()
        optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]], [0, 1, 1, 0])
        step = kind(nn.WithLossCell(net, nets.loss_fn()), optimizer)
        for x, y in nets.batches(6):
            step.set_train()(Tensor(x), Tensor(y))
        trained[kind] = nets.weights(net)
        if kind is OwnFreezing:
            assert int(step.asked.asnumpy()) == 6
    for name, value in trained[OwnFreezing].items():
        np.testing.assert_array_equal(value, trained[BoostTrainOneStepCell][name])


def own_way(self, *inputs):
    loss = self.network(*inputs)
    sens = ops.fill(loss.dtype, loss.shape, self.sens)
    gradients = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
    return ops.depend(loss, self.optimizer(gradients))


class OwnConstruct(BoostTrainOneStepCell):
    def construct(self, *inputs):
        return own_way(self, *inputs)


class Updates(OwnConstruct):
    def construct(self, *inputs):
        return self.inner(*inputs)

    def inner(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        return self.update(loss, self.grad(self.network, self.weights)(*inputs, sens))


class Wraps(OwnConstruct):
    def construct(self, *inputs):
        return BoostTrainOneStepCell.construct(self, *inputs)


class OwnUpdate(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return super().update(loss, gradients, *inputs)


def made(kind, settings, algorithms=()):
    net = nets.MLP()
    rates = [0.1 * (1 - i / 20) for i in range(20)]
    optimizer = nn.Momentum(net.trainable_params(), rates, 0.9)
    boost = AutoBoost("O1", {"boost": OFF, **settings}, algorithms=algorithms)
    network, optimizer = boost.network_auto_process_train(
        nn.WithLossCell(net, nets.loss_fn()), optimizer
    )
    return kind(network, optimizer).set_train()


def test_clipping_that_a_construct_of_a_subclass_leaves_out_is_told(recwarn):
    settings = {"gradients": {"clip_norm": 0.01}}
    with pytest.warns(NoEffectWarning, match=r"clip_norm has no .* that OwnConstruct overrides"):
        step = made(OwnConstruct, settings)
    assert step.report()["gradient clipping"].status == "inactive"
    recwarn.clear()
    for kind in (BoostTrainOneStepCell, Updates, Wraps):
        assert made(kind, settings).report()["gradient clipping"].status == "applied"
    assert list(recwarn) == []


def test_a_schedule_that_a_construct_of_a_subclass_leaves_out_is_told(recwarn):
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    settings = {"short_schedule": {"total_steps": 20}}
    with pytest.warns(NoEffectWarning, match=r"short_schedule has no .* methods that OwnC"):
        made(OwnConstruct, settings)(x, y)
    recwarn.clear()
    for kind in (Updates, Wraps):
        made(kind, settings)(x, y)
    assert list(recwarn) == []


def test_methods_that_the_variants_of_a_step_do_not_call_are_told():
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]], [0, 1])
    with pytest.warns(NoEffectWarning, match=r"OwnUpdate overrides .* not called, update: with"):
        OwnUpdate(nn.WithLossCell(net, nets.loss_fn()), optimizer)


def finish(step, loss, gradients):
    return step.update(loss, gradients)


class Helper(BoostTrainOneStepCell):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        return finish(self, loss, self.grad(self.network, self.weights)(*inputs, sens))


class Below(OwnConstruct):
    def construct(self, *inputs):
        return super().construct(*inputs)


class LosesUpdate(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return ops.depend(loss, self.optimizer(gradients))


def test_a_function_of_the_users_may_lead_to_update(recwarn):
    assert (
        made(Helper, {"gradients": {"clip_norm": 0.01}}).report()["gradient clipping"].status
        == "applied"
    )
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    made(Helper, {"short_schedule": {"total_steps": 20}})(x, y)
    assert list(recwarn) == []


class PastUpdate(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return self.update_part(loss, gradients)


def test_a_call_past_update_is_cut_short_and_clips_nothing():
    with pytest.warns(NoEffectWarning, match="clip_norm has no effect"):
        made(PastUpdate, {"gradients": {"clip_norm": 0.01}})
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    made(PastUpdate, {"short_schedule": {"total_steps": 20}})(x, y)


@pytest.mark.parametrize("kind", [Below, LosesUpdate])
def test_a_base_class_or_an_update_of_the_users_loses_clipping(kind):
    with pytest.warns(NoEffectWarning, match="clip_norm has no effect"):
        made(kind, {"gradients": {"clip_norm": 0.01}})
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    with pytest.warns(NoEffectWarning, match="short_schedule has no effect"):
        made(kind, {"short_schedule": {"total_steps": 20}})(x, y)


class OwnFreezeUpdate(OwnUpdate):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        return self.update(loss, self.grad(self.network, self.weights)(*inputs, sens))


def test_a_method_that_a_construct_of_a_subclass_calls_is_not_told():
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]], [0, 1])
    with pytest.warns(NoEffectWarning, match="^grad_freeze has no effect") as told:
        step = OwnFreezeUpdate(nn.WithLossCell(net, nets.loss_fn()), optimizer)
    assert len(told) == 1
    assert step.report()["grad_freeze"].status == "inactive"


class WithoutSens(BoostTrainOneStepCell):
    """As subclasses that were written for mindspore.boost go on where they have no sens."""

    def construct(self, *batch):
        return self._no_sens_impl(*batch)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "boost": {**OFF, "grad_accumulation": True},
            "grad_accumulation": {"grad_accumulation_step": 2},
        },
        {"gradients": {"clip_norm": 0.01}},
    ],
    ids=["window", "clipping"],
)
def test_what_upstreams_construct_leaves_to_mindspore_without_a_sens_is_ours(mode, settings):
    trained = {}
    for kind in (WithoutSens, BoostTrainOneStepCell):
        step = made(kind, settings)
        for x, y in nets.batches(3):
            step(Tensor(x), Tensor(y))
        trained[kind] = nets.weights(step.network)
    for name, value in trained[WithoutSens].items():
        np.testing.assert_array_equal(value, trained[BoostTrainOneStepCell][name])


class OwnWithoutSens(BoostTrainOneStepCell):
    def _no_sens_impl(self, *inputs):
        gradients = self.grad_no_sens(self.network, self.weights)(*inputs)
        return ops.depend(self.network(*inputs), self.optimizer(gradients))


def test_a_way_of_a_subclass_past_clipping_is_told_where_it_runs(recwarn):
    with pytest.warns(NoEffectWarning, match=r"clip_norm has no .* methods that OwnWithoutS"):
        made(OwnWithoutSens, {"gradients": {"clip_norm": 0.01}})
    recwarn.clear()
    made(lambda *parts: OwnWithoutSens(*parts, 1.0), {"gradients": {"clip_norm": 0.01}})
    assert list(recwarn) == []


def test_a_window_that_a_construct_of_a_subclass_leaves_out_is_told():
    with pytest.warns(NoEffectWarning, match=r"^grad_accumulation has no .* methods that OwnCon"):
        step = made(OwnConstruct, WINDOW)
    assert step.report()["grad_accumulation"].status == "inactive"


def test_a_subspace_that_a_construct_of_a_subclass_leaves_out_is_refused(tmp_path):
    size = sum(one.size for one in nets.MLP().trainable_params())
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, 2)))[0].T
    np.save(tmp_path / "basis.npy", basis.astype(np.float32))
    settings = {
        "boost": {**OFF, "dim_reduce": True},
        "dim_reduce": {"n_components": 2, "pca_mat_path": str(tmp_path / "basis.npy")},
    }
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    made(Wraps, settings)(x, y)
    with pytest.raises(ValueError, match="methods that OwnConstruct overrides does not call up"):
        made(OwnConstruct, settings)(x, y)


class CombinesServers(OwnConstruct):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        gradients = self.grad_no_sens(self.network, self.weights)(*inputs)
        if self.enable_adasum:
            return self.adasum_process(loss, gradients)
        return ops.depend(loss, self.optimizer(gradients))


def test_servers_that_a_construct_of_a_subclass_never_combines_are_refused():
    for kind in (OwnConstruct, CombinesServers, Wraps):
        step = made(kind, {})
        vars(step)["enable_adasum"] = True  # as on several servers
        if kind is OwnConstruct:
            with pytest.raises(ValueError, match=r"adasum cannot combine .* methods that OwnC"):
                AdaSumAlgorithm().check_state(step)
        else:
            AdaSumAlgorithm().check_state(step)


class MovesOn(BoostTrainOneStepCell):
    """Upstream's own way along a schedule."""

    def gradient_freeze_process(self, *inputs):
        loss = self.freeze_nets[self.step](*inputs)
        self.step = (self.step + 1) % len(self.freeze_nets)
        return loss


def test_a_subclass_that_moves_the_schedule_of_freezing_is_refused():
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]])
    with pytest.raises(ValueError, match=r"MovesOn sets step, .* call super"):
        MovesOn(nn.WithLossCell(net, nets.loss_fn()), optimizer)


class Counts(BoostTrainOneStepCell):
    """Has counts of its own under names that upstream's step has, too."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.step = counter("own_count")
        self.accumulation = False

    def construct(self, *inputs):
        return ops.depend(super().construct(*inputs), ops.assign_add(self.step, 1))


def test_a_subclass_may_set_names_that_are_kept_elsewhere(mode):
    step = made(Counts, {})
    for x, y in nets.batches(3):
        step(Tensor(x), Tensor(y))
    assert int(step.step.asnumpy()) == 3
    assert step.accumulation is False
    assert "own_count" in [one.name for one in step.get_parameters()]


def test_buffers_that_the_window_keeps_are_not_handed_out():
    step = made(BoostTrainOneStepCell, {})
    with pytest.raises(AttributeError, match=r"call super\(\)\.gradient_accumulation_process"):
        _ = step.grad_accumulation


class Notes(BoostTrainOneStepCell):
    """Sets ``step`` of something else."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.notes = types.SimpleNamespace()

    def gradient_freeze_process(self, *inputs):
        self.notes.step = 1
        return super().gradient_freeze_process(*inputs)


def test_a_step_of_something_else_may_be_set():
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]])
    step = Notes(nn.WithLossCell(net, nets.loss_fn()), optimizer)
    assert step.report()["grad_freeze"].status == "applied"


def decorated(function):
    def inner(*arguments):
        return function(*arguments)

    return inner


class Decorated(BoostTrainOneStepCell):
    @decorated
    def construct(self, *inputs):
        return override_helpers.through_the_window(self, *inputs)


class OwnFinish(BoostTrainOneStepCell):
    def construct(self, *inputs):
        return self.finish_step(*override_helpers.unchanged(*inputs))

    def finish_step(self, *inputs):
        return override_helpers.Finish.through_the_window(self, *inputs)


class OtherFinish(OwnFinish):
    def finish_step(self, *inputs):
        return super().finish_step(*inputs)


@pytest.mark.parametrize("kind", [Decorated, OwnFinish, OtherFinish])
def test_what_helpers_of_other_modules_call_is_seen(pynative_mode, kind, recwarn):
    settings = {"boost": {**OFF, "grad_accumulation": True}}
    settings["grad_accumulation"] = {"grad_accumulation_step": 2}
    step = made(kind, settings)
    assert step.report()["grad_accumulation"].status == "applied"
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    step(x, y)
    assert step.accumulation.micro_steps() == 1
    assert list(recwarn) == []


def test_an_own_way_without_a_sens_runs_there_alone(mode):
    x, y = (Tensor(one) for one in nets.batches(1)[0])
    for sens, moved in ((None, False), (1.0, True)):
        step = made(lambda *parts, sens=sens: Rests(*parts, sens), {})
        before = nets.weights(step.network)
        step(x, y)
        after = nets.weights(step.network)
        assert any((after[name] != value).any() for name, value in before.items()) == moved


class Rests(BoostTrainOneStepCell):
    def _no_sens_impl(self, *inputs):
        return self.network(*inputs)


def test_a_way_without_a_sens_is_not_that_of_a_frozen_or_a_scaled_step(recwarn):
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(weights), [weights, weights[4:]])
    step = Rests(nn.WithLossCell(net, nets.loss_fn()), optimizer, 1.0)
    assert step.report()["grad_freeze"].status == "applied"

    class Scaled(BoostTrainOneStepWithLossScaleCell):
        _no_sens_impl = Rests._no_sens_impl

    recwarn.clear()
    step = made(lambda *parts: Scaled(*parts, Tensor(2.0)), {"gradients": {"clip_norm": 1.0}})
    assert step.report()["gradient clipping"].status == "applied"
    assert list(recwarn) == []


class Halves(nn.Cell):
    """A reducer of the user's own."""

    def construct(self, gradients):
        return tuple([0.5 * one for one in gradients])


def with_own_reducer(name=None, **section):
    settings = {} if name is None else {"boost": {**OFF, name: True}, name: section}
    step = made(BoostTrainOneStepCell, settings)
    step.grad_reducer = Halves()
    return step


@pytest.mark.parametrize(
    ("step", "who"),
    [
        (lambda: with_own_reducer("grad_accumulation", grad_accumulation_step=2), "a full window"),
        (lambda: with_own_reducer("thor", frequency=2), "each variant of the step"),
    ],
    ids=["window", "variants"],
)
def test_a_reducer_that_is_not_all_that_reduces_is_told(step, who):
    """As one of a group of ranks: the gradients of all would be mixed without a word."""
    with pytest.warns(NoEffectWarning, match=f"own grad_reducer, but {who} uses"):
        step()(*map(Tensor, nets.batches(1)[0]))


def assert_half_the_way(whole, half, batches):
    """The weights move half as far in one step as in another."""
    ways = []
    for step in (whole, half):
        before = nets.weights(step.network)
        for x, y in nets.batches(batches):
            step(Tensor(x), Tensor(y))
        ways.append({name: one - before[name] for name, one in nets.weights(step.network).items()})
    for name, way in ways[0].items():
        assert np.any(way)
        # A way is a difference of two weights of up to 1, each rounded to 6e-8.
        np.testing.assert_allclose(ways[1][name], 0.5 * way, rtol=1e-5, atol=1e-7)


def test_a_reducer_of_a_step_without_variants_is_used(pynative_mode):
    assert_half_the_way(made(BoostTrainOneStepCell, {}), with_own_reducer(), 1)


class Halving(Algorithm):
    switch = "halving"

    def join(self, step):
        step.reducer_of = lambda weights: Halves()


def assert_reduced_once(kind, batches):
    """The way of some batches is half as long with a reducer that halves."""
    assert_half_the_way(made(kind, WINDOW), made(kind, WINDOW, [Halving()]), batches)


class OwnSums(BoostTrainOneStepCell):
    """Adds gradients up by itself, and so never comes to the library's window."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sums = self.weights.clone(prefix="sums", init="zeros")

    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        loss = ops.depend(loss, self.hyper_map(ops.assign_add, self.sums, grads))
        return ops.depend(loss, self.optimizer(self.sums))


class OwnCall(BoostTrainOneStepCell):
    def __call__(self, *inputs):
        return own_way(self, *inputs)


class OwnPartial(BoostTrainOneStepCell):
    construct = functools.partialmethod(own_way)


class Branch(BoostTrainOneStepCell):
    """Names the window's way, and does not take it."""

    def construct(self, *inputs):
        if self.training:
            return own_way(self, *inputs)
        return super().construct(*inputs)


class BranchOfWindow(BoostTrainOneStepCell):
    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        if self.training:
            return ops.depend(loss, self.optimizer(grads))
        return super().gradient_accumulation_process(loss, grads, sens, *inputs)


class SecondUpdate(BoostTrainOneStepCell):
    """After the library's step, one of its own, as for a penalty."""

    def construct(self, *inputs):
        return ops.depend(super().construct(*inputs), own_way(self, *inputs))


class WrappedSums(OwnSums):
    def construct(self, *inputs):
        return super().construct(*inputs) * 1.0


class SumsByProperty(BoostTrainOneStepCell):
    @property
    def chosen(self):
        return self.optimizer

    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        return ops.depend(loss, self.chosen(grads))


WAYS_OF_THEIR_OWN = [OwnConstruct, OwnSums, Branch, BranchOfWindow, SecondUpdate, WrappedSums]


@pytest.mark.filterwarnings("ignore:grad_accumulation has no effect")
@pytest.mark.parametrize("kind", WAYS_OF_THEIR_OWN)
def test_a_step_that_passes_the_window_by_reduces_each_batch(mode, kind):
    """On ranks, each would go its own way."""
    assert_reduced_once(kind, 1)


@pytest.mark.filterwarnings("ignore:grad_accumulation has no effect")
@pytest.mark.parametrize("kind", [OwnCall, OwnPartial, SumsByProperty])
def test_a_step_that_python_alone_can_run_reduces_each_batch(pynative_mode, kind):
    assert_reduced_once(kind, 1)


class ReducesAndHandsOn(BoostTrainOneStepCell):
    """The text of mindspore.boost: it reduces, and hands on what is reduced."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        return self.gradient_accumulation_process(loss, grads, sens, *inputs)


class HandsOn(BoostTrainOneStepCell):
    """Leaves the reduction to the window."""

    def construct(self, *inputs):
        return override_helpers.through_the_window(self, *inputs)


@pytest.mark.parametrize("kind", [BoostTrainOneStepCell, ReducesAndHandsOn, HandsOn])
def test_what_comes_into_the_window_is_reduced_once(mode, kind):
    """Sums over ranks would grow with each reduction."""
    assert_reduced_once(kind, 2)


class ReadsRate(BoostTrainOneStepCell):
    def rate(self):
        return self.optimizer.get_lr()


@pytest.mark.parametrize("weighting", ["equal", "samples"])
@pytest.mark.parametrize("kind", [ReducesAndHandsOn, ReadsRate, OwnSums])
def test_a_weighted_window_is_reduced_when_it_is_full(kind, weighting):
    """Each rank divides by its own weights, so that what is divided must be its own, too."""
    section = {"grad_accumulation_step": 2, "weighting": weighting}
    step = made(kind, {**WINDOW, "grad_accumulation": section}, [Halving()])
    at_end = weighting == "samples" and kind is not OwnSums
    expected = (nn.Identity, Halves) if at_end else (Halves, nn.Identity)
    assert (type(step.grad_reducer), type(step.window_reducer)) == expected


class OwnScaledWindow(BoostTrainOneStepWithLossScaleCell):
    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        halves = self.hyper_map(ops.partial(ops.mul, 0.5), grads)
        return super().gradient_accumulation_process(loss, halves, sens, *inputs)


@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_a_window_of_a_subclass_is_called_by_a_scaled_step(mode, weighting):
    section = {"grad_accumulation_step": 2, "weighting": weighting}
    settings = {**WINDOW, "grad_accumulation": section}
    whole, half = (
        made(lambda *parts, kind=kind: kind(*parts, Tensor(1024.0)), settings)
        for kind in (BoostTrainOneStepWithLossScaleCell, OwnScaledWindow)
    )
    assert_half_the_way(whole, half, 2)


class Sums(BoostTrainOneStepCell):
    """Has upstream's text of the window, which takes the sums from the step."""

    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        return ops.depend(loss, self.hyper_map(ops.add, self.grad_accumulation, grads))


def test_a_window_of_upstreams_text_is_refused_before_it_is_compiled(mode):
    accumulating = {**OFF, "grad_accumulation": True}
    settings = {"boost": accumulating, "grad_accumulation": {"grad_accumulation_step": 2}}
    step = made(Sums, settings)
    (x, y), *_ = nets.batches(1)
    with pytest.raises(AttributeError, match=r"call super\(\)\.gradient_accumulation_process"):
        step(Tensor(x), Tensor(y))


class Configured(BoostTrainOneStepCell):
    """Reads a section of the same name, and hands on."""

    def gradient_accumulation_process(self, loss, grads, sens, *inputs):
        assert self.auto_boost.config.grad_accumulation.weighting == "equal"
        return super().gradient_accumulation_process(loss, grads, sens, *inputs)


def test_a_section_of_the_windows_name_may_be_read(pynative_mode):
    accumulating = {**OFF, "grad_accumulation": True}
    settings = {"boost": accumulating, "grad_accumulation": {"grad_accumulation_step": 2}}
    (x, y), *_ = nets.batches(1)
    made(Configured, settings)(Tensor(x), Tensor(y))


class Averages(BoostTrainOneStepCell):
    """Has a method of its own that happens to be called ``update``."""

    def update(self):
        return 0


def test_another_method_named_update_is_refused_before_it_is_called():
    step = made(Averages, {})
    (x, y), *_ = nets.batches(1)
    with pytest.raises(ValueError, match=r"update of Averages is called with \(loss, grad"):
        step(Tensor(x), Tensor(y))


def _wrapped(function):
    @functools.wraps(function)
    def wrapper(self, *args):
        return function(self, *args)

    return wrapper


class Wrapped(BoostTrainOneStepCell):
    """Has a method under a decorator, and an update that takes the two inputs of the batch."""

    @_wrapped
    def construct(self, *inputs):
        return super().construct(*inputs)

    def update(self, loss, gradients, data, label):
        return super().update(loss, gradients, data, label)


def test_methods_under_a_decorator_are_read(pynative_mode):
    (x, y), *_ = nets.batches(1)
    made(Wrapped, {})(Tensor(x), Tensor(y))


def test_a_setting_that_is_read_when_a_step_is_made_is_warned_of_later():
    step = made(BoostTrainOneStepCell, {})
    step.max_accumulation_step = 1  # as it is
    step.train_strategy = getattr(step.optimizer, "train_strategy", None)
    step.freeze_nets, step.freeze, step.adasum = [], None, False  # other words for what it is
    with pytest.warns(NoEffectWarning, match="setting max_accumulation_step has no effect after"):
        step.max_accumulation_step = 4


# ---- What is set after the step is made ----


class Still(nn.Cell):
    """Hands an optimizer gradients of zero."""

    def __init__(self, inner):
        super().__init__(auto_prefix=False)
        self.inner, self.parameters = inner, inner.parameters

    def construct(self, gradients):
        return self.inner(tuple([ops.zeros_like(one) for one in gradients]))


class SetsOptimizer:
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.optimizer = Still(self.optimizer)


class StillStep(SetsOptimizer, BoostTrainOneStepCell):
    pass


class StillScaledStep(SetsOptimizer, BoostTrainOneStepWithLossScaleCell):
    pass


LATE = {
    "nothing": {},
    "clip": {"gradients": {"clip_norm": 1.0}},
    "window": {**WINDOW, "gradients": {"clip_norm": 1.0}},
}


@pytest.mark.parametrize("settings", LATE.values(), ids=LATE)
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_that_a_subclass_sets_is_used(mode, scaled, settings):
    kind = (lambda *parts: StillScaledStep(*parts, Tensor(8.0))) if scaled else StillStep
    step = made(kind, settings)
    before = nets.weights(step.network)
    for x, y in nets.batches(2):
        step(Tensor(x), Tensor(y))
    assert int(step.optimizer.inner.global_step.asnumpy()[0]) > 0
    for name, value in nets.weights(step.network).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("settings", LATE.values(), ids=LATE)
def test_an_optimizer_with_state_of_its_own_is_used_and_the_first_one_is_gone(mode, settings):
    step = made(BoostTrainOneStepCell, settings)
    first = weakref.ref(step.optimizer)
    step.optimizer = nn.SGD(step.optimizer.parameters, 0.0)
    before = nets.weights(step.network)
    for x, y in nets.batches(2):
        step(Tensor(x), Tensor(y))
    gc.collect()
    assert first() is None
    assert int(step.optimizer.global_step.asnumpy()[0]) > 0
    for name, value in nets.weights(step.network).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_schedule_that_counts_the_first_optimizers_updates_is_told_of(pynative_mode):
    step = made(StillStep, {"short_schedule": {"total_steps": 20}})
    with pytest.warns(NoEffectWarning, match="^optimizer of the training step was set after"):
        step(*map(Tensor, nets.batches(1)[0]))


def test_what_is_set_too_late_for_the_variants_is_told(pynative_mode):
    step = made(StillStep, {"boost": {**OFF, "thor": True}})
    step.network = nn.WithLossCell(step.network.backbone_network, nets.loss_fn())
    with pytest.warns(NoEffectWarning, match=r"^network, optimizer of the training step was set a"):
        step(*map(Tensor, nets.batches(1)[0]))


@pytest.mark.parametrize(
    "place", ["batch_part", "captures_part", "window_part", "update_part", "clip_norm"]
)
def test_a_part_that_is_set_too_late_for_the_variants_is_told(pynative_mode, place):
    step = made(BoostTrainOneStepCell, {"boost": {**OFF, "thor": True}})
    setattr(step, place, 1.0 if place == "clip_norm" else Update(step.optimizer))
    with pytest.warns(NoEffectWarning, match=rf"^{place} of .* in join of an Algorithm$"):
        follow_parts(step)


def test_a_method_that_is_set_on_the_object_is_told(pynative_mode):
    for settings in ({}, {"gradients": {"clip_norm": 1.0}}):
        step = made(BoostTrainOneStepCell, settings)
        step.update = types.MethodType(BoostTrainOneStepCell.update, step)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(*map(Tensor, nets.batches(1)[0]))
        assert [str(one.message)[:10] for one in seen] == ["update was"] * bool(settings)


class UpdatesAlone(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return ops.depend(loss, self.optimizer(gradients))


class OnTop(UpdatesAlone):
    def update(self, loss, gradients, *inputs):
        return super().update(loss, gradients, *inputs)


class UpdatesNothing(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return loss


@pytest.mark.parametrize("kind", [OwnCall, OwnPartial, OnTop, UpdatesNothing])
def test_clipping_that_another_way_leaves_out_is_told(kind):
    with pytest.warns(NoEffectWarning, match=r"clip_norm has no effect"):
        step = made(kind, {"gradients": {"clip_norm": 0.01}})
    assert step.report()["gradient clipping"].status == "inactive"


def test_servers_that_a_call_of_a_subclass_never_combines_are_refused():
    step = made(OwnCall, {})
    assert step.updates_past("adasum_process")
    assert not step.runs_our_construct()


class PublicRule(BoostTrainOneStepWithLossScaleCell):
    """Every batch counts as an overflow."""

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(super().get_overflow_status(status, compute_output))


def test_an_overflow_rule_under_the_public_name_decides(mode):
    step = made(lambda *parts: PublicRule(*parts, Tensor(8.0)), {})
    _, overflow, _ = step(*map(Tensor, nets.batches(1)[0]))
    assert bool(overflow.asnumpy())


class Adapter(BoostTrainOneStepWithLossScaleCell):
    """Names a rule of mindspore.boost as MindSpore does."""

    def get_overflow_status(self, status, compute_output):
        return self._get_overflow_status(status, compute_output)

    def process_loss_scale(self, overflow):
        return self._process_loss_scale(overflow)


def test_a_rule_may_call_that_of_the_other_name(mode):
    step = made(lambda *parts: Adapter(*parts, nn.DynamicLossScaleUpdateCell(8, 2, 1)), {})
    _, overflow, _ = step(*map(Tensor, nets.batches(1)[0]))
    assert not bool(overflow.asnumpy())
    assert float(step.scale_sense.asnumpy()) == 16


class OwnStart(BoostTrainOneStepWithLossScaleCell):
    def start_overflow_check(self, pre_cond, compute_input):
        return super().start_overflow_check(pre_cond, compute_input)


class OwnConstructToo(OwnStart):
    def construct(self, *inputs):
        return super().construct(*inputs)


def test_rules_that_are_not_called_are_told(recwarn):
    with pytest.warns(NoEffectWarning, match="methods that are not called, start_overflow_check:"):
        made(lambda *parts: OwnStart(*parts, Tensor(8.0)), {})
    net = nets.MLP()
    manager = GroupLossScaleManager(8.0, [net.trainable_params()])
    network, optimizer = nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
    with pytest.warns(NoEffectWarning, match="methods that are not called, _get_overflow_status:"):
        OwnRule(network, optimizer, manager)
    recwarn.clear()
    made(lambda *parts: OwnConstructToo(*parts, Tensor(8.0)), {})
    assert list(recwarn) == []


def test_a_module_of_a_name_that_begins_like_this_package_is_the_users(monkeypatch):
    monkeypatch.setattr(OwnUpdate, "__module__", "mindspore_boost_ext_plus")
    assert made(OwnUpdate, {}).overridden("update") == ["update"]
