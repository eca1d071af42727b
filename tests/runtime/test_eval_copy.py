"""Copies of networks with layers in evaluation mode: they leave the network as it is."""

from __future__ import annotations

import contextlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.runtime.eval_copy import EvalCopy

X = Tensor(np.ones((3, 2), np.float32))


def test_the_flags_of_the_network_stay():
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5)).set_train()
    copy = EvalCopy(net, [net[1]]).network
    assert [copy[1].training, copy[1].get_flags()["training"]] == [False, False]
    copy.set_train()
    assert [copy[1].training, copy[1].get_flags()["training"]] == [False, False]
    copy.set_train(False)
    for cell in (net, net[1]):  # the Dense is in both
        assert [cell.training, cell.get_flags()["training"]] == [True, True]


def test_a_method_of_the_network_is_one_of_the_copy_also_if_it_is_set_later():
    net = nn.SequentialCell(nn.Dropout(p=0.5))
    copy = EvalCopy(net, [net[0]])
    net.along = [net[0].construct]
    copy.follow()
    assert copy.network.along[0].__self__ is copy.network[0]


def test_a_layer_with_weights_stays_one_layer_where_it_is_used_twice():
    dense, dropout = nn.Dense(2, 2), nn.Dropout(p=0.5)
    net = nn.SequentialCell(nn.SequentialCell(dense, dropout), dense, dropout).set_train()
    copy = EvalCopy(net, [net[0]]).network
    assert copy[0][0] is copy[1]
    assert [copy[0][1].training, copy[2].training] == [False, True]


class Crossed(nn.Cell):
    """Its parts reach one another past their own layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.SequentialCell(nn.Dropout(p=0.5))
        self.last = nn.SequentialCell(nn.Dropout(p=0.5))
        self.head = nn.SequentialCell(nn.Dense(2, 2))
        self.first.later = [self.last]
        self.last.around = [self.both]
        self.head.others = {"first": self.first}

    def both(self, x):
        return self.last[0](self.first[0](x))

    def construct(self, x):
        return self.first.later[0].around[0](x) + self.head.others["first"](x)


def test_what_reaches_another_past_its_layers_reaches_the_copy(mode):
    net = Crossed().set_train()
    copy = EvalCopy(net, [net.first[0], net.last[0]])
    with copy.followed(contextlib.nullcontext):
        np.testing.assert_array_equal(copy.network(X).asnumpy(), 2 * X.asnumpy())
    assert net.first[0].training


class Around(nn.Cell):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def construct(self, x):
        return self.inner(x)


@pytest.mark.parametrize("around", [Around, nn.SequentialCell])
def test_what_a_script_puts_around_layers_later_keeps_them_at_rest(mode, around):
    net = nn.SequentialCell(nn.SequentialCell(nn.Dropout(p=0.5)), nn.ReLU()).set_train()
    copy = EvalCopy(net, [net[0][0]])
    net[0] = around(net[0])
    with copy.followed(contextlib.nullcontext):
        np.testing.assert_array_equal(copy.network(X).asnumpy(), X.asnumpy())


def test_a_network_whose_layers_are_shared_is_its_own_copy():
    net = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU())
    assert EvalCopy(net, [net[0]], [net[0]]).network is net


def test_a_recomputed_cell_rests(pynative_mode):
    net = nn.SequentialCell(Around(nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5))))
    net.set_train()[0].recompute()
    copy = EvalCopy(net, [net[0]]).network
    got, _ = ms.value_and_grad(copy, 0)(X)
    np.testing.assert_array_equal(got.asnumpy(), net.set_train(False)(X).asnumpy())


class Branching(nn.Cell):
    """Chooses a child, and keeps its choice, when it first runs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5))
        self.way, self.scale, self.once = None, 1.0, 1.0

    def construct(self, x):
        if self.way is None:
            self.way = [self.layers, {"one": self.layers[1].construct}]
            self.chosen = self.layers[0]
            del self.once
        return self.layers(x)


def test_what_its_code_keeps_is_the_networks_own(pynative_mode):
    net = Branching().set_train()
    copy = EvalCopy(net, [net])
    with copy.followed(contextlib.nullcontext):
        copy.network(X)
    assert net.way[0] is net.layers
    assert net.way[1]["one"].__self__ is net.layers[1]
    assert net.chosen is net.layers[0]
    assert not hasattr(net, "once")
    with copy.followed(contextlib.nullcontext):
        assert copy.network.way[0] is copy.network.layers
        assert copy.network.chosen is copy.network.layers[0]
    assert all(cell.training for _, cell in net.cells_and_names())


def test_it_follows_exchanged_parts(mode):
    net = Branching()
    net.way = ()
    copy = EvalCopy(net, [net])
    net.layers[0] = nn.Dense(2, 2, weight_init="ones")
    net.layers[0].weight = Parameter(Tensor(np.full((2, 2), 2.0, np.float32)), name="other")
    del net.scale
    copy.follow()
    np.testing.assert_array_equal(copy.network(X).asnumpy(), net.set_train(False)(X).asnumpy())
    assert not hasattr(copy.network, "scale")


class Growing(nn.Cell):
    def construct(self, x):
        if not hasattr(self, "layer"):
            self.layer = nn.Dense(2, 2)
        return self.layer(x)


def test_parameters_of_layers_that_its_code_makes_have_their_names(pynative_mode):
    net = nn.SequentialCell(Growing(), nn.Dropout(p=0.5))
    copy = EvalCopy(net, [net])
    with copy.followed(contextlib.nullcontext):
        copy.network(X)
    assert [one.name for one in net[0].get_parameters()] == ["layer.weight", "layer.bias"]


def test_it_follows_the_precision(mode):
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5))
    copy = EvalCopy(net, [net])
    net[0].to_float(ms.float16)
    copy.follow()
    assert copy.network[0](X).dtype == ms.float16


def test_it_follows_hooks(pynative_mode):
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5))
    copy, seen = EvalCopy(net, [net]), []
    handle = net[0].register_forward_pre_hook(lambda cell, inputs: seen.append(inputs))
    copy.follow()
    copy.network(X)
    handle.remove()
    copy.follow()
    copy.network(X)
    assert len(seen) == 1


def test_a_graph_keeps_what_it_was_compiled_with(graph_mode):
    """In PYNATIVE_MODE, which compiles nothing, the copy follows again."""
    net = Branching()
    copy = EvalCopy(net, [net])
    copy.follow()
    net.scale = 2.0
    copy.follow()
    assert copy.network.scale == 1.0
    ms.set_context(mode=ms.PYNATIVE_MODE)
    copy.follow()
    assert copy.network.scale == 2.0
