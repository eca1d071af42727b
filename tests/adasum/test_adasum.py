"""AdaSum in one process: the pair rule, the tree, the packing, the swap, and what is refused."""

from __future__ import annotations

import re
import types

import mindspore as ms
import nets
import numpy as np
import oracles
import pytest
from mindspore import Parameter, Tensor, nn
from models import model_of
from test_own_parts import Measuring

from mindspore_boost_ext import (
    AdaSum,
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
)
from mindspore_boost_ext.adasum import algorithm
from mindspore_boost_ext.adasum import cell as adasum
from mindspore_boost_ext.adasum import collectives as exchange
from mindspore_boost_ext.adasum.algorithm import AdaSumAlgorithm, AdaSumUpdate
from mindspore_boost_ext.adasum.packing import Packing, block_width
from mindspore_boost_ext.adasum.rule import (
    PairRule,
    WholeTree,
    _split,
    _whole,
    owners_of_slices,
    tree,
)
from mindspore_boost_ext.stages.update import parts_within

wide = pytest.mark.parametrize("wide", [True, False], ids=["float64", "scaled float32"])
GENERATOR = np.random.default_rng(5)
ONE, OTHER = GENERATOR.normal(size=(2, 300)).astype(np.float32)
HALF = np.arange(300) < 150
PAIRS = {
    "random": (ONE, OTHER),
    "orthogonal": (ONE * HALF, OTHER * ~HALF),
    "parallel": (ONE, 3 * ONE),
    "opposite": (ONE, -ONE / 2),
    "tiny": (ONE * 1e-30, OTHER * 1e-30),
    "small": (ONE * 1e-12, OTHER * 1e-12),
    "large": (ONE * 1e19, OTHER * 1e19),
    "huge": (ONE * 1e37, OTHER * 1e37),
    "tiny to huge": (ONE * 1e-30, OTHER * 1e30),
    "one zero": (np.zeros_like(ONE), OTHER),
    "both zero": (np.zeros_like(ONE), np.zeros_like(ONE)),
    "one value": (ONE[:1], OTHER[:1]),
}
BOUND = 100 * np.finfo(np.float32).eps  # Horovod's


def both_ways(first, second, wide):
    rule = PairRule(np.zeros(1, np.int32), 1, wide)
    pair = rule.pair(*(Tensor(one.reshape(1, -1)) for one in (first, second)))
    products, scales = rule.joined(rule.sums(pair).reshape(1, -1))
    return rule.combined(pair, products, scales).asnumpy().reshape(first.shape)


def error(found, expected):
    return np.linalg.norm(np.float64(found) - expected)


@wide
@pytest.mark.parametrize("kind", PAIRS)
def test_the_pair_rule_agrees_with_its_formula(mode, wide, kind):
    first, second = PAIRS[kind]
    expected = oracles.adasum_pair(first, second)
    assert error(both_ways(first, second, wide), expected) <= BOUND * np.linalg.norm(expected)


def test_the_oracle_adds_orthogonal_and_averages_parallel_vectors():
    first = np.array([2.0, 0.0])
    np.testing.assert_array_equal(oracles.adasum_pair(first, np.array([0.0, 3.0])), [2.0, 3.0])
    np.testing.assert_array_equal(oracles.adasum_pair(first, 2 * first), 1.5 * first)
    np.testing.assert_array_equal(oracles.adasum([first] * 5), first)


@wide
def test_the_pair_rule_is_commutative_and_turns_with_its_inputs(wide):
    straight = both_ways(ONE, OTHER, wide)
    assert error(both_ways(OTHER, ONE, wide), straight) <= BOUND * np.linalg.norm(straight)
    turn, _ = np.linalg.qr(GENERATOR.normal(size=(300, 300)))
    turned = both_ways(*(np.float32(turn @ one) for one in (ONE, OTHER)), wide)
    expected = turn @ np.float64(both_ways(ONE, OTHER, wide))
    assert error(turned, expected) <= BOUND * np.linalg.norm(expected)


