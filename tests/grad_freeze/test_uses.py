"""A weight that is used again later is not frozen with the layer that uses it first."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import initializer
from models import model_of

from mindspore_boost_ext import GradientFreeze
from mindspore_boost_ext.grad_freeze.uses import in_order_of_last_use
from mindspore_boost_ext.less_batch_normalization import CommonHeadLastFN
from mindspore_boost_ext.thor.layers import layer_plans

WORDS, WIDTH = 5, 4


class Body(nn.Cell):
    """An embedding, two Dense layers, and an output by the embedding's table."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.SequentialCell(nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH))


class ReadByCode(Body):
    def construct(self, x):
        x = self.hidden(self.embedding(x))
        return ops.matmul(x, self.embedding.embedding_table.T)


class HeldTwice(Body):
    def __init__(self):
        super().__init__()
        self.output = nn.Dense(WIDTH, WORDS, has_bias=False)
        self.output.weight = self.embedding.embedding_table

    def construct(self, x):
        return self.output(self.hidden(self.embedding(x)))


class InTwoPlaces(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Dense(WIDTH, WIDTH)
        self.hidden = nn.SequentialCell(nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH))
        self.last = self.first


class ByAnotherName(Body):
    def construct(self, x):
        table = self.embedding
        return ops.matmul(self.hidden(table(x)), table.embedding_table.T)


class ByLoop(Body):
    def __init__(self):
        super().__init__()
        self.tables = nn.CellList([self.embedding])

    def construct(self, x):
        for place, table in enumerate(self.tables):
            x = table(x) + place
        hidden = self.hidden(x)
        outputs = [ops.matmul(hidden, one.embedding_table.T) for one in reversed(self.tables)]
        return outputs[place]


class ByIndex(ByLoop):
    def construct(self, x):
        outputs = []
        for place in range(1):
            outputs.append(self.tables[place].embedding_table.T)
        return ops.matmul(self.hidden(self.embedding(x)), outputs[0])


class FromTheEnd(ByLoop):
    def construct(self, x):
        return ops.matmul(self.hidden(self.embedding(x)), self.tables[-1].embedding_table.T)


class ByPart(ByLoop):
    def construct(self, x):
        table: nn.Embedding = self.embedding
        x = self.hidden(table(x))
        for place, one in enumerate(self.tables[:1], 1):
            x = ops.matmul(x, one.embedding_table.T) * place
        return x


class ByKey(Body):
    def __init__(self):
        super().__init__()
        self.parts = {"table": self.embedding}

    def construct(self, x):
        return ops.matmul(self.hidden(self.embedding(x)), self.parts["table"].embedding_table.T)


class ByItems(ByKey):
    def construct(self, x):
        x = self.hidden(self.embedding(x))
        for _, one in self.parts.items():
            x = ops.matmul(x, one.embedding_table.T)
        return x


class ByTuple(Body):
    def __init__(self):
        super().__init__()
        self.tied = ms.ParameterTuple([self.embedding.embedding_table])

    def construct(self, x):
        return ops.matmul(self.hidden(self.embedding(x)), self.tied[0].T)


TIED = [
    *(ReadByCode, HeldTwice, ByAnotherName, ByLoop, ByIndex, FromTheEnd, ByPart, ByKey, ByItems),
    ByTuple,
]


@pytest.mark.parametrize("kind", TIED)
def test_thor_leaves_a_tied_embedding_plain(kind):
    plans, reasons = layer_plans(net := kind(), net.trainable_params(), 128)
    assert "Embedding" not in [plan.kind for plan in plans]
    reason = "shared" if kind is HeldTwice else f"read by the code of {kind.__name__}, too"
    assert reasons[id(net.embedding.embedding_table)] == reason


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_embedding_stands_where_the_output_is(kind):
    net = kind()
    assert in_order_of_last_use(net)[-1] is net.embedding.embedding_table
    groups = GradientFreeze(2, 0, 0.5, 8).split_parameters_groups(net, 2)
    assert any(one is net.embedding.embedding_table for one in groups[-1])


def test_a_layer_in_two_places_is_frozen_with_the_second():
    net = InTwoPlaces()
    found = in_order_of_last_use(net)[-2:]
    assert (found[0] is net.first.weight, found[1] is net.first.bias) == (True, True)


def test_without_shared_weights_the_order_is_that_of_the_network():
    for net in (nets.MLP(), nets.Deep(), nets.ConvNet(), nn.Dense(2, 2)):
        expected = [id(one) for one in net.trainable_params()]
        assert [id(one) for one in in_order_of_last_use(net)] == expected


