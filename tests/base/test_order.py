"""What the construct of a Cell uses, in the order in which it runs."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext.base.order import in_order_of_construct


def names(cell):
    """Return the names of what construct uses: that of a Dense is its weight's."""
    uses = in_order_of_construct(cell)
    return [one.name if isinstance(one, Parameter) else one.weight.name for one in uses]


class Scaled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.scale = Parameter(Tensor(np.ones(2, np.float32)), name="scale")
        self.one, self.two = nn.Dense(2, 2), nn.Dense(2, 2)
        self.update_parameters_name("", True)


class InALoop(Scaled):
    """In the second round the scale is used after the layer."""

    def construct(self, x):
        for _ in range(2):
            x = x * self.scale
            x = self.one(x)
        return self.two(x)


def test_in_a_loop_parameters_come_after_layers():
    assert names(InALoop()) == ["one.weight", "scale", "two.weight"]


class NamedAnew(Scaled):
    def construct(self, x):
        y = self.one(x)
        x = self.two(y)
        y = self.scale * 2
        return x + y


def test_a_name_that_gets_another_value_stands_for_that_one():
    """What is made of parameters alone is used where it meets a value."""
    assert names(NamedAnew()) == ["one.weight", "two.weight", "scale"]
