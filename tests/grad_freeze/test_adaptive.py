"""Adaptive freezing: decisions against the rule, in plain loops over weights that are known."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn

from mindspore_boost_ext import AutoBoost, NoEffectWarning, restore, save_checkpoint

PARTS, PART, WINDOW, TOLERANCE = 3, 3, 2, 0.3


class Steered(nn.Cell):
    """A loss that is linear in nine weights: each step moves each by its input."""

    def __init__(self):
        super().__init__()
        first = np.ones(2, np.float32)
        self.weight = ParameterTuple(
            [Parameter(Tensor(first), name=f"weight{one}") for one in range(PARTS * PART)]
        )

    def construct(self, moves):
        loss = 0
        for number in range(PARTS * PART):
            loss = loss - (self.weight[number] * moves[number]).sum()
        return loss


def step_of(net, loss_scale_manager=None, **settings):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    section = {
        "param_groups": PARTS,
        "schedule": "adaptive",
        "adaptive_window": WINDOW,
        "adaptive_tolerance": TOLERANCE,
        **settings,
    }
    window = settings.pop("accumulate", 1)
    section.pop("accumulate", None)
    boost = {"mode": "manual", **off, "grad_freeze": True, "grad_accumulation": window > 1}
    config = {"boost": boost, "grad_freeze": section}
    if window > 1:
        config["grad_accumulation"] = {"grad_accumulation_step": window}
    optimizer = nn.SGD(net.trainable_params(), 1.0)
    return ms.Model(
        net,
        optimizer=optimizer,
        loss_scale_manager=loss_scale_manager,
        boost_level="O1",
        boost_config_dict=config,
    ).train_network


def moves_of(parts):
    """Return moves [steps, 9, 2] from those of each part, [steps]."""
    each = np.repeat(np.array(parts, np.float32).T, PART, axis=1)
    return np.stack([each, 0.5 * each], axis=2)


def reference(moves, most=PARTS - 1):
    """Return the group of each step, by the rule in float64."""
    weights = np.ones((PARTS * PART, 2))
    kept, fastest, group, groups = [], [0.0] * PARTS, 0, []
    for number, move in enumerate(np.float64(moves)):
        if number % WINDOW == 0:
            kept.append(weights.copy())
        if number % WINDOW == 0 and len(kept) > 1:
            slow = []
            for part in range(PARTS):
                own = slice(part * PART, (part + 1) * PART)
                change = np.linalg.norm(kept[-1][own] - kept[-2][own])
                change /= np.linalg.norm(kept[-1][own])
                slow.append(change <= TOLERANCE * fastest[part])
                fastest[part] = max(fastest[part], change)
            if len(kept) > 2 and group < most:
                own = slice(group * PART, (group + 1) * PART)
                now, last, before = (kept[-one][own] for one in (1, 2, 3))
                way = np.linalg.norm(now - last) + np.linalg.norm(last - before)
                noise = np.linalg.norm(now - before) <= way / np.sqrt(2)
                group += slow[group] and noise
        groups.append(int(group))
        weights[group * PART :] += move[group * PART :]
    return groups


def groups_of(step, net, moves):
    """Train; return the group of each step, seen in which weights moved."""
    groups = []
    for move in moves:
        before = [one.asnumpy().copy() for one in net.trainable_params()]
        step(Tensor(move))
        same = [(one.asnumpy() == old).all() for one, old in zip(net.trainable_params(), before)]
        assert same == sorted(same, reverse=True)  # a prefix
        groups.append(sum(same) // PART)
    return groups


FAST, STEADY, NOISE = [1.0] * 4, [0.05] * 8, [0.05, 0.05, -0.05, -0.05] * 2


@pytest.mark.parametrize(
    ("parts", "ends_at"),
    [
        # The first part only trembles from step 4 on; the others go on.
        ((FAST + NOISE + NOISE, FAST * 5, FAST * 5), 1),
        # A slow way in one direction is no noise.
        ((FAST + STEADY + STEADY, FAST * 5, FAST * 5), 0),
        # The second part stops too late, or a little sooner; the last one always trains.
        ((FAST + NOISE + NOISE, FAST * 4 + NOISE[:4], FAST * 5), 1),
        ((FAST + NOISE + NOISE, FAST * 2 + NOISE + NOISE[:4], NOISE + NOISE + FAST), 2),
        # Weights that grow tenfold: 2 of 20 is little, though 2 is much of the first change.
        (([1.0] * 4 + [5.0] * 4 + [2.0, 2.0, -2.0, -2.0] * 3, FAST * 5, FAST * 5), 1),
        # A third of what is there now is not little, though it is of the largest change.
        (([10.0] * 2 + [5.0, 5.0, -5.0, -5.0] * 4 + [5.0] * 2, FAST * 5, FAST * 5), 0),
        # The second part waits for the first.
        ((FAST * 5, FAST + NOISE + NOISE, FAST * 5), 0),
    ],
)
def test_a_part_is_frozen_when_its_weights_have_stopped_moving(mode, parts, ends_at):
    moves = moves_of(parts)
    net = Steered()
    found = groups_of(step_of(net), net, moves)
    assert found == reference(moves)
    assert found[-1] == ends_at


def test_a_part_of_zeros_that_rests_is_frozen_at_the_third_look(pynative_mode):
    """As biases do before their rate has risen: its change is 0, not 0 / 0."""
    net = Steered()
    for one in net.weight[:PART]:
        one.set_data(Tensor(np.zeros(2, np.float32)))
    step, groups = step_of(net), []
    for move in moves_of(([0.0] * 6, [1.0] * 6, [1.0] * 6)):
        groups.append(step.observations()["grad_freeze_group"])
        step(Tensor(move))
    groups.append(step.observations()["grad_freeze_group"])
    assert groups[: 2 * WINDOW] == [0] * 2 * WINDOW
    assert groups[-1] == 1


@pytest.mark.parametrize("saved_at", [3, 6, 9])  # before, between and after the looks that decide
def test_it_goes_on_from_a_checkpoint(mode, saved_at, tmp_path):
    moves = moves_of((FAST + NOISE + NOISE, FAST * 2 + NOISE + NOISE[:4], FAST * 5))
    first, net = Steered(), Steered()
    step = step_of(first)
    found = groups_of(step, first, moves[:saved_at])
    ms.save_checkpoint(step, str(tmp_path / "run.ckpt"))
    step = step_of(net)
    ms.load_param_into_net(step, ms.load_checkpoint(str(tmp_path / "run.ckpt")), strict_load=True)
    found += groups_of(step, net, moves[saved_at:])
    assert found == reference(moves)
    assert found[-1] == 2


def test_a_run_that_may_freeze_nothing_goes_on_from_its_file(mode, tmp_path):
    """A file of MindSpore's leaves out a Parameter without entries, and none may be missed."""
    first, second = (step_of(Steered(), prefix_fraction=0.1) for _ in range(2))
    save_checkpoint(first, tmp_path / "run.ckpt", append_dict={"epoch": 2})
    assert restore(second, tmp_path / "run.ckpt") == 2


