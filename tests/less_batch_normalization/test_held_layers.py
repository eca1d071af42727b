"""A BatchNorm stays where code reaches it by other ways than its own name in its own Cell."""

from __future__ import annotations

import collections
import copy
import functools
import types

import pytest
from mindspore import nn, ops
from residual_nets import InHalves as Block

from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn


def done(net):
    return {one.name.rpartition(".")[2]: one.done for one in less_bn(net).changes}


# ---- Layers that code finds by other ways than their names ----


class Reaching(nn.Cell):
    """Branches on a shape, so it is not understood; uses bn1 of its block once more."""

    def __init__(self, reach):
        super().__init__()
        self.reach, self.block = reach, Block()
        self.held = [self.block.bn1]
        self.call = lambda x: self.block.bn1(x)

    def construct(self, x):
        y = self.block(x)
        if y.shape[0] > 1:
            return y
        return y + self.reach(self, y)


def by_a_list(self, y):
    return self.held[0](y)


def by_getattr(self, y):
    return getattr(self.block, "bn" + str(1))(y)


def by_cells(self, y):
    return list(self.block.cells())[2](y)


def by_a_function(self, y):
    return self.call(y)


class ReachingItself(Reaching):
    def construct(self, x):
        y = self.block(x)
        if y.shape[0] > 1:
            return y
        for cell in self.block.cells():
            y = cell(y)
        return y + getattr(self.block, "bn1")(y)  # noqa: B009


def by_a_helper(self, y):
    return helper(self.block, y)


def helper(block, y):
    return block.bn1(y)


def by_a_helper_that_finds_it(self, y):
    return finding(self.block, y)


def finding(block, y):
    """Its first argument is no ``self``."""
    return getattr(block, "bn" + str(1))(y)


@pytest.mark.parametrize(
    "reach",
    [by_a_helper, by_a_helper_that_finds_it, by_a_list, by_getattr, by_cells, by_a_function],
)
def test_a_cell_that_is_not_understood_reaches_into_its_parts(reach):
    assert done(Reaching(reach))["bn1"] == "kept"
    assert done(ReachingItself(reach))["bn1"] == "kept"


def by_a_method_of_its_block(self, y):
    return self.block.first(y)


def through_a_sequence(self, y):
    return self.sequence[0].bn1(y)


@pytest.mark.parametrize("reach", [by_a_method_of_its_block, through_a_sequence])
@pytest.mark.parametrize("training", [True, False])
def test_also_where_another_mode_is_understood(reach, training):
    class InOneMode(Reaching):
        def construct(self, x):
            y = self.sequence(x)
            if self.training is training and y.shape[0] > 1:
                return y + self.reach(self, y)
            return y

    net = InOneMode(reach)
    net.sequence = nn.SequentialCell(net.block)
    assert set(done(net).values()) == {"kept"}


