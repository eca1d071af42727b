"""Ranks that were not given the same say so, every one of them, before they train."""

from __future__ import annotations

import re
import types

import nets
import numpy as np
import pytest
import unequal_worker
from mindspore import Parameter, Tensor, experimental, nn
from models import model_of

from mindspore_boost_ext import AutoBoost, BoostModel, BoostWarning, _compat
from mindspore_boost_ext.boost_cell_wrapper import agreement, broadcast
from mindspore_boost_ext.boost_cell_wrapper.agreement import _settings
from mindspore_boost_ext.boost_cell_wrapper.broadcast import hand_out
from mindspore_boost_ext.boost_cell_wrapper.flush import Flush

REFUSED = {
    "clip": "gradients.clip_norm is 1.0 on rank 0, None on rank 1. Give every rank the same",
    "window": "grad_accumulation.grad_accumulation_step is 2 on rank 0, 3 on rank 1",
    "level": "boost_level is O1 on rank 0, O0 on rank 1",
    "shape": "weight 0.weight is Float32 (6, 3) on rank 0, Float32 (5, 3) on rank 1",
    "rate": "learning rate is 0.1 on rank 0, 0.2 on rank 1",
    "rates": "learning rate is _IteratorLearningRate(learning_rate 0.4, 0.3, 0.2, 0.1) on rank 0",
    "schedule": "on rank 0, CosineDecayLR(decay_steps 4, ",
    "scale": "loss scale is 64.0 on rank 0, 65.0 on rank 1",
    "dynamic scale": "loss scale is 64.0 on rank 0, 128.0 on rank 1",
    "scale window": "scale window is 2 on rank 0, 3 on rank 1",
    "batches": "number of batches in an epoch is 2 on rank 0, 3 on rank 1",
    "first batch": "updates per batch is 2 on rank 0, 1 on rank 1. Give ranks the same size and ki",
    "labels": "one class per sample is True on rank 0, False on rank 1. Give ranks the same size",
    "smoothing": "one class per sample is True on rank 0, False on rank 1. Give every rank the sam",
    "padding": "seq_length_warmup is applied on rank 0, skipped on rank 1. Give every rank the sam",
    "again": "learning rate is 0.1 on rank 0, 0.2 on rank 1",
    "later": "learning rate is 0.1 on rank 0, 0.2 on rank 1",
    "loop": "learning rate is 0.1 on rank 0, 0.2 on rank 1",
    "order": "order of the weights is 0.weight, 0.bias, 1.weight, 1.bias on rank 0, 1.bias, 1.wei",
    "counter": "global_step is 0 on rank 0, 3 on rank 1. To resume, load checkpoints of the same",
    "experimental": "state_step is 0 on rank 0, 7 on rank 1. To resume, load checkpoints of the s",
    "micro-batches": "micro-batches in the window is 0 on rank 0, 1 on rank 1",
    "freezing": "freezing schedule is 0, 0 on rank 0, 0, 1 on rank 1. Give every rank the same",
}
TRAINED = {
    "seed",
    "moments",
    "own seed",
    "own loop",
    "own loop O0",
    "equal",
    "lengths",
    "alone",
    "broadcast",
    "broadcast place",
    "broadcast files",
}


def test_every_case_is_judged():
    assert set(unequal_worker.NAMES) == {*REFUSED, *TRAINED}


def in_both_modes(names):
    """Return the modes in which the ranks run these cases, and the cases."""
    not_run = unequal_worker.NOT_RUN
    return [(mode, name) for mode in not_run for name in names if name not in not_run[mode]]


@pytest.mark.parametrize(("mode", "name"), in_both_modes(REFUSED))
def test_every_rank_raises_the_same_error_and_trains_nothing(ended, mode, name):
    _, results = ended(2, mode)
    for result in results:
        message = result["unequal"][name]["messages"][0]
        assert REFUSED[name] in message
        assert not result["unequal"][name]["moved"]


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("name", ["seed", "own loop", "own loop O0"])
def test_ranks_that_begin_with_other_weights_are_warned_and_train(ended, mode, name):
    _, results = ended(2, mode)
    (message,) = results[0]["unequal"][name]["messages"]
    assert "the weights are not the same on all ranks" in message
    assert "mindspore.set_seed" in message
    assert results[1]["unequal"][name]["messages"] == []  # rank 0 speaks for the job
    assert all(result["unequal"][name]["moved"] for result in results)