def test_no_more_is_frozen_than_the_share_allows(mode):
    moves = moves_of((FAST + NOISE + NOISE, FAST + NOISE + NOISE, FAST * 5))
    net = Steered()
    found = groups_of(step_of(net, prefix_fraction=0.5), net, moves)
    assert found == reference(moves, most=1)
    assert found[-1] == 1


def test_steps_that_overflow_and_micro_batches_are_no_updates(mode):
    moves = moves_of((FAST + NOISE + NOISE, FAST * 5, FAST * 5))
    net = Steered()
    scale = ms.DynamicLossScaleManager(2**4, 2, 1000)
    step = step_of(net, scale, accumulate=2)
    for number, move in enumerate(moves):
        if number == 5:
            step(Tensor(np.full_like(move, np.inf)))
        for _ in range(2):
            step(Tensor(move))
    assert step.observations()["grad_freeze_group"] == reference(moves)[-1] == 1


def test_over_another_optimizer_it_goes_through_the_same_schedule():
    optimizer = step_of(Steered()).optimizer
    assert optimizer.over_other_parameters(optimizer.opt).position is optimizer.position


def test_a_graph_cannot_look_at_weights(graph_mode):
    step = nets.Outer(step_of(Steered()))
    with pytest.raises(ValueError, match="'adaptive' cannot compare the weights: train without si"):
        step(Tensor(moves_of((FAST, FAST, FAST))[0]))


def test_settings_of_other_schedules_have_no_effect():
    section = {"schedule": "adaptive", "prefix_start": 0.1}
    with pytest.warns(NoEffectWarning, match="grad_freeze.prefix_start has no effect"):
        AutoBoost("O1", {"grad_freeze": section})
    with pytest.warns(NoEffectWarning, match="grad_freeze.adaptive_window has no effect"):
        AutoBoost("O1", {"grad_freeze": {"schedule": "cubic", "adaptive_window": 3}})


def test_the_report_names_what_may_be_frozen():
    report = step_of(Steered()).report()
    assert "at most weight0 ... weight5, each part when" in report["grad_freeze"].reason
    assert nets.weights(step_of(Steered()))["boost.grad_freeze.looked"].tolist() == [0, 0]
