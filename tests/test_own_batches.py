"""Algorithms look at a batch as a ``batch_part`` of the user's own hands it to the network."""

import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import Algorithm, BoostModel
from mindspore_boost_ext.stages.trial import batch_behind


class Changing(Algorithm):
    switch = "changing"

    def __init__(self, part):
        self.part = part

    def join(self, step):
        step.batch_part = self.part


def step_of(net, config, part, loss=None):
    optimizer = nn.SGD(net.trainable_params(), nn.cosine_decay_lr(0.0, 0.1, 4, 1, 4))
    arguments = {"boost_config_dict": config, "boost_level": "O1", "loss_fn": loss}
    model = BoostModel(net, optimizer=optimizer, algorithms=[Changing(part)], **arguments)
    return model.train_network


class Unfolded(nn.Cell):
    """Makes images of rows."""

    def construct(self, x, *rest):
        return (x.reshape((-1, 1, 8, 8)), *rest)


class OfImages(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(1.0), name="weight")

    def construct(self, x):
        return x.mean((1, 2, 3)).mean() * self.weight


def test_images_that_a_part_makes_can_be_resized(mode):
    config = switched(progressive_resizing=True)
    config["progressive_resizing"] = {"phases": [[0.5, 0.5]], "total_steps": 2}
    step = step_of(OfImages(), config, Unfolded())
    step(Tensor(np.ones((2, 64), np.float32)))
    row = step.report()["progressive_resizing"]
    assert (row.status, row.reason) == ("applied", "scale 0.5 until update 1 of 2, then full size")


class Classes(nn.Cell):
    """Takes the first of several labels of a sample."""

    def construct(self, x, labels):
        return x, labels[:, 0]


@pytest.mark.parametrize("switch", ["label_smoothing", "short_schedule"])
def test_classes_that_a_part_makes_are_classes(mode, switch):
    config = switched(**{switch: True})
    config["label_smoothing"] = {"when": "always", "if_unfit": "skip"}
    config["short_schedule"] = {"total_steps": 4, "if_unfit": "skip"}
    step = step_of(nets.MLP(), config, Classes(), nets.loss_fn())
    x, labels = nets.batches(1)[0]
    step(Tensor(x), Tensor(np.stack([labels] * 3, 1)))
    assert step.report()[switch].status == "applied"


class Unpacked(nn.Cell):
    def construct(self, pair):
        return pair


def test_samples_that_a_part_unpacks_are_counted(pynative_mode):
    config = switched(grad_accumulation=True)
    config["grad_accumulation"] = {"grad_accumulation_step": 2, "weighting": "samples"}
    step = step_of(nets.MLP(), config, Unpacked(), nets.loss_fn())
    for batch in nets.batches(2):
        step(tuple(map(Tensor, batch)))
    assert step.window_part.micro_steps() == 0


class Shuffling(nn.Cell):
    """Draws numbers, and counts its batches."""

    def __init__(self):
        super().__init__()
        self.count = Parameter(Tensor(0.0), name="count")
        self.random, self.seen, self.calls = np.random.default_rng(0), [], 0

    def construct(self, x):
        ops.assign_add(self.count, Tensor(1.0))
        self.calls += 1
        self.seen.append(self.random.random())
        return (x + float(np.random.random()),)


def test_looking_at_a_batch_changes_no_state(mode):
    part = Shuffling()
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    seen = [float(batch_behind(part, Tensor(0.0))[0].asnumpy()) for _ in range(2)]
    # A number of float64 that is added in float32.
    assert seen == pytest.approx([expected] * 2, rel=1e-7)
    assert (float(part.count.asnumpy()), part.calls, part.seen) == (0.0, 0, [])
    assert part.random.random() == np.random.default_rng(0).random()
    assert np.random.random() == expected


def test_a_function_may_change_the_batch(pynative_mode):
    config = switched(grad_accumulation=True)
    config["grad_accumulation"] = {"grad_accumulation_step": 2}
    step = step_of(nets.MLP(), config, lambda x, labels: (2 * x, labels), nets.loss_fn())
    step(*map(Tensor, nets.batches(1)[0]))
    assert step.window_part.micro_steps() == 1


def test_a_part_that_fails_when_it_is_tried_shows_no_batch(mode):
    class Failing(nn.Cell):
        def construct(self, *inputs):
            raise KeyError("in a graph only")

    assert batch_behind(Failing(), 1, 2) == (1, 2)
