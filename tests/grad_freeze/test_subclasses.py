"""A FreezeOpt of the user's own: it chooses the group by itself, or has an update of its own."""

from __future__ import annotations

import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Tensor, nn

from mindspore_boost_ext import FreezeOpt, NoEffectWarning, make_train_step


class EverySecond(FreezeOpt):
    """Freezes in every second update, whatever the schedule says."""

    def next_group(self):
        return int(self.position.asnumpy()) % 2


def step_of(kind, schedule=(0,), **switches):
    """Return a network, and a step that may freeze all but its last layer."""
    net = nets.Deep()
    weights = net.trainable_params()
    optimizer = kind(nn.SGD(weights, 0.1), [weights, weights[-2:]], list(schedule))
    config = switched(grad_freeze=True, **switches)
    return net, make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)


def moves(net, step, count=4):
    """Return of each step whether it moved the first weight."""
    found = []
    for x, y in nets.batches(count):
        before = net.trainable_params()[0].asnumpy().copy()
        step(Tensor(x), Tensor(y))
        found.append(not np.array_equal(before, net.trainable_params()[0].asnumpy()))
    return found


@pytest.mark.parametrize("centralized", [False, True])
def test_its_choice_counts_where_another_optimizer_is_made_too(mode, centralized):
    net, step = step_of(EverySecond, gradient_centralization=centralized)
    assert moves(net, step) == [True, False, True, False]
    assert type(step.train_network.optimizer) is EverySecond


def test_its_report_is_not_that_of_the_schedule():
    row = step_of(EverySecond)[1].report()["grad_freeze"]
    assert (row.status, row.counts) == ("applied", {"groups": 2, "distinct_groups": 2})
    assert row.reason.startswith("freezes at most 10 parameters")


def test_a_graph_cannot_ask_it(graph_mode):
    step = nets.Outer(step_of(EverySecond)[1].train_network)
    with pytest.raises(ValueError, match="cannot ask next_group of EverySecond: train without si"):
        step(*map(Tensor, nets.batches(1)[0]))


class KeepsTheOptimizer(EverySecond):
    def __init__(self, opt, groups, schedule):
        super().__init__(opt, groups, schedule)
        self.plain = opt


class KeepsViews(EverySecond):
    def __init__(self, opt, groups, schedule):
        super().__init__(opt, groups, schedule)
        self.mine = nn.CellList([self.view(group) for group in range(len(groups))])


def test_what_it_keeps_of_the_optimizer_is_made_anew_or_refused():
    optimizer = step_of(KeepsTheOptimizer, gradient_centralization=True)[1].train_network.optimizer
    assert optimizer.plain is optimizer.opt
    step_of(KeepsViews)
    with pytest.raises(ValueError, match=r"KeepsViews holds optimizers .* override over_other_par"):
        step_of(KeepsViews, gradient_centralization=True)


def test_a_choice_that_a_script_sets_is_no_schedule():
    weights = nets.Deep().trainable_params()
    optimizer = FreezeOpt(nn.SGD(weights, 0.1), [weights, weights[-2:]], [0])
    assert not optimizer.ever_freezes()
    optimizer.next_group = lambda: 1
    assert optimizer.ever_freezes()


class Clips(FreezeOpt):
    """Has an update that no group's step runs."""

    def construct(self, gradients):
        return super().construct(tuple(gradient.clip(-1e-3, 1e-3) for gradient in gradients))


def test_an_update_of_its_own_is_warned_of():
    with pytest.warns(NoEffectWarning, match="construct of Clips has no effect: the step of each"):
        step_of(Clips, (0, 1))