class WithPositions(Body):
    """As a vision transformer: positions in front, a token in between, a scale behind."""

    def __init__(self):
        super().__init__()
        self.positions = ms.Parameter(Tensor(np.ones((3, WIDTH), np.float32)))
        self.token = ms.Parameter(Tensor(np.ones((1, WIDTH), np.float32)))
        self.scale = ms.Parameter(Tensor(np.ones(WIDTH, np.float32)))
        self.head = nn.Dense(WIDTH, WORDS)

    def features(self, x):
        size = x.shape[0]
        positions = ops.tile(self.positions, (size, 1, 1))
        x = self.embedding(x) + positions
        return self.hidden(x) + self.token

    def construct(self, x):
        return self.head(self.features(x)) * self.scale[0]


def test_what_a_network_holds_itself_stands_where_its_code_reads_it():
    found = [one.name for one in in_order_of_last_use(WithPositions())]
    assert found == [
        "embedding.embedding_table",
        "positions",
        "hidden.0.weight",
        "hidden.0.bias",
        "hidden.1.weight",
        "hidden.1.bias",
        "token",
        "head.weight",
        "head.bias",
        "scale",
    ]


class InATuple(Body):
    """Holds the weights of its output in a tuple, and a tuple of all weights."""

    def __init__(self):
        super().__init__()
        self.head = ms.ParameterTuple(
            [
                ms.Parameter(Tensor(np.ones((WIDTH, WIDTH), np.float32)), name=f"head.{place}")
                for place in range(2)
            ]
        )

    def construct(self, x):
        x = self.hidden(self.embedding(x))
        return ops.matmul(ops.matmul(x, self.head[0]), self.head[1])


class InATupleByLoop(InATuple):
    def construct(self, x):
        x = self.hidden(self.embedding(x))
        for weight in self.head:
            x = ops.matmul(x, weight)
        return x


@pytest.mark.parametrize("kind", [InATuple, InATupleByLoop])
def test_weights_in_a_tuple_stand_where_the_code_reads_them(kind):
    found = [one.name for one in in_order_of_last_use(kind())]
    assert found[0] == "embedding.embedding_table"
    assert found[-2:] == ["head.0", "head.1"]


class SumOfSquares(nn.Cell):
    """A loss that goes through all weights of the network."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.all = ms.ParameterTuple(network.trainable_params())

    def construct(self, x):
        loss = self.network(x).mean()
        for weight in self.all:
            loss += ops.square(weight).sum()
        return loss


class ByNumber(SumOfSquares):
    def construct(self, x):
        loss = self.network(x).mean()
        for place in range(len(self.all)):
            loss += ops.square(self.all[place]).sum()
        return loss


class Beside(nn.Cell):
    """The network and what goes through its weights stand side by side."""

    def __init__(self, network):
        super().__init__()
        self.network, self.norm = network, Norm(network.trainable_params())

    def construct(self, x):
        return self.network(x).mean() + self.norm()


class Norm(nn.Cell):
    def __init__(self, weights):
        super().__init__()
        self.all = ms.ParameterTuple(weights)

    def construct(self):
        return sum(ops.square(weight).sum() for weight in self.all)


@pytest.mark.parametrize("kind", [SumOfSquares, ByNumber])
def test_a_tuple_of_all_weights_is_no_use_of_them(kind):
    expected = [one.name for one in in_order_of_last_use(ReadByCode())]
    found = [one.name for one in in_order_of_last_use(kind(ReadByCode()))]
    assert [one.removeprefix("network.") for one in found] == expected


@pytest.mark.parametrize("kind", [SumOfSquares, ByNumber, Beside])
def test_thor_takes_no_notice_of_a_tuple_of_all_weights(kind):
    plans, _ = layer_plans(net := kind(InALoop()), net.trainable_params(), 128)
    assert "Embedding" in [plan.kind for plan in plans]


class InALoop(WithPositions):
    def construct(self, x):
        x = self.embedding(x)
        for layer in self.hidden:
            x = layer(x + self.positions)
        x = x + self.token
        return self.head(x) * self.scale


def test_what_a_loop_reads_stands_behind_its_layers():
    found = [one.name for one in in_order_of_last_use(InALoop())]
    assert found[0] == "embedding.embedding_table"
    assert found[5:] == ["positions", "token", "head.weight", "head.bias", "scale"]


class Filled(Body):
    """Its constructor scales weights, as that of MindCV's ConvNeXt, and a function fills them."""

    def __init__(self):
        super().__init__()
        self.output = nn.Dense(WIDTH, WORDS)
        self.scale()

    def scale(self):
        self.embedding.embedding_table.set_data(self.embedding.embedding_table * 0.5)

    def reset(self):
        shape = self.embedding.embedding_table.shape
        self.embedding.embedding_table.set_data(initializer("ones", shape))

    def construct(self, x):
        return self.output(self.hidden(self.embedding(x)))


