"""Layers are known by their kind, also when mixed precision O1 has written their classes anew."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import mindspore as ms
import nets
import pytest
from mindspore import mint, nn

from mindspore_boost_ext import AutoBoost
from mindspore_boost_ext.base.cells import exchange, exchanged, is_a, layers_of, leaves
from mindspore_boost_ext.base.centralization import output_axes
from mindspore_boost_ext.dim_reduce.p_bfgs import without_dropout
from mindspore_boost_ext.thor.optimizer import THOR


class Mixed(nn.Cell):
    """One layer of each kind that algorithms look for."""

    def __init__(self):
        super().__init__()
        self.up = nn.Conv2dTranspose(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(p=0.5)
        self.flat = nn.Flatten()
        self.head = nn.Dense(12, 3)

    def construct(self, x):
        return self.head(self.flat(self.drop(self.norm(self.up(x)))))


@pytest.fixture(params=["first", "second"])
def rewritten(request):
    """Return a network after O1; from the second on the classes derive from copies."""
    for _ in range(1 if request.param == "first" else 2):
        net = ms.amp.auto_mixed_precision(Mixed(), "O1")
    assert type(net.head) is not nn.Dense
    return net


def test_layers_are_found_by_their_kind(rewritten):
    assert layers_of(rewritten, (nn.BatchNorm1d, nn.BatchNorm2d)) == [rewritten.norm]
    assert is_a(rewritten.head, (nn.Dense,))
    assert not is_a(rewritten.head, (nn.Dropout, nn.Conv2d))


def test_a_class_of_the_users_is_not_known_by_its_name():
    kind = type("Dense", (nn.Cell,), {})
    assert not is_a(kind(), (nn.Dense,))


def test_algorithms_know_them(rewritten):
    assert output_axes(rewritten)["up.weight"] == 1
    trial = without_dropout(rewritten).network
    assert (trial.drop.training, trial.norm.training) == (False, rewritten.norm.training)
    optimizer = THOR(rewritten, 0.1, 0.03, 0.9)
    assert optimizer.counts()["layers"] == 1
    off = {"boost": {"mode": "manual", "grad_freeze": False}, "less_bn": {"gc_flag": False}}
    boost = AutoBoost("O1", off)
    with pytest.warns(UserWarning, match="less_bn has no effect"):
        boost.network_auto_process_train(rewritten, nets.momentum(rewritten.trainable_params()))
    assert boost.report()["less_bn norm"].status == "kept"


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, mint.nn.Dropout, mint.nn.Dropout2d])
def test_every_dropout_rests_in_a_search(kind):
    net = nn.SequentialCell(nn.Dense(3, 3), kind(p=0.5)).set_train()
    trial = without_dropout(net).network
    assert [one.training for one in trial] == [True, False]
    assert net[1].training


def test_what_stands_beside_an_exchanged_layer_stays_what_it_is():
    size, places = namedtuple("Size", "width depth")(1, 2), OrderedDict(first=0)
    net, relu = Mixed(), nn.ReLU()
    net.stages = [(net.drop, size), {"places": places}]
    exchange(net, {id(net.drop): relu})
    assert net.stages == [(relu, size), {"places": places}]
    assert type(net.stages[1]["places"]) is OrderedDict


def test_a_container_within_itself_is_read_once():
    held = {"one": 1, "more": [2, (3,)]}
    held["more"].append(held)
    assert list(leaves(held)) == [1, 2, 3]


class Both(tuple):
    """A tuple whose constructor takes two arguments."""

    def __new__(cls, one, two):
        return super().__new__(cls, (one, two))


def test_containers_keep_their_kind_and_what_is_not_changed():
    Pair = namedtuple("Pair", "low high")
    same = [1, [2]]
    held = OrderedDict(pair=Pair(0, 1), both=Both(0, 1), list=[0, same], same=same)
    found = exchanged(held, lambda one: 5 if one == 0 else one)
    assert found == OrderedDict(pair=Pair(5, 1), both=Both(5, 1), list=[5, same], same=same)
    assert [type(one) for one in (found, *found.values())] == [OrderedDict, Pair, Both, list, list]
    assert found["same"] is same
    assert held["list"][0] == 0
