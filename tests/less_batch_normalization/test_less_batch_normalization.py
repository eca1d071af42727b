"""LessBN: which BatchNorms go, in which networks, and what stays true of those that do."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from pathlib import Path

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
import residual_nets as zoo
from mindcv.models import create_model
from mindspore import ParameterTuple, Tensor, mint, nn, ops
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
    BoostWarning,
    FreezeOpt,
    GroupLossScaleManager,
    LessBN,
    NoEffectWarning,
)
from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN, no_classes
from mindspore_boost_ext.less_batch_normalization.rewrite import RemovedBatchNorm, less_bn
from mindspore_boost_ext.less_batch_normalization.steps import is_batch_norm
from mindspore_boost_ext.less_batch_normalization.tracing import trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
from networks import SmallResNet


def switched(**settings):
    """Return a configuration with less_bn alone."""
    off = dict.fromkeys(AutoBoost().boost_config, False)
    config = {"boost": {"mode": "manual", **off, "less_bn": True}}
    return {**config, "less_bn": settings} if settings else config


def done(rewriting, what):
    return [change.name for change in rewriting.changes if change.done == what]


def norms(net):
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    return sum(isinstance(cell, kinds) for _, cell in net.cells_and_names())


# ---- What only looks like a BatchNorm, a block or a classifier ----


class FusedBatchNorm(nn.BatchNorm2d):
    """A BatchNorm with its activation, as some libraries have it."""

    def construct(self, x):
        return ops.relu(super().construct(x))


class Fused(zoo.Block):
    def __init__(self):
        super().__init__()
        self.bn1 = FusedBatchNorm(zoo.WIDTH)
        self.act = nn.Identity()


class Read(zoo.Block):
    """Its code looks at a parameter of the BatchNorm."""

    def construct(self, x):
        return super().construct(x) * (1.0 + 0.0 * self.bn1.gamma.mean())


class ReadStatistics(zoo.Block):
    def construct(self, x):
        return super().construct(x) * (1.0 + 0.0 * self.bn1.moving_mean.mean())


SCALES = []


class ReadFromAGlobalName(zoo.Block):
    def __init__(self):
        super().__init__()
        SCALES[:] = [self.bn1.gamma]

    def construct(self, x):
        return super().construct(x) * (1.0 + 0.0 * SCALES[0].mean())


class OtherPath(zoo.Block):
    """In training the result of the first BatchNorm goes elsewhere too."""

    def construct(self, x):
        inner = self.bn1(self.conv1(x))
        out = self.act(self.bn2(self.conv2(self.act(inner))) + x)
        return (out, inner) if self.training else out


class Asks(zoo.Block):
    """Its code decides by the class of a layer what follows it."""

    def asked(self, layer):
        return isinstance(layer, nn.BatchNorm2d)

    def construct(self, x):
        inner = self.bn1(self.conv1(x))
        if self.asked(self.bn1):
            inner = self.act(inner)
        return self.act(self.bn2(self.conv2(inner)) + x)


class AsksType(Asks):
    def asked(self, layer):
        return type(layer).__name__ == "BatchNorm2d"


class AsksTypeWithin(Asks):
    def asked(self, layer):
        return [type(one).__name__ for one in (layer,)] == ["BatchNorm2d"]


class AsksTypeItself(Asks):
    def asked(self, layer):
        return type(layer) is nn.BatchNorm2d


class AsksOfOthers(Asks):
    """The answers are the same of what takes the BatchNorm's place."""

    def asked(self, layer):
        return isinstance(layer, (nn.Cell, nn.Dense)) and not isinstance(layer, nn.Identity)


class AsksForAClass(Asks):
    def asked(self, layer):
        return not isinstance(self.act, type)


class Kinds:
    """No Cell: its code runs as it is, with what stands for a layer and for a class of layers."""

    @staticmethod
    def of(layer, kind):
        return isinstance(layer, kind)


class AsksByOtherCode(zoo.Block):
    """It is a residual block if the answer is the right one."""

    def construct(self, x):
        out = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(out + x if Kinds.of(self.act, nn.ReLU) else out)


class AsksName(Asks):
    def asked(self, layer):
        return layer.cls_name == "BatchNorm2d"


def together(conv, norm):
    return lambda x: norm(conv(x))


def one_after_the_other(*layers):
    def run(x):
        for layer in layers:
            x = layer(x)
        return x

    return run


