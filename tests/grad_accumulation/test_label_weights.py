"""Windows weighted by the labels that a loss counts: the big batch of plain MindSpore."""

from __future__ import annotations

import warnings

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostWarning,
    GradientAccumulation,
    make_train_step,
    restore,
    save_checkpoint,
)
from mindspore_boost_ext.grad_accumulation.labels import LabelCount

WEIGHTS = Tensor(np.array([1.0, 0.1, 5.0], np.float32))
LOSSES = {
    "ignored": lambda: nn.CrossEntropyLoss(),
    "another index": lambda: nn.CrossEntropyLoss(ignore_index=2),
    "class weights": lambda: nn.CrossEntropyLoss(WEIGHTS),
    "smoothed": lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2),
}
SIZES = (8, 8, 4)
# Rounding of float32 means of up to 20 gradients; weights by samples are off by 0.1.
ROUNDING = {"rtol": 0, "atol": 1e-6}


def config(weighting, window=3):
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True}
    section = {"grad_accumulation_step": window, "weighting": weighting}
    return {"boost": switches, "grad_accumulation": section}


def data(kind="ignored"):
    """Return inputs, and labels of which more are ignored in the first micro-batch than later."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(sum(SIZES), nets.FEATURES)).astype(np.float32)
    y = generator.integers(0, nets.CLASSES, sum(SIZES)).astype(np.int32)
    y[1:7] = 2 if kind == "another index" else -100
    return x, y


def by_parts(model, x, y):
    edges = np.cumsum((0, *SIZES))
    for start, end in zip(edges, edges[1:]):
        model.train_network(Tensor(x[start:end]), Tensor(y[start:end]))


def trained(net, loss, settings=None, **arguments):
    return model_of(net, settings, nn.SGD(net.trainable_params(), 1.0), loss_fn=loss, **arguments)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_window_is_the_big_batch(mode, kind, scaled):
    x, y = data(kind)
    big, small = nets.MLP(), nets.MLP()
    trained(big, LOSSES[kind]()).train_network(Tensor(x), Tensor(y))
    manager = {"loss_scale_manager": ms.DynamicLossScaleManager(64, 2, 9)} if scaled else {}
    by_parts(trained(small, LOSSES[kind](), config("labels"), **manager), x, y)
    for name, value in nets.weights(small).items():
        np.testing.assert_allclose(value, nets.weights(big)[name], **ROUNDING)


def test_pixels_count(mode):
    x = np.random.default_rng(0).normal(size=(4, 2, 3, 3)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 3, (4, 3, 3)).astype(np.int32)
    y[:2, 1:] = -100
    kernels = []
    for window in (1, 2):
        net = nn.Conv2d(2, 3, 1, weight_init="ones")
        optimizer = nn.SGD(net.trainable_params(), 1.0)
        settings = config("labels", window) if window > 1 else None
        loss = nn.CrossEntropyLoss()
        step = make_train_step(
            net, loss, optimizer, level="O1" if settings else "O0", config=settings
        )
        for one in range(window):
            part = slice(one * 4 // window, (one + 1) * 4 // window)
            step(Tensor(x[part]), Tensor(y[part]))
        kernels.append(net.weight.asnumpy())
    np.testing.assert_allclose(*kernels, **ROUNDING)


def test_a_window_without_labels_changes_nothing(mode):
    x, y = data()
    net = nets.MLP()
    model, before = trained(net, nn.CrossEntropyLoss(), config("labels")), nets.weights(net)
    by_parts(model, x, np.full_like(y, -100))
    nets.assert_same(nets.weights(net), before)
    by_parts(model, x, y)
    assert all((before[name] != value).any() for name, value in nets.weights(net).items())


def test_a_micro_batch_of_classes_without_weight_adds_nothing(mode):
    """Its own loss is NaN, which must not reach the window."""
    x, y = data()
    y[:8], y[8:] = 0, np.maximum(y[8:], 1)
    loss, (big, small) = nn.CrossEntropyLoss(Tensor([0.0, 1.0, 5.0])), (nets.MLP(), nets.MLP())
    trained(big, loss).train_network(Tensor(x), Tensor(y))
    by_parts(trained(small, loss, config("labels")), x, y)
    for name, value in nets.weights(small).items():
        np.testing.assert_allclose(value, nets.weights(big)[name], **ROUNDING)


def test_the_loss_counts_as_it_is_now(pynative_mode):
    loss, labels = nn.CrossEntropyLoss(), Tensor(np.array([0, 1, 2, 2], np.int32))
    count = LabelCount(loss)
    assert float(count(labels).asnumpy()) == 4
    loss.ignore_index = 2
    assert float(count(labels).asnumpy()) == 2
    loss.weight = Tensor([0.5, 0.25, 9.0])
    assert float(count(labels).asnumpy()) == 0.75


def test_logarithms_with_a_negative_log_likelihood(mode):
    x, y = data()
    big, small = (nn.SequentialCell(nets.MLP(), nn.LogSoftmax(-1)) for _ in range(2))
    trained(big, nn.NLLLoss()).train_network(Tensor(x), Tensor(y))
    by_parts(trained(small, nn.NLLLoss(), config("labels")), x, y)
    for name, value in nets.weights(small).items():
        np.testing.assert_allclose(value, nets.weights(big)[name], **ROUNDING)


def test_a_window_of_weight_0_in_a_loop_by_hand_changes_nothing():
    weight = Parameter(Tensor([1.0]), name="w")
    accumulation = GradientAccumulation(2, nn.SGD([weight], 1.0), weighting="labels")
    for _ in range(2):
        accumulation(Tensor(0.0), (Tensor([np.nan]),), Tensor(0.0))
    assert weight.asnumpy().tolist() == [1.0]


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (3,)])
def test_shares_of_classes_count_as_the_loss_divides(mode, shape):
    shares = np.random.default_rng(0).random(shape).astype(np.float32)
    logits = np.zeros(shape, np.float32)
    loss = nn.CrossEntropyLoss()
    mean = float(loss(Tensor(logits), Tensor(shares)).asnumpy())
    total = float(nn.CrossEntropyLoss(reduction="sum")(Tensor(logits), Tensor(shares)).asnumpy())
    # The loss's sums are float32.
    assert float(LabelCount(loss)(Tensor(shares)).asnumpy()) == pytest.approx(
        total / mean, rel=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.CrossEntropyLoss(), r"labels to ignore \(-100\).*set weighting 'labels'"),
        (nn.CrossEntropyLoss(WEIGHTS, -1), "by the weights of the classes.*weighting 'labels'"),
        (nn.CrossEntropyLoss(reduction="sum"), "1/3 of the big batch's gradient"),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True), "returns several losses"),
    ],
    ids=["ignored", "class weights", "sum", "none"],
)
@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_other_weights_are_warned_of(pynative_mode, loss, match, weighting):
    x, y = data()
    y = np.where(y < 0, loss_index(loss), y)
    with pytest.warns(BoostWarning, match=match):
        by_parts(trained(nets.MLP(), loss, config(weighting)), x, y)


def loss_index(loss):
    """Return what stands for a label that is ignored; a class where the loss ignores none."""
    return loss.ignore_index if getattr(loss, "reduction", "") == "mean" else 0


class OfItsOwn(nn.LossBase):
    """Takes the mean by itself, whatever its base class says."""

    def construct(self, logits, labels):
        return nn.CrossEntropyLoss()(logits, labels)


class Uninitialised(OfItsOwn):
    def __init__(self):
        nn.Cell.__init__(self)


class Shifted(nn.CrossEntropyLoss):
    def construct(self, logits, labels):
        return super().construct(logits[:-1], labels[1:])


@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.MSELoss])
def test_every_loss_that_adds_up_is_warned_of(kind):
    with pytest.warns(BoostWarning, match="1/3 of the big batch's gradient"):
        trained(nets.MLP(), kind(reduction="sum"), config("samples"))


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nets.loss_fn(), OfItsOwn("none"), Uninitialised()]
)
def test_a_mean_over_samples_needs_no_warning(pynative_mode, loss):
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoostWarning)
        by_parts(trained(nets.MLP(), loss, config("samples")), x, np.maximum(y, 0))


@pytest.mark.parametrize(
    "loss", [nets.loss_fn(), nn.CrossEntropyLoss(reduction="sum"), Shifted(), None], ids=str
)
def test_a_loss_without_such_labels_is_refused(loss):
    net = nets.MLP() if loss is not None else nn.WithLossCell(nets.MLP(), nets.loss_fn())
    with pytest.raises(ValueError, match=r"weighting='labels' counts .* got .*another weighting"):
        trained(net, loss, config("labels"))


def test_a_step_cell_that_is_made_by_hand_knows_no_loss():
    network = nn.WithLossCell(nets.MLP(), nn.CrossEntropyLoss())
    boost = AutoBoost("O1", config("labels"))
    network, optimizer = boost.network_auto_process_train(
        network, nets.momentum(network.trainable_params())
    )
    with pytest.raises(ValueError, match="got None"):
        BoostTrainOneStepCell(network, optimizer)


@pytest.mark.parametrize("pair", [("samples", "labels"), ("equal", "labels"), ("labels", "equal")])
def test_a_window_of_another_weighting_does_not_go_on(pynative_mode, tmp_path, pair):
    x, y = data()
    one, other = (trained(nets.MLP(), nn.CrossEntropyLoss(), config(name)) for name in pair)
    first = Tensor(x[:8]), Tensor(np.maximum(y[:8], 0))
    one.train_network(*first)
    save_checkpoint(one.train_network, tmp_path / "run", append_dict={"epoch": 0})
    with pytest.warns(BoostWarning, match="other settings"):
        restore(other.train_network, tmp_path / "run.ckpt", allow_other_settings=True)
    with pytest.raises(ValueError, match=rf"not weighted by .*weighting='{pair[1]}'"):
        other.train_network(*first)


def test_shares_of_classes_with_weights_need_no_warning(pynative_mode):
    x, y = data()
    shares = np.eye(nets.CLASSES, dtype=np.float32)[np.maximum(y, 0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", BoostWarning)
        by_parts(trained(nets.MLP(), nn.CrossEntropyLoss(WEIGHTS), config("samples")), x, shares)
