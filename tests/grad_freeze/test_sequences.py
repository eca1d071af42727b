"""Schedules of any length: the same groups as ever, computed as they are asked for."""

from __future__ import annotations

import fractions
import hashlib
import math
import tracemalloc

import mindspore as ms
import nets
import numpy as np
import oracles
import pytest
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.grad_freeze.chooser import GroupChooser
from mindspore_boost_ext.grad_freeze.freezing import FreezeOpt, GradientFreeze, tabulate
from mindspore_boost_ext.grad_freeze.schedule import FreezeSchedule, prefix_schedule
from mindspore_boost_ext.grad_freeze.sequences import AT_ONCE, GroupSequence
from mindspore_boost_ext.report import NoEffectWarning

LONG = 10**9
LONGEST = 2**31 - 1  # the most that total_steps may be


def frozen(total_steps, **settings):
    """Return a FreezeOpt with three groups, as the switch makes it."""
    net = nets.Deep()
    arguments = {"param_groups": 3, "freeze_type": 1, "freeze_p": 0.7, **settings}
    freeze = GradientFreeze(total_steps=total_steps, **arguments)
    return freeze.freeze_generate(net, nets.momentum(net.trainable_params()))[1]


def of_type(freeze_type, groups, share, steps, seed=0):
    freeze = GradientFreeze(groups, freeze_type, share, steps, seed=seed)
    return freeze.generate_freeze_index_sequence(groups, freeze_type, share, steps)


def interval_sequence(groups, share, steps, seed):
    return of_type(1, groups, share, steps, seed)


# --- the same groups as ever ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("steps", [1, 2, 100, 4055, 4056, 8200, 65536])
@pytest.mark.parametrize(
    ("groups", "share"), [(2, 0.5), (3, 0.0), (10, 0.7), (10, 1 / 3), (57, 0.9), (4, 1 - 2**-20)]
)
def test_drawn_block_by_block_is_drawn_at_once(groups, share, steps, seed):
    sequence = interval_sequence(groups, share, steps, seed)
    assert list(sequence) == oracles.interval_groups(groups, share, steps, seed)


# SHA-256 of the int32 groups, written by the code of before, which held them all.
BEFORE = {
    (2, 0.5, 4056, 0): "0c67569b7bd0bdb7",
    (3, 0.7, 65536, 7): "4025153c916d51c4",
    (10, 0.7, 65536, 0): "02eb9e7bdae7ec0a",
    (10, 0.7, 200003, 7): "f26db1a57baec1ec",
    (57, 0.0, 4055, 7): "056a579b0e493e0a",
    (10, 1 / 3, 65536, 0): "6789c93241ba712c",
}


@pytest.mark.parametrize("arguments", BEFORE)
def test_a_schedule_of_before_is_the_schedule_of_today(arguments):
    groups = np.array(list(interval_sequence(*arguments)), "<i4")
    assert hashlib.sha256(groups.tobytes()).hexdigest()[:16] == BEFORE[arguments]