@wide
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_through(mode, wide, value):
    """By the products it reaches all of the tensor, on whichever rank one looks."""
    spoilt = ONE.copy()
    spoilt[7] = value
    for pair in ((spoilt, OTHER), (OTHER, spoilt), (spoilt, np.zeros_like(ONE))):
        assert not np.isfinite(both_ways(*pair, wide)).any()


@wide
def test_ranges_of_a_tensor_join_to_the_whole(mode, wide):
    """Blocks of two tensors over two ranks, which differ in magnitude."""
    owners = np.array([0, 0, 1, 1], np.int32)
    lower, upper = GENERATOR.normal(size=(2, 4, 8)).astype(np.float32)
    lower[1] *= 1e20
    upper[3] *= 1e-20
    halves = [slice(0, 3), slice(3, 4)]
    rules = [PairRule(owners[half], 2, wide) for half in halves]
    pairs = [
        rule.pair(Tensor(lower[half]), Tensor(upper[half])) for rule, half in zip(rules, halves)
    ]
    rows = ms.ops.stack([rule.sums(pair) for rule, pair in zip(rules, pairs)])
    found = [rule.combined(pair, *rule.joined(rows)).asnumpy() for rule, pair in zip(rules, pairs)]
    for tensor in (slice(0, 2), slice(2, 4)):
        expected = oracles.adasum_pair(lower[tensor], upper[tensor])
        result = np.concatenate(found)[tensor]
        assert error(result, expected) <= BOUND * np.linalg.norm(expected)


def test_products_travel_whole_where_collectives_carry_float32():
    """As two float32 of 24 bits and a power of two, beyond the reach of float32."""
    pairs = np.random.default_rng(0).uniform(1, 2, (3, 2, 50)) * [[[1e-30]], [[1.0]], [[1e30]]]
    products = (pairs @ pairs.transpose(0, 2, 1)).reshape(3, 4)
    sent = _split(Tensor(products))
    assert sent.dtype == ms.float32
    found = _whole(sent.reshape((1, 3, 8))).asnumpy()[0]
    # Two float32 hold 48 bits, 4e-15; one alone leaves 6e-8.
    np.testing.assert_allclose(found, products, rtol=1e-13)


@wide
@pytest.mark.parametrize("size", [1e-9, 1e-12, 1e-18, 1e-30])
def test_small_tensors_that_lie_in_one_range_are_averaged_where_they_are_equal(mode, wide, size):
    """By sums of products that are no float32 unless they are scaled."""
    steps = (GENERATOR.normal(size=(2, 1, 16)) * size).astype(np.float32)
    rules = [PairRule(np.array([owner], np.int32), 2, wide) for owner in range(2)]
    pairs = [rule.pair(Tensor(step), Tensor(step)) for rule, step in zip(rules, steps)]
    rows = ms.ops.stack([rule.sums(pair) for rule, pair in zip(rules, pairs)])
    for rule, pair, step in zip(rules, pairs, steps):
        found = rule.combined(pair, *rule.joined(rows)).asnumpy()
        assert error(found / size, step / size) <= BOUND * np.linalg.norm(step / size)


@pytest.mark.parametrize(
    ("servers", "wide"), [(2, True), (7, True), (8, False), (3, False)], ids=str
)
def test_the_whole_tree_on_one_rank_agrees_with_float64(mode, servers, wide):
    """Two tensors of two blocks and of one, the first far larger than the second.

    A function of ``ms.jit``, which compiles for a second in both modes.
    """
    owners = np.array([0, 0, 1], np.int32)
    rows = GENERATOR.normal(size=(servers, 3, 16)).astype(np.float32)
    rows[:, :2] *= 1e20
    found = WholeTree(owners, 2, servers, wide)(Tensor(rows)).asnumpy()
    for tensor in (slice(0, 2), slice(2, 3)):
        expected = oracles.adasum(list(rows[:, tensor]))
        assert error(found[tensor], expected) <= BOUND * np.linalg.norm(expected)


