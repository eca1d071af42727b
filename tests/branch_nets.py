"""Residual branches that are no plain sequence of convolution, BatchNorm and activation."""

from __future__ import annotations

from mindspore import nn, ops
from residual_nets import WIDTH, Block, Gate


class PreActivation(Block):
    """BatchNorm and activation come before each convolution, nothing after the last one."""

    def branch(self, x):
        out = self.conv1(self.act(self.bn1(x)))
        return self.conv2(self.act(self.bn2(out)))

    def construct(self, x):
        return self.branch(x) + x


class FramedByNorms(Block):
    """A BatchNorm before the first convolution, and one after each."""

    def __init__(self):
        super().__init__()
        self.bn0 = nn.BatchNorm2d(WIDTH)

    def construct(self, x):
        return self.branch(self.bn0(x)) + x


class DenseLayer(PreActivation):
    """A layer of a DenseNet: its result is put beside what came in."""

    def construct(self, x):
        return ops.concat((x, self.branch(x)), 1)


class MultiScale(nn.Cell):
    """A block of a Res2Net: the channels are split, each part is added to the next one's input."""

    def __init__(self, parts=4):
        super().__init__()
        width = parts * WIDTH
        self.parts = parts
        self.conv1, self.bn1 = nn.Conv2d(WIDTH, width, 1), nn.BatchNorm2d(width)
        self.convs = nn.CellList([nn.Conv2d(WIDTH, WIDTH, 3) for _ in range(parts - 1)])
        self.bns = nn.CellList([nn.BatchNorm2d(WIDTH) for _ in range(parts - 1)])
        self.conv3, self.bn3 = nn.Conv2d(width, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.act = nn.ReLU()

    def branch(self, x):
        split = ops.split(self.act(self.bn1(self.conv1(x))), WIDTH, 1)
        out = part = self.act(self.bns[0](self.convs[0](split[0])))
        for i in range(1, self.parts - 1):
            part = self.act(self.bns[i](self.convs[i](part + split[i])))
            out = ops.concat((out, part), 1)
        out = ops.concat((out, split[self.parts - 1]), 1)
        return self.bn3(self.conv3(out))

    def construct(self, x):
        return self.act(self.branch(x) + x)


class GatedBottleneck(Block):
    """A squeeze-and-excitation gate before the last convolution, with a projected shortcut."""

    def __init__(self):
        super().__init__()
        self.conv3, self.bn3 = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)
        self.projection = nn.SequentialCell(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))
        self.gate = Gate()

    def branch(self, x):
        out = self.gate(self.act(super().branch(x)))
        return self.bn3(self.conv3(out))

    def construct(self, x):
        return self.act(self.branch(x) + self.projection(x))


class SelfGated(Block):
    """Its activation is written as a product."""

    def branch(self, x):
        out = self.bn1(self.conv1(x))
        return self.bn2(self.conv2(out * ops.sigmoid(out) * 2.0))


class Around(Block):
    """A residual block with a projection stands in the branch of another one."""

    def __init__(self):
        super().__init__()
        self.inner = GatedBottleneck()

    def branch(self, x):
        return self.bn2(self.conv2(self.inner(self.act(self.bn1(self.conv1(x))))))


class LongBranch(nn.Cell):
    """So many convolutions with BatchNorm."""

    def __init__(self, convolutions):
        super().__init__()
        layers = [(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)) for _ in range(convolutions)]
        self.layers = nn.SequentialCell([layer for pair in layers for layer in pair])

    def construct(self, x):
        return x + self.layers(x)


# The BatchNorms of each that go; those that stay, with the reason.
LAST = "last BatchNorm of its residual branch"
GATE = "a squeeze-and-excitation gate inside the branch"
BRANCHES = {
    PreActivation: ({"bn1"}, {"bn2": LAST}),
    FramedByNorms: ({"bn0", "bn1"}, {"bn2": LAST}),
    DenseLayer: ({"bn1"}, {"bn2": LAST}),
    MultiScale: ({"bn1", "bns.0", "bns.1", "bns.2"}, {"bn3": LAST}),
    GatedBottleneck: ({"bn1", "projection.1"}, {"bn2": GATE, "bn3": LAST}),
    SelfGated: ({"bn1"}, {"bn2": LAST}),
    Around: (
        {"inner.bn1", "inner.projection.1"},
        {
            "bn1": "another residual block inside the branch",
            "inner.bn2": GATE,
            "inner.bn3": LAST,
            "bn2": LAST,
        },
    ),
}
