"""A network on trial: what comes of it, and that it leaves no mark."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.stages.trial import on_trial


class Counting(nn.Cell):
    """Counts its runs; has frozen Parameters that CPU cannot assign, and outputs within outputs."""

    def __init__(self):
        super().__init__()
        self.frozen = Parameter(Tensor([1.0], ms.bfloat16), requires_grad=False)
        self.runs = Parameter(Tensor([0], ms.int32), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.runs, Tensor([1], ms.int32))
        return x.mean(), (x, [x.sum(), x.astype(ms.bfloat16)])


@pytest.mark.parametrize("value", [1.0, np.inf])
def test_all_outputs_are_looked_at_and_parameters_restored(mode, value):
    net = Counting()
    with on_trial(net) as run:
        found = [run(Tensor(np.full((2, 3), value, np.float32))) for _ in range(2)]
    assert found == [([(), (2, 3), (), (2, 3)], value == 1.0)] * 2
    assert net.runs.asnumpy().tolist() == [0]


def test_parameters_are_restored_where_it_fails(mode):
    net = Counting()
    with pytest.raises(AttributeError), on_trial(net) as run:
        run(None)
    assert net.runs.asnumpy().tolist() == [0]