class Closure(zoo.Block):
    """A function of its own holds the first BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first = together(self.conv1, self.bn1)

    def construct(self, x):
        return self.act(self.bn2(self.conv2(self.act(self.first(x)))) + x)


class ClosureOfMany(Closure):
    def __init__(self):
        super().__init__()
        self.first = one_after_the_other(self.conv1, self.bn1)


class Parts(nn.Cell):
    """Not understood, and uses the layers of a block in another order than the block."""

    def __init__(self):
        super().__init__()
        self.block = zoo.Block()

    def construct(self, x):
        count, channels, height, width = x.shape
        out = ops.relu(self.block.conv1(self.block.bn1(x)))
        out = self.block.bn2(self.block.conv2(out))
        return out.reshape(count, channels, height * width)


def patched_norm():
    net = OtherPath()
    bn1 = next(cell for name, cell in net.cells_and_names() if name.endswith("bn1"))
    bn1.construct = types.MethodType(lambda self, x: x * 2, bn1)
    return net


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Fused, "FusedBatchNorm has its own construct"),
        (patched_norm, "BatchNorm2d has its own construct"),
        (Read, "other code reads its parameters"),
        (ReadStatistics, "other code reads its parameters"),
        (ReadFromAGlobalName, "other code reads its parameters"),
        (OtherPath, "its result is used outside of its residual branch too"),
        (Asks, "the network's code asks for its class"),
        (AsksType, "the network's code asks for its class"),
        (AsksName, "the network's code asks for its class"),
        (AsksTypeWithin, "the network's code asks for its class"),
        (AsksTypeItself, "the network's code asks for its class"),
        (Closure, "a function of the script holds it"),
        (ClosureOfMany, "a function of the script holds it"),
        (Parts, "Parts may use parts of it, but Parts.construct was not understood"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_that_may_do_more_stays(kind, reason, training):
    net = kind().set_train(training)
    before = {name: type(cell) for name, cell in net.cells_and_names()}
    (change,) = [one for one in less_bn(net).changes if one.name.endswith("bn1")]
    assert change.done == "kept"
    assert reason in change.reason
    assert {name: type(cell) for name, cell in net.cells_and_names()} == before
    assert all(cell.training == training for _, cell in net.cells_and_names())


@pytest.mark.parametrize("kind", [AsksOfOthers, AsksForAClass, AsksByOtherCode])
def test_a_batch_norm_goes_where_the_answer_stays_the_same(kind):
    (change,) = [one for one in less_bn(kind()).changes if one.name.endswith("bn1")]
    assert change.done == "removed"


class Penalty(nn.Cell):
    """A cross-entropy, and the scale of a BatchNorm: network slimming."""

    def __init__(self, norm, held):
        super().__init__(auto_prefix=False)
        self.scales = held(norm)

    def construct(self, outputs, labels):
        return ops.cross_entropy(outputs, labels) + ops.abs(self.scales[0]).sum()


@pytest.mark.parametrize("of_loss", [True, False], ids=["the loss", "the network"])
@pytest.mark.parametrize(
    "held",
    [
        lambda norm: [norm.gamma],
        lambda norm: ParameterTuple([norm.gamma]),
        lambda norm: norm.gamma,
        lambda norm: norm.beta,
    ],
    ids=["list", "tuple", "gamma", "beta"],
)
def test_a_batch_norm_stays_whose_parameters_other_cells_hold(held, of_loss):
    """Else a penalty would train a scale that scales nothing, and pruning would go by it."""
    assert [one.done for one in less_bn(zoo.Block()).changes] == ["removed", "kept"]
    net = zoo.Block()
    list(net.get_parameters())  # gives them their names
    penalty = Penalty(net.bn1, held)
    if not of_loss:
        net.penalty = penalty
    first, _ = less_bn(net, loss_fn=penalty if of_loss else None).changes
    assert first.reason == "other code reads its parameters"


class ByVars(nn.Cell):
    """Finds its list by another way than its name."""

    def __init__(self, norm):
        super().__init__(auto_prefix=False)
        self.scales = [norm.gamma]

    def construct(self, outputs, labels):
        return ops.cross_entropy(outputs, labels) + ops.abs(vars(self)["scales"][0]).sum()


def test_a_batch_norm_stays_whose_scale_a_loss_may_find_in_a_list():
    net = zoo.Block()
    first, _ = less_bn(net, loss_fn=ByVars(net.bn1)).changes
    assert first.reason == "other code reads its parameters"


class Graded(nn.Cell):
    def __init__(self):
        super().__init__()
        self.block, self.other = zoo.Block(), zoo.Block()
        self.head = nn.Dense(zoo.WIDTH, 2)

    def construct(self, x):
        return self.head(self.other(self.block(x)).mean((2, 3)))


@pytest.mark.parametrize("reads", [True, False])
def test_a_models_loss_is_looked_at(reads):
    net = Graded()
    held = net.block.bn1 if reads else nn.BatchNorm2d(zoo.WIDTH)
    model = BoostModel(
        net,
        Penalty(held, lambda norm: [norm.gamma]),
        nn.SGD(net.trainable_params()),
        boost_level="O1",
        boost_config_dict=contract.switched(less_bn=True),
    )
    row = model.train_network.report()["less_bn block.bn1"]
    assert row.status == ("kept" if reads else "removed")


def test_a_network_that_mixed_precision_has_rewritten_stays_with_the_remedy():
    net = ms.amp.auto_mixed_precision(zoo.Block(), "O1")
    for change in less_bn(net).changes:
        assert change.done == "kept"
        assert "give amp_level='O1' to the Model instead" in change.reason


class Volumes(nn.Cell):
    """A residual block over volumes, and a head."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv3d(2, 2, 3), nn.BatchNorm3d(2)
        self.conv2, self.bn2 = nn.Conv3d(2, 2, 3), nn.BatchNorm3d(2)
        self.head = nn.Dense(2, 3)

    def construct(self, x):
        out = self.bn2(self.conv2(ops.relu(self.bn1(self.conv1(x)))))
        return self.head(ops.relu(out + x).mean((2, 3, 4)))


def test_a_network_with_batch_norms_over_volumes_trains(mode):
    """nn.BatchNorm3d is no BatchNorm itself: it holds one."""
    net = Volumes()
    boost = AutoBoost("O1", {"boost": {"mode": "manual", "less_bn": True, "grad_freeze": False}})
    optimizer = nets.momentum(net.trainable_params())
    network, optimizer = boost.network_auto_process_train(net, optimizer)
    done = {one.algorithm: one.status for one in boost.report() if "bn2d" in one.algorithm}
    assert list(done) == ["less_bn bn1.bn2d", "less_bn bn2.bn2d"]
    step = BoostTrainOneStepCell(nn.WithLossCell(network, nets.loss_fn()), optimizer).set_train()
    x = Tensor(np.random.default_rng(0).normal(size=(2, 2, 4, 4, 4)).astype(np.float32))
    assert np.isfinite(step(x, Tensor([0, 1], ms.int32)).asnumpy())


class LowRank(nn.Dense):
    def construct(self, x):
        return super().construct(x) * 2.0


class Head(nn.Cell):
    """A Dense that is followed by what a subclass does."""

    def __init__(self, outputs=3, kind=nn.Dense):
        super().__init__()
        self.first, self.last = nn.Dense(4, 4), kind(4, outputs)
        self.weight = ms.Parameter(Tensor(np.ones((outputs, outputs), np.float32)), name="w")

    def construct(self, x):
        return self.last(ops.relu(self.first(x)))


class Product(Head):
    def construct(self, x):
        return ops.matmul(ops.relu(super().construct(x)), self.weight.T)


class TwoHeads(Head):
    def construct(self, x):
        return self.first(x), self.last(x)


class Generator(nn.Cell):
    """Its only Dense is its first layer, and its shape is taken apart."""

    def __init__(self):
        super().__init__()
        self.last = nn.Dense(4, 4)
        self.up = nn.Conv2dTranspose(1, 1, 2, 2)

    def construct(self, x):
        count, _ = x.shape
        return self.up(self.last(x).reshape(count, 1, 2, 2))


