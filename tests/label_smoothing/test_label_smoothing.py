"""Smoothed labels: gradients against float64, the loss that is shown, what is left alone."""

from __future__ import annotations

import types

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import AutoBoost, make_train_step, restore, save_checkpoint
from mindspore_boost_ext.base.cells import layers_of
from mindspore_boost_ext.label_smoothing.algorithm import SmoothedLoss

SHARE = 0.2
RNG = np.random.default_rng(5)
X, SPARSE = RNG.normal(size=(6, 4)).astype("f"), np.array([0, 2, 1, 2, 2, 0], np.int32)
ROWS = RNG.dirichlet(np.ones(3), 6).astype("f")
WEIGHTS = np.array([0.5, 1.0, 3.0], "f")


def softmax_loss(sparse, reduction="mean"):
    return nn.SoftmaxCrossEntropyWithLogits(sparse=sparse, reduction=reduction)


# loss, labels, and the weight of each sample in the loss that is differentiated.
LOSSES = {
    "sparse": (softmax_loss(True), SPARSE, np.full(6, 1 / 6)),
    "sparse, sum": (softmax_loss(True, "sum"), SPARSE, np.ones(6)),
    "rows": (softmax_loss(False), ROWS, np.full(6, 1 / 6)),
    "classes": (nn.CrossEntropyLoss(), SPARSE, np.full(6, 1 / 6)),
    "ignored": (
        nn.CrossEntropyLoss(ignore_index=2),
        SPARSE,
        np.where(SPARSE == 2, 0, 1 / 3),
    ),
}


def config_of(**section):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    return {
        "boost": {"mode": "manual", **off, "label_smoothing": True},
        "label_smoothing": {"smoothing": SHARE, **section},
    }


def step_of(loss, net=None, optimizer=None, **section):
    net = net or nn.Dense(4, 3)
    optimizer = optimizer or nn.SGD(net.trainable_params(), 1.0)
    on = {"level": "O1", "config": config_of(**section)} if section is not None else {}
    return net, make_train_step(net, loss, optimizer, **on)


def float64_step(net, labels, of_samples, inputs=X):
    """Return the weights after one step of SGD at rate 1 on smoothed labels, by hand."""
    weight, bias = (one.asnumpy().astype(np.float64) for one in net.trainable_params())
    logits = inputs.astype(np.float64) @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = labels if labels.ndim == 2 else np.eye(3)[labels]
    smooth = (1 - SHARE) * rows + SHARE / 3
    gradient = of_samples[:, None] * (shares * smooth.sum(1, keepdims=True) - smooth)
    return weight - gradient.T @ inputs, bias - gradient.sum(0)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_step_is_that_of_smoothed_labels(mode, kind):
    loss, labels, of_samples = LOSSES[kind]
    net, step = step_of(loss)
    expected = float64_step(net, labels, of_samples)
    step(Tensor(X), Tensor(labels))
    for one, by_hand in zip(net.trainable_params(), expected):
        # float32 of values near 1, six samples summed
        np.testing.assert_allclose(one.asnumpy(), by_hand, rtol=2e-6, atol=2e-6, err_msg=kind)


def test_weights_of_classes_follow_the_operator(mode):
    """MindSpore weighs the share of each class; the oracle is its operator on smoothed labels."""
    net, step = step_of(nn.CrossEntropyLoss(weight=Tensor(WEIGHTS)))
    twin = nn.Dense(4, 3)
    nets.set_weights(twin, nets.weights(net))

    class Weighted(nn.Cell):
        def construct(self, logits, labels):
            return ops.cross_entropy(logits, labels, Tensor(WEIGHTS), label_smoothing=SHARE)

    plain = make_train_step(twin, Weighted(), nn.SGD(twin.trainable_params(), 1.0), level="O0")
    step(Tensor(X), Tensor(SPARSE))
    plain(Tensor(X), Tensor(SPARSE))
    for one, other in zip(net.trainable_params(), twin.trainable_params()):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_that_is_shown_stays_that_of_the_labels(mode, kind):
    loss, labels, _ = LOSSES[kind]
    net, step = step_of(loss)
    expected = loss(net(Tensor(X)), Tensor(labels)).asnumpy()
    assert step.report()["label_smoothing"].reason == f"{SHARE:g} of each label"
    # the same operators, in a graph of their own
    np.testing.assert_allclose(
        step(Tensor(X), Tensor(labels)).asnumpy(), expected, rtol=1e-6, err_msg=kind
    )


