"""Float16 with loss scales: one dynamic scale, or one for each group of layers.

    python examples/fp16.py
    python examples/fp16.py --groups

A loss scale keeps small gradients from becoming zero. A step that overflows is skipped, and its
scale becomes smaller. With ``--groups``, markers in the network show where a group of layers ends.
LeNet's gradients fit into float16: the script shows how, not a gain.

Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018.
"""

from __future__ import annotations

import argparse

import mindspore as ms
from mindspore import Tensor, nn

from mindspore_boost_ext import BoostMonitor, GroupLossScaleManager
from mindspore_boost_ext.bundled import LeNet5, digits_datasets


class TwoGroups(LeNet5):
    """LeNet-5 with a group of loss scales for the convolutions and one for the dense layers."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [*self.conv1.trainable_params(), *self.conv2.trainable_params()]
        dense = [
            one for layer in (self.fc1, self.fc2, self.fc3) for one in layer.trainable_params()
        ]
        self.scales = GroupLossScaleManager([2.0**10, 2.0**10], [convolutions, dense])

    def construct(self, image: Tensor) -> Tensor:
        """Return the logits; there is a marker before each group, and after the last one."""
        hidden = self.pool(self.relu(self.conv1(self.scales(image, 0, 1))))
        hidden = self.flatten(self.pool(self.relu(self.conv2(hidden))))
        hidden = self.relu(self.fc1(self.scales(hidden, 1, 2)))
        return self.scales(self.fc3(self.relu(self.fc2(hidden))), 2, 3)


def main() -> None:
    """Train in float16, and say how often a step was skipped."""
    parser = argparse.ArgumentParser(description="Train LeNet-5 in float16.")
    parser.add_argument("--groups", action="store_true", help="a scale for each group of layers")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    train, test = digits_datasets(32)
    net = TwoGroups() if options.groups else LeNet5()
    scales = net.scales if options.groups else ms.DynamicLossScaleManager(2**16, 2, 100)
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), learning_rate=0.03, momentum=0.9),
        metrics={"accuracy"},
        amp_level="O3",  # every layer computes in float16; the weights stay float32
        loss_scale_manager=scales,
        boost_level="O1",
        boost_config_dict={"boost": {**switches, "loss_scale_group": options.groups}},
    )
    model.fit(options.epochs, train, test, callbacks=[BoostMonitor()])
    print(model.train_network.report())
    print(f"skipped steps: {model.train_network.observations()['skipped_steps']}")
    print(f"test accuracy {model.eval(test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
