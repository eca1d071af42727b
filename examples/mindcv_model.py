"""A network of MindCV (``pip install mindcv``): fewer BatchNorms, half of it frozen later on.

    python examples/mindcv_model.py
    python examples/mindcv_model.py --network mobilenet_v2_035_224

MindCV's own train.py needs no change: ``python -m mindspore_boost_ext --level O1 train.py ...``.
Here its networks, losses and optimizers are put together by hand, on the bundled digits.
"""

from __future__ import annotations

import argparse

import mindcv
import mindspore as ms

from mindspore_boost_ext import BoostModel, BoostMonitor
from mindspore_boost_ext.bundled import digits_datasets


def main() -> None:
    """Train, and say what happened to every BatchNorm."""
    parser = argparse.ArgumentParser(description="Train a network of MindCV on digits.")
    parser.add_argument("--network", default="resnet18", help="a name that MindCV knows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-images", type=int, default=640, help="use no more digits")
    options = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    train, test = digits_datasets(32, side=64, channels=3, most=options.max_images)
    net = mindcv.create_model(options.network, num_classes=10)
    steps = options.epochs * train.get_dataset_size()
    half = {"schedule": "step", "prefix_start": 0.3, "prefix_fraction": 0.5, "total_steps": steps}
    model = BoostModel(
        net,
        mindcv.create_loss("CE", label_smoothing=0.1),
        mindcv.create_optimizer(net.trainable_params(), opt="momentum", lr=0.02, momentum=0.9),
        metrics={"accuracy"},
        boost_level="O1",
        boost_config_dict={"less_bn": {"fn_flag": False}, "grad_freeze": half},
    )
    model.fit(options.epochs, train, test, callbacks=[BoostMonitor()])
    print(model.train_network.report())
    print(f"test accuracy {model.eval(test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