def test_ranks_that_begin_with_other_moments_are_warned_and_train(ended):
    _, results = ended(2, "pynative")
    (message,) = results[0]["unequal"]["moments"]["messages"]
    assert "the state of the optimizer is not the same on all ranks" in message
    assert "checksum of moments.0.weight is" in message
    assert all(result["unequal"]["moments"]["moved"] for result in results)


@pytest.mark.parametrize(("mode", "name"), in_both_modes(["equal", "alone", "own seed"]))
def test_ranks_that_were_given_the_same_are_told_nothing(ended, mode, name):
    """A Model that one rank alone has built, to evaluate with, is nothing to compare."""
    _, results = ended(2, mode)
    for result in results:
        assert result["unequal"][name] == {"messages": [], "moved": True}


def test_weights_are_broadcast_before_an_algorithm_looks_at_them(ended):
    """MindSpore would do so when it compiles; ranks would take that for a change of one's own."""
    _, results = ended(2, "graph")
    first, second = (result["unequal"]["broadcast"] for result in results)
    assert first == second
    assert first["moved"]
    assert max(first["largest changes"]) > 0


def test_what_rank_0_alone_has_loaded_is_that_of_all_ranks(ended):
    """At another place rank 1 would run another variant, which reduces other gradients."""
    _, results = ended(2, "graph")
    first, second = (result["unequal"]["broadcast place"] for result in results)
    assert first == second
    assert (first["messages"], first["moved"], first["place"]) == ([], True, 3)
    np.testing.assert_allclose(first["rate and scale"], [0.2, 128.0], rtol=1e-6)  # float32


def test_statistics_that_every_rank_has_restored_stay_its_own(ended):
    _, results = ended(2, "graph")
    for rank, result in enumerate(results):
        found = result["unequal"]["broadcast files"]
        assert (found["messages"], found["moved"]) == ([], True)
        # Two steps of momentum 0.9 leave 81 of 100, and add a fifth of features below 10.
        np.testing.assert_allclose(found["mean"], 81 * rank, atol=2)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_integers_arrive_whole_where_floats_are_sent(monkeypatch, dtype, shape):
    """MindSpore sends float32 on CPU, which hold 24 bits."""
    sent = []
    monkeypatch.setattr(_compat, "broadcast_parameters", lambda named: sent.extend(named.values()))
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    values = np.array([least, 1, 2**24 + 1, most], dtype)
    values = values if shape else np.array(values[2])
    counter = Parameter(Tensor(values), name="counter")
    hand_out([counter])
    assert len(sent) == 1
    np.testing.assert_array_equal(sent[0].asnumpy().astype(np.float32), sent[0].asnumpy())
    np.testing.assert_array_equal(counter.asnumpy(), values)
    assert (counter.shape, counter.asnumpy().dtype) == (shape, dtype)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_sizes_begin_together_where_the_first_batches_are_of_other_lengths(ended, mode):
    """On rank 1 two of the lengths are one, and would begin at once."""
    _, results = ended(2, mode)
    found = [result["unequal"]["lengths"] for result in results]
    assert found[0]["begins"] == found[1]["begins"]
    assert all(one["moved"] for one in found)
    assert "scale 0.25 until update 1, scale 0.5 until update 2 of 4" in found[0]["begins"]


def optimizers(rate):
    """Return optimizers with a number in all the places where rates, and a decay, stand."""
    first, *rest = nets.MLP().trainable_params()
    schedule = nn.CosineDecayLR(0.0, rate, 4)
    yield nn.Momentum([first, *rest], schedule, 0.9)
    yield nn.Momentum([first, *rest], [rate, rate / 2], 0.9)
    for one in (rate, [rate, rate / 2], schedule):
        yield nn.Momentum([{"params": [first], "lr": one}, {"params": rest}], 0.1, 0.9)
    yield nn.Momentum([first, *rest], 0.1, 0.9, weight_decay=schedule)
    yield nn.LARS(nn.Momentum([first, *rest], rate, 0.9))
    yield experimental.optim.SGD([first, *rest], lr=rate)


def test_rates_are_compared_wherever_they_stand():
    for one, same, other in zip(optimizers(0.2), optimizers(0.2), optimizers(0.20001)):
        assert _settings(one) == _settings(same)
        assert _settings(one) != _settings(other)


def test_a_long_list_of_rates_is_compared_to_its_end():
    rates = [[0.1] * 100 + [last] for last in (0.1, 0.1, 0.2)]
    one, same, other = (_settings(nn.SGD(nets.MLP().trainable_params(), each)) for each in rates)
    assert one == same
    assert one != other
    assert max(map(len, one.values())) < 200  # the message stays short


