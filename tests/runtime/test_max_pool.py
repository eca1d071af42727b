"""``ops.max_pool2d`` after the import: MindSpore's values and gradients, in less time."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.ops import functional

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import max_pool

SETTINGS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True},
    {"kernel_size": 2, "stride": 1, "dilation": 2},
]


class Pooled(nn.Cell):
    """Pools, and multiplies by weights."""

    def __init__(self, settings, outputs=None):
        super().__init__()
        self.settings = settings
        weights = np.random.default_rng(7).normal(size=outputs or 1)
        self.weights = None if outputs is None else Tensor(weights.astype("f"))

    def construct(self, x):
        found = ops.max_pool2d(x, **self.settings)
        return found if self.weights is None else (found * self.weights).sum()


def both(cell, *inputs):
    """Return what a function gives with the import's cure, and with MindSpore's function."""
    tune_machine()
    assert ops.max_pool2d is max_pool.max_pool2d
    tuned = cell()(*inputs)
    tune_machine(False)
    assert ops.max_pool2d is max_pool.ORIGINAL
    return tuned, cell()(*inputs)


@pytest.mark.parametrize("settings", SETTINGS)
def test_values_and_gradients_are_mindspores_with_ties(mode, settings, untuned):
    values = np.random.default_rng(1).integers(-2, 3, (2, 3, 8, 9)).astype("f")
    one, other = both(lambda: Pooled(settings), Tensor(values))
    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
    slopes = both(lambda: ms.grad(Pooled(settings, one.shape)), Tensor(values))
    np.testing.assert_array_equal(*(slope.asnumpy() for slope in slopes))


class Classified(nn.Cell):
    """Its loss asks for the number of axes when it is compiled."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, labels):
        pooled = ops.max_pool2d(x, 2, ceil_mode=True)
        return self.loss(pooled.mean((2, 3)), labels)


@pytest.mark.parametrize("sizes", [(None, 3, 8, 8), (None, 3, None, None)])
def test_open_sizes_keep_the_number_of_axes(graph_mode, sizes):
    net = Classified()
    net.set_inputs(Tensor(shape=sizes, dtype=ms.float32), Tensor(shape=(None,), dtype=ms.int32))
    for batch, side in ((2, 8), (3, 8 if sizes[2:] == (8, 8) else 5)):
        x = np.random.default_rng(batch).normal(size=(batch, 3, 8, side)).astype("f")
        x = x.transpose(0, 1, 3, 2) if sizes[2] is None else x
        labels = Tensor(np.zeros(batch, np.int32))
        image = [x[:, :, row : row + 2] for row in range(0, x.shape[2], 2)]
        cuts = [[rows[..., at : at + 2] for at in range(0, x.shape[3], 2)] for rows in image]
        means = np.mean([[cut.max((2, 3)) for cut in row] for row in cuts], (0, 1))
        expected = np.mean(np.log(np.exp(means).sum(1)) - means[:, 0])
        # A loss of float32 means and logarithms.
        np.testing.assert_allclose(net(Tensor(x), labels).asnumpy(), expected, rtol=1e-5)


def test_indices_are_mindspores(untuned):
    values = Tensor(np.random.default_rng(2).normal(size=(1, 2, 6, 6)).astype("f"))
    one, other = both(lambda: Pooled({"kernel_size": 2, "return_indices": True}), values)
    for mine, theirs in zip(one, other):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy())
        assert mine.dtype == theirs.dtype


def test_a_batch_of_another_rank_is_refused_as_by_mindspore(pynative_mode):
    with pytest.raises((ValueError, RuntimeError), match="rank must be equal to 4"):
        ops.max_pool2d(Tensor(np.ones((8, 8), np.float32)), 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": [2, 2]},
        {"kernel_size": 2.0},
        {"kernel_size": True},
        {"kernel_size": 0},
        {"kernel_size": 2, "stride": -1},
        {"kernel_size": 2, "padding": 2},
        {"kernel_size": 2, "dilation": (1, 1, 1, 1)},
        {"kernel_size": 2, "ceil_mode": 1},
    ],
)
def test_what_mindspore_refuses_is_refused_in_its_words(pynative_mode, settings, untuned):
    errors = []
    for tuned in (True, False):
        tune_machine(tuned)
        with pytest.raises((TypeError, ValueError)) as caught:
            ops.max_pool2d(Tensor(np.ones((1, 1, 4, 4), np.float32)), **settings)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_the_other_name_of_the_function_is_replaced():
    assert functional.max_pool2d is max_pool.max_pool2d