class OpaqueClassifier(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Dense(4, 3)

    def construct(self, x):
        count, channels, _, _ = self.conv(x).shape
        return self.last(self.conv(x).reshape(count, channels, -1).mean(-1))


class WithFeatures(Head):
    def construct(self, x):
        features = ops.relu(self.first(x))
        return self.last(features), features


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Head(kind=LowRank), "LowRank has its own construct"),
        (lambda: Head(outputs=1), "one output"),
        (Product, "layers with weights come after the last Dense (matmul)"),
        (TwoHeads, "other outputs"),
        (Generator, "is not the last layer with weights"),
    ],
)
def test_a_dense_that_is_no_classifier_stays(make, reason):
    net = make()
    (change,) = less_bn(net, fn_flag=True).changes
    assert (change.done, type(net.last)) == ("kept", type(make().last))
    assert reason in change.reason


class Similarities(Head):
    """Multiplies what it gives by itself, and by no weights."""

    def construct(self, x):
        outputs = super().construct(x)
        return ops.matmul(outputs, outputs.T)


class WithPenalty(Head):
    """Its loss has a part that is made of features."""

    def construct(self, x, labels):
        features = ops.relu(self.first(x))
        return ops.cross_entropy(self.last(features), labels) + features.mean()


@pytest.mark.parametrize("make", [Head, OpaqueClassifier, WithFeatures, Similarities, WithPenalty])
def test_a_classifier_is_found(make):
    (change,) = less_bn(make(), fn_flag=True).changes
    assert (change.name, change.done) == ("last", "normalised")


def test_a_named_head_with_code_of_its_own_stays():
    net = Head(kind=LowRank)
    (change,) = less_bn(net, fn_flag=True, heads=["last"]).changes
    assert (change.done, type(net.last)) == ("kept", LowRank)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss, nn.L1Loss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss]
)
@pytest.mark.parametrize("with_loss", [False, True])
def test_a_network_without_classes_keeps_its_last_dense(loss, with_loss):
    net = nn.SequentialCell(zoo.ZooResNet(), nn.Dense(zoo.CLASSES, 2))
    optimizer = nets.momentum(net.trainable_params())
    if with_loss:
        boost = AutoBoost("O1", switched())
        boost.network_auto_process_train(nn.WithLossCell(net, loss()), optimizer)
    else:
        model = model_of(net, switched(), optimizer, loss_fn=loss())
        boost = model.train_network
    assert type(net[1]) is nn.Dense
    reason = boost.report()["less_bn head"].reason
    assert f"{loss.__name__} is not known to be a loss over classes" in reason
    assert boost.report()["less_bn"].counts["batch_norms_removed"] == 5


class Holds(nn.LossBase):
    def __init__(self, *held):
        super().__init__()
        self.held = nn.CellList(list(held))

    def construct(self, outputs, labels):
        return sum(one(outputs, labels) for one in self.held)


class Calls(nn.Cell):
    def construct(self, outputs, labels):
        return ops.mse_loss(outputs, labels)


class CallsToo(nn.LossBase):
    def construct(self, outputs, labels):
        return ops.huber_loss(outputs, labels) + ops.l1_loss(outputs, labels)


class Both(nn.Cell):
    def construct(self, outputs, labels):
        return ops.cross_entropy(outputs, labels) + ops.mse_loss(outputs, outputs * 0.0)


class Operator(nn.LossBase):
    def __init__(self):
        super().__init__()
        self.entropy = ops.SparseSoftmaxCrossEntropyWithLogits()

    def construct(self, outputs, labels):
        return self.entropy(outputs, labels) + ops.l1_loss(outputs, outputs * 0.0)


class Static(nn.LossBase):
    @staticmethod
    def of(outputs, labels):
        return ops.cross_entropy(outputs, labels)

    def construct(self, outputs, labels):
        return self.of(outputs, labels) + ops.l1_loss(outputs, outputs * 0.0)


class Unknown(nn.LossBase):
    def construct(self, outputs, labels):
        return -(outputs * labels).sum()


def entropy_of(outputs, labels):
    return ops.cross_entropy(outputs, labels)


class ByHelper(nn.Cell):
    def construct(self, outputs, labels):
        return entropy_of(outputs, labels)


class Held(nn.Cell):
    def __init__(self, entropy=ops.cross_entropy):
        super().__init__()
        self.entropy = entropy

    def construct(self, outputs, labels):
        return self.entropy(outputs, labels)


class Squares(nn.Cell):
    def construct(self, outputs, labels):
        return ops.square(outputs - labels).mean()


@pytest.mark.parametrize(
    ("make_loss", "named"),
    [
        (lambda: Holds(nn.MSELoss()), "MSELoss"),
        (Calls, "Calls"),
        (CallsToo, "CallsToo"),
        (lambda: Holds(nn.SoftmaxCrossEntropyWithLogits(sparse=True), nn.MSELoss()), ""),
        (Both, ""),
        (Operator, ""),
        (Static, ""),
        (Unknown, "Unknown"),
        (Squares, "Squares"),
        (Held, ""),
        (lambda: Held(mint.nn.functional.cross_entropy), ""),
        (ByHelper, ""),
        (nn.TripletMarginLoss, "TripletMarginLoss"),
        (nn.KLDivLoss, "KLDivLoss"),
        (mint.nn.MSELoss, "MSELoss"),
        (mint.nn.CrossEntropyLoss, ""),
        (nn.CrossEntropyLoss, ""),
        (nn.NLLLoss, ""),
        (nn.FocalLoss, ""),
        (nn.MultiMarginLoss, ""),
    ],
)
def test_a_loss_is_known_by_what_it_holds_and_calls(make_loss, named):
    assert no_classes(nn.SequentialCell(nn.ReLU()), make_loss()) == ""  # has no Dense to speak of
    reason = no_classes(nn.SequentialCell(nn.Dense(2, 2)), make_loss())
    remedy = "if it is one, name the Dense in less_bn.heads"
    unknown = f"is not known to be a loss over classes: {remedy}"
    assert reason == (f"{named} {unknown}" if named else "")


