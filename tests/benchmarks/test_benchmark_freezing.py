"""The arithmetic of the freezing benchmark, on cases done by hand. Nothing is timed here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import freezing  # noqa: E402
from networks import SmallResNet  # noqa: E402

from mindspore_boost_ext.grad_freeze.freezing import split_chunks  # noqa: E402

CHAIN = ((), (0,), (0, 1))
FORWARD = [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (0, 7 + 6 + 7),  # forward 1 + 2 + 4, inputs 2 + 4, weights 1 + 2 + 4
        (1, 7 + 4 + 6),
        (2, 7 + 0 + 4),
    ],
)
def test_in_a_chain_the_cost_is_that_of_the_formula(group, expected):
    passes = [freezing.even(cost) for cost in FORWARD]
    assert freezing.modelled_cost(passes, CHAIN, group) == expected


def test_a_branch_beside_the_trained_layer_needs_no_input_gradient():
    # 0 feeds 1 and 2, both feed 3. Training from 1 on: inputs of 3 alone, weights of 1, 2 and 3.
    before = ((), (0,), (0,), (0, 1, 2))
    passes = [freezing.even(cost) for cost in (1.0, 2.0, 4.0, 8.0)]
    assert freezing.modelled_cost(passes, before, 1) == 15 + 8 + 14


def test_each_pass_counts_where_it_is_needed():
    # The last layer is frozen by nobody; the middle one is trained with nothing trained before it.
    passes = [freezing.Pass(1.0, 10.0, 100.0, 1000.0)] * 3
    assert freezing.modelled_cost(passes, CHAIN, 1) == 3 + 100 + 1000


def test_a_frozen_layer_behind_a_trained_one_passes_gradients_on():
    passes = [freezing.Pass(1.0, 10.0, 100.0, 1000.0)] * 2
    # Layer 1 stands before layer 0 in the network, though not in the order of the parameters.
    assert freezing.modelled_cost(passes, ((1,), ()), 1) == 2 + 10 + 100


def test_relative_costs_begin_at_one():
    passes = [freezing.even(cost) for cost in FORWARD]
    assert freezing.relative_costs(passes, CHAIN) == [1.0, 17 / 20, 11 / 20]


def test_layers_are_the_parts_that_freezing_cuts_the_network_into():
    network = SmallResNet()
    layers = freezing.layers_of(network)
    cut = split_chunks(network.trainable_params())
    assert sum(len(chunk) for chunk in cut) == 53
    names = [[one.name for one in layer.cell.trainable_params()] for layer in layers]
    assert names == [[one.name for one in chunk] for chunk in cut]


def test_the_two_branches_of_a_block_do_not_depend_on_each_other():
    layers = {layer.name: layer for layer in freezing.layers_of(SmallResNet())}
    names = list(layers)
    second, shortcut = layers["block 3, convolution 2"], layers["block 3, shortcut"]
    first = names.index("block 3, convolution 1")
    assert first in second.before
    assert not {first, names.index(second.name)} & set(shortcut.before)
    assert layers["head"].before == tuple(range(17))
    assert (second.shape, shortcut.shape) == ((32, 16, 16, 16), (32, 8, 32, 32))


def test_a_run_counts_medians_and_puts_the_rest_down_to_compilation():
    seconds = [9.0, 1.0, 3.0, 2.0, 4.5, 1.0, 0.5]
    plain = [7.0, 1.0, 1.0, 1.0, 0.5, 2.0, 1.0]  # a plain step is 1: the median without the first
    times = freezing.run_times(seconds, plain, [0, 0, 0, 0, 1, 1, 1])
    assert times.steps == 7
    assert times.trained == 4 * 2.0 + 3 * 0.5  # medians of 1, 3, 2 and of 1/2, 0.5/1
    assert times.compilation == (9.0 - 2.0) + (4.5 / 0.5 - 0.5)


def test_a_group_that_comes_up_once_counts_as_a_plain_step():
    times = freezing.run_times([9.0, 2.0, 2.0, 8.0], [5.0, 4.0, 4.0, 4.0], [0, 0, 0, 1])
    assert times == freezing.Times(4, 3 * 0.5 + 1.0, (9.0 / 4 - 0.5) + (2.0 - 1.0))


def test_a_plain_run_is_itself():
    plain = [6.0, 2.0, 2.0]
    times = freezing.run_times(plain, plain, [0, 0, 0])
    assert times == freezing.Times(3, 3.0, 2.0)
    assert freezing.Times(3, 1.5, 3.0).over(times) == (0.5, 4.5 / 5.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (True, True, True)),
        (["--groups"], (True, False, False)),
        (["--runs", "--speed"], (False, True, True)),
    ],
)
def test_without_a_choice_all_parts_run(arguments, expected):
    args = freezing.parse_arguments(arguments)
    assert (args.groups, args.runs, args.speed) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--speed", "--plot", "x.png"], "--plot draws groups and runs: give --groups or --runs"),
    ],
)
def test_refused_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        freezing.parse_arguments(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
