"""Random shift: where the pixels of a batch come from, and the step on the moved images."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindspore_boost_ext import AutoBoost, BoostTrainOneStepCell, make_train_step
from mindspore_boost_ext.random_shift import ShiftedImages

HEIGHT, WIDTH, SHARE = 8, 12, 0.25  # up to 2 and 3 pixels
SIZE = (nets.BATCH, 2, HEIGHT, WIDTH)
LABELS = np.arange(nets.BATCH, dtype=np.int32) % nets.CLASSES


def coordinates(count, dtype=np.int32):
    """Return images that hold at each place its number, the second channel 100 more."""
    plane = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    return np.broadcast_to(np.stack([plane, plane + 100]), (count, 2, HEIGHT, WIDTH)).astype(dtype)


def offsets(moved):
    """Return how far each image of coordinates went, read off in its middle."""
    middle = moved[:, 0, HEIGHT // 2, WIDTH // 2].astype(int)
    return middle // WIDTH - HEIGHT // 2, middle % WIDTH - WIDTH // 2


def moved_by(images, rows, columns):
    """Return images moved image by image, with NumPy's padding."""
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (3, 3)), mode="edge")
    return np.stack(
        [
            one[:, 2 + row :, 3 + column :][:, :HEIGHT, :WIDTH]
            for one, row, column in zip(padded, rows, columns)
        ]
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.float32, bool])
def test_pixels_move_together_and_borders_are_repeated(mode, dtype):
    cell = ShiftedImages(SHARE)
    rows, columns = offsets(cell(Tensor(coordinates(40)))[0].asnumpy())
    again = ShiftedImages(SHARE)
    images = np.random.default_rng(0).integers(0, 200, (40, *SIZE[1:])).astype(dtype)
    found, rest = again(Tensor(images), Tensor(7))
    np.testing.assert_array_equal(found.asnumpy(), moved_by(images, rows, columns))
    assert found.dtype == Tensor(images).dtype
    assert int(rest) == 7
    assert len({*zip(rows, columns)}) > 10


def test_all_moves_are_equally_likely(mode):
    """The 8,191 draws of a seed, over 5 x 7 moves."""
    rows, columns = offsets(ShiftedImages(SHARE)(Tensor(coordinates(8191)))[0].asnumpy())
    counts = np.zeros((5, 7))
    np.add.at(counts, (rows + 2, columns + 3), 1)
    assert np.abs(rows).max() == 2
    assert np.abs(columns).max() == 3
    expected = 8191 / 35
    # Chi-squared with 34 degrees of freedom is below 70 with probability 0.9997; seed 0 is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 70


def test_batches_go_on_in_the_draws_and_begin_again_behind_the_last(mode):
    whole = offsets(ShiftedImages(SHARE)(Tensor(coordinates(8191)))[0].asnumpy())
    cell = ShiftedImages(SHARE)
    parts = [offsets(cell(Tensor(coordinates(one)))[0].asnumpy()) for one in (5, 8000, 300)]
    for axis in (0, 1):
        found = np.concatenate([part[axis] for part in parts])
        np.testing.assert_array_equal(found[:8191], whole[axis])
        np.testing.assert_array_equal(found[8191:], whole[axis][: 8305 - 8191])


def test_seeds_and_ranks_have_draws_of_their_own(monkeypatch):
    images = Tensor(coordinates(50))
    found = [offsets(ShiftedImages(SHARE, seed)(images)[0].asnumpy()) for seed in (0, 1, 2**32 - 1)]
    where = "mindspore_boost_ext.random_shift.algorithm.rank_and_count"
    monkeypatch.setattr(where, lambda: (1, 2))
    found.append(offsets(ShiftedImages(SHARE)(images)[0].asnumpy()))
    assert len({str(one) for one in found}) == 4


class Net(nn.Cell):
    """Every place of the image has weights of its own."""

    def __init__(self):
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Dense(2 * HEIGHT * WIDTH, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.head(self.flatten(x))


def config_of(also=None, **section):
    """Return a configuration; ``also`` holds sections that are switched on beside it."""
    also = also or {}
    on = {name: name in ("random_shift", *also) for name in AutoBoost().boost_config}
    moves = {"random_shift": {"share": SHARE, **section}}
    return {"boost": {"mode": "manual", **on}, **moves, **also}


def step_of(net, also=None, loss=None, **section):
    optimizer = nets.momentum(net.trainable_params())
    config = config_of(also, **section)
    return make_train_step(net, loss or nets.loss_fn(), optimizer, level="O1", config=config)


def batches(count):
    random = np.random.default_rng(0)
    return [random.normal(size=SIZE).astype(np.float32) for _ in range(count)]


def plain_on(moved):
    """Return the weights that plain MindSpore has after these batches."""
    net = Net()
    optimizer = nets.momentum(net.trainable_params())
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), optimizer).set_train()
    for images in moved:
        step(Tensor(images), Tensor(LABELS))
    return nets.weights(net)