class Stages(nn.Cell):
    """Calls its layers by their names, and is not understood."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.SequentialCell(Block()), nn.SequentialCell(Block())
        self.names, self.flat, self.fill = ["layer1", "layer2"], [*self.layer1], fill

    def construct(self, x):
        assert x.shape[-1] % 4 == 0
        for name in self.names:
            x = getattr(self, name)(x)
        return ops.relu(x)


def fill(net):
    return list(net.cells_and_names())


class Asking(Stages):
    """Asks for settings and functions by name; some of its own names are those of its blocks."""

    def __init__(self):
        super().__init__()
        self.settings, self.function = types.SimpleNamespace(deep=1), "relu"
        self.act, self.first = ops.ReLU(), "layer1"

    def construct(self, x):
        assert x.shape[-1] % 4 == 0
        if getattr(self.settings, "deep", False) and getattr(x, "device", None) is None:
            x = self.layer2(getattr(ops, self.function)(x))
        settings = copy.deepcopy(self.settings)
        return self.act(self.layer1(x)) if settings and self.first == "layer1" else x


@pytest.mark.parametrize("kind", [Stages, Asking])
def test_a_cell_that_only_calls_what_it_holds_reaches_into_nothing(kind):
    found = {one.name: one.done for one in less_bn(kind()).changes}
    assert [name for name, done in found.items() if done == "removed"] == [
        "layer1.0.bn1",
        "layer2.0.bn1",
    ]


# ---- Layers that the script holds, too ----


class Slots:
    __slots__ = ("__private", "__weakref__", "layer")

    def __init__(self, layer):
        self.layer, self.__private = layer, layer


Named = collections.namedtuple("Named", "layer")
HOLDERS = {
    "slots": Slots,
    "namedtuple": Named,
    "OrderedDict": lambda layer: collections.OrderedDict(layer=layer),
    "namespace": lambda layer: types.SimpleNamespace(layer=layer),
    "deque": lambda layer: collections.deque([layer]),
    "default": lambda layer: lambda x, layer=layer: layer(x),
    "partial": functools.partial,
}


def layer_in(holder):
    if isinstance(holder, dict):
        return holder["layer"]
    if isinstance(holder, collections.deque):
        return holder[0]
    return getattr(holder, "layer", holder)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_layer_that_an_object_holds_cannot_be_exchanged(hold):
    class Holding(Block):
        def __init__(self):
            super().__init__()
            self.holder = hold(self.bn1)

        def first(self, x):
            return layer_in(self.holder)(self.conv1(x))

    assert done(Holding())["bn1"] == "kept"


bn1 = Block().bn1  # a name as in a notebook; it has nothing to do with an attribute of this name


def test_a_global_name_like_an_attributes_holds_no_layer():
    class ByItsName(Block):
        def construct(self, x):
            return self.last(x, self.bn1(self.conv1(x)))

    net = ByItsName()
    bn1.__dict__.update(vars(net.bn1))
    globals()["bn1"] = net.bn1
    assert done(net)["bn1"] == "removed"


class WithKeysAsAttributes(dict):
    def __init__(self, entries):
        super().__init__(entries)
        vars(self).update(entries)


class Lazy:
    """A proxy of another package: it lets nobody look into it now."""

    __slots__ = ("real",)

    @property
    def __class__(self):
        raise RuntimeError("there is no request")

    def __getattr__(self, name):
        return getattr(self.real, name)


class Closed(list):
    def __iter__(self):
        raise RuntimeError("closed")


@pytest.mark.parametrize(
    "hold", [lambda: WithKeysAsAttributes({"values": [1, 2]}), Lazy, lambda: Closed([1])]
)
def test_what_cannot_be_looked_into_does_no_harm(hold):
    net = Block()
    vars(net)["held"] = types.SimpleNamespace(inner=hold())
    assert done(net)["bn1"] == "removed"


def test_a_layer_in_a_list_is_exchanged_there():
    class Listing(Block):
        def first(self, x):
            return self.layers[0](self.conv1(x))

    net = Listing()
    net.layers = [net.bn1]
    assert done(net)["bn1"] == "removed"
    assert net.layers[0] is net.bn1


@pytest.mark.parametrize("hold", [list, dict, lambda pairs: types.SimpleNamespace(**dict(pairs))])
def test_scales_that_a_loss_reads_from_what_it_holds(hold):
    class Penalty(nn.Cell):
        def __init__(self, net):
            super().__init__()
            self.net = net
            norms = {"one": net.bn1.gamma, "other": net.bn2.gamma}
            self.scales = hold(norms.items() if hold is not list else norms.values())

        def construct(self, x):
            return ops.mean(self.net(x)) + self.penalty()

        def penalty(self):
            held = getattr(self.scales, "__dict__", self.scales)
            return sum(
                one.abs().sum() for one in (held.values() if isinstance(held, dict) else held)
            )

    assert set(done(Penalty(Block())).values()) == {"kept"}


def test_parameters_keep_their_names():
    class Slicing(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = nn.SequentialCell(Block(), Block())

        def construct(self, x):
            return self.net[1:](self.net[:1](x))

    net = Slicing()
    names = [one.name for one in net.get_parameters()]
    rewriting = less_bn(net, include=["net.0.*"])
    assert [one.name for one in rewriting.changes if one.done == "removed"] == ["net.0.bn1"]
    assert {one.name for one in net.get_parameters()} <= set(names)


class Counting(Reaching):
    """Looks for its layers in a method that no call reaches."""

    def construct(self, x):
        y = self.block(x)
        return y if y.shape[0] > 1 else ops.relu(y)

    def count(self):
        return len(list(self.cells_and_names()))


def test_a_method_that_is_never_called_reaches_nothing():
    net = Counting(None)
    net.held = net.call = None
    assert done(net)["bn1"] == "removed"
