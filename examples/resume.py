"""Resume after a kill: start it, kill it in any epoch, start it again.

    python examples/resume.py
    ^C, kill -9, a power cut ...
    python examples/resume.py            # goes on after the last whole epoch

The file run.ckpt holds weights, moments, schedules, loss scale and the epoch. It is complete
whenever the process dies: a run with breaks ends with the same weights as one without. Start it
with the same --epochs again: schedules depend on them, and ``restore`` refuses other settings.
Freezing is on to show that its schedule continues; a network as small as LeNet gains nothing by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import BoostCheckpoint, BoostMonitor, restore
from mindspore_boost_ext.bundled import EpochOrder, LeNet5, digits_datasets

CHECKPOINT, SEED = Path("run.ckpt"), 0


def main() -> None:
    """Train from the start, or go on from the checkpoint."""
    parser = argparse.ArgumentParser(description="Train LeNet-5, in as many starts as it takes.")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(SEED)
    order = EpochOrder(1437, SEED)  # of the 1,437 training images: the same in every start
    train, test = digits_datasets(32, order=lambda count: order)
    net = LeNet5()
    updates = options.epochs * train.get_dataset_size()
    prefix = {"schedule": "cubic", "prefix_fraction": 1.0, "total_steps": updates}
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), learning_rate=0.03, momentum=0.9),
        metrics={"accuracy"},
        loss_scale_manager=ms.DynamicLossScaleManager(2**10, 2, 100),
        boost_level="O1",
        boost_config_dict={"boost": {"mode": "manual", "less_bn": False}, "grad_freeze": prefix},
    )
    if CHECKPOINT.exists():
        order.epoch = restore(model.train_network, CHECKPOINT)
        print(f"goes on after epoch {order.epoch}", flush=True)
    if order.epoch < options.epochs:
        callbacks = [BoostMonitor("run.jsonl"), BoostCheckpoint(CHECKPOINT)]
        model.fit(options.epochs, train, test, callbacks=callbacks, initial_epoch=order.epoch)
    print(f"test accuracy {model.eval(test)['accuracy']:.4f}")


if __name__ == "__main__":
    main()