class Commits(nn.Cell):
    """A network that computes one of its losses, or all of them."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 2)

    def construct(self, outputs, labels):
        return ops.mse_loss(self.dense(outputs), labels)


class CommitsByShares(Commits):
    def construct(self, outputs, labels):
        return -(ops.log_softmax(self.dense(outputs)) * labels).sum()


class CommitsElsewhere(Commits):
    """What it offers beside its construct is no loss of a training that has its own."""

    def entropy(self, outputs, labels):
        return ops.cross_entropy(self.dense(outputs), labels)


def test_a_network_is_asked_for_losses_where_it_is_given_none():
    assert no_classes(Commits(), nn.CrossEntropyLoss()) == ""
    assert no_classes(Commits(), None).startswith("no loss over classes is known: if it is one,")
    assert no_classes(CommitsByShares(), None) == ""
    assert no_classes(CommitsElsewhere(), nn.MSELoss()).startswith("MSELoss is not known")
    attends = nn.SequentialCell(nn.Dense(2, 2), nn.Softmax())
    assert no_classes(nn.WithLossCell(attends, Squares()), None).startswith("Squares is not known")
    assert no_classes(nn.WithLossCell(attends, ByHelper()), None) == ""
    within = nn.WithLossCell(nn.Dense(2, 2), nn.CrossEntropyLoss())
    assert no_classes(within, None) == ""


def test_a_network_for_evaluation_gets_the_head_of_the_trained_one():
    """The trained network holds the loss, the one for evaluation does not."""
    for loss, kind in ((nets.loss_fn(), CommonHeadLastFN), (Squares(), nn.Dense)):
        net = nn.SequentialCell(zoo.ZooResNet(), nn.Dense(zoo.CLASSES, 2))
        other = copy.deepcopy(net)
        with AutoBoost("O1", switched()).building() as boost:
            with_loss = nn.WithLossCell(net, loss)
            boost.network_auto_process_train(with_loss, nets.momentum(net.trainable_params()))
            boost.network_auto_process_eval(other)
        assert type(net[1]) is kind
        assert type(other[1]) is kind


@pytest.mark.parametrize("settings", [{"fn_flag": "False"}, {"keep_shortcut": "False"}])
def test_a_flag_that_is_no_bool_is_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"less_bn\.{name} must be True or False, got 'False'"):
        less_bn(zoo.ZooResNet(), **settings)


@pytest.mark.parametrize(
    "settings",
    [{"exclude": ["nothere.*"]}, {"include": ["nothere.*", "*"]}, {"heads": ["nothere.*"]}],
)
def test_a_pattern_that_matches_nothing_is_told(settings):
    with pytest.warns(NoEffectWarning, match=r"no layer matches 'nothere\.\*'"):
        less_bn(zoo.ZooResNet(), fn_flag=True, **settings)


def test_what_is_said_of_a_missing_head_is_counted_as_no_batch_norm():
    assert less_bn(zoo.Block(), fn_flag=True).counts == {
        "batch_norms_removed": 1,
        "batch_norms_kept": 1,
        "heads_normalised": 0,
    }


# ---- Which blocks ----


@pytest.mark.parametrize("kind", zoo.UNDERSTOOD, ids=lambda one: one.__name__)
def test_the_first_batch_norm_of_a_block_goes_however_it_is_written(kind):
    net = kind()
    rewriting = less_bn(net)
    assert done(rewriting, "removed") == ["bn1"]
    assert done(rewriting, "kept") == ["bn2"]
    assert [node.cell for node in trace(net)[0].nodes if is_batch_norm(node)] == [net.bn2]


def test_a_frozen_part_keeps_its_batch_norms():
    """It could not learn back what their removal loses; a teacher that is held, say."""
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell([nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind()])
    for parameter in body[1].get_parameters():
        parameter.requires_grad = False
    rewriting = less_bn(nn.WithLossCell(body, nn.MSELoss()))
    assert done(rewriting, "removed") == ["2.bn1"]
    (kept,) = (one for one in rewriting.changes if one.name == "1.bn1")
    assert kept.reason == "its scale and shift are not trained, as in a frozen part"


FROZEN = "its {} not trained, as in a frozen part"


@pytest.mark.parametrize("part", ["gamma", "beta"])
def test_a_batch_norm_that_trains_in_part_is_no_frozen_part(part):
    net = zoo.Block()
    getattr(net.bn1, part).requires_grad = False
    assert done(less_bn(net), "removed") == ["bn1"]


def test_a_multiplier_joins_its_group_once():
    """As when the groups of a network that was rewritten before are fitted again."""
    net = Head()
    parameters = net.trainable_params()
    rewriting = less_bn(net, fn_flag=True)
    groups = rewriting.regrouped([parameters])
    for found in (groups, rewriting.regrouped(groups)):
        assert [list(map(id, one)) for one in found] == [
            [*map(id, parameters), id(net.last.multiplier)]
        ]


def test_what_the_optimizer_leaves_out_is_a_frozen_part():
    """As where only the last layer of a pretrained network is trained; its own is one of two."""
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell(
        nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind(), nn.Flatten(), nn.Dense(zoo.WIDTH * 16, 3)
    )
    weights = [*body[2].trainable_params(), body[0].weight]
    other = copy.deepcopy(body)
    config = {**contract.switched(less_bn=True), "less_bn": {"fn_flag": True}}
    with AutoBoost("O1", config).building() as boost:
        boost.loss_fn = nets.loss_fn()
        boost.network_auto_process_train(body, nets.momentum(weights))
        boost.network_auto_process_eval(other)
    rows = {row.algorithm: row for row in boost.report().rows}
    assert rows["less_bn 1.bn1"].reason == FROZEN.format("scale and shift are")
    assert rows["less_bn 2.bn1"].status == "removed"
    assert rows["less_bn 4"].reason == FROZEN.format("weight is")
    kinds = [[type(cell) for _, cell in one.cells_and_names()] for one in (body, other)]
    assert kinds[0] == kinds[1]


def test_an_eval_network_of_other_names_is_rewritten_alike():
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell(nn.Conv2d(1, zoo.WIDTH, 3), kind())
    other = nn.CellList([copy.deepcopy(body)])
    other.update_parameters_name("other.")
    with AutoBoost("O1", contract.switched(less_bn=True)).building() as boost:
        boost.network_auto_process_train(body, nets.momentum(body.trainable_params()))
        boost.network_auto_process_eval(other)
    assert boost.report()["less_bn (evaluation)"].status == "applied"
    assert type(other[0][1].bn1) is type(body[1].bn1) is RemovedBatchNorm


def hooked(norm):
    norm.register_forward_hook(lambda *_: None)


def at_rest(norm):
    norm.set_train(False)


@pytest.mark.parametrize("change", [hooked, at_rest], ids=lambda one: one.__name__)
def test_an_eval_network_keeps_what_is_kept_in_the_trained_one(change):
    """It has no hooks, and another mode."""
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell(nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind())
    other = copy.deepcopy(body)
    body.set_train()
    change(body[1].bn1)
    with AutoBoost("O1", contract.switched(less_bn=True)).building() as boost:
        boost.network_auto_process_train(body, nets.momentum(body.trainable_params()))
        boost.network_auto_process_eval(other)
    for net in (body, other):
        assert [type(one.bn1) for one in (net[1], net[2])] == [nn.BatchNorm2d, RemovedBatchNorm]


class Dropout(nn.Cell):
    """A layer of the user's own, under the name of one of MindSpore's that keeps the scale."""

    def construct(self, x):
        return x if x.sum() > 0 else ops.clamp(x, 0, 3)


def patched_relu():
    layer = nn.ReLU()
    layer.construct = types.MethodType(lambda self, x: ops.clamp(x, 0, 3), layer)
    return layer


@pytest.mark.parametrize("activation", [Dropout, patched_relu])
def test_a_layer_that_may_do_anything_keeps_the_batch_norm_before_it(activation):
    """It clips what a BatchNorm would have brought to size."""
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell(nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind())
    body[1].act = activation()
    done = {one.name: one.done for one in less_bn(body).changes}
    assert (done["1.bn1"], done["2.bn1"]) == ("kept", "removed")


def test_layers_with_hooks_stay():
    (kind, *_) = zoo.UNDERSTOOD
    body = nn.SequentialCell(nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind(), nn.Dense(4, 3))
    for hooked in (body[1].bn1, body[3]):
        hooked.register_forward_hook(lambda cell, inputs, output: None)
    rewriting = less_bn(body, fn_flag=True)
    assert done(rewriting, "removed") == ["2.bn1"]
    reasons = {one.name: one.reason for one in rewriting.changes}
    assert (reasons["1.bn1"], reasons["3"]) == ("it has hooks",) * 2


def test_settings_of_a_removed_batch_norm_can_be_read():
    (kind, *_) = zoo.UNDERSTOOD
    block = kind()
    before = block.bn1
    less_bn(block)
    assert block.bn1 is not before
    assert (block.bn1.eps, block.bn1.num_features) == (before.eps, before.num_features)


@pytest.mark.parametrize("kind", zoo.UNDERSTOOD, ids=lambda one: one.__name__)
def test_a_block_inside_a_sequence_and_a_network_with_loss(kind):
    body = nn.SequentialCell([nn.Conv2d(1, zoo.WIDTH, 3), kind(), kind()])
    rewriting = less_bn(nn.WithLossCell(body, nn.MSELoss()))
    assert done(rewriting, "removed") == ["1.bn1", "2.bn1"]


@pytest.mark.parametrize("kind", zoo.UNTOUCHED, ids=lambda one: one.__name__)
def test_what_is_not_understood_stays_as_it_is_and_the_reason_is_given(kind):
    net = kind()
    before = list(nets.weights(net))
    rewriting = less_bn(net)
    assert not done(rewriting, "removed")
    (reason,) = [change.reason for change in rewriting.changes if change.name == "bn1"]
    assert zoo.UNTOUCHED[kind] in reason
    assert list(nets.weights(net)) == before


def test_of_a_long_error_the_report_has_the_beginning():
    class Raising(zoo.Block):
        def construct(self, x):
            raise RuntimeError("first " + "word " * 100)

    first, _ = less_bn(Raising()).changes
    assert first.reason.startswith("Raising.construct was not understood: first word")
    assert len(first.reason) == 160


def test_an_outer_cell_that_is_not_understood_does_not_hide_the_blocks_in_it():
    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.blocks = nn.CellList([zoo.Block(), zoo.Swapped()])

        def construct(self, x):
            for block in self.blocks:
                x = block(x) if x.shape[0] > 1 else x
            return x

    assert done(less_bn(Outer()), "removed") == ["blocks.0.bn1", "blocks.1.bn1"]


def test_the_reason_is_told_of_a_batch_norm_at_any_depth():
    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.stem = nn.SequentialCell(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))

        def construct(self, x):
            return self.stem(x) if x.shape[0] > 1 else x

    (change,) = less_bn(Outer()).changes
    assert change.reason.startswith("Outer.construct was not understood: it branches")


def test_a_scale_that_a_kept_batch_norm_has_too_is_not_gone():
    net = zoo.Block()
    net.bn2.gamma = net.bn1.gamma
    rewriting = less_bn(net)
    assert done(rewriting, "removed") == ["bn1"]
    gone = [one.name.rpartition(".")[2] for one in rewriting.removed_parameters]
    assert sorted(gone) == ["beta", "moving_mean", "moving_variance"]


class Projected(nn.Cell):
    """A block with a projection; subclasses use it in another way."""

    def __init__(self):
        super().__init__()
        self.block = zoo.Block()
        self.projection = nn.Conv2d(zoo.WIDTH, zoo.WIDTH, 1)
        self.norm = nn.BatchNorm2d(zoo.WIDTH)

    def construct(self, x):
        return self.block.branch(x) + self.norm(self.projection(x))


class UsedTwice(Projected):
    def construct(self, x):
        projected = self.projection(x)
        return self.block.branch(x) + self.norm(projected), projected


class BeforeActivation(Projected):
    """Its branch begins with a BatchNorm, and ends with a convolution."""

    def construct(self, x):
        out = self.block.conv1(self.block.act(self.block.bn1(x)))
        out = self.block.conv2(self.block.act(self.block.bn2(out)))
        return out + self.norm(self.projection(x))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Projected, "on the shortcut of a residual block"),
        (UsedTwice, "on a shortcut, but the result is used elsewhere too"),
        (BeforeActivation, "on a shortcut, but no BatchNorm ends the other branch"),
    ],
)
def test_why_a_batch_norm_on_a_shortcut_goes_or_stays(kind, reason):
    (found,) = [one.reason for one in less_bn(kind()).changes if one.name == "norm"]
    assert found == reason


def test_the_block_of_a_model_zoo_with_its_shortcut():
    rewriting = less_bn(zoo.ZooResNet())
    assert done(rewriting, "kept") == ["bn1", "layer1.0.bn3", "layer2.0.bn3"]
    assert "layer1.0.down_sample_layer.1" in done(rewriting, "removed")
    kept = done(less_bn(zoo.ZooResNet(), keep_shortcut=True), "kept")
    assert kept == ["bn1", "layer1.0.bn3", "layer1.0.down_sample_layer.1", "layer2.0.bn3"]


# Networks of MindCV: BatchNorms before, after, and after with those on shortcuts kept.
MINDCV = {
    "resnet18": (20, 9, 12),
    "resnet50": (53, 17, 21),
    "resnext50_32x4d": (53, 17, 21),
    "seresnet18": (20, 9, 12),
    "mobilenet_v2_035_128": (52, 32, 32),  # ten residual blocks of two removable ones
    "densenet121": (121, 63, 63),  # the first of each of 58 layers
    "resnetv2_50": (53, 25, 25),  # two of each of 16 branches, but not four that shortcuts share
    "res2net50": (85, 17, 21),  # 4 of each of 16 branches, 4 on shortcuts
    "regnet_y_200mf": (44, 27, 31),  # the one before the gate and the last of 13 branches stay
    "efficientnet_b0": (49, 40, 40),  # nine residual blocks, the first of three goes
    "dpn92": (96, 36, 36),  # two of each of 30 branches
}


@pytest.mark.parametrize("name", MINDCV)
def test_the_counts_in_mindcv_networks(name):
    before, after, with_shortcuts = MINDCV[name]
    net = create_model(name, num_classes=10)
    assert norms(net) == before
    rewriting = less_bn(net, keep_shortcut=True)
    assert rewriting.counts["batch_norms_kept"] == with_shortcuts
    rewriting = less_bn(net)  # what an earlier rewriting has removed counts too
    assert (norms(net), rewriting.counts["batch_norms_kept"]) == (after, after)
    assert rewriting.counts["batch_norms_removed"] == before - after


def test_the_bundled_resnet():
    # 7 blocks, 2 of them with a projection: 1 + 7 * 2 + 2 = 17 before, 1 + 7 = 8 after.
    net = SmallResNet(4)
    assert less_bn(net).counts["batch_norms_removed"] == 9
    assert norms(net) == 8


def test_patterns_of_names_choose():
    names = [f"layer1.0.{one}" for one in ("bn1", "bn2", "down_sample_layer.1")]
    included = less_bn(zoo.ZooResNet(), include=["layer1.*"])
    assert done(included, "removed") == names
    assert "no pattern of include" in included.changes[-2].reason
    excluded = less_bn(zoo.ZooResNet(), exclude=["*.bn1", "layer2.*"])
    assert done(excluded, "removed") == names[1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"include": "layer1.*"}, r"less_bn\.include must be None or a list of patterns"),
        ({"exclude": [""]}, r"less_bn\.exclude must be a list of patterns"),
        ({"multiplier": 0}, r"less_bn\.multiplier must be a number in \(0, inf\), got 0"),
        ({"heads": [1]}, r"less_bn\.heads must be None or a list of patterns"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        less_bn(zoo.Block(), **settings)
    with pytest.raises(ValueError, match=message):
        AutoBoost("O1", switched(**settings))


def test_a_network_must_be_a_cell():
    with pytest.raises(TypeError, match="network must be a Cell, got 3"):
        LessBN(3)


def test_nothing_changed_is_told_and_twice_is_not():
    with pytest.warns(NoEffectWarning, match="less_bn has no effect.*squeeze-and-excitation gate"):
        LessBN(zoo.GateBetween())
    with pytest.warns(NoEffectWarning, match="the network has no BatchNorm"):
        LessBN(nn.SequentialCell(nn.Dense(2, 2)))
    net = zoo.ZooResNet()
    less_bn(net, True)
    before = list(nets.weights(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = LessBN(LessBN(net, True), True).rewriting
    assert list(nets.weights(net)) == before
    assert not any(change.now and change.done != "kept" for change in again.changes)
    assert {"removed before", "before"} <= {change.reason for change in again.changes}


def test_a_network_that_was_trained_before_is_warned_of(tmp_path):
    """Its accuracy is lost, and a fine-tuning would only be slow to show it."""
    trained = SmallResNet().set_train()
    trained(Tensor(np.ones((2, 1, 8, 8), np.float32)))  # moves the statistics
    ms.save_checkpoint(trained, str(tmp_path / "trained.ckpt"))
    net = SmallResNet()
    ms.load_param_into_net(net, ms.load_checkpoint(str(tmp_path / "trained.ckpt")))
    with pytest.warns(BoostWarning, match=r"less_bn has removed 9 BatchNorms .* trained.*less_bn"):
        lessened(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lessened(net)  # said once
        lessened(SmallResNet())


def test_tracing_leaves_the_network_and_random_state_alone():
    ms.set_seed(5)
    expected = ops.standard_normal((3,)).asnumpy()
    ms.set_seed(5)
    net = zoo.GateBetween()
    before = nets.weights(net)
    less_bn(net)
    np.testing.assert_array_equal(ops.standard_normal((3,)).asnumpy(), expected)
    for name, value in nets.weights(net).items():
        np.testing.assert_array_equal(value, before[name])


# ---- What the rewritten network computes ----


def test_the_rewritten_block_is_the_block_without_that_batch_norm(mode):
    x, _ = zoo.images(4, zoo.WIDTH)
    net = zoo.Block().set_train(False)
    net.bn1.gamma.set_data(Tensor(np.full(zoo.WIDTH, 3.0, np.float32)))
    expected = net.act(net.bn2(net.conv2(net.act(net.conv1(x)))) + x).asnumpy()
    before = net(x).asnumpy()  # compiled before the rewriting
    less_bn(net)
    # Both are float32 sums of a few dozen products of order one.
    np.testing.assert_allclose(net(x).asnumpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(before - expected).max() > 0.1


def branch_gradients(net, x):
    def forward(x):
        return (net(x) * weights).sum()

    weights = Tensor(np.random.default_rng(7).normal(size=x.shape).astype(np.float32))
    return ms.value_and_grad(forward, None, [net.conv1.weight, net.conv2.weight])(x)[1]


def test_the_weights_of_a_branch_have_no_scale(mode):
    """W -> cW changes nothing, so the gradient is orthogonal to W."""
    x, _ = zoo.images(8, zoo.WIDTH)
    net = zoo.Block().set_train()
    for weight in (net.conv1.weight, net.conv2.weight):
        weight.set_data(Tensor(weight.asnumpy() * 10))  # variances far above BatchNorm's 1e-5
    less_bn(net)
    for weight, gradient in zip((net.conv1.weight, net.conv2.weight), branch_gradients(net, x)):
        w, g = weight.asnumpy().astype(np.float64), gradient.asnumpy().astype(np.float64)
        # float32 sums; an unrelated gradient would stand at about 1 / sqrt(144) = 0.08.
        assert abs((w * g).sum()) < 1e-4 * np.linalg.norm(w) * np.linalg.norm(g)
    before = net(x).asnumpy()
    ops.assign(net.conv1.weight, net.conv1.weight * 8)
    np.testing.assert_allclose(net(x).asnumpy(), before, rtol=1e-4, atol=1e-4)


def test_a_gamma_of_zero_makes_the_branch_zero(mode):
    x, _ = zoo.images(2, zoo.WIDTH)
    net = zoo.Block().set_train()
    less_bn(net)
    net.bn2.gamma.set_data(ops.zeros_like(net.bn2.gamma))
    np.testing.assert_array_equal(net(x).asnumpy(), np.maximum(x.asnumpy(), 0))


# ---- Optimizer, checkpoints, ms.Model ----


def lessened(net, optimizer=None, config=None, **arguments):
    return model_of(net, config or switched(), optimizer, metrics={"loss"}, **arguments)


def test_training_evaluation_and_prediction_agree_in_both_modes(tmp_path):
    """Defect row 17: trained in one mode, saved, loaded and evaluated in the other."""
    x, _ = zoo.images()
    outputs, losses = {}, {}
    path = str(tmp_path / "net.ckpt")
    before = ms.get_context("mode")
    try:
        for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
            ms.set_context(mode=mode)
            net = zoo.ZooResNet()
            model = lessened(net)
            if mode == ms.GRAPH_MODE:
                model.train(4, zoo.dataset(), dataset_sink_mode=False)
                ms.save_checkpoint(net, path)
            else:
                assert ms.load_param_into_net(net, ms.load_checkpoint(path)) == ([], [])
            losses[mode] = model.eval(zoo.dataset(), dataset_sink_mode=False)["loss"]
            outputs[mode] = model.predict(x).asnumpy()
    finally:
        ms.set_context(mode=before)
    # The same kernels on the same weights, in another order of launches.
    np.testing.assert_allclose(*outputs.values(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*losses.values(), rtol=1e-5)
    logits = outputs[ms.GRAPH_MODE].astype(np.float64)
    labels = zoo.images()[1].asnumpy()
    likelihoods = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = -likelihoods[np.arange(len(labels)), labels].mean()
    assert losses[ms.GRAPH_MODE] == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_network_of_its_own_is_rewritten_too():
    net, evaluated = zoo.ZooResNet(), zoo.ZooResNet()
    model = lessened(
        net, eval_network=nn.WithEvalCell(evaluated, nets.loss_fn()), eval_indexes=[0, 1, 2]
    )
    assert norms(net) == norms(evaluated) == 3
    assert list(nets.weights(net)) == list(nets.weights(evaluated))
    assert model.train_network.report()["less_bn"].counts["batch_norms_removed"] == 5


@pytest.mark.parametrize("shares", [True, False])
def test_an_evaluation_network_on_the_same_parameters_has_the_trained_multiplier(shares):
    """It has a Dense of its own on them, so a head of its own, too."""
    net, evaluated = zoo.ZooResNet(), zoo.ZooResNet()
    if shares:
        table = {one.name: one for one in net.get_parameters()}
        for _, cell in evaluated.cells_and_names():
            for name, one in cell.parameters_dict(recurse=False).items():
                setattr(cell, name.rpartition(".")[2], table[one.name])
    lessened(net, eval_network=nn.WithEvalCell(evaluated, nets.loss_fn()), eval_indexes=[0, 1, 2])
    assert type(evaluated.end_point) is CommonHeadLastFN
    assert (evaluated.end_point.weight is net.end_point.weight) == shares
    assert (evaluated.end_point.multiplier is net.end_point.multiplier) == shares


def test_the_parameters_of_removed_layers_are_gone_everywhere():
    net = zoo.ZooResNet()
    optimizer = nets.momentum(net.trainable_params())
    trained = len(optimizer.parameters)
    model = lessened(net, optimizer)
    step = model.train_network
    names = set(nets.weights(step))
    assert not [name for name in names if "layer1.0.bn1" in name or "layer1.0.bn2" in name]
    assert "moments.layer1.0.bn3.gamma" in names
    # 5 removed layers of 2 parameters, and the multiplier of the head.
    assert len(step.optimizer.parameters) == trained - 10 + 1
    assert {one.name for one in step.optimizer.parameters} == {
        one.name for one in net.trainable_params()
    }
    assert len(optimizer.parameters) == trained
    assert lessened(net, optimizer).train_network.weights[-1].name == "end_point.multiplier"


def test_every_parameter_keeps_its_weight_decay():
    """Defect row 18c: of 34 gammas and betas none was decayed before, all of them after."""
    for fn_flag in (False, True):
        net = zoo.ZooResNet()
        decayed = [one for one in net.trainable_params() if one.ndim > 1]
        others = [one for one in net.trainable_params() if one.ndim == 1]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = nn.Momentum(groups, 0.1, 0.9)
        fitted = lessened(net, optimizer, switched(fn_flag=fn_flag)).train_network.optimizer
        decays = dict(zip([one.name for one in fitted.parameters], fitted.weight_decay))
        for one in net.trainable_params():
            if not one.name.endswith("multiplier"):
                expected = np.float32(0.01 if one.ndim > 1 else 0.0)
                assert np.float32(decays[one.name]) == expected, one.name


def test_the_report_lists_every_batch_norm():
    report = lessened(zoo.ZooResNet()).train_network.report()
    row = report["less_bn"]
    assert (row.status, row.counts) == (
        "applied",
        {"batch_norms_removed": 5, "batch_norms_kept": 3, "heads_normalised": 1},
    )
    assert report["less_bn bn1"].cells()[2:4] == ("kept", "not in a residual block")
    assert report["less_bn layer2.0.bn1"].status == "removed"
    assert "shortcut" in report["less_bn layer1.0.down_sample_layer.1"].reason
    assert report["less_bn end_point"].status == "normalised"


def test_a_model_in_which_nothing_changes_says_so():
    with pytest.warns(NoEffectWarning, match="less_bn has no effect"):
        model = lessened(nets.MLP(), config=switched(fn_flag=False))
    assert model.train_network.report()["less_bn"].status == "skipped"


def test_without_a_removed_batch_norm_the_classifier_stays_unless_it_is_named():
    """The head costs accuracy: alone, it is no reason to call less_bn applied."""
    net = nets.ConvNet()
    with pytest.warns(NoEffectWarning, match="less_bn has no effect .*: no BatchNorm was removed"):
        report = lessened(net).train_network.report()
    assert type(net.head) is nn.Dense
    assert (report["less_bn"].status, report["less_bn"].counts["heads_normalised"]) == (
        "skipped",
        0,
    )
    assert report["less_bn head"].cells()[2:4] == (
        "kept",
        "no BatchNorm was removed: to normalise a Dense anyway, name it in less_bn.heads",
    )
    net = nets.ConvNet()
    report = lessened(net, config=switched(heads=["head"])).train_network.report()
    assert (report["less_bn"].status, type(net.head)) == ("applied", CommonHeadLastFN)


def test_a_checkpoint_of_the_original_network_loads_and_the_surplus_is_reported(tmp_path):
    path = str(tmp_path / "original.ckpt")
    ms.save_checkpoint(zoo.ZooResNet(seed=9), path)
    net = zoo.ZooResNet()
    less_bn(net)
    missing, removed_parameters = ms.load_param_into_net(net, ms.load_checkpoint(path))
    assert missing == []
    assert "layer1.0.bn1.gamma" in removed_parameters
    assert len(removed_parameters) == 5 * 4
    original = nets.weights(zoo.ZooResNet(seed=9))
    np.testing.assert_array_equal(nets.weights(net)["conv1.weight"], original["conv1.weight"])


def test_only_an_optimizer_of_mindspore_can_be_fitted():
    net = zoo.ZooResNet()
    with pytest.raises(TypeError, match=r"less_bn needs an nn\.Optimizer, got Identity"):
        AutoBoost("O1", switched()).network_auto_process_train(net, nn.Identity())


def test_a_freeze_optimizer_of_the_user_is_fitted():
    net = zoo.ZooResNet()
    plain = nets.momentum(net.trainable_params())
    everything = list(plain.parameters)
    optimizer = FreezeOpt(plain, [everything, everything[-8:]], [0, 1])
    model = lessened(net, optimizer)
    fitted = model.train_network.optimizer
    assert fitted.train_strategy == (0, 1)
    names = [[one.name for one in group] for group in fitted.train_parameter_groups]
    assert names[1][-1] == "end_point.multiplier"
    assert "layer2.0.bn3.gamma" in names[1]
    assert not [name for name in names[0] if "layer1.0.bn1" in name]


def test_with_freezing_accumulation_and_loss_scaling(mode):
    kind = ms.Model if mode == "graph" else BoostModel
    net = zoo.ZooResNet()
    config = {
        "boost": {"mode": "manual", "grad_accumulation": True},
        "grad_freeze": {"param_groups": 2, "freeze_p": 0.5, "total_steps": 4},
        "grad_accumulation": {"grad_accumulation_step": 2},
    }
    model = kind(
        net,
        nets.loss_fn(),
        nets.momentum(net.trainable_params()),
        loss_scale_manager=ms.DynamicLossScaleManager(2**10, 2, 5),
        boost_level="O1",
        boost_config_dict=config,
    )
    start = nets.weights(net)
    x, y = zoo.images()
    losses = [model.train_network(x, y)[0].asnumpy() for _ in range(4)]
    assert np.isfinite(losses).all()
    after = nets.weights(net)
    assert norms(net) == 3
    for name in ("end_point.multiplier", "layer2.0.bn3.gamma", "layer2.0.conv1.weight"):
        assert not np.array_equal(start[name], after[name]), name


class MarkedResNet(zoo.ZooResNet):
    """Two groups of loss scales: everything, and the classifier."""

    def __init__(self, manager):
        super().__init__()
        self.manager = manager
        head = self.end_point.trainable_params()
        names = {one.name for one in head}
        body = [one for one in self.trainable_params() if one.name not in names]
        manager.loss_scale_groups = [body, head]

    def construct(self, x):
        x = self.relu(self.bn1(self.conv1(self.manager(x, 0, 1))))
        x = self.mean(self.layer2(self.layer1(x)), (2, 3))
        x = self.end_point(self.manager(self.flatten(x), 1, 2))
        return self.manager(x, 2, 3)


def test_with_grouped_loss_scales(mode):
    manager = GroupLossScaleManager([64.0, 4.0], [])
    net = MarkedResNet(manager)
    config = switched()
    config["boost"]["loss_scale_group"] = True
    model = lessened(net, config=config, loss_scale_manager=manager)
    names = [[one.name for one in group] for group in manager.loss_scale_groups]
    assert names[1] == ["end_point.weight", "end_point.bias", "end_point.multiplier"]
    assert not [name for name in names[0] if "layer1.0.bn1" in name]
    x, y = zoo.images()
    loss, overflow, _ = model.train_network(x, y)
    assert np.isfinite(loss.asnumpy())
    assert not overflow.asnumpy()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_with_mixed_precision(mode, level):
    net = zoo.ZooResNet()
    manager = ms.FixedLossScaleManager(1.0, False)
    model = lessened(net, amp_level=level, loss_scale_manager=manager)
    start = nets.weights(net)
    x, y = zoo.images()
    losses = [float(model.train_network(x, y).asnumpy()) for _ in range(3)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert not np.array_equal(start["end_point.multiplier"], net.end_point.multiplier.asnumpy())
    names = set(nets.weights(model.train_network))
    assert not [name for name in names if "layer1.0.bn1" in name]
    assert "moments.end_point.multiplier" in names


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", pytest.param("res2net50", marks=pytest.mark.slow)]
)
def test_level_o1_trains_mindcv_networks(mode, name):
    net = create_model(name, num_classes=10)
    config = {"grad_freeze": {"param_groups": 2, "total_steps": 10}}
    model = lessened(net, config=config)
    x, _ = zoo.images(2, 3, 32)
    losses = [float(model.train_network(x, Tensor([1, 2], ms.int32)).asnumpy()) for _ in range(2)]
    assert np.isfinite(losses).all()
    assert losses[0] != losses[1]
