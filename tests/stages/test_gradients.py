"""What is multiplied keeps its digits."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindspore_boost_ext.stages.gradients import clipped, multiplied


def test_gradients_in_float64_keep_their_digits(mode):
    """Scaling and clipping round others to float32, which has seven."""
    values = np.array([1 / 3, -2 / 7, 1e60])
    scaled = multiplied(Tensor(0.5, ms.float32), Tensor(values))
    np.testing.assert_array_equal(scaled.asnumpy(), values / 2)
    (kept,) = clipped((Tensor(values[:2]),), 10.0)
    np.testing.assert_array_equal(kept.asnumpy(), values[:2])
