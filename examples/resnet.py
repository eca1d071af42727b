"""Trains ResNet-18 or ResNet-50 with mindspore_boost_ext: digits by default, or CIFAR-10.

    python examples/resnet.py                                  # ResNet-18, bundled digits
    python examples/resnet.py --network resnet50 --side 32
    python examples/resnet.py --config examples/configs/grad_freeze.json --amp-level O2
    python examples/resnet.py --level O1 --config FILE.json --loss-scale dynamic
    python examples/resnet.py --thor                           # second order
    python examples/resnet.py --data-dir ~/cifar-10-batches-bin --epochs 30
    python examples/resnet.py --checkpoint run.ckpt            # after every epoch ...
    python examples/resnet.py --resume run.ckpt                # ... and on from there

Needs MindSpore and mindspore_boost_ext (``pip install .`` in the repository), no download: the
bundled digits are enlarged from 8x8 and repeated over three channels. Shows a progress bar, and
after every epoch the loss and the accuracy on images kept for testing. Equal seeds give equal runs
on one machine, and a resumed run ends as it would have without the break.

Reference: see ``resnets.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import (
    boosted_model,
    check_history,
    cosine_rates,
    fit,
    make_parser,
    output_file,
    parse,
    positive_int,
    prepare,
    refuse,
    thor_model,
)
from datasets import EpochOrder, cifar10_datasets, digits_datasets
from mindspore import DynamicLossScaleManager, FixedLossScaleManager, Model, nn
from resnets import NETWORKS

from mindspore_boost_ext import BoostCheckpoint, restore

FIXED_SCALE = 1024.0  # a power of two: scaling by it costs no bit
WEIGHT_DECAY = 1e-4
LOSS_SCALES = ("none", "fixed", "dynamic")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        argv (Sequence[str] | None): Arguments without the program name; None takes ``sys.argv``.

    Returns:
        int, exit code: 0 after training, 2 when data, level, config, history or checkpoint is
        refused.
    """
    args = parse_arguments(argv)
    try:
        prepare(args)
        train, test, order = load_data(args)
        model = build_model(args, train.get_dataset_size())
        order.epoch = resume(args, model)
        check_history(args)
    except (NotImplementedError, TypeError, ValueError) as error:
        return refuse("resnet.py", error)
    callbacks = [BoostCheckpoint(args.checkpoint)] if args.checkpoint else []
    fit(args, model, train, test, callbacks, order.epoch)
    return 0


def load_data(args: argparse.Namespace) -> tuple[Any, Any, EpochOrder]:
    """Returns the training dataset, the test dataset, and the order of the training images."""
    orders = []

    def order(count: int) -> EpochOrder:
        orders.append(EpochOrder(count, args.seed))
        return orders[0]

    if args.data_dir is not None:
        data = cifar10_datasets(args.data_dir, args.batch_size, order, args.max_images)
    else:
        data = digits_datasets(
            args.batch_size, args.side, channels=3, order=order, most=args.max_images
        )
    return (*data, orders[0])


def build_model(args: argparse.Namespace, steps_per_epoch: int) -> Model:
    """Returns the network with loss, momentum and the requested boost, ready to fit.

    Weights decay, but neither biases nor the scales and offsets of BatchNorm.
    """
    net = NETWORKS[args.network]()
    rates = cosine_rates(args, steps_per_epoch)
    # The optimizer divides out what a manager with drop_overflow_update=False has multiplied in.
    scale = FIXED_SCALE if args.loss_scale == "fixed" else 1.0
    manager = {
        "none": lambda: None,
        "fixed": lambda: FixedLossScaleManager(FIXED_SCALE, drop_overflow_update=False),
        "dynamic": DynamicLossScaleManager,
    }[args.loss_scale]()
    precision = {"amp_level": args.amp_level, "loss_scale_manager": manager}
    if args.thor:
        decay = {"weight_decay": WEIGHT_DECAY, "decay_filter": lambda one: one.ndim > 1}
        return thor_model(args, net, rates, loss_scale=scale, **decay, **precision)
    weights = [one for one in net.trainable_params() if one.ndim > 1]
    others = [one for one in net.trainable_params() if one.ndim < 2]
    groups = [
        {"params": weights, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
        {"order_params": net.trainable_params()},
    ]
    optimizer = nn.Momentum(groups, learning_rate=rates, momentum=0.9, loss_scale=scale)
    return boosted_model(args, net, optimizer, **precision)


def resume(args: argparse.Namespace, model: Model) -> int:
    """Goes on from the checkpoint that was asked for; returns how many epochs are done.

    Raises:
        ValueError: It cannot be read, was written with other arguments, or is trained to the end.
    """
    done = restore(model.train_network, args.resume) if args.resume else 0
    if done >= args.epochs:
        raise ValueError(
            f"{args.resume} has trained {done} epochs already: --epochs must be above that"
        )
    return done


def checkpoint_file(text: str) -> Path:
    """Argument type: a file to write whose name ends in .ckpt, as MindSpore wants it."""
    if not text.endswith(".ckpt"):
        raise argparse.ArgumentTypeError(f"must end in .ckpt, got {text!r}")
    return output_file(text)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line; argparse exits with code 2 on a mistake."""
    parser = make_parser(
        "resnet.py",
        "Train ResNet-18 or ResNet-50 with mindspore_boost_ext.",
        data_dir="CIFAR-10's binary files instead of bundled digits",
        epochs=4,
        learning_rate=0.05,
    )
    add = parser.add_argument
    add("--network", choices=NETWORKS, default="resnet18", help="which network")
    add("--side", type=positive_int, default=16, help="height and width of the digits")
    add("--max-images", type=positive_int, help="use no more images than this, for a quick look")
    add("--amp-level", choices=("O0", "O1", "O2", "O3"), default="O0", help="mixed precision")
    add("--loss-scale", choices=LOSS_SCALES, default="none", help="loss-scale manager")
    add("--checkpoint", type=checkpoint_file, metavar="FILE.ckpt", help="save after every epoch")
    add("--resume", type=Path, metavar="FILE.ckpt", help="go on from a saved epoch")
    args = parse(parser, argv)
    if args.loss_scale == "dynamic" and args.level == "O0":
        parser.error(
            "--loss-scale dynamic needs a boost level: MindSpore's own step for it does not run on "
            "every device; take --level O1, with --config examples/configs/nothing_enabled.json "
            "for nothing but the scale"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
