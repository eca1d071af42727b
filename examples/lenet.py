"""Trains LeNet-5 on handwritten digits with mindspore_boost_ext plugged into ``ms.Model``.

    python examples/lenet.py                               # 1,797 bundled digits, graph mode
    python examples/lenet.py --mode pynative
    python examples/lenet.py --config examples/configs/accumulation.json
    python examples/lenet.py --thor --epochs 5             # second order
    python examples/lenet.py --dim-reduce                  # again, in 30 directions of that run
    python examples/lenet.py --data-dir ~/mnist --epochs 2
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/lenet.py --distributed

Needs MindSpore and mindspore_boost_ext (``pip install .`` in the repository), no download: the
bundled digits are enlarged from 8x8 to 32x32. Shows a progress bar, and after every epoch the loss
and the accuracy on images kept for testing. Equal seeds give equal runs on one machine. With
``--distributed`` each process trains on its part of the images (``--batch-size`` counts those of
one process) and the accuracy is that of all together; rank 0 alone shows it.

Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner (1998), Gradient-based learning applied to
document recognition; here with ReLU, max pooling and fully connected channels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import (
    boosted_model,
    check_history,
    cosine_rates,
    fit,
    make_parser,
    parse,
    prepare,
    refuse,
    thor_model,
)
from datasets import digits_datasets, mnist_datasets, unpack_mnist
from mindspore import Model, nn
from processes import WHOLE, Accuracy, Shard, join_processes

from mindspore_boost_ext import TrajectorySampler
from mindspore_boost_ext.bundled import LeNet5

# Training in a subspace: snapshots of the first stage, directions and batches of the second.
SNAPSHOTS, DIRECTIONS, LARGER_BATCH = 40, 30, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        argv (Sequence[str] | None): Arguments without the program name; None takes ``sys.argv``.

    Returns:
        int, exit code: 0 after training, 2 when data, level, config or history is refused.
    """
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="lenet-") as scratch:
        prepare(args)
        shard = join_processes() if args.distributed else WHOLE
        try:
            train, test = load_data(args, Path(scratch), shard)
            model = build_model(args, train.get_dataset_size())
            if shard.rank == 0:
                check_history(args)
        except (NotImplementedError, TypeError, ValueError) as error:
            return refuse("lenet.py", error)
        if args.dim_reduce:
            fit_twice(args, model, train, test, Path(scratch))
        else:
            fit(args, model, train, test, shows=shard.rank == 0)
    return 0


def load_data(args: argparse.Namespace, scratch: Path, shard: Shard = WHOLE) -> tuple[Any, Any]:
    """Returns the training and the test dataset; ``scratch`` has to outlive them."""
    if args.data_dir is None:
        return digits_datasets(args.batch_size, shard=shard)
    unpack_mnist(args.data_dir, scratch)
    return mnist_datasets(scratch, args.batch_size, shard)


def build_model(args: argparse.Namespace, steps_per_epoch: int) -> Model:
    """Returns LeNet-5 with loss, optimizer and the requested boost, ready to fit."""
    net = LeNet5()
    rates = cosine_rates(args, steps_per_epoch)
    if args.thor:
        return thor_model(args, net, rates)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=rates, momentum=0.9)
    metrics = {"accuracy": Accuracy()} if args.distributed else {"accuracy"}
    return boosted_model(args, net, optimizer, metrics=metrics)


def fit_twice(args: argparse.Namespace, model: Model, train: Any, test: Any, scratch: Path) -> None:
    """Trains, then trains from the same start in the directions of the first run.

    The batches are larger then, since a quasi-Newton step needs a gradient with little noise; the
    number of passes over the images is the same.
    """
    steps_per_epoch = train.get_dataset_size()
    every = max(1, args.epochs * steps_per_epoch // SNAPSHOTS)
    folder = scratch / "snapshots"
    print("stage 1: training, with snapshots of the weights", flush=True)
    fit(args, model, train, test, [TrajectorySampler(folder, every, "step", keep=2 * SNAPSHOTS)])

    args.batch_size *= min(LARGER_BATCH, steps_per_epoch)
    args.level, args.config = "O1", subspace_config(folder)
    prepare(args)  # the same start
    (scratch / "again").mkdir()
    train, test = load_data(args, scratch / "again")
    model = build_model(args, train.get_dataset_size())
    print(f"stage 2: {model.train_network.report()['dim_reduce'].reason}", flush=True)
    fit(args, model, train, test)


def subspace_config(folder: Path) -> dict[str, Any]:
    """Returns the settings that train in the directions of the snapshots in a folder."""
    count = len(list(folder.iterdir()))
    switches = dict.fromkeys(("less_bn", "grad_freeze", "adasum"), False)
    return {
        "boost": {"mode": "manual", **switches, "dim_reduce": True},
        "dim_reduce": {
            "weight_load_dir": str(folder),
            "n_components": min(DIRECTIONS, count - 1),
            "trials": 8,
        },
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line; argparse exits with code 2 on a mistake."""
    parser = make_parser(
        "lenet.py",
        "Train LeNet-5 on handwritten digits with mindspore_boost_ext.",
        data_dir="MNIST files instead of bundled digits",
        epochs=20,
        learning_rate=0.03,
    )
    add = parser.add_argument
    add("--dim-reduce", action="store_true", help="train again, in the directions of the first run")
    add("--distributed", action="store_true", help="one of several processes, see msrun above")
    args = parse(parser, argv)
    if args.distributed and "MS_ROLE" not in os.environ:
        parser.error("--distributed needs the launcher: msrun --worker_num=4 ... --distributed")
    if args.dim_reduce and (args.config or args.thor or args.distributed):
        parser.error("--dim-reduce goes without --config, --thor and --distributed")
    return args


if __name__ == "__main__":
    sys.exit(main())