@pytest.mark.parametrize("servers", range(2, 10))
def test_partners_agree_and_everyone_takes_every_level(servers):
    trees = [tree(server, servers) for server in range(servers)]
    assert len({len(levels) for levels in trees}) == 1
    for server, levels in enumerate(trees):
        for number, level in enumerate(levels):
            if level.partner is not None:
                assert trees[level.partner][number].partner == server
                assert trees[level.partner][number].members == level.members
            if level.halves:  # who has been folded into another server is in no group
                assert (level.partner is not None) == (server in range(*level.members))


def test_the_tree_is_over_adjacent_servers_with_the_last_ones_folded():
    assert [level.partner for level in tree(5, 8)] == [4, 7, 1]
    assert [level.members for level in tree(5, 8)] == [(4, 6), (4, 8), (0, 8)]
    assert [level.partner for level in tree(1, 6)] == [5, 0, 3]
    assert [level.partner for level in tree(5, 6)] == [1, None, None]
    assert [level.halves for level in tree(1, 6)] == [False, True, True]


@pytest.mark.parametrize(("devices", "servers"), [(1, 2), (1, 8), (2, 4), (3, 5)])
def test_slices_belong_to_the_rank_that_the_halving_leads_to(devices, servers):
    owners = owners_of_slices(devices, servers)
    for rank in range(devices * servers):
        server, device = divmod(rank, devices)
        first, count = device * len(owners) // devices, len(owners) // devices
        for level in tree(server, servers):
            if level.halves and level.partner is not None:
                count //= 2
                first += count if level.partner < server else 0
        holds = rank in owners
        assert holds == (server < 2 ** (servers.bit_length() - 1))
        assert not holds or (count == 1 and owners[first] == rank)


def test_packing_brings_every_tensor_back(mode):
    shapes = [(3, 5), (), (1,), (70,), (2, 1, 16)]
    values = [GENERATOR.normal(size=shape).astype(np.float32) for shape in shapes]
    values[3] = values[3].astype(np.float16)
    packing = Packing([Tensor(value) for value in values], multiple=8)
    buffer = packing.pack(tuple(Tensor(value) for value in values))
    assert buffer.shape == (packing.blocks, packing.width)
    assert packing.blocks % 8 == 0
    for value, back in zip(values, packing.unpack(buffer)):
        np.testing.assert_array_equal(back.asnumpy(), value)
        assert back.asnumpy().dtype == value.dtype
    for index, value in enumerate(values):
        own = buffer.asnumpy()[packing.owners == index].ravel()
        np.testing.assert_array_equal(own[: value.size], np.float32(value).ravel())
        assert not own[value.size :].any()
    assert not buffer.asnumpy()[packing.owners == packing.count].any()


@pytest.mark.parametrize(
    ("sizes", "width"),
    [([1], 16), ([1000] * 10, 64), ([25_000_000] * 3, 1024), ([10**5, 10], 1024)],
)
def test_blocks_are_as_wide_as_the_padding_allows(sizes, width):
    assert block_width(sizes) == width