@pytest.mark.parametrize(
    ("kind", "settings", "others"),
    [
        ("SGD", {"dampening": 0.0}, {"dampening": 0.5}),
        ("SGD", {"loss_scale": 1.0}, {"loss_scale": 2.0}),
        ("SGD", {"nesterov": False, "momentum": 0.9}, {"nesterov": True, "momentum": 0.9}),
        ("Adam", {"use_nesterov": False}, {"use_nesterov": True}),
        ("Adam", {"use_amsgrad": False}, {"use_amsgrad": True}),
        ("RMSProp", {"decay": 0.9}, {"decay": 0.5}),
        ("RMSProp", {"epsilon": 1e-10}, {"epsilon": 1e-5}),
        ("RMSProp", {"centered": False}, {"centered": True}),
        ("Adadelta", {"rho": 0.9}, {"rho": 0.8}),
        ("ASGD", {"lambd": 1e-4}, {"lambd": 1e-1}),
        ("ASGD", {"alpha": 0.75}, {"alpha": 0.5}),
        ("ASGD", {"t0": 1e6}, {"t0": 1e5}),
        ("Rprop", {"etas": (0.5, 1.2)}, {"etas": (0.5, 1.3)}),
        ("FTRL", {"l1": 0.0}, {"l1": 0.5}),
        ("FTRL", {"lr_power": -0.5}, {"lr_power": -0.25}),
        ("AdaFactor", {"decay_rate": 0.8}, {"decay_rate": 0.7}),
    ],
)
def test_settings_of_single_optimizers_are_compared(kind, settings, others):
    def made(given):
        rate = None if kind == "AdaFactor" else 0.1  # AdaFactor computes its own
        return getattr(nn, kind)(nets.MLP().trainable_params(), learning_rate=rate, **given)

    assert _settings(made(settings)) == _settings(made(settings))
    assert _settings(made(settings)) != _settings(made(others))


def test_an_optimizer_of_the_users_own_may_give_other_names_a_meaning_by_rank():
    class Timed(nn.Momentum):
        def __init__(self, params, t0):
            super().__init__(params, 0.1, 0.9)
            self.t0, self.alpha = t0, t0

    first, second = (Timed(nets.MLP().trainable_params(), rank) for rank in (0.5, 1.5))
    assert _settings(first) == _settings(second)


@pytest.mark.parametrize("value", [None, "auto", {"a": 1}, lambda: 0.1, object(), 10**400, [None]])
def test_what_an_optimizer_of_the_users_own_means_by_a_name_is_left_to_it(value):
    optimizer = nets.momentum(nets.MLP().trainable_params())
    optimizer.eps = value
    assert "learning rate" in _settings(optimizer)


