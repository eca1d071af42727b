"""Trains LeNet-5 on handwritten digits with mindspore_boost_ext plugged into ``ms.Model``.

    python examples/lenet.py                               # 1,797 bundled digits, graph mode
    python examples/lenet.py --mode pynative
    python examples/lenet.py --config examples/configs/accumulation.json
    python examples/lenet.py --data-dir ~/mnist --epochs 2
    python examples/lenet.py --dim-reduce                  # again, in 30 directions of that run

Needs MindSpore and mindspore_boost_ext (``pip install .`` in the repository), no download: the
bundled digits are enlarged from 8x8 to 32x32. Shows a progress bar, and after every epoch the loss
and the accuracy on images kept for testing. Equal seeds give equal runs on one machine.

Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner (1998), Gradient-based learning applied to
document recognition; here with ReLU, max pooling and fully connected channels.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# oneDNN in the MindSpore 2.9 and 2.10 wheels falls back to its reference convolution on AVX-512
# machines (20 to 50 times slower). Has to be set before MindSpore starts; a user's value stays.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
from datasets import digits_datasets, mnist_datasets, unpack_mnist
from mindspore import nn

from mindspore_boost_ext import BoostMonitor, TrajectorySampler, plot_history
from mindspore_boost_ext.history import HistoryWriter

# Training in a subspace: snapshots of the first stage, directions and length of the second.
SNAPSHOTS, DIRECTIONS, LARGER_BATCH = 40, 30, 8

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


class LeNet5(nn.Cell):
    """LeNet-5: two convolutions with pooling, three dense layers.

    Args:
        num_classes (int): Length of the output. Default: ``10``.
        channels (int): Channels of the input image. Default: ``1``.

    Inputs:
        - **image** (Tensor) - float32 ``[batch, channels, 32, 32]``.

    Outputs:
        Tensor, float32 ``[batch, num_classes]``, the logits.
    """

    def __init__(self, num_classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_classes)

    def construct(self, image: ms.Tensor) -> ms.Tensor:
        """Returns the logits of a batch of images."""
        hidden = self.pool(self.relu(self.conv1(image)))
        hidden = self.pool(self.relu(self.conv2(hidden)))
        hidden = self.flatten(hidden)
        hidden = self.relu(self.fc1(hidden))
        hidden = self.relu(self.fc2(hidden))
        return self.fc3(hidden)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        argv (Sequence[str] | None): Arguments without the program name; None takes ``sys.argv``.

    Returns:
        int, exit code: 0 after training, 2 when data, level, config or history is refused.
    """
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="lenet-") as scratch:
        try:
            train, test = load_data(args, Path(scratch))
            ms.set_context(mode=MODES[args.mode])
            ms.set_seed(args.seed)  # weights, and the shuffling of the datasets
            model = build_model(args, train.get_dataset_size())
            if args.history:
                HistoryWriter(args.history).close()  # refuses what cannot be continued, now
        except (NotImplementedError, TypeError, ValueError) as error:
            print(f"lenet.py: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        started = time.perf_counter()
        callbacks = [BoostMonitor(history_path=args.history)]
        if args.dim_reduce:
            every = max(1, args.epochs * train.get_dataset_size() // SNAPSHOTS)
            folder = Path(scratch) / "snapshots"
            callbacks.append(TrajectorySampler(folder, every, "step", keep=2 * SNAPSHOTS))
        model.fit(args.epochs, train, test, callbacks=callbacks)
        accuracy = model.eval(test)["accuracy"]
        seconds = time.perf_counter() - started
        if args.dim_reduce:
            print(f"stage 1: test accuracy {accuracy:.4f} in {seconds:.1f} s", flush=True)
            accuracy = train_again(args, Path(scratch), train.get_dataset_size())
            seconds = time.perf_counter() - started
    print(f"test accuracy {accuracy:.4f} after {args.epochs} epochs in {seconds:.1f} s")
    if args.plot:
        plot_history(args.history, args.plot)
    return 0


def train_again(args: argparse.Namespace, scratch: Path, steps_per_epoch: int) -> float:
    """Trains from the same start in the directions of the first run; returns the accuracy.

    The batches are larger, since a quasi-Newton step needs a gradient with little noise; the number
    of passes over the images is the same.
    """
    factor = min(LARGER_BATCH, steps_per_epoch)
    args.batch_size *= factor
    ms.set_seed(args.seed)  # the same start
    (scratch / "again").mkdir()
    train, test = load_data(args, scratch / "again")
    count = len(list((scratch / "snapshots").iterdir()))
    section = {
        "weight_load_dir": str(scratch / "snapshots"),
        "n_components": min(DIRECTIONS, count - 1),
        "trials": 8,
    }
    switches = dict.fromkeys(("less_bn", "grad_freeze", "adasum"), False)
    args.config = {
        "boost": {"mode": "manual", **switches, "dim_reduce": True},
        "dim_reduce": section,
    }
    args.level = "O1"
    model = build_model(args, train.get_dataset_size())
    print(model.train_network.report()["dim_reduce"].reason, flush=True)
    model.fit(args.epochs, train, test, callbacks=[BoostMonitor(history_path=args.history)])
    accuracy: float = model.eval(test)["accuracy"]
    return accuracy


def load_data(args: argparse.Namespace, scratch: Path) -> tuple[Any, Any]:
    """Returns the training and the test dataset; ``scratch`` has to outlive them."""
    if args.data_dir is None:
        return digits_datasets(args.batch_size)
    unpack_mnist(args.data_dir, scratch)
    return mnist_datasets(scratch, args.batch_size)


def build_model(args: argparse.Namespace, steps_per_epoch: int) -> ms.Model:
    """Returns LeNet-5 with loss, momentum and the requested boost, ready to fit.

    The learning rate falls from ``--learning-rate`` along a half cosine, once per epoch.
    """
    net = LeNet5()
    steps = args.epochs * steps_per_epoch
    rates = nn.cosine_decay_lr(0.0, args.learning_rate, steps, steps_per_epoch, args.epochs)
    return ms.Model(
        net,
        # Equal to nn.CrossEntropyLoss(), which takes half of a PYNATIVE step on CPU.
        loss_fn=nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        optimizer=nn.Momentum(net.trainable_params(), learning_rate=rates, momentum=0.9),
        metrics={"accuracy"},
        boost_level=args.level,
        boost_config_dict=args.config,
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line; argparse exits with code 2 on a mistake."""
    parser = argparse.ArgumentParser(
        prog="lenet.py",
        description="Train LeNet-5 on handwritten digits with mindspore_boost_ext.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="graph", help="execution mode of MindSpore")
    level = "boost level (default: O1 with --config, else O0)"
    add("--level", choices=("O0", "O1", "O2"), default=argparse.SUPPRESS, help=level)
    add("--config", type=Path, metavar="FILE.json", help="boost config, see examples/configs")
    add("--epochs", type=_positive_int, default=20, help="passes over the training images")
    add("--batch-size", type=_positive_int, default=32, help="images per step")
    add("--seed", type=_seed, default=0, help="seed of the weights and of the order of images")
    add("--learning-rate", type=_positive_float, default=0.03, help="in the first epoch")
    add("--data-dir", type=Path, metavar="FOLDER", help="MNIST files instead of bundled digits")
    add("--dim-reduce", action="store_true", help="train again, in the directions of the first run")
    add("--history", type=_output_file, metavar="FILE", help="append progress as JSON lines")
    add("--plot", type=_output_file, metavar="FILE.png", help="draw the history (matplotlib)")
    args = parser.parse_args(argv)
    if args.dim_reduce and args.config:
        parser.error("--dim-reduce makes a config of its own: leave out --config")
    if "level" not in args:
        args.level = "O1" if args.config else "O0"
    if args.plot and not args.history:
        parser.error("--plot draws the history, so it needs --history FILE as well")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'mindspore_boost_ext[plot]'")
    return args


def _positive_int(text: str) -> int:
    """Argument type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    """Argument type: an integer that NumPy and MindSpore both take as a seed."""
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer in 0..2**32-1, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def _output_file(text: str) -> Path:
    """Argument type: a file to write, in a folder that exists (found out before training)."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    return path


if __name__ == "__main__":
    sys.exit(main())
