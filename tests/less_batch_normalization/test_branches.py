"""Branches that split, are gated, or begin with a BatchNorm: what goes, and what stays true."""

from __future__ import annotations

import branch_nets as zoo
import mindspore as ms
import nets
import numpy as np
import pytest
import residual_nets
from mindspore import Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn

WIDTH = residual_nets.WIDTH
KINDS = pytest.mark.parametrize("kind", zoo.BRANCHES, ids=lambda one: one.__name__)


def reasons(rewriting, done):
    return {one.name: one.reason for one in rewriting.changes if one.done == done}


@KINDS
def test_which_batch_norms_go_and_why_the_others_stay(kind):
    removed, kept = zoo.BRANCHES[kind]
    rewriting = less_bn(kind())
    assert set(reasons(rewriting, "removed")) == removed
    assert reasons(rewriting, "kept") == kept


@KINDS
def test_a_second_rewriting_finds_nothing_more(kind):
    net = kind()
    less_bn(net)
    again = less_bn(net)
    assert not again.is_new
    assert reasons(again, "kept") == zoo.BRANCHES[kind][1]


def test_a_branch_of_too_many_convolutions_keeps_all():
    assert len(reasons(less_bn(zoo.LongBranch(6)), "removed")) == 5
    (reason,) = set(reasons(less_bn(zoo.LongBranch(7)), "kept").values())
    assert reason == "a branch of more than 6 convolutions needs BatchNorms between them"