class Logged(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule of the user's own that knows its rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.highest = rank, 0.1

    def construct(self, step):
        return self.highest


@pytest.mark.parametrize("module", [__name__, "mindspore_utils.rates"])
def test_a_schedule_of_the_users_own_may_keep_its_rank(monkeypatch, module):
    monkeypatch.setattr(Logged, "__module__", module)
    of_ranks = [nn.SGD(nets.MLP().trainable_params(), Logged(rank)) for rank in range(2)]
    assert _settings(of_ranks[0]) == _settings(of_ranks[1])
    assert "highest 0.1" in _settings(of_ranks[0])["learning rate"]


def test_weights_alone_are_broadcast_when_a_part_compiles_in_mid_training(graph_mode):
    """MindSpore asks at every compilation; buffers and moments may differ by rank by then."""
    net = nets.Deep(hidden=1)
    net.trainable_params()[0].requires_grad = False
    every = net.trainable_params()
    config = {"grad_accumulation": {"grad_accumulation_step": 2}}
    config["boost"] = {"mode": "manual", "less_bn": False, "grad_accumulation": True}
    config["grad_freeze"] = {"param_groups": 2, "schedule": [0, 0, 1]}
    step = model_of(net, config, nets.momentum(every)).train_network
    # A checkpoint may have been loaded on rank 0 alone; but each rank has a window of its own.
    own = {one.name for one in step.window_part.state()}
    assert len(own) == len(every) + 2
    assert set(step.parameters_broadcast_dict()) == {*step.parameters_dict()} - own
    x, y = nets.batches(1)[0]
    step(Tensor(x), Tensor(y))
    names = {one.name for one in every}
    assert set(step.parameters_broadcast_dict()) == names
    for variant in step.choice_part.variants:
        assert set(Flush(variant).parameters_broadcast_dict()) <= names


@pytest.mark.parametrize("sent", [True, False])  # windows are not, if rank 0 sends its start
def test_the_start_is_compared_once_in_each_training(monkeypatch, sent):
    """A file may have been loaded on one rank alone since the last one."""
    monkeypatch.setattr(broadcast.BroadcastsWeights, "begin_together", lambda step: sent)
    seen = []
    monkeypatch.setattr(agreement, "check_equal_on_ranks", lambda facts, *words: seen.append(facts))
    section = {"grad_freeze": {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}}
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": True}, **section}
    step = model_of(nets.Deep(), config).train_network
    step.reducer_flag, step.mean = True, True
    for _ in range(2):
        agreement.check_same_training_on_ranks(step, 1, "2")
        agreement.check_same_start_on_ranks(step)
    starts = [facts for facts in seen if "global_step" in facts]
    assert len(starts) == 2
    position = step.optimizer.position
    assert starts[0][position.name] == "0"  # of the schedule, which decides what is reduced


@pytest.mark.parametrize(
    ("restored", "differs", "sent"),
    [(False, False, 1), (True, False, 0), (True, True, 1), (False, True, 1)],
)
def test_rank_0_sends_its_start_once_unless_every_rank_has_a_file(
    monkeypatch, restored, differs, sent
):
    """All ranks decide alike: one that alone was restored sends, or takes, as the others do."""
    calls = []
    answer = ["restored from a file is True on rank 0, False on rank 1"] * differs
    monkeypatch.setattr(broadcast, "broadcasts_weights", lambda: True)
    monkeypatch.setattr(broadcast, "differences_between_ranks", lambda facts, what: answer)
    monkeypatch.setattr(broadcast, "hand_out", calls.append)
    step = model_of(nets.MLP(), {"boost": {"mode": "disable_all"}}).train_network
    step.reducer_flag, step.was_restored = True, restored
    assert [step.begin_together() for _ in range(2)] == [bool(sent), False]
    assert len(calls) == sent


def test_under_adasum_the_moments_of_a_server_stay_its_own():
    net = nets.MLP()
    step = model_of(net, {"boost": {"mode": "disable_all"}}).train_network
    assert len(step.parameters_broadcast_dict()) > len(net.trainable_params())
    vars(step)["enable_adasum"] = True  # as on several servers
    assert set(step.parameters_broadcast_dict()) == {one.name for one in net.get_parameters()}


@pytest.mark.parametrize(
    ("begun", "parallel", "message"),
    [
        (False, "stand_alone", r"each on all that it reads: call init\(\) and .* before the Model"),
        (True, "data_parallel", r"call init\(\) and .*_context before the .* built, not after it"),
        (True, "stand_alone", ""),  # the report says so
        (True, "semi_auto_parallel", ""),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_processes_that_are_meant_to_train_together_and_do_not_are_warned(
    monkeypatch, recwarn, begun, parallel, message, level
):
    """MindSpore says nothing where ``init`` or the parallel mode comes late, or not at all."""
    config = {"boost": {"mode": "disable_all"}} if level == "O1" else None
    model = model_of(nets.MLP(), config, kind=BoostModel)
    monkeypatch.setattr(agreement, "rank_count", lambda: 2 if begun else 1)
    monkeypatch.setattr(agreement, "launched_count", lambda: 2)
    monkeypatch.setattr(agreement.ms, "get_auto_parallel_context", lambda name: parallel)
    for _ in range(2):  # warned once
        model.train(1, nets.dataset(1), dataset_sink_mode=False)
    warned = [str(one.message) for one in recwarn if isinstance(one.message, BoostWarning)]
    assert len(warned) == bool(message)
    assert re.search(message, "".join(warned))


@pytest.mark.parametrize("parallel", ["stand_alone", "semi_auto_parallel"])
def test_ranks_that_train_apart_are_in_the_report(monkeypatch, parallel):
    """Semi-automatic parallelism reduces in the graph, without a reducer of the step."""
    monkeypatch.setattr(agreement, "rank_count", lambda: 2)
    monkeypatch.setattr(agreement.ms, "get_auto_parallel_context", lambda name: parallel)
    boost = AutoBoost()
    step = types.SimpleNamespace(reducer_flag=False, report=boost.report)
    agreement.watch_or_report(step)
    reasons = [row.reason for row in boost.report().rows if row.algorithm == "ranks"]
    assert [one.partition(":")[0] for one in reasons] == ["2 ranks train independently"] * (
        parallel == "stand_alone"
    )
