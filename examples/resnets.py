"""ResNet-18 in its CIFAR form, and ResNet-50, as in the papers.

Attribute and parameter names are those of MindSpore's model zoo and of torchvision where these
agree (``conv1``, ``bn1``, ``layer1`` ... ``layer4``, ``fc``; ``downsample`` for the shortcut).

Reference: He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016. Weights
start as in He et al., ICCV 2015 (normal, by fan-out), as is usual for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspore import Tensor, nn
from mindspore.common.initializer import HeNormal

STAGE_WIDTHS = (64, 128, 256, 512)


def convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    """Returns a convolution without bias that keeps the size of an image up to its stride."""
    start = HeNormal(mode="fan_out", nonlinearity="relu")
    padding = side // 2
    return nn.Conv2d(
        inputs, outputs, side, stride, pad_mode="pad", padding=padding, weight_init=start
    )


class Block(nn.Cell):
    """The base of both kinds of residual blocks: ReLU of the main branch plus the shortcut.

    Args:
        inputs (int): channels of the input.
        outputs (int): channels of the output.
        stride (int): the factor by which the image shrinks.

    Inputs:
        - **image** (Tensor) - float ``[batch, inputs, height, width]``.

    Outputs:
        Tensor, ``[batch, outputs, height / stride, width / stride]``.
    """

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.downsample = nn.SequentialCell()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.SequentialCell(
                convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def branch(self, image: Tensor) -> Tensor:
        """Returns the output of the main branch."""
        raise NotImplementedError

    def construct(self, image: Tensor) -> Tensor:
        """Returns the output of the block."""
        return self.relu(self.branch(image) + self.downsample(image))


class BasicBlock(Block):
    """Two 3x3 convolutions, the block of ResNet-18. Arguments as for ``Block``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.conv1 = convolution(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)

    def branch(self, image: Tensor) -> Tensor:
        """Returns the output of the main branch."""
        hidden = self.relu(self.bn1(self.conv1(image)))
        return self.bn2(self.conv2(hidden))


class Bottleneck(Block):
    """1x1, 3x3 and 1x1 convolutions, the block of ResNet-50. Arguments as for ``Block``."""

    expansion = 4

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        inner = outputs // self.expansion
        self.conv1 = convolution(inputs, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = convolution(inner, inner, 3, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = convolution(inner, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)

    def branch(self, image: Tensor) -> Tensor:
        """Returns the output of the main branch."""
        hidden = self.relu(self.bn1(self.conv1(image)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        return self.bn3(self.conv3(hidden))


class ResNet(nn.Cell):
    """A residual network of four stages.

    Args:
        block (type): ``BasicBlock`` or ``Bottleneck``.
        depths (Sequence[int]): blocks in each of the four stages.
        num_classes (int): length of the output.
        small_images (bool): a 3x3 stem without pooling, for images of 32x32 and less, in place of
            the 7x7 stem with pooling, which shrinks an image to a quarter.

    Inputs:
        - **image** (Tensor) - float32 ``[batch, 3, height, width]``.

    Outputs:
        Tensor, float32 ``[batch, num_classes]``, the logits.
    """

    def __init__(
        self, block: type[Block], depths: Sequence[int], num_classes: int, small_images: bool
    ) -> None:
        super().__init__()
        width = STAGE_WIDTHS[0]
        self.conv1 = convolution(3, width, 3) if small_images else convolution(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity()
        if not small_images:
            self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        inputs, stages = width, []
        for stage, (width, depth) in enumerate(zip(STAGE_WIDTHS, depths)):
            blocks, outputs = [], width * block.expansion
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, outputs, stride))
                inputs = outputs
            stages.append(nn.SequentialCell(blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Dense(inputs, num_classes)

    def construct(self, image: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        hidden = self.layer2(self.layer1(hidden))
        hidden = self.layer4(self.layer3(hidden))
        return self.fc(hidden.mean((2, 3)))


def resnet18(num_classes: int = 10) -> ResNet:
    """Returns ResNet-18 for small images: 20 BatchNorms, 11.2 million weights."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, small_images=True)


def resnet50(num_classes: int = 10) -> ResNet:
    """Returns ResNet-50 for images of 224x224: 53 BatchNorms, 23.5 million weights."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, small_images=False)


NETWORKS: dict[str, Callable[[], ResNet]] = {"resnet18": resnet18, "resnet50": resnet50}
