"""LeNet-5 on handwritten digits, with the boost of your choice.

    python examples/lenet.py
    python examples/lenet.py --config examples/configs/accumulation.json
    python examples/lenet.py --config examples/configs/thor.json --learning-rate 0.01
    python examples/lenet.py --level O1 --mode pynative
    python examples/lenet.py --data-dir ~/mnist --epochs 2       # MNIST's four files, unpacked

Level O1 alone warns that LeNet has no BatchNorm to remove; lines with --config ask for more.

Needs no download: the 1,797 bundled digits are enlarged from 8x8 to 32x32. Equal seeds give equal
runs on one machine.

Reference: LeCun, Bottou, Bengio, Haffner, Gradient-based learning applied to document recognition,
1998; here with ReLU, max pooling and fully connected channels.
"""

from __future__ import annotations

import argparse

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.dataset import transforms, vision

from mindspore_boost_ext import BoostMonitor
from mindspore_boost_ext.bundled import LeNet5, digits_datasets


def mnist(folder: str, usage: str) -> ds.Dataset:
    """Return batches of MNIST: float32 ``[32, 1, 32, 32]`` in [0, 1] and int32 ``[32]``."""
    data = ds.MnistDataset(folder, usage, shuffle=usage == "train")
    data = data.map([vision.Pad(2), vision.Rescale(1 / 255, 0), vision.HWC2CHW()], "image")
    data = data.map(transforms.TypeCast(ms.int32), "label")
    return data.batch(32, drop_remainder=usage == "train")


def main() -> None:
    """Train, show the progress, and say what the boost did."""
    parser = argparse.ArgumentParser(description="Train LeNet-5 on handwritten digits.")
    parser.add_argument("--level", default="O1", help="boost level: O0, O1 or O2 (O1)")
    parser.add_argument("--config", help="a JSON file for boost_config_dict")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.03, help="at first (0.03)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", help="a folder with MNIST, in place of the bundled digits")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")

    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(options.seed)
    if options.data_dir:
        train, test = (mnist(options.data_dir, usage) for usage in ("train", "test"))
    else:
        train, test = digits_datasets(32)

    net, steps = LeNet5(), train.get_dataset_size()
    rates = nn.cosine_decay_lr(
        0.0, options.learning_rate, options.epochs * steps, steps, options.epochs
    )
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), rates, momentum=0.9),
        metrics={"accuracy"},
        boost_level=options.level,
        boost_config_dict=options.config,
    )
    model.fit(options.epochs, train, test, callbacks=[BoostMonitor()])
    print(model.train_network.report())
    print(f"test accuracy {model.eval(test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
