"""Residual blocks as people write them, and blocks that only look like them. All tiny."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

WIDTH, CLASSES = 4, 3


class Block(nn.Cell):
    """conv, BN, ReLU, conv, BN and a shortcut; subclasses differ in how they say it."""

    activation = nn.ReLU
    has_bias = False

    def __init__(self, width=WIDTH):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, has_bias=self.has_bias)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, has_bias=self.has_bias)
        self.bn2 = nn.BatchNorm2d(width)
        self.act = self.activation()

    def branch(self, x):
        return self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))

    def construct(self, x):
        return self.act(self.branch(x) + x)


class InHalves(Block):
    """Subclasses use what the first half gives, the result of bn1, once more."""

    def first(self, x):
        return self.bn1(self.conv1(x))

    def last(self, x, y):
        return self.act(x + self.bn2(self.conv2(self.act(y))))

    def construct(self, x):
        return self.last(x, self.first(x))


class Swapped(Block):
    def construct(self, x):
        return self.act(x + self.branch(x))


class InPlace(Block):
    def construct(self, x):
        identity = x
        out = self.branch(x)
        out += identity
        return self.act(out)


class AddOperator(Block):
    def __init__(self):
        super().__init__()
        self.add = ops.Add()

    def construct(self, x):
        return self.act(self.add(self.branch(x), x))


class AddFunction(Block):
    def construct(self, x):
        out = ops.relu(self.bn1(self.conv1(x)))
        return ops.relu(ops.add(x, self.bn2(self.conv2(out))))


class AddMethod(Block):
    def construct(self, x):
        return self.act(self.branch(x).add(x))


class Sum(nn.Cell):
    def construct(self, one, two):
        return one + two


class AddCell(Block):
    def __init__(self):
        super().__init__()
        self.sum = Sum()

    def construct(self, x):
        return self.act(self.sum(self.branch(x), x))


class ReLU6Block(Block):
    activation = nn.ReLU6


class GELUBlock(Block):
    activation = nn.GELU


class OperatorBlock(Block):
    activation = ops.ReLU


class BiasBlock(Block):
    has_bias = True


class InBranchOperator(Block):
    def construct(self, x):
        out = ops.ReLU()(self.bn1(self.conv1(x)))
        return ops.Add()(self.bn2(self.conv2(out)), x)


class LoopBlock(Block):
    def construct(self, x):
        out = x
        for layer in (self.conv1, self.bn1, self.act, self.conv2, self.bn2):
            out = layer(out)
        return self.act(out + x)


class Gate(nn.Cell):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Conv2d(WIDTH, WIDTH, 1)

    def construct(self, x):
        return x * ops.sigmoid(self.squeeze(x.mean((2, 3), True)))


class GateAfter(Block):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def construct(self, x):
        return self.act(self.gate(self.branch(x)) + x)


class Reshaped(Block):
    """Asks for a shape, but only to pass it on."""

    def construct(self, x):
        return self.act(self.branch(x).reshape(x.shape) + x)


class Inherited(AddFunction):
    """Calls the code of its parent, which is a function of the module."""

    def construct(self, x):
        return super().construct(x)


class Compiled(Block):
    """Its construct is a function for the compiler."""

    @ms.jit
    def construct(self, x):
        return self.act(ops.add(self.branch(x), x))


class InClosure(Block):
    """Its activation is a function from a closure, its layers stand in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.layers = [self.conv1, self.bn1]
        self.rest = {"conv": self.conv2, "norm": self.bn2}
        self.rectified = rectifier(ops.relu)

    def construct(self, x):
        out = x
        for layer in self.layers:
            out = layer(out)
        out = self.rest["norm"](self.rest["conv"](self.rectified(out)))
        return ops.relu(x + out)


def rectifier(function):
    return lambda x: function(x)


class ByKeyword(Block):
    """Its activation is the default of an argument that has to be named."""

    def activated(self, x, *, by=ops.relu):
        return by(x)

    def construct(self, x):
        out = self.activated(self.bn1(self.conv1(x)))
        return self.act(x + self.bn2(self.conv2(out)))


class WithoutMore(Block):
    """It may hold more layers behind its first half."""

    def __init__(self):
        super().__init__()
        self.more = nn.CellList()

    def construct(self, x):
        out = self.bn1(self.conv1(x))
        if self.more:
            out = ops.softmax(out)
        return self.act(x + self.bn2(self.conv2(self.act(out))))


