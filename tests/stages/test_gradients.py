"""What is multiplied keeps its digits."""

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext import BoostModel
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


class Losses(nn.Cell):
    """Returns its losses in a container."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.loss = kind, nn.CrossEntropyLoss()
        self.layer = nn.Dense(nets.FEATURES, nets.CLASSES)

    def construct(self, x, y):
        loss = self.loss(self.layer(x), y)
        return [loss, loss] if self.kind == "list" else {"loss": loss}


CLIPPING = {"gradients": {"clip_norm": 1.0}}
ACCUMULATING = {"grad_accumulation": {"grad_accumulation_step": 2}}


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("section", [CLIPPING, ACCUMULATING], ids=["clipping", "accumulating"])
def test_a_list_or_a_dict_of_losses_is_refused_where_it_cannot_train(mode, kind, section):
    net = Losses(kind)
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    switches["grad_accumulation"] = section is ACCUMULATING
    model = model_of(net, {"boost": switches, **section}, kind=BoostModel, loss_fn=None)
    before = nets.weights(net)
    with pytest.raises(ValueError, match="returns a list or a dict of losses"):
        model.train(1, nets.dataset(2), dataset_sink_mode=False)
    nets.assert_same(nets.weights(net), before)
