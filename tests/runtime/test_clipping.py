"""``ops.clip_by_global_norm`` after the import: MindSpore's values, in less time."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, RowTensor, Tensor, nn, ops
from mindspore.ops import composite, functional

from mindspore_boost_ext import tune_machine
from mindspore_boost_ext.runtime import clipping

RNG = np.random.default_rng(3)
SHAPES = [(), (7,), (3, 5), (2, 64, 3), (1030, 2)]
GRADIENTS = [RNG.normal(size=shape) for shape in SHAPES]
NORM = np.sqrt(sum((one**2).sum() for one in GRADIENTS))


class Clipped(nn.Cell):
    def __init__(self, *settings):
        super().__init__()
        self.settings = settings

    def construct(self, *gradients):
        return ops.clip_by_global_norm(gradients, *self.settings)


class ClippedList(Clipped):
    def construct(self, *gradients):
        return ops.clip_by_global_norm(list(gradients), *self.settings)


def tensors(values, dtype=np.float32):
    return [Tensor(np.array(one, dtype)) for one in values]


def both(cell, *inputs):
    """Return what a Cell gives with the import's cure, and with MindSpore's function."""
    tune_machine()
    assert ops.clip_by_global_norm is clipping.clip_by_global_norm
    tuned = cell()(*inputs)
    tune_machine(False)
    assert ops.clip_by_global_norm is clipping.ORIGINAL
    return tuned, cell()(*inputs)


@pytest.mark.parametrize("norm", [1.0, 3, NORM / 2])
def test_gradients_shrink_to_the_norm(mode, norm):
    found = [one.asnumpy() for one in Clipped(norm)(*tensors(GRADIENTS))]
    for one, gradient in zip(found, GRADIENTS):
        assert (one.dtype, one.shape) == (np.float32, gradient.shape)
        np.testing.assert_allclose(one, gradient * norm / NORM, rtol=1e-6)  # float32
    assert np.sqrt(sum((one.astype(float) ** 2).sum() for one in found)) == pytest.approx(norm)


@pytest.mark.parametrize("settings", [(1000.0,), (1000.0, None)])
def test_gradients_below_the_norm_stay_bit_for_bit(mode, settings):
    inputs = tensors(GRADIENTS)
    for one, gradient in zip(Clipped(*settings)(*inputs), inputs):
        np.testing.assert_array_equal(one.asnumpy(), gradient.asnumpy())


@pytest.mark.parametrize("size", [2**20, 2**20 + 1])  # of which the second is in rows of no width
def test_the_norm_of_many_equal_numbers_loses_none(mode, size):
    (found,) = Clipped(1.0)(Tensor(np.full(size, 0.1, np.float32)))
    np.testing.assert_allclose(found.asnumpy()[:9], size**-0.5, rtol=1e-6)  # float32


@pytest.mark.parametrize("cell", [Clipped, ClippedList])
def test_what_comes_back_is_held_as_mindspores_is(mode, untuned, cell):
    found, expected = both(cell, *tensors(GRADIENTS[1:]))
    assert (type(found), len(found)) == (type(expected), len(expected))


def test_a_list_outside_a_graph_comes_back_as_mindspores_does(mode):
    found, expected = (
        one(tensors(GRADIENTS), 1.0) for one in (clipping.clip_by_global_norm, clipping.ORIGINAL)
    )
    assert type(found) is type(expected)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 0.0, 1e25])
def test_odd_numbers_give_what_mindspores_function_does(mode, untuned, odd):
    """All of them 0 as well; squares that leave float32 make everything 0 there."""
    inputs = tensors([[odd, 0.0], [0.0 if odd == 0.0 else 2.0]])
    found, expected = both(Clipped, *inputs)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


MIXED = [(np.float16, np.float16), (np.float32, np.float16), (np.float16, np.float32)]


@pytest.mark.parametrize("dtypes", MIXED)
def test_16_bits_are_left_to_mindspore(mode, untuned, dtypes):
    inputs = [Tensor(one.astype(dtype)) for one, dtype in zip(GRADIENTS[1:], dtypes)]
    for one, other in zip(*both(Clipped, *inputs)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("kind", [list, tuple])
def test_mindspores_function_is_not_asked(pynative_mode, monkeypatch, kind):
    monkeypatch.setattr(clipping, "ORIGINAL", None)
    (found,) = clipping.clip_by_global_norm(kind(tensors([[3.0, 4.0]])))
    np.testing.assert_allclose(found.asnumpy(), [0.6, 0.8], rtol=1e-6)  # float32


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_result_is_of_the_kind_of_mindspores(mode, untuned, kind):
    """Called by Python: in GRAPH_MODE a list, whose elements may be changed."""
    found, expected = both(lambda: ops.clip_by_global_norm, kind(tensors([[3.0, 4.0]])))
    assert type(found) is type(expected)


class Slope(nn.Cell):
    def construct(self, x, y):
        clipped = ops.clip_by_global_norm((x, y), 1.0)
        return (clipped[0] * x).sum() + clipped[1][0]


def test_its_own_gradient_is_mindspores(mode, untuned):
    found, expected = both(lambda: ms.grad(Slope(), (0, 1)), *tensors(GRADIENTS[1:3]))
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([Tensor([1.0])], 0.0), ValueError),
        (([Tensor([1.0])], -1), ValueError),
        (([Tensor([1.0])], "1"), TypeError),
        (([Tensor([1.0])], 1.0, 2.0), ValueError),
        (([],), Exception),
        ((["a"],), Exception),
    ],
)
def test_wrong_arguments_have_mindspores_errors(pynative_mode, untuned, arguments, error):
    texts = []
    for tuned in (True, False):
        tune_machine(tuned)
        with pytest.raises(error) as raised:
            [one.asnumpy() for one in ops.clip_by_global_norm(*arguments)]
        texts.append(str(raised.value).splitlines()[0])
    assert texts[0] == texts[1]


def test_one_tensor_is_left_to_mindspore(pynative_mode, untuned):
    ends = []
    for tuned in (True, False):
        tune_machine(tuned)
        try:
            ends.append(ops.clip_by_global_norm(Tensor([3.0, 4.0])).asnumpy().tolist())
        except Exception as error:
            ends.append(type(error))
    assert ends[0] == ends[1]


def test_weights_are_clipped_too(pynative_mode):
    (found,) = ops.clip_by_global_norm([Parameter(Tensor([3.0, 4.0]), name="weight")])
    np.testing.assert_allclose(found.asnumpy(), [0.6, 0.8], rtol=1e-6)  # float32


def test_all_names_of_the_function_are_replaced_and_given_back(untuned):
    places = (ops, ops.function, functional, composite, ops.function.clip_func)
    for tuned in (True, False):
        tune_machine(tuned)
        own = clipping.clip_by_global_norm if tuned else clipping.ORIGINAL
        assert all(one.clip_by_global_norm is own for one in places)


class DynamicClipped(nn.Cell):
    def construct(self, x):
        return ops.clip_by_global_norm((x, x))


def test_a_shape_that_a_graph_does_not_know(graph_mode):
    net = DynamicClipped()
    net.set_inputs(Tensor(shape=[None, 2], dtype=ms.float32))
    for rows in (1, 3):
        (found, _) = net(Tensor(np.ones((rows, 2), np.float32)))
        np.testing.assert_allclose(found.asnumpy(), (4 * rows) ** -0.5, rtol=1e-6)  # float32


def test_rows_are_refused_as_by_mindspore(pynative_mode, untuned):
    rows = RowTensor(Tensor([0], ms.int32), Tensor(np.ones((1, 2), np.float32)), (3, 2))
    errors = []
    for tuned in (True, False):
        tune_machine(tuned)
        with pytest.raises((TypeError, RuntimeError, ValueError)) as raised:
            ops.clip_by_global_norm((rows,))
        errors.append(type(raised.value))
    assert errors[0] == errors[1]