def test_a_late_step_is_drawn_as_if_all_before_it_had_been():
    sequence = interval_sequence(10, 0.3, LONG, 5)
    begin, end = 1_300_000, 1_310_000
    assert list(sequence[begin:end]) == oracles.interval_groups(10, 0.3, end, 5)[begin:end]
    late = interval_sequence(10, 0.3, 2**21, 5)
    assert [late[place] for place in (-1, 0, begin)] == [late[len(late) - 1], 0, sequence[begin]]


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.7, 0.9, 1 - 2**-20])
def test_the_share_of_zeros_holds_to_the_last_step(share):
    """In exact arithmetic: after n + 1 steps ceil(m n) are frozen.

    m is half-way between 1 - share and the float below it: what rounds to 1 - share is not less.
    """
    sequence = interval_sequence(5, share, LONGEST, 0)
    bound = fractions.Fraction(1 - share) + fractions.Fraction(math.nextafter(1 - share, 0))
    exact = [math.ceil(bound / 2 * n) for n in range(LONGEST - 20_000, LONGEST)]
    groups = sequence.between(LONGEST - 20_000 + 1, LONGEST)
    np.testing.assert_array_equal(groups > 0, np.diff(exact) > 0)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_type_0_repeats_its_pattern(groups, share):
    zeros = int(share * (groups - 1) // (1 - share) + 0.5)
    pattern = [0] * zeros + list(range(1, groups)) or [0]
    sequence = of_type(0, groups, share, LONG)
    assert len(sequence) >= 1.01 * LONG
    assert len(sequence) % len(pattern) == 0
    for begin in (0, 1, 10**8 + 3, len(sequence) - 5):
        wanted = [pattern[step % len(pattern)] for step in range(begin, begin + 5)]
        assert list(sequence[begin : begin + 5]) == wanted


def test_a_prefix_of_any_length_freezes_at_its_first_steps():
    schedule = prefix_schedule(4, LONG, start=0.25)
    first_steps = [LONG // 4, LONG // 2, LONG * 3 // 4]  # K = 3 parts, at 0.25, 0.5, 0.75
    for group, first in enumerate(first_steps):
        assert (schedule.at(first - 1), schedule.at(first)) == (group, group + 1)
    assert (schedule.at(0), schedule.at(LONGEST)) == (0, 3)


# --- time and memory -----------------------------------------------------------------------------

SETTINGS = {
    "type 0": {"freeze_type": 0},
    "type 1": {},
    "linear": {"schedule": "linear"},
    "cubic": {"schedule": "cubic"},
    "step": {"schedule": "step"},
    "function": {"schedule": lambda step: step % 3},
}


@pytest.mark.parametrize("total_steps", [10**7, LONGEST])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_long_schedule_takes_no_more_memory(name, total_steps):
    """Nothing is timed: with a list of so many steps this test would never end."""
    tracemalloc.start()
    optimizer = frozen(total_steps, **SETTINGS[name])
    for position in (0, 10**6, total_steps // 2, total_steps - 1, LONGEST):
        assert optimizer.schedule.at(position) in (0, 1, 2)
    optimizer.position.set_data(Tensor(min(10**8, total_steps), ms.int32))  # as on resuming
    assert optimizer.next_group() == optimizer.schedule.at(min(10**8, total_steps))
    optimizer.expect_updates(10**18)
    assert optimizer.most_frozen().startswith("at most 8 parameters")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A block of AT_ONCE int64 and its like are some 8 MiB each; a list of 10**7 alone is 80 MB.
    assert peak < 64 * 2**20
    assert isinstance(optimizer.schedule.groups, GroupSequence)


@pytest.mark.parametrize(
    ("name", "percent"),
    # Type 0 of three groups at 0.7: 5 zeros to 2 others are 71 %. A prefix begins half-way.
    [("type 1", 70), ("linear", 50), ("cubic", 50), ("step", 50), ("function", 33)],
)
def test_the_report_counts_a_long_schedule(name, percent):
    assert frozen(LONG, **SETTINGS[name]).counts()["steps_training_everything_percent"] == percent


@pytest.mark.parametrize("name", SETTINGS)
def test_counts_of_long_parts_are_those_of_their_steps(name):
    optimizer = frozen(3 * AT_ONCE, **SETTINGS[name])
    groups = optimizer.schedule.groups
    begin, end = 1000, 2 * AT_ONCE + 2000  # more than is counted one by one
    counted = np.bincount(groups.between(begin, end), minlength=3)
    tallied = groups.tally(begin, end)
    found = np.array([tallied.get(group, 0) for group in range(3)])
    # Five standard deviations, at most, of a binomial: draws vary around what is expected, and of
    # a function 2**16 steps are asked.
    total = counted.sum()
    tolerance = {"type 1": 5 * np.sqrt(total / 4), "function": 5 * total / 2**9}.get(name, 0)
    assert np.abs(found - counted).max() <= tolerance


def test_a_training_that_ends_before_a_long_schedule_freezes_is_warned_of():
    optimizer = frozen(LONG, schedule="linear", prefix_start=0.9)
    with pytest.warns(NoEffectWarning, match=r"set grad_freeze\.total_steps to the updates"):
        optimizer.expect_updates(10**8)
    late = frozen(LONG, schedule="linear", prefix_start=0.9)
    late.position.set_data(Tensor(9 * 10**8 - 1, ms.int32))
    late.expect_updates(2)  # the second of them freezes


def test_a_short_schedule_is_a_tuple_and_a_list_as_ever():
    assert type(frozen(65536).train_strategy) is tuple
    freeze = GradientFreeze(3, 1, 0.7, 100)
    assert type(freeze.generate_freeze_index_sequence(3, 1, 0.7, 65536)) is list
    computed = freeze.generate_freeze_index_sequence(3, 1, 0.7, 2 * AT_ONCE)
    assert isinstance(computed, GroupSequence)
    assert computed == interval_sequence(3, 0.7, 2 * AT_ONCE, 0)
    assert computed != interval_sequence(3, 0.7, 2 * AT_ONCE, 1)
    net = nets.Deep()
    every = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(every), [every, every[4:], every[8:]], computed)
    assert optimizer.train_strategy is computed


# --- functions -----------------------------------------------------------------------------------


def test_a_function_is_asked_as_it_comes_up():
    asked = []
    schedule = tabulate(lambda step: asked.append(step) or step // (LONG // 4), LONG)
    assert asked == []
    assert [schedule.at(step) for step in (0, LONG // 2, LONG - 1, LONG)] == [0, 2, 3, 0]
    assert len(asked) < 20_000  # blocks of 4096
    assert tabulate(lambda step: step // 2, 6).groups == (0, 0, 1, 1, 2, 2)


def test_what_a_function_returns_wrongly_is_an_error_with_its_step():
    with pytest.raises(ValueError, match=r"grad_freeze\.schedule\(0\) must be an int from 0"):
        frozen(LONG, schedule=lambda step: "a")
    with pytest.raises(ValueError, match="must name groups 0 to 2, got 3: the network has 3"):
        frozen(LONG, schedule=lambda step: 3 * (step > LONG // 2))
    with pytest.raises(ValueError, match=r"grad_freeze\.schedule\(5\) must be an int from 0"):
        frozen(10, schedule=lambda step: 0.5 if step == 5 else 0)
    late = frozen(LONG, schedule=lambda step: 7 * (step == 1))
    late.position.set_data(Tensor(1, ms.int32))
    with pytest.raises(ValueError, match="must name groups 0 to 2, got 7"):
        late.next_group()


# --- in the graph --------------------------------------------------------------------------------


class Look(nn.Cell):
    """Makes the choice where the graph makes it."""

    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.chooser = GroupChooser(optimizer, (0, 1, 2))

    def construct(self):
        return self.chooser.index()


CHOSEN = {
    "type 0": ({"freeze_type": 0}, LONG, (0, 5, 6, 7, 10**9 + 7)),
    "linear": ({"schedule": "linear"}, LONG, (0, LONG // 2 - 1, LONG // 2, LONG - 1, LONGEST)),
    "nothing": ({"schedule": "step", "prefix_fraction": 0.0}, LONG, (0, LONGEST)),
    "type 1": ({}, 2 * AT_ONCE, (0, 1, 4, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE)),
    "short": ({"schedule": [0, 2, 1]}, 3, (0, 1, 2, 3, 10**9)),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_graph_chooses_as_the_host_does(name, mode):
    settings, total_steps, positions = CHOSEN[name]
    optimizer = frozen(total_steps, **settings)
    look = Look(optimizer)
    for position in positions:
        optimizer.position.set_data(Tensor(position, ms.int32))
        assert int(look().asnumpy()) == optimizer.next_group() == look.chooser.now(), position


LAST = 2 * AT_ONCE + 3  # of a sequence of 2 * AT_ONCE + 4 steps, whose period is 6


@pytest.mark.parametrize("at_end", ["hold", "wrap"])
@pytest.mark.parametrize(
    "groups",
    [
        of_type(0, 3, 0.7, LAST + 1),
        interval_sequence(3, 0.7, LAST + 1, 0),
        prefix_schedule(3, LAST + 1).groups,
    ],
    ids=["type 0", "type 1", "linear"],
)
def test_behind_a_long_sequence_the_graph_chooses_as_the_host_does(graph_mode, groups, at_end):
    parameters = nets.Deep().trainable_params()
    parts = [parameters, parameters[2:], parameters[4:]]
    optimizer = FreezeOpt(nn.SGD(parameters), parts, FreezeSchedule(groups, at_end))
    look = Look(optimizer)
    for position in (0, 5, 6, LAST, LAST + 1, LAST + 4, LONGEST):
        optimizer.position.set_data(Tensor(position, ms.int32))
        place = min(position, len(groups) - 1) if at_end == "hold" else position % len(groups)
        assert int(look().asnumpy()) == look.chooser.now() == groups[place], position


@pytest.mark.parametrize(
    "settings", [{"total_steps": LONG}, {"total_steps": 2**21, "schedule": lambda step: 0}]
)
def test_a_table_that_no_graph_can_hold_is_refused_by_name(settings, mode):
    optimizer = frozen(**settings)
    look = Look(optimizer)
    assert look.chooser.now() == 0
    with pytest.raises(ValueError, match=r"lower grad_freeze\.total_steps, after which"):
        look()


def test_a_chooser_holds_no_table_on_the_host():
    chooser = GroupChooser(frozen(65536), (0, 1, 2))
    held = [one for one in vars(chooser).values() if isinstance(one, (Tensor, np.ndarray))]
    assert all(isinstance(one, Parameter) for one in held)
    assert not {"table", "first_steps"} & vars(chooser).keys()