@pytest.mark.parametrize("size", [2, 16])  # with padding, and one whole block
def test_a_snapshot_is_a_copy(mode, size):
    parameter = Parameter(Tensor([1.0, 2.0] * (size // 2)), name="w")
    cell = AdaSum(0, 1, 1, (parameter,))
    old = cell.snapshot()
    ms.ops.assign(parameter, Tensor([5.0] * size))
    np.testing.assert_array_equal(old.asnumpy()[0, :2], [1.0, 2.0])
    np.testing.assert_array_equal(cell.snapshot().asnumpy()[0, :2], [5.0, 5.0])
    cell.update_since(old)
    np.testing.assert_array_equal(parameter.asnumpy(), [5.0] * size)


# ---- Send and Receive: recorded, since no device here has them ----


class Recorder(nn.Cell):
    def __init__(self, calls, name, answer=None):
        super().__init__()
        self.__dict__.update(calls=calls, named=name, answer=answer)

    def construct(self, x):
        self.calls.append((self.named, x.asnumpy().tolist()))
        return x if self.answer is None else Tensor(self.answer)


@pytest.mark.parametrize(("rank", "partner", "order"), [(0, 2, "sr"), (2, 0, "rs")])
def test_the_lower_rank_sends_first(rank, partner, order, monkeypatch, pynative_mode):
    calls, made = [], []

    def make(name):
        def build(**settings):
            made.append((name, settings))
            return Recorder(calls, name, [[9.0]] if name == "r" else None)

        return build

    monkeypatch.setattr(exchange.ops, "Send", make("s"))
    monkeypatch.setattr(exchange.ops, "Receive", make("r"))
    with monkeypatch.context() as patch:
        patch.setattr(ms, "get_context", {"device_target": "Ascend"}.__getitem__)
        swap = exchange.make_swap(rank, partner, (1, 1), 7)
    assert swap(Tensor([[4.0]])).asnumpy().tolist() == [[9.0]]
    assert "".join(name for name, _ in calls) == order
    assert dict(calls)["s"] == [[4.0]]
    (_, send), (_, receive) = made
    assert (send["dest_rank"], receive["src_rank"]) == (partner, partner)
    assert send["sr_tag"] == receive["sr_tag"] == 7
    assert receive["shape"] == [1, 1]


def test_one_process_is_its_own_row(mode):
    value = Tensor([1.0, 2.0])
    assert exchange.RowsOfRanks()(value).asnumpy().tolist() == [[1.0, 2.0]]


# ---- What is refused, and what the report says ----

WEIGHT = (Parameter(Tensor([1.0]), name="w"),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1, WEIGHT), r"AdaSum.rank must be an int from 0 to 2147483647, got -1 \(int\)"),
        ((0, 0, 1, WEIGHT), "AdaSum.device_number must be an int from 1 to 2147483647"),
        ((0, 1, 1.5, WEIGHT), "AdaSum.group_number must be an int from 1 to 2147483647"),
        ((0, 1, 1, ()), "AdaSum.parameter_tuple must hold at least one parameter"),
        ((2, 2, 1, WEIGHT), r"AdaSum.rank must be below device_number \* group_number = 2, got 2"),
        ((0, 1, 2, WEIGHT), r"must be the number of ranks \(1\), got 1 \* 2: start .* msrun"),
        ((0, 2, 1, WEIGHT), r"must be the number of ranks \(1\), got 2 \* 1: start .* msrun"),
    ],
)
def test_arguments_that_break_a_rule(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaSum(*arguments)


def model(mode_of_boost, level="O2", **switches):
    net = nets.MLP()
    switches = {"less_bn": False, "grad_freeze": False, **switches}
    boost = {"mode": "manual", **switches} if mode_of_boost == "manual" else {"mode": mode_of_boost}
    return net, model_of(net, {"boost": boost}, boost_level=level)


def test_one_process_trains_plainly_and_says_so(mode):
    net, boosted = model("manual")
    row = boosted.train_network.report()["adasum"]
    assert (row.status, row.asked_by) == ("skipped", "level O2")
    assert row.reason.startswith("one process: start several with msrun")
    plain_net = nets.MLP()
    optimizer = nets.momentum(plain_net.trainable_params())
    plain = nn.TrainOneStepCell(nn.WithLossCell(plain_net, nets.loss_fn()), optimizer)
    for x, y in nets.batches(3):
        boosted.train_network(Tensor(x), Tensor(y))
        plain(Tensor(x), Tensor(y))
    nets.assert_same_weights(net, plain_net)


@pytest.mark.parametrize(
    ("ranks", "devices", "parallel", "reason"),
    [
        (1, 1, "data_parallel", "one process"),
        (4, 2, "stand_alone", "the ranks train independently"),
        (4, 4, "data_parallel", "4 ranks are 1 server .* plain data parallel"),
        (4, 8, "data_parallel", "set common.device_number below 4"),
        (6, 4, "data_parallel", r"must divide the number of ranks \(6\), got 4"),
    ],
)
def test_obstacles_name_their_remedy(monkeypatch, ranks, devices, parallel, reason):
    monkeypatch.setattr(adasum, "rank_count", lambda: ranks)
    monkeypatch.setattr(ms, "get_auto_parallel_context", lambda name: parallel)
    assert re.search(reason, adasum.unavailable_reason(devices))


@pytest.mark.parametrize("ranks", [4, 6])
def test_a_server_that_is_not_whole_ends_the_building_of_the_step(monkeypatch, ranks):
    """4 ranks are one server of 4 (a row says so); 6 are one and a half."""
    monkeypatch.setattr(adasum, "rank_count", lambda: ranks)
    monkeypatch.setattr(ms, "get_auto_parallel_context", lambda name: "data_parallel")
    manual = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    boost = AutoBoost("O2", {"boost": manual, "common": {"device_number": 4}})
    step = types.SimpleNamespace(auto_boost=boost, report=boost.report, reducer_flag=True)
    if ranks == 6:
        with pytest.raises(ValueError, match=r"common\.device_number must divide .*\(6\), got 4"):
            AdaSumAlgorithm().join(step)
    else:
        AdaSumAlgorithm().join(step)
        assert not hasattr(step, "update_part")
        assert boost.report()["adasum"].status == "skipped"


def test_enable_all_leaves_it_out_in_one_process():
    boost = AutoBoost("O2", {"boost": {"mode": "enable_all"}})
    boost.leave_out("adasum", adasum.unavailable_reason(1))
    assert not boost.boost_config["adasum"]
    assert "one process" in boost.report()["adasum"].reason


class Declines(BoostTrainOneStepCell):
    """Asks as upstream's scripts do, and says no."""

    asked = None

    def check_adasum_enable(self):
        self.asked = super().check_adasum_enable()
        return False


def test_a_subclass_is_asked_and_may_decline(monkeypatch):
    monkeypatch.setattr(algorithm, "unavailable_reason", lambda devices: "")
    net = nets.MLP()
    settings = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}}
    with AutoBoost("O2", settings).building():
        step = Declines(net, nets.momentum(net.trainable_params()))
    row = step.report()["adasum"]
    assert (row.status, row.reason) == ("skipped", "check_adasum_enable of Declines returned False")
    assert (step.asked, step.enable_adasum, step.adasum) == (True, False, None)