class LastMaskedOut(nn.Cell):
    """Gives its last class the logit -inf."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(4, 3)
        self.mask = Tensor(np.array([0, 0, -np.inf], "f"))

    def construct(self, x):
        return self.head(x) + self.mask


def test_a_class_that_is_masked_out_gets_no_share(mode):
    net, labels = nets.fill(LastMaskedOut()), SPARSE % 2
    weight, bias = (one.asnumpy().astype(np.float64) for one in net.trainable_params())
    _, step = step_of(softmax_loss(True), net)
    loss = step(Tensor(X), Tensor(labels)).asnumpy()
    shares = np.exp((X @ weight.T + bias)[:, :2])
    shares /= shares.sum(1, keepdims=True)
    np.testing.assert_allclose(loss, -np.log(shares[range(6), labels]).mean(), rtol=1e-6)
    smooth = (1 - SHARE) * np.eye(2)[labels] + SHARE / 3
    gradient = (shares * smooth.sum(1, keepdims=True) - smooth) / 6
    expected = weight - np.pad(gradient, ((0, 0), (0, 1))).T @ X
    np.testing.assert_allclose(net.head.weight.asnumpy(), expected, rtol=2e-6, atol=2e-6)


def test_in_evaluation_the_gradient_is_that_of_the_labels(pynative_mode):
    loss, logits = SmoothedLoss(softmax_loss(True), SHARE).set_train(False), X[:, :3]
    found = ms.grad(loss)(Tensor(logits), Tensor(SPARSE)).asnumpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found, (shares - np.eye(3)[SPARSE]) / 6, atol=1e-7)  # float32


def test_an_infinite_loss_is_shown_as_it_is_and_trains(mode):
    """MindSpore's is infinite where the right class has the share 0 in float32."""
    net, step = step_of(softmax_loss(True))
    net.weight.set_data(net.weight * 0)
    net.bias.set_data(Tensor(np.array([200, 0, 0], "f")))
    assert step(Tensor(X), Tensor(np.ones(6, np.int32))).asnumpy() == np.inf
    # Of class 1 each sample asks for (1 - SHARE) + SHARE / 3, of class 2 for SHARE / 3.
    share = SHARE / 3
    expected = [200 - (1 - share), 1 - SHARE + share, share]
    np.testing.assert_allclose(net.bias.asnumpy(), expected, rtol=1e-6)


def test_a_later_model_over_the_same_objects_trains_as_ever(mode):
    """Neither the user's network nor the user's loss is left smoothed."""
    net, loss = nn.Dense(4, 3), softmax_loss(True)
    start = nets.weights(net)
    ends = []
    for level, config in (("O0", None), ("O1", config_of()), ("O0", None)):
        nets.set_weights(net, start)
        optimizer = nn.SGD(net.trainable_params(), 1.0)
        make_train_step(net, loss, optimizer, level=level, config=config)(Tensor(X), Tensor(SPARSE))
        ends.append(nets.weights(net)["weight"])
    np.testing.assert_array_equal(ends[0], ends[2])
    assert not np.allclose(ends[0], ends[1], atol=1e-3)


class WithLoss(nn.Cell):
    """A network of the user's that holds its loss."""

    def __init__(self):
        super().__init__()
        self.dense, self.loss = nn.Dense(4, 3), softmax_loss(True)

    def construct(self, x, labels):
        return self.loss(self.dense(x), labels)


def test_a_loss_that_the_network_holds_is_refused_or_left_alone(mode):
    with pytest.raises(ValueError, match="given as the loss_fn, and not held by the network"):
        step_of(None, WithLoss())
    _, step = step_of(None, WithLoss(), if_unfit="skip")
    assert step.train_network.report()["label_smoothing"].status == "skipped"


class Own(nn.Cell):
    """A loss of the user's own."""

    def construct(self, logits, labels):
        return ops.cross_entropy(logits, labels)


def patched():
    loss = nn.CrossEntropyLoss()
    loss.construct = types.MethodType(lambda self, logits, labels: logits.sum(), loss)
    return loss


def hooked():
    """A loss that a hook doubles."""
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda cell, inputs, output: 2 * output)
    return loss


