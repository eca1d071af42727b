"""Progressive resizing: the images against bilinear interpolation in float64, and its schedule."""

from __future__ import annotations

import re

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import AutoBoost, BoostTrainOneStepCell, NoEffectWarning
from mindspore_boost_ext.progressive_resizing import ResizedImages
from mindspore_boost_ext.stages.phases import first_updates

PHASES, TOTAL = [[0.25, 0.5], [0.25, 0.75]], 8
SIZES = [4] * 2 + [6] * 2 + [8] * 6  # of the first ten updates


class Net(nn.Cell):
    """Convolution, BatchNorm, mean over all places, Dense: takes images of any size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, pad_mode="same")
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Dense(4, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.head(ms.ops.tanh(self.norm(self.conv(x))).mean((2, 3)))


class Flat(nn.Cell):
    """Fixes the size of its images."""

    def __init__(self):
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Dense(2 * 8 * 8, nets.CLASSES)

    def construct(self, x):
        return self.head(self.flatten(x))


class OfTwo(nn.Cell):
    """Takes further images in a tuple."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def construct(self, x, others, y):
        return nets.loss_fn()(self.net(x), y) * others[0].sum()


class Segments(nn.Cell):
    """A loss for each place of the image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3)

    def construct(self, x):
        return self.conv(x).square()


def bilinear(images, height, width):
    """Return images in another size, in float64: at half-pixel centres, edges repeated."""

    def along(values, size):
        length = values.shape[-1]
        places = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
        low = np.floor(places).astype(int)
        high = np.minimum(low + 1, length - 1)
        return values[..., low] * (1 - places + low) + values[..., high] * (places - low)

    rows = along(np.float64(images), width).swapaxes(-1, -2)
    return along(rows, height).swapaxes(-1, -2)


def batches(count, size=8):
    random = np.random.default_rng(0)
    shape = (nets.BATCH, 2, size, size)
    return [
        (random.normal(size=shape).astype("f"), random.integers(0, 3, nets.BATCH).astype("i"))
        for _ in range(count)
    ]


def resizing(net, loss_fn=None, boost=None, **arguments):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    section = {"phases": PHASES, "total_steps": TOTAL, **(arguments.pop("section", {}))}
    config = {
        "boost": {"mode": "manual", **off, "progressive_resizing": True, **(boost or {})},
        "progressive_resizing": section,
        **arguments.pop("sections", {}),
    }
    return model_of(net, config, loss_fn=loss_fn, **arguments)


@pytest.mark.parametrize(("scale", "multiple", "sizes"), [
    (0.5, 1, (4, 5)),
    (0.75, 1, (6, 8)),  # 7.5 is rounded up
    (0.25, 1, (2, 3)),  # and so is 2.5
    (0.6, 4, (4, 8)),
    (0.01, 3, (3, 3)),
    (0.9, 6, (6, 10)),  # 12 would be more than there is
])  # fmt: skip
def test_images_are_interpolated_bilinearly(mode, scale, multiple, sizes):
    images = np.random.default_rng(0).normal(size=(2, 3, 8, 10)).astype(np.float32)
    labels = Tensor([1, 2])
    found, rest = ResizedImages(scale, multiple)(Tensor(images), labels)
    # Weighted means of four float32 numbers around 1.
    np.testing.assert_allclose(found.asnumpy(), bilinear(images, *sizes), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(rest.asnumpy(), labels.asnumpy())


def test_all_images_of_that_size_are_made_smaller(mode):
    """As those of a network for pairs; not what has other sides, or is no image."""
    random = np.random.default_rng(0)
    first, second = (random.normal(size=(2, sides, 8, 6)).astype(np.float32) for sides in (3, 1))
    others = random.normal(size=(2, 1, 4, 6)).astype(np.float32), np.ones((2, 1, 8, 6), np.int32)
    _, pair, *rest, nothing = ResizedImages(0.5)(*map(Tensor, (first, second, *others)), None)
    assert nothing is None
    np.testing.assert_allclose(pair.asnumpy(), bilinear(second, 4, 3), rtol=0, atol=1e-6)
    for one, other in zip(rest, others):
        np.testing.assert_array_equal(one.asnumpy(), other)


def test_float16_images_stay_float16(mode):
    images = np.random.default_rng(0).normal(size=(1, 1, 6, 6)).astype(np.float16)
    (found,) = ResizedImages(0.5)(Tensor(images))
    assert found.dtype == ms.float16
    # Half of float16's last place at numbers below 2, and one more for the mean itself.
    np.testing.assert_allclose(found.asnumpy(), bilinear(images, 3, 3), rtol=0, atol=1e-3)


def plain_training(sizes, steps):
    """Return losses and weights of plain training on images of given sizes."""
    net = Net()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
    ).set_train()
    losses = [
        step(Tensor(bilinear(x, size, size).astype("f")), Tensor(y)).asnumpy()
        for size, (x, y) in zip(sizes, steps)
    ]
    return losses, nets.weights(net)


def assert_close(found, expected):
    for name, value in expected.items():
        # Ten float32 steps; images were rounded after an interpolation in float64 there.
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_training_is_plain_training_on_growing_images(mode):
    net, steps = Net(), batches(10)
    model = resizing(net, nets.loss_fn())
    losses, scales = [], []
    for x, y in steps:
        scales.append(model.train_network.observations()["progressive_resizing_scale"])
        losses.append(model.train_network(Tensor(x), Tensor(y)).asnumpy())
    expected, weights = plain_training(SIZES, steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_close(nets.weights(net), weights)
    assert [8 * scale for scale in scales] == SIZES


class Compiled(Net):
    """The same with a function of ms.jit in it."""

    @ms.jit
    def features(self, x):
        return ms.ops.tanh(self.norm(self.conv(x)))

    def construct(self, x):
        return self.head(self.features(x).mean((2, 3)))


def test_what_is_tried_makes_ms_jit_forget_no_gradients(mode):
    """MindSpore leaves out for ever what a function was not asked for at its first backward."""
    trained = []
    for kind in (Net, Compiled):
        net = kind()
        step = resizing(net, nets.loss_fn()).train_network
        for x, y in batches(6):
            step(Tensor(x), Tensor(y))
        trained.append(nets.weights(net))
    assert_close(*trained)


def test_a_window_is_of_one_size(mode):
    """Updates are counted, not micro-batches: those of a window are equal here."""
    net, steps = Net(), batches(5)
    sections = {"grad_accumulation": {"grad_accumulation_step": 2}}
    model = resizing(net, nets.loss_fn(), {"grad_accumulation": True}, sections=sections)
    for x, y in steps:
        for _ in range(2):
            model.train_network(Tensor(x), Tensor(y))
    _, expected = plain_training(SIZES, steps)
    trained = [one.name for one in net.trainable_params()]  # statistics move with each micro-batch
    assert_close(nets.weights(net), {name: expected[name] for name in trained})


def test_a_step_that_overflows_is_not_counted(mode):
    net, steps = Net(), batches(5)
    scale = ms.DynamicLossScaleManager(2**10, 2, 100)
    step = resizing(net, nets.loss_fn(), loss_scale_manager=scale).train_network
    for number, (x, y) in enumerate(steps):
        if number == 2:
            statistics = nets.weights(net.norm)
            _, overflow, _ = step(Tensor(np.full_like(x, np.inf)), Tensor(y))
            assert bool(overflow.asnumpy())
            nets.set_weights(net.norm, statistics)  # an infinite batch leaves its mark on them
        step(Tensor(x), Tensor(y))
    _, expected = plain_training(SIZES, steps)
    assert_close(nets.weights(net), expected)


def test_with_freezing_and_thor(mode):
    """All three choose among variants of the step: the sizes are those of the schedule."""
    net = Net()
    sections = {
        "grad_freeze": {"param_groups": 2, "schedule": [0, 1], "total_steps": 2},
        "thor": {"damping": 0.1, "frequency": 2},
    }
    switches = {"grad_freeze": True, "thor": True}
    step = resizing(net, nets.loss_fn(), switches, sections=sections).train_network
    scales = []
    for number, (x, y) in enumerate(batches(6)):
        scales.append(step.observations()["progressive_resizing_scale"])
        before = nets.weights(net)
        assert np.isfinite(step(Tensor(x), Tensor(y)).asnumpy())
        moved = {name: (before[name] != value).any() for name, value in nets.weights(net).items()}
        assert moved["head.weight"]
        assert moved["conv.weight"] == (number % 2 == 0)
    assert [8 * scale for scale in scales] == SIZES[:6]


def test_inside_another_graph_the_size_is_chosen_in_the_graph(graph_mode):
    trained = []
    for wrap in (nets.Outer, lambda step: step):
        net = Net()
        step = wrap(resizing(net, nets.loss_fn()).train_network)
        for x, y in batches(7):
            step(Tensor(x), Tensor(y))
        trained.append(nets.weights(net))
    nets.assert_same(*trained)


@pytest.mark.parametrize(
    ("net", "loss_fn", "reason"),
    [(Flat, nets.loss_fn(), "ValueError"), (Segments, None, "the loss has shapes")],
)
def test_a_network_that_fixes_the_size_is_refused_before_training(mode, net, loss_fn, reason):
    net = net()
    step = resizing(net, loss_fn).train_network
    inputs = [Tensor(one) for one in batches(1)[0]][: 1 if loss_fn is None else 2]
    before = nets.weights(step)
    with pytest.raises(ValueError, match=r"cannot train this network, .* at scale 0\.5") as raised:
        step(*inputs)
    assert reason in str(raised.value)
    assert "leave progressive_resizing out, or choose progressive_resizing.phases" in str(
        raised.value
    )
    nets.assert_same(nets.weights(step), before)


class Infinite(Net):
    def construct(self, x):
        return super().construct(x) * np.inf


class OfAGraph(Net):
    def construct(self, x):
        raise RuntimeError("operator by operator this does not run")


@pytest.mark.parametrize("kind", [Infinite, OfAGraph])
def test_what_fails_at_full_size_too_is_no_matter_of_size(kind):
    step = resizing(kind(), nets.loss_fn()).train_network
    step.look_before_first(*map(Tensor, batches(1)[0]))
    assert step.report()["progressive_resizing"].status == "applied"


@pytest.mark.parametrize("images", [True, False])
def test_a_network_that_fixes_the_size_may_be_left_alone(mode, images):
    """Plain training then, whether its inputs are images or not."""
    net, plain = (Flat() if images else nets.MLP() for _ in range(2))
    if images:
        for one in (net, plain):
            nets.fill(one)
    step = resizing(net, nets.loss_fn(), section={"if_unfit": "skip"}).train_network
    reference = model_of(plain)
    for x, y in batches(3) if images else nets.batches(3):
        found = step(Tensor(x), Tensor(y)).asnumpy()
        assert found == reference.train_network(Tensor(x), Tensor(y)).asnumpy()
    nets.assert_same(nets.weights(net), nets.weights(plain))
    row = step.report()["progressive_resizing"]
    assert row.status == "skipped"
    reason = "may need inputs of a fixed size" if images else "which must be images"
    assert reason in row.reason
    assert step.observations()["progressive_resizing_scale"] == 1


def test_what_is_tried_leaves_no_mark(mode):
    """Statistics of BatchNorm, what is in training mode and the mode itself stay."""
    net = Net()
    step = resizing(net, nets.loss_fn()).train_network
    net.norm.set_train(False)
    before, flags = nets.weights(net), [one.training for _, one in net.cells_and_names()]
    inputs = [Tensor(one) for one in batches(1)[0]]
    for algorithm in step.auto_boost.algorithms:
        algorithm.check_state(step, *inputs)
    nets.assert_same(nets.weights(net), before)
    assert [one.training for _, one in net.cells_and_names()] == flags
    assert ms.get_context("mode") == (ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)


@pytest.mark.parametrize(
    "images",
    [
        np.ones((8, 3), "f"),
        np.ones((8, 2, 8, 8), "i"),
        np.ones((8, 8, 8, 3), "f"),  # channels last
        np.ones((8, 2, 16, 1), "f"),  # a set of points
    ],
)
def test_inputs_that_are_no_images_are_refused(images):
    step = resizing(Net(), nets.loss_fn()).train_network
    with pytest.raises(ValueError, match=r"must be images: a float Tensor of shape \(N, C, H, W\)"):
        step(Tensor(images), Tensor(batches(1)[0][1]))


class OwnStep(BoostTrainOneStepCell):
    def construct(self, *inputs):
        return super().construct(*inputs)


def test_images_in_a_tuple_which_would_keep_their_size_are_refused(mode):
    x, y = batches(1)[0]
    step = resizing(OfTwo()).train_network
    with pytest.raises(ValueError, match="but not those in a tuple, list or dict"):
        step(Tensor(x), (Tensor(x),), Tensor(y))


def test_a_step_with_a_construct_of_its_own_is_refused():
    net = Net()
    config = {"progressive_resizing": {"total_steps": 4}}
    boost = AutoBoost("O1", {"boost": {"mode": "manual", "less_bn": False}, **config})
    with boost.building(), pytest.raises(ValueError, match="OwnStep overrides construct"):
        OwnStep(nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params()))


def test_a_training_that_ends_on_small_images_warns():
    images, labels = map(np.concatenate, zip(*batches(4)))
    data = ms.dataset.NumpySlicesDataset((images, labels), shuffle=False).batch(nets.BATCH)
    model = resizing(Net(), nets.loss_fn())
    message = (
        r"ends at update 4, before its inputs have their full size \(from update 5 on\): unless"
    )
    with pytest.warns(NoEffectWarning, match=message):
        model.train(1, data, dataset_sink_mode=False)


def test_updates_made_before_count_towards_the_full_size():
    step = resizing(Net(), nets.loss_fn()).train_network
    step.parameters_dict()["boost.progressive_resizing.updates"].set_data(Tensor(4, ms.int32))
    step.expect_training(1, 1)  # of update 5: a warning would be an error


def test_the_report_says_when_sizes_change():
    row = resizing(Net(), nets.loss_fn()).train_network.report()["progressive_resizing"]
    expected = "scale 0.5 until update 2, scale 0.75 until update 4 of 8, then full size"
    assert (row.reason, row.counts) == (expected, {"sizes": 3})


def first_steps(step):
    """Return the names of the variants that have run, so have been compiled."""
    return [one.rpartition(":")[0] for one in step.report()["first steps"].reason.split("; ")]


def test_the_report_says_how_long_each_variant_compiled(mode):
    sections = {"grad_freeze": {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}}
    step = resizing(Net(), nets.loss_fn(), {"grad_freeze": True}, sections=sections).train_network
    for x, y in batches(3):
        step(Tensor(x), Tensor(y))
    times = step.report()["first steps"].reason.split("; ")
    assert first_steps(step) == ["group 0, scale 0.5", "group 1, scale 0.5", "group 0, scale 0.75"]
    assert all(re.fullmatch(r".*: \d+\.\d s", one) for one in times)


@pytest.mark.parametrize(
    ("phases", "multiple", "sizes", "variants"),
    [
        ([[0.25, 0.45], [0.25, 0.5]], 1, [4] * 4 + [8] * 2, ["scale 0.5", "full size"]),
        ([[0.25, 0.5], [0.25, 0.95]], 1, [4] * 2 + [8] * 4, ["scale 0.5", "full size"]),
        ([[0.25, 0.3], [0.25, 0.6], [0.125, 0.65]], 4, [4] * 5 + [8], ["scale 0.65", "full size"]),
        ([[0.25, 0.9], [0.25, 0.95]], 8, [8] * 6, ["full size"]),
        ([[0.25, 0.95], [0.25, 0.96]], 5, [8] * 6, ["full size"]),  # not 10
    ],
)
def test_sizes_rounded_to_the_same_are_one_variant(mode, phases, multiple, sizes, variants):
    net, steps = Net(), batches(6)
    section = {"phases": phases, "multiple": multiple}
    step = resizing(net, nets.loss_fn(), section=section).train_network
    losses = [step(Tensor(x), Tensor(y)).asnumpy() for x, y in steps]
    expected, weights = plain_training(sizes, steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_close(nets.weights(net), weights)
    assert first_steps(step) == variants
    row = step.report()["progressive_resizing"]
    assert row.reason.count("scale") == len(variants) - 1
    assert dict(row.counts) == ({"sizes": len(variants)} if len(variants) > 1 else {})
    assert row.status == ("applied" if len(variants) > 1 else "skipped")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "needs progressive_resizing.total_steps, the updates of the training, got none"),
        ({"phases": [[0.4, 0.8], [0.2, 0.5]]}, "the scales in (0, 1) and rising"),
        ({"phases": [[0.4, 0.5], [0.4, 0.75]]}, "the shares above 0 and together at most 0.7"),
        ({"phases": [[0.4, 1.0]]}, "progressive_resizing.phases must be a list of pairs"),
        ({"phases": [0.4, 0.5]}, "progressive_resizing.phases must be a list of pairs"),
        ({"phases": []}, "progressive_resizing.phases must be a list of pairs"),
        ({"multiple": 0}, "progressive_resizing.multiple must be an int from 1"),
    ],
)
def test_settings_are_checked(section, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AutoBoost("O1", {"progressive_resizing": section})


def test_phases_begin_at_the_nearest_update():
    assert first_updates([0.29, 0.2], 100) == (0, 29, 49)  # 0.29 * 100 is a little below 29


def test_shares_may_add_up_to_exactly_what_is_allowed():
    phases = [[0.1, 0.5], [0.2, 0.6], [0.4, 0.75]]  # 0.7000000000000001 in binary
    AutoBoost("O1", {"progressive_resizing": {"phases": phases, "total_steps": 10}})