@pytest.mark.parametrize("freezes", [False, True])
def test_a_part_of_ones_own_sees_no_loss_scale_and_the_optimizer_gets_it(
    mode, monkeypatch, freezes
):
    """On one rank AdaSum leaves the optimizer's step as it is. A scale of 8 rounds nothing."""
    monkeypatch.setattr(algorithm, "unavailable_reason", lambda devices: "")
    boost = {"mode": "manual", "less_bn": False, "adasum": True, "grad_freeze": freezes}
    config = {"boost": boost, "common": {"device_number": 1}}
    if freezes:
        config["grad_freeze"] = {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}
    found = []
    for scale in (1.0, 8.0):
        net = nets.Deep()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=scale)
        manager = ms.FixedLossScaleManager(scale, drop_overflow_update=False)
        settings = {"algorithms": [Measuring()], "loss_scale_manager": manager}
        step = model_of(net, config, optimizer, BoostModel, **settings).train_network
        assert type(parts_within(step.update_part)[-1]) is AdaSumUpdate
        for x, y in nets.batches(2):
            step(Tensor(x), Tensor(y))
        seen = step.parameters_dict()["boost.measuring.size"]
        found.append([seen.asnumpy(), *(one.asnumpy() for one in net.trainable_params())])
    assert all(map(np.array_equal, *found))
    assert found[0][0].any()