@pytest.mark.parametrize(
    "loss",
    [Own(), nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1), patched(), hooked()],
    ids=lambda one: one.cls_name,
)
def test_an_unknown_loss_is_refused_or_left_alone(loss):
    with pytest.raises(ValueError, match=r"label_smoothing needs an .*leave label_smoothing out"):
        step_of(loss)
    _, step = step_of(loss, if_unfit="skip")
    assert step.train_network.report()["label_smoothing"].status == "skipped"


class EachPlace(nn.Cell):
    """A language model: logits for each place of a sequence."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Dense(4, 3)

    def construct(self, tokens):
        return self.head(self.table(tokens)).reshape((-1, 3))


def test_a_language_model_is_refused_or_trains_as_ever(mode):
    loss, labels = softmax_loss(True), np.arange(12, dtype=np.int32) % 3
    tokens = Tensor(np.arange(12, dtype=np.int32).reshape(2, 6) % 5)
    with pytest.raises(ValueError, match="one class per sample, but the last input, used"):
        step_of(loss, EachPlace())[1](tokens, Tensor(labels))
    ms.set_seed(1)
    net, step = step_of(loss, EachPlace(), if_unfit="skip")
    twin = EachPlace()
    nets.set_weights(twin, nets.weights(net))
    plain = make_train_step(twin, loss, nn.SGD(twin.trainable_params(), 1.0), level="O0")
    for one in (step, plain):
        one(tokens, Tensor(labels))
    assert step.train_network.report()["label_smoothing"].status == "skipped"
    for one, other in zip(net.trainable_params(), twin.trainable_params()):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy(), err_msg=one.name)


def test_it_stays_out_of_a_training_that_a_language_model_has_begun(pynative_mode, tmp_path):
    """Though the first batch after the restore has one class a sample."""
    tokens, labels = np.arange(12, dtype=np.int32) % 5, Tensor(np.arange(12, dtype=np.int32) % 3)
    found = []
    for restored in (False, True):
        _, first = step_of(softmax_loss(True), EachPlace(), if_unfit="skip")
        if restored:
            _, begun = step_of(softmax_loss(True), EachPlace(), if_unfit="skip")
            begun(Tensor(tokens.reshape(2, 6)), labels)
            save_checkpoint(begun.train_network, tmp_path / "run.ckpt", append_dict={"epoch": 1})
            restore(first.train_network, tmp_path / "run.ckpt")
        first(Tensor(tokens.reshape(12, 1)), labels)
        found.append(first.train_network.report()["label_smoothing"].status)
    assert found == ["applied", "skipped"]


def test_a_stream_of_tokens_is_a_language_model_too(pynative_mode):
    """A sequence by itself, without an axis of samples."""
    stream = np.random.default_rng(0).permutation(40).astype(np.int32) % 11
    net = nn.SequentialCell(nn.Embedding(11, 4), nn.Dense(4, 11))
    with pytest.raises(ValueError, match="input 2 has tokens shifted by one"):
        step_of(softmax_loss(True), net)[1](Tensor(stream[:-1]), Tensor(stream[1:]))


@pytest.mark.parametrize(
    ("when", "rate", "refused"),
    [("shorter", [1.0, 0.5], ""), ("shorter", 1.0, "is not shortened"), ("always", 1.0, "")],
)
def test_it_may_be_asked_for_in_a_shorter_training_only(when, rate, refused):
    config = config_of(when=when)
    config["boost"]["short_schedule"] = True
    config["short_schedule"] = {"total_steps": 2, "if_unfit": "skip"}
    net = nn.Dense(4, 3)
    expected = float64_step(net, SPARSE, np.full(6, 1 / 6))
    arguments = {"level": "O1", "config": config}

    def made():
        optimizer = nn.SGD(net.trainable_params(), rate)
        return make_train_step(net, softmax_loss(True), optimizer, **arguments)

    if refused:
        with pytest.raises(ValueError, match=f"label_smoothing .*{refused}.*: leave label_smooth"):
            made()
        return
    made()(Tensor(X), Tensor(SPARSE))
    for one, by_hand in zip(net.trainable_params(), expected):
        np.testing.assert_allclose(one.asnumpy(), by_hand, rtol=2e-6, atol=2e-6)


def test_it_goes_with_a_loss_scale_accumulation_and_freezing(mode):
    """Two micro-batches of three samples each make the step of the six; the first layer stays."""
    net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 3))
    frozen, hidden = nets.weights(net[0]), X.astype(np.float64)
    for layer in net[:2]:
        hidden = hidden @ layer.weight.asnumpy().T.astype(np.float64) + layer.bias.asnumpy()
    config = config_of()
    config["boost"].update(grad_accumulation=True, grad_freeze=True)
    config["grad_accumulation"] = {"grad_accumulation_step": 2}
    config["grad_freeze"] = {"param_groups": 2, "schedule": [1], "total_steps": 1}
    step = make_train_step(
        net,
        softmax_loss(True),
        nn.SGD(net.trainable_params(), 1.0),
        level="O1",
        config=config,
        loss_scale_manager=ms.DynamicLossScaleManager(2**8, 2, 100),
    )
    expected = float64_step(net[2], SPARSE, np.full(6, 1 / 6), hidden)
    for half in (slice(0, 3), slice(3, 6)):
        step(Tensor(X[half]), Tensor(SPARSE[half]))
    assert step.report()["grad_freeze"].status == "applied"
    nets.assert_same(nets.weights(net[0]), frozen)
    for one, by_hand in zip(net[2].trainable_params(), expected):
        # float32 of values near 1 behind three layers; the scale is a power of two
        np.testing.assert_allclose(one.asnumpy(), by_hand, rtol=4e-6, atol=4e-6)


def test_the_users_loss_stays_as_it_is(mode):
    """Metrics of the loss are taken on the labels as they are."""
    loss, net = softmax_loss(True), nn.Dense(4, 3)
    model = ms.Model(
        net,
        loss,
        nets.momentum(net.trainable_params()),
        metrics={"loss"},
        boost_level="O1",
        boost_config_dict=config_of(),
    )
    data = ms.dataset.NumpySlicesDataset((X, SPARSE), shuffle=False).batch(6)
    model.train(2, data)
    expected = loss(net(Tensor(X)), Tensor(SPARSE)).asnumpy()
    assert model.eval(data)["loss"] == pytest.approx(float(expected), rel=1e-6)


class HoldsLoss(nn.Cell):
    """A network whose output depends on a loss that it holds, and that the Model is given, too."""

    def __init__(self, loss):
        super().__init__()
        self.dense, self.loss, self.best = nn.Dense(4, 3), loss, ops.Argmax(1)

    def construct(self, x):
        logits = self.dense(x)
        return logits * (1 + self.loss(logits, self.best(logits)))


@pytest.mark.parametrize("settings", [{}, {"cheaper_operators": {}}])
def test_a_loss_that_the_network_holds_too_stays_the_users_there(mode, settings):
    loss = nn.CrossEntropyLoss()
    network = HoldsLoss(loss)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    config = {"boost": off, "label_smoothing": {}, **settings}
    step = make_train_step(network, loss, optimizer, level="O1", config=config)
    assert step.report()["label_smoothing"].status == "applied"
    assert not layers_of(network, (SmoothedLoss,))


@pytest.mark.parametrize(
    "loss",
    [
        lambda: nn.CrossEntropyLoss(),
        lambda: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
    ],
    ids=["classes", "softmax"],
)
def test_it_computes_in_the_precision_that_the_loss_was_given(mode, loss):
    """In float16 a gradient that is scaled by 131,072 is infinite."""
    net = nn.Dense(4, 3).to_float(ms.float16)
    optimizer = nn.SGD(net.trainable_params(), 1.0, loss_scale=131072.0)
    before = net.weight.asnumpy().copy()
    manager = ms.FixedLossScaleManager(131072.0, drop_overflow_update=False)
    step = make_train_step(
        *(net, loss().to_float(ms.float32), optimizer),
        level="O1",
        config=config_of(),
        loss_scale_manager=manager,
    )
    step(Tensor(X), Tensor(SPARSE))
    moved = net.weight.asnumpy() - before
    assert np.isfinite(moved).all()
    assert np.abs(moved).max() > 0


def test_a_batch_that_was_refused_decides_nothing(mode):
    net, step = step_of(softmax_loss(True))
    with pytest.raises(ValueError, match="label_smoothing"):
        step(Tensor(np.ones((6, 5, 4), np.float32)), Tensor(np.zeros((6, 5), np.int32)))
    before = net.weight.asnumpy().copy()
    step(Tensor(X), Tensor(SPARSE))
    assert (net.weight.asnumpy() != before).any()