class OverItsWeights(Block):
    """Goes through what a method of MindSpore's gives one after the other."""

    def construct(self, x):
        size = 0
        for weight in self.conv1.get_parameters():
            size = size + weight.sum()
        return self.act(x + self.branch(x)) * size


UNDERSTOOD = [
    *(Block, Swapped, InPlace, AddOperator, AddFunction, AddMethod, AddCell, ReLU6Block, GELUBlock),
    *(OperatorBlock, BiasBlock, InBranchOperator, LoopBlock, GateAfter, Reshaped),
    *(Inherited, Compiled, InClosure, ByKeyword, WithoutMore, OverItsWeights),
]


class Multiplied(Block):
    def construct(self, x):
        return self.act(self.branch(x) * x)


class GateBetween(Block):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def construct(self, x):
        out = self.gate(self.act(self.bn1(self.conv1(x))))
        return self.act(self.bn2(self.conv2(out)) + x)


class Tapped(Block):
    def construct(self, x):
        inner = self.bn1(self.conv1(x))
        out = self.bn2(self.conv2(self.act(inner)))
        return self.act(out + x) + inner.mean()


class Unknown(Block):
    def construct(self, x):
        out = ops.sin(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(out)) + x)


class Alike(Block):
    def construct(self, x):
        return self.act(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)))


class Branching(Block):
    def construct(self, x):
        if x.shape[0] > 0:
            return self.act(self.branch(x) + x)
        return x


class Shared(Block):
    """Its first BatchNorm is used outside of the branch as well."""

    def construct(self, x):
        return self.act(self.branch(x) + x) + self.bn1(self.conv1(ops.tanh(x)))


# Why each stays as it is, as its first BatchNorm's entry says.
UNTOUCHED = {
    Multiplied: "not in a residual block",
    GateBetween: "a squeeze-and-excitation gate inside the branch",
    Tapped: "used outside of its residual branch",
    Unknown: "the operation sin inside the branch",
    Alike: "both branches of the addition have one convolution",
    Branching: "branches on the value or shape",
    Shared: "last BatchNorm of its residual branch",
}


class ZooBlock(nn.Cell):
    """A bottleneck in the manner of MindSpore's model zoo."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        middle = outputs // 2
        self.conv1 = nn.Conv2d(inputs, middle, 1)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.down_sample = stride != 1 or inputs != outputs
        self.down_sample_layer = None
        if self.down_sample:
            self.down_sample_layer = nn.SequentialCell(
                [nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)]
            )
        self.add = ops.Add()

    def construct(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.down_sample:
            identity = self.down_sample_layer(identity)
        return self.relu(self.add(out, identity))


class ZooResNet(nn.Cell):
    """Stem, two bottlenecks, one of them with a projection, pooling, classifier: 8 BatchNorms."""

    def __init__(self, seed=0):
        super().__init__()
        self.conv1 = nn.Conv2d(1, WIDTH, 3)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.relu = ops.ReLU()
        self.layer1 = nn.SequentialCell([ZooBlock(WIDTH, 2 * WIDTH, 2)])
        self.layer2 = nn.SequentialCell([ZooBlock(2 * WIDTH, 2 * WIDTH)])
        self.mean = ops.ReduceMean(keep_dims=True)
        self.flatten = nn.Flatten()
        self.end_point = nn.Dense(2 * WIDTH, CLASSES)
        generator = np.random.default_rng(seed)
        for parameter in self.trainable_params():
            if parameter.ndim > 1:
                values = generator.normal(0, 0.4, parameter.shape).astype(np.float32)
                parameter.set_data(Tensor(values))

    def construct(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        x = self.flatten(self.mean(x, (2, 3)))
        return self.end_point(x)


def images(count=8, channels=1, size=8, seed=1):
    """Return a batch of random images and labels as Tensors."""
    generator = np.random.default_rng(seed)
    pixels = generator.normal(size=(count, channels, size, size)).astype(np.float32)
    return Tensor(pixels), Tensor(generator.integers(0, CLASSES, count).astype(np.int32))


def dataset(count=8):
    """Return one batch of images as a dataset."""
    x, y = images(count)
    columns = (x.asnumpy(), y.asnumpy())
    return ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(count)