def assert_same(net, expected):
    for name, value in nets.weights(net).items():
        # float32 of weights near 1, a handful of steps
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_step_is_plain_on_moved_images(mode):
    net, by = Net(), ShiftedImages(SHARE)
    step, data = step_of(net), batches(4)
    for images in data:
        step(Tensor(images), Tensor(LABELS))
    moved = [by(Tensor(images))[0].asnumpy() for images in data]
    assert_same(net, plain_on(moved))
    assert not np.allclose(nets.weights(net)["head.weight"], plain_on(data)["head.weight"])


def test_micro_batches_of_a_window_move_each_for_itself(mode):
    """Two halves of a batch make the step of the whole."""
    net, by = Net(), ShiftedImages(SHARE)
    window = {"grad_accumulation": {"grad_accumulation_step": 2}}
    step, data = step_of(net, window), batches(2)
    for images in data:
        for half in (slice(0, 4), slice(4, 8)):
            step(Tensor(images[half]), Tensor(LABELS[half]))
    assert_same(net, plain_on([by(Tensor(images))[0].asnumpy() for images in data]))


class Pooled(Net):
    """Takes images of any size that it can be divided into."""

    def construct(self, x):
        factor = HEIGHT // x.shape[2]
        return super().construct(x.repeat_interleave(factor, 2).repeat_interleave(factor, 3))


def test_images_move_first_and_are_made_smaller_then(mode):
    net, by = Pooled(), ShiftedImages(SHARE)
    small = {"progressive_resizing": {"phases": [[0.5, 0.5]], "total_steps": 4}}
    step, data = step_of(net, small), batches(4)
    for images in data:
        step(Tensor(images), Tensor(LABELS))
    moved = [by(Tensor(images))[0].asnumpy() for images in data]
    for number in (0, 1):
        means = moved[number].reshape(*SIZE[:2], HEIGHT // 2, 2, WIDTH // 2, 2).mean((3, 5))
        moved[number] = means.repeat(2, axis=2).repeat(2, axis=3)
    assert_same(net, plain_on(moved))


def test_evaluation_sees_images_as_they_are(mode):
    net = Net()
    model = ms.Model(
        net,
        nets.loss_fn(),
        nets.momentum(net.trainable_params()),
        metrics={"loss"},
        boost_level="O1",
        boost_config_dict=config_of(),
    )
    data = ms.dataset.NumpySlicesDataset((batches(1)[0], LABELS), shuffle=False).batch(nets.BATCH)
    model.train(2, data)
    expected = nets.loss_fn()(net(Tensor(batches(1)[0])), Tensor(LABELS)).asnumpy()
    assert model.eval(data)["loss"] == pytest.approx(float(expected), rel=1e-6)


class OfPixels(nn.Cell):
    """A loss for each pixel."""

    def construct(self, logits, labels):
        return (logits.reshape((-1, 1, 1, nets.CLASSES)) * labels.expand_dims(-1)).mean()


class Flat(nn.Cell):
    """Takes inputs of any number of axes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(12, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.head(x.reshape((x.shape[0], -1))[:, :12])


BAD = {
    "sequences": (np.ones((8, 16), "f"), LABELS, nets.loss_fn(), "got shape \\(8, 16\\)"),
    "small images": (
        np.ones((8, 12, 1, 1), "f"),
        LABELS,
        nets.loss_fn(),
        r"moves images of \(1, 1\) by no pixel at random_shift.share=0.25",
    ),
    "pixels": (
        np.ones((8, 2, 4, 4), "f"),
        np.ones((8, 4, 4), "f"),
        OfPixels(),
        "one class a sample, but the labels have the shape",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_batch_of_images_is_refused_or_trained_plainly(mode, kind):
    inputs, labels, loss, words = BAD[kind]
    with pytest.raises(ValueError, match=f"random_shift .*{words}.*leave random_shift away"):
        step_of(Flat(), loss=loss)(Tensor(inputs), Tensor(labels))
    nets_of = []
    for section in ({"if_unfit": "skip"}, None):
        net = Flat()
        if section:
            step = step_of(net, loss=loss, **section)
        else:
            step = make_train_step(net, loss, nets.momentum(net.trainable_params()), level="O0")
        step(Tensor(inputs), Tensor(labels))
        nets_of.append(nets.weights(net))
        if section:
            assert step.train_network.report()["random_shift"].status == "skipped"
    for name, value in nets_of[0].items():
        np.testing.assert_array_equal(value, nets_of[1][name], err_msg=f"{kind}: {name}")


def test_a_step_with_a_construct_of_its_own_is_refused():
    class Own(BoostTrainOneStepCell):
        def construct(self, *inputs):
            return self.network(*inputs)

    net, boost = Net(), AutoBoost("O1", {"random_shift": {}})
    words = "Own has a construct of its own, in which images would not move"
    with boost.building(), pytest.raises(ValueError, match=words):
        Own(nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params()))