def test_what_is_filled_is_not_used_there():
    assert in_order_of_last_use(Filled())[0].name == "embedding.embedding_table"


class FilledByLoop(Body):
    """The names of a method that fills weights are no names of another."""

    def __init__(self):
        super().__init__()
        self.output = nn.Dense(WIDTH, WIDTH)
        self.fill()

    def fill(self):
        for layer in self.hidden:
            layer.weight.set_data(initializer("ones", layer.weight.shape))

    def construct(self, x):
        layer = self.output
        return ops.matmul(self.hidden(self.embedding(x)), layer.weight)


def test_local_names_are_those_of_their_method():
    net = FilledByLoop()
    names = [one.name for one in in_order_of_last_use(net)]
    assert names.index("hidden.1.weight") < names.index("output.bias")
    assert names[-1] == "output.weight"


class BiasFirst(nn.Cell):
    """Its code reads what it holds in another order than it was made in."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones((WIDTH, WIDTH), np.float32)))
        self.bias = ms.Parameter(Tensor(np.ones(WIDTH, np.float32)))

    def construct(self, x):
        x = x + self.bias
        return ops.matmul(x, self.weight)


def test_what_one_cell_holds_stays_in_its_order():
    """Else a bias opens a chunk that its weight is not in."""
    for cell in (BiasFirst(), CommonHeadLastFN(WIDTH, 2)):
        net = nn.SequentialCell(nn.Dense(WIDTH, WIDTH), cell, nn.Dense(2, 2))
        expected = [one.name for one in net.trainable_params()]
        assert [one.name for one in in_order_of_last_use(net)] == expected


@pytest.mark.parametrize("kind", [ReadByCode, HeldTwice])
def test_the_output_goes_on_learning_when_the_prefix_is_frozen(mode, kind):
    net = nets.fill(kind())
    config = switched(grad_freeze=True)
    config["grad_freeze"] = {"param_groups": 2, "schedule": [1], "total_steps": 1}
    model = model_of(net, config)
    frozen = "hidden.0.weight, hidden.0.bias, hidden.1.weight"
    assert model.train_network.report()["grad_freeze"].reason.startswith("freezes at most")
    before = nets.weights(net)
    x = np.arange(WORDS).astype(np.int32)
    for _ in range(2):
        model.train_network(Tensor(x), Tensor(x[::-1].copy()))
    after = nets.weights(net)
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert "embedding.embedding_table" in changed
    assert changed.isdisjoint(frozen.split(", "))


class Head(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Dense(4, 4), nn.LayerNorm((4,))
        self.proj = ms.Parameter(Tensor(np.ones((4, 4), np.float32)), name="proj")


class Call(Head):
    def construct(self, x):
        return ops.matmul(self.norm(self.layer(x)), self.proj)


class Left(Head):
    def construct(self, x):
        return x + self.proj * self.norm(self.layer(x))


class Property(Head):
    @property
    def cache(self):
        raise RuntimeError("not built yet")

    def construct(self, x):
        return ops.matmul(self.norm(self.layer(x)), self.proj) + self.cache


class Alias(Head):
    def construct(self, x):
        proj, norm = self.proj, self.norm
        return ops.matmul(norm(self.layer(x)), proj)


class Cast(Head):
    def construct(self, x):
        proj: Tensor = ops.transpose(self.proj.astype(x.dtype), (1, 0)) * 0.5
        return self.forward(x) @ proj

    def forward(self, x):
        return self.norm(self.layer(x))


class Given(Head):
    def construct(self, x):
        return self.forward(x, self.proj)

    def forward(self, x, proj):
        return ops.matmul(self.norm(self.layer(x)), proj)


class Pair(Head):
    def construct(self, x):
        proj, y = self.proj, x
        return ops.matmul(self.norm(self.layer(y)), proj)


class Later(Head):
    def construct(self, x):
        def head(y):
            return ops.matmul(y, self.proj)

        return head(self.norm(self.layer(x)))


class Generated(Head):
    def construct(self, x):
        return sum(one(x) @ self.proj for one in (self.layer, self.norm))


class Above(Left):
    def construct(self, x):
        return super().construct(x) + 1


KINDS = [Call, Left, Property, Alias, Cast, Given, Pair, Later, Generated, Above]


@pytest.mark.parametrize("kind", KINDS)
def test_what_multiplies_the_output_of_the_last_layer_is_last(kind):
    assert in_order_of_last_use(kind())[-1].name == "proj"
