"""ResNet-18 or ResNet-50 with the recipe "fast": digits, or CIFAR-10.

    python examples/resnet.py                                  # ResNet-18, bundled digits
    python examples/resnet.py --config examples/configs/grad_freeze.json
    python examples/resnet.py --data-dir ~/cifar-10-batches-bin --epochs 30

Needs no download: the bundled digits are enlarged from 8x8 to 16x16 and repeated over three
channels. Equal seeds give equal runs on one machine. The networks are in ``resnets.py``.
"""

from __future__ import annotations

import argparse

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.dataset import transforms, vision
from resnets import NETWORKS

from mindspore_boost_ext import BoostMonitor, recipe
from mindspore_boost_ext.bundled import digits_datasets

BATCH = 32


def cifar10(folder: str, usage: str) -> ds.Dataset:
    """Return batches of CIFAR-10: float32 ``[32, 3, 32, 32]`` in [0, 1] and int32 ``[32]``."""
    data = ds.Cifar10Dataset(folder, usage, shuffle=usage == "train")
    flip = [vision.RandomHorizontalFlip()] if usage == "train" else []
    data = data.map([*flip, vision.Rescale(1 / 255, 0), vision.HWC2CHW()], "image")
    data = data.map(transforms.TypeCast(ms.int32), "label")
    return data.batch(BATCH, drop_remainder=usage == "train")


def without_decay_of_norms(net: nn.Cell) -> list[dict]:
    """Return groups of parameters: weights decay, biases and BatchNorms do not."""
    weights = [one for one in net.trainable_params() if one.ndim > 1]
    others = [one for one in net.trainable_params() if one.ndim < 2]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    return [*groups, {"order_params": net.trainable_params()}]


def main() -> None:
    """Train, show the progress, and say what the boost did."""
    parser = argparse.ArgumentParser(description="Train a ResNet on digits or on CIFAR-10.")
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--level", default="O1", help="boost level: O0, O1 or O2 (O1)")
    parser.add_argument("--config", help="a JSON file for boost_config_dict (the recipe 'fast')")
    parser.add_argument("--mode", choices=("graph", "pynative"), default="graph")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-images", type=int, help="use no more digits, for a quick look")
    parser.add_argument("--data-dir", help="a folder with CIFAR-10's binary files")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")

    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(options.seed)
    if options.data_dir:
        train, test = (cifar10(options.data_dir, usage) for usage in ("train", "test"))
    else:
        train, test = digits_datasets(BATCH, side=16, channels=3, most=options.max_images)

    net, steps = NETWORKS[options.network](), train.get_dataset_size()
    rates = nn.cosine_decay_lr(0.0, 0.05, options.epochs * steps, steps, options.epochs)
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(without_decay_of_norms(net), rates, momentum=0.9),
        metrics={"accuracy"},
        boost_level=options.level,
        boost_config_dict=options.config or recipe("fast", options.epochs * steps),
    )
    model.fit(options.epochs, train, test, callbacks=[BoostMonitor()])
    print(model.train_network.report())
    print(f"test accuracy {model.eval(test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
