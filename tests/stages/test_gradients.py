"""What is multiplied keeps its digits."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindspore_boost_ext._compat import RowTensor
from mindspore_boost_ext.stages.gradients import clipped, multiplied


def test_gradients_in_float64_keep_their_digits(mode):
    """Scaling and clipping round others to float32, which has seven."""
    values = np.array([1 / 3, -2 / 7, 1e60])
    scaled = multiplied(Tensor(0.5, ms.float32), Tensor(values))
    np.testing.assert_array_equal(scaled.asnumpy(), values / 2)
    (kept,) = clipped((Tensor(values[:2]),), 10.0)
    np.testing.assert_array_equal(kept.asnumpy(), values[:2])


class OfRows(nn.Cell):
    """Multiplies a gradient of one row of four."""

    def construct(self, factor, indices, values):
        return multiplied(factor, RowTensor(indices, values, (4, 1))).values


def test_rows_in_float16_are_divided_by_a_large_scale(graph_mode):
    """Its inverse is 0 in float16, in which the quotient is a number."""
    factor, values = Tensor(2.0**-26, ms.float32), Tensor([[1024.0]], ms.float16)
    found = OfRows()(factor, Tensor([1], ms.int32), values)
    assert found.asnumpy().tolist() == [[2.0**-16]]
