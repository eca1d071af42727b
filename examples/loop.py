"""A training loop of your own, without ms.Model: LeNet-5 on the bundled digits, boosted.

    python examples/loop.py
    python examples/loop.py --resume            # goes on from loop.ckpt, to six epochs

Needs no download. Shows a progress bar, writes loop.jsonl, and saves loop.ckpt after every epoch.
After a resume the images come in a new order; ``resume.py`` keeps the order of an unbroken run.
Freezing is on to show that its schedule continues; a network as small as LeNet gains nothing by it.
"""

from __future__ import annotations

import argparse

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import BoostCheckpoint, BoostMonitor, make_train_step, restore
from mindspore_boost_ext.bundled import LeNet5, digits_datasets

CONFIG = {
    "boost": {"mode": "manual", "less_bn": False},
    "grad_freeze": {
        "param_groups": 5,
        "schedule": "cubic",
        "prefix_start": 0.4,
        "prefix_fraction": 1.0,
        "total_steps": 44 * 6,  # batches of an epoch times epochs
    },
    "gradients": {"clip_norm": 5.0},
}


def main() -> None:
    """Train for three epochs, or go on to the sixth."""
    parser = argparse.ArgumentParser(description="Train LeNet-5 in a loop of one's own.")
    parser.add_argument("--resume", action="store_true", help="go on from loop.ckpt")
    resume = parser.parse_args().resume
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    train, test = digits_datasets(batch_size=32)
    net, loss_fn = LeNet5(), nn.CrossEntropyLoss()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.03, momentum=0.9)
    step = make_train_step(net, loss_fn, optimizer, level="O1", config=CONFIG)

    epochs = 6 if resume else 3
    done = restore(step.train_network, "loop.ckpt") if resume else 0
    callbacks = [BoostMonitor("loop.jsonl"), BoostCheckpoint("loop.ckpt")]
    for images, labels in step.over(train, epochs, callbacks, initial_epoch=done):
        step(images, labels)  # in place of value_and_grad and optimizer(gradients)

    net.set_train(False)
    found = [net(x).argmax(1) == y for x, y in test.create_tuple_iterator()]
    right = sum(int(one.sum()) for one in found) / sum(len(one) for one in found)
    print(f"test accuracy {right:.4f} after {max(done, epochs)} epochs")
    print(step.report())


if __name__ == "__main__":
    main()