class Joined(nn.Cell):
    """Parts of a split, and what is made of them, in one tuple, as in the blocks of YOLOv8."""

    def __init__(self, join):
        super().__init__()
        self.join = join
        self.one, self.other = (nn.SequentialCell(*self.layers(), *self.layers()) for _ in "12")

    def layers(self):
        return nn.Conv2d(WIDTH, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU()

    def construct(self, x):
        return ops.concat(self.join(ops.relu(x), self.one, self.other), 1)


def from_nothing(x, one, other):
    joined = ()
    joined += ops.split(x, WIDTH, 1)
    joined += (one(joined[-1]),)
    return joined


def twice(x, one, other):
    joined = ops.chunk(x, 2, 1)
    joined = joined + (one(joined[-1]),)  # noqa: RUF005
    return joined + (other(joined[-1]),)  # noqa: RUF005


def of_two_splits(x, one, other):
    return ops.chunk(x, 2, 1) + ops.chunk(other(one(x)), 2, 1)


class ByNumbers(residual_nets.Block):
    """A residual block of the sum of a tensor and numbers."""

    def construct(self, x):
        x = x + (0.5,)  # noqa: RUF005
        return self.branch(x) + x


def test_numbers_in_a_tuple_are_added():
    assert len(reasons(less_bn(ByNumbers()), "removed")) == 1


@pytest.mark.parametrize("join", [from_nothing, twice, of_two_splits], ids=lambda one: one.__name__)
def test_tuples_that_are_joined_are_no_residual_block(join):
    assert reasons(less_bn(Joined(join)), "removed") == {}


# ---- Words for what stands between two BatchNorms ----


class Between(residual_nets.Block):
    """Does something between its first BatchNorm and its last convolution."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.squeeze = nn.Conv2d(WIDTH, WIDTH, 1)
        self.dense = nn.Dense(WIDTH, WIDTH)
        self.norm = nn.LayerNorm((8,))
        self.up = nn.Conv2dTranspose(WIDTH, WIDTH, 1)
        self.layer = Opaque()
        self.coordinates = Tensor(np.ones((2, 2, 8, 8), np.float32))

    def branch(self, x):
        return self.bn2(self.conv2(self.step(self, self.bn1(self.conv1(x)))))


class Opaque(nn.Cell):
    def construct(self, x):
        return x if x.mean() > 0 else -x


def excited(net, x):
    return x * ops.sigmoid(net.dense(x.mean((2, 3)))).reshape((-1, WIDTH, 1, 1))


def excited_with_swish(net, x):
    inner = net.squeeze(x.mean((2, 3), True))
    return ops.mul(ops.sigmoid(net.squeeze(inner * ops.sigmoid(inner))), x)


SCALE = ms.Parameter(Tensor(np.ones((1, WIDTH, 1, 1), np.float32)), name="scale")
# What a user reads of a step, and what passes without a word.
WORDS = {
    "a squeeze-and-excitation gate": [excited, excited_with_swish],
    "a gate": [lambda net, x: x * ops.sigmoid(net.squeeze(x))],
    "a product of two values": [lambda net, x: net.squeeze(x) * net.conv1(x), lambda _, x: x * x],
    "a mean, sum or maximum over positions or channels": [
        lambda _, x: ops.ReduceSum(True)(x, 1).broadcast_to((2, WIDTH, 8, 8)),
        lambda _, x: x.max(1, keepdims=True),
    ],
    "a matrix product": [lambda _, x: ops.matmul(x, x), lambda net, x: net.dense(x)],
    "a softmax": [lambda _, x: ops.softmax(x, 1)],
    "a normalisation of another kind": [lambda net, x: net.norm(x)],
    "a transposed convolution": [lambda net, x: net.up(x)],
    "a division": [lambda _, x: x / (1.0 + ops.abs(x))],
    "a resizing of the image": [lambda _, x: ops.interpolate(x, size=(8, 8), mode="bilinear")],
    "an addition of a number": [lambda _, x: x + 1.0, lambda _, x: ops.add(2, x)],
    "a concatenation with a constant": [
        lambda net, x: ops.cat((x[:, :2], net.coordinates), 1),
        lambda _, x: ops.stack((ops.ones((2, 4, 8, 8)), x), 1),
    ],
    "a padding with a number": [
        lambda _, x: ops.pad(x, (1, 1), "constant", 1.0),
        lambda _, x: ops.pad(x, (1, 1), value=0.5),
    ],
    "a subtraction": [lambda net, x: x - net.squeeze(x)],
    "the operation cumsum": [lambda _, x: ops.cumsum(x, 1)],
    "the layer Opaque": [lambda net, x: net.layer(x)],
    "": [
        lambda _, x: x * ops.sigmoid(x),
        lambda _, x: sum([x, ops.relu(x)]),
        lambda _, x: x * ops.tanh(ops.softplus(x)),
        lambda _, x: 0.5 * x * SCALE,
        lambda _, x: ops.concat(ops.chunk(x, 2, 1)[::-1], 1),
        lambda _, x: ops.pad(x, (1, 1), "constant", 0.0),
        lambda _, x: ops.cat((x[:, :2], ops.zeros((2, 2, 8, 8))), 1),
        lambda _, x: ops.relu(x).reshape((2, 2, 2, 8, 8)).swapaxes(1, 2).reshape((2, 4, 8, 8)),
    ],
}


@pytest.mark.parametrize(
    ("words", "step"), [(words, step) for words, steps in WORDS.items() for step in steps]
)
def test_the_words_for_a_step_in_the_branch(words, step):
    (first, last) = less_bn(Between(step)).changes
    assert (first.done, last.reason) == ("kept" if words else "removed", zoo.LAST)
    if words:
        assert first.reason == f"{words} inside the branch"


def test_a_batch_norm_with_fixed_statistics_does_not_end_a_branch():
    """It leaves the scale in, which the removal of the one before it would set free."""
    net = residual_nets.Block()
    net.bn2.use_batch_statistics = False
    first, last = less_bn(net).changes
    assert (first.done, last.done, last.reason) == ("kept", "kept", "its statistics are fixed")


class Pooled(residual_nets.Block):
    """Calls functions that the import has replaced, in front of the block."""

    def construct(self, x):
        return super().construct(ops.max_pool2d(ops.pad(x, (1, 1, 1, 1)), 2))


def test_functions_of_the_import_are_steps_as_mindspores():
    tune_machine()
    assert ops.max_pool2d.__module__.startswith("mindspore_boost_ext")
    changes, expected = (less_bn(one).changes for one in (Pooled(), residual_nets.Block()))
    assert [one.done for one in changes] == [one.done for one in expected]
    assert expected[0].done == "removed"


def test_cheaper_operators_of_an_earlier_model_hide_nothing():
    block = residual_nets.Block()
    block.act = nn.LeakyReLU()
    net = nn.SequentialCell(nn.Conv2d(1, WIDTH, 3), nn.MaxPool2d(2, 2), block, nn.Flatten())
    config = {"boost": {"mode": "manual", "less_bn": False}, "cheaper_operators": {}}
    model_of(net, config, nets.momentum(net.trainable_params()))
    assert set(reasons(less_bn(net), "removed")) == {"2.bn1"}


class ByShape(residual_nets.Block):
    """Has a use for a number where tracing has none."""

    def __init__(self, use):
        super().__init__()
        self.use = use

    def construct(self, x):
        return self.use(x) * (self.branch(x) + x)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: nn.AvgPool2d(x.shape[2], pad_mode="same")(x),
        lambda x: nn.AvgPool2d((x.shape[2], 1))(x),
        lambda x: sum(range(x.shape[1])),
        lambda x: int(x.mean()),
    ],
)
def test_a_number_made_from_a_tensor_is_told_in_words(use):
    expected = "ByShape.construct was not understood: it makes a number or a layer from a tensor or"
    for change in less_bn(ByShape(use)).changes:
        assert change.reason == f"{expected} its shape"


# ---- What the rewritten network computes ----


def filled(kind, size=1.0, seed=0):
    """Return a block with random weights, far from zero for BatchNorm's 1e-5 to be nothing."""
    net = kind()
    generator = np.random.default_rng(seed)
    for one in net.trainable_params():
        scale = size / np.sqrt(np.prod(one.shape[1:])) if one.ndim > 1 else 0.5
        offset = 1.0 if one.name.endswith("gamma") else 0.0
        values = generator.normal(offset, scale, one.shape)
        one.set_data(Tensor(values.astype(np.float32)))
    return net


def without(net, names):
    """Return a network with an Identity in the place of each layer named."""
    for name in names:
        *path, last = name.split(".")
        holder = net
        for part in path:
            holder = getattr(holder, part) if not part.isdigit() else holder[int(part)]
        if last.isdigit():
            holder[int(last)] = nn.Identity()
        else:
            setattr(holder, last, nn.Identity())
    return net


@KINDS
def test_the_rewritten_block_is_the_block_without_those_batch_norms(mode, kind):
    x, _ = residual_nets.images(4, WIDTH)
    net, expected = filled(kind).set_train(), without(filled(kind), zoo.BRANCHES[kind][0])
    before = net(x).asnumpy()
    less_bn(net)
    # The same operators on the same numbers in float32.
    np.testing.assert_allclose(
        net(x).asnumpy(), expected.set_train()(x).asnumpy(), rtol=1e-5, atol=1e-5
    )
    assert np.abs(before - net(x).asnumpy()).max() > 0.05


def branch_and_gradients(net, x):
    everything = [one for one in net.trainable_params() if one.ndim > 1]
    weights = [one for one in everything if "projection" not in one.name]
    shape = net.branch(x).shape
    direction = Tensor(np.random.default_rng(7).normal(size=shape).astype(np.float32))

    def forward(x):
        return (net.branch(x) * direction).sum()

    gradients = ms.value_and_grad(forward, None, ms.ParameterTuple(weights))(x)[1]
    return {one.name: (one.asnumpy(), grad.asnumpy()) for one, grad in zip(weights, gradients)}


# Weights whose result a BatchNorm receives, through ReLU and sums of equally scaled values alone.
WITHOUT_SCALE = {
    zoo.PreActivation: ["conv1.weight"],
    zoo.FramedByNorms: ["conv1.weight", "conv2.weight"],
    zoo.DenseLayer: ["conv1.weight"],
    zoo.MultiScale: ["conv1.weight", "conv3.weight"],
    zoo.GatedBottleneck: ["conv1.weight", "conv2.weight", "conv3.weight"],
}


@pytest.mark.parametrize("kind", WITHOUT_SCALE, ids=lambda one: one.__name__)
def test_a_branch_does_not_feel_the_scale_of_what_enters_it_nor_of_its_weights(mode, kind):
    x, _ = residual_nets.images(8, WIDTH)
    net = filled(kind, size=10.0).set_train()
    less_bn(net)
    before = net.branch(x).asnumpy()
    found = branch_and_gradients(net, x)
    for name, (_, gradient) in found.items():
        assert np.linalg.norm(gradient) > 0, name
        assert np.isfinite(gradient).all(), name
    for name in WITHOUT_SCALE[kind]:
        w, g = (one.astype(np.float64) for one in found[name])
        # float32 sums; an unrelated gradient would stand at about 1 / sqrt(144) = 0.08.
        assert abs((w * g).sum()) < 1e-4 * np.linalg.norm(w) * np.linalg.norm(g), name
    # float32 rounding on values of order one; eight is a power of two.
    np.testing.assert_allclose(net.branch(x * 8).asnumpy(), before, rtol=1e-3, atol=1e-3)


def test_the_oracle_of_scales_is_broken_by_a_gate_without_its_batch_norm():
    """Why the BatchNorm before a gate stays: without it the gate feels the scale of the weights."""
    x, _ = residual_nets.images(8, WIDTH)
    net = without(filled(zoo.GatedBottleneck), ["bn1", "bn2"]).set_train()
    before = net.branch(x).asnumpy()
    assert np.abs(net.branch(x * 8).asnumpy() - before).max() > 0.1


class Classifier(nn.Cell):
    def __init__(self, kind):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, WIDTH, 3), nn.SequentialCell([filled(kind)])
        outputs = 2 * WIDTH if kind is zoo.DenseLayer else WIDTH
        self.head = nn.Dense(outputs, residual_nets.CLASSES)

    def construct(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@KINDS
def test_a_rewritten_network_learns(graph_mode, kind):
    """One batch again and again: without learning the loss would stay what it was."""
    ms.set_seed(1)
    net = Classifier(kind)
    removed = less_bn(net).counts["batch_norms_removed"]
    assert removed == len(zoo.BRANCHES[kind][0])
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nets.loss_fn()), nn.Momentum(net.trainable_params(), 0.05, 0.9)
    )
    step.set_train()
    losses = [float(step(*residual_nets.images()).asnumpy()) for _ in range(20)]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.95 * losses[0]
