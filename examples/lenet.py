"""Trains LeNet-5 on handwritten digits with mindspore_boost_ext plugged into ``ms.Model``.

    python examples/lenet.py                               # 1,797 bundled digits, graph mode
    python examples/lenet.py --mode pynative
    python examples/lenet.py --config examples/configs/accumulation.json
    python examples/lenet.py --data-dir ~/mnist --epochs 2

Needs MindSpore and mindspore_boost_ext (``pip install .`` in the repository), no download: the
bundled digits are enlarged from 8x8 to 32x32. Shows a progress bar, and after every epoch the loss
and the accuracy on images kept for testing. Equal seeds give equal runs on one machine.

Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner (1998), Gradient-based learning applied to
document recognition; here with ReLU, max pooling and fully connected channels.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import (  # sets the oneDNN variable: must come first
    boosted_model,
    check_history,
    cosine_rates,
    fit,
    make_parser,
    parse,
    prepare,
    refuse,
)
from datasets import digits_datasets, mnist_datasets, unpack_mnist
from mindspore import nn

from mindspore_boost_ext.bundled import LeNet5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
        argv (Sequence[str] | None): Arguments without the program name; None takes ``sys.argv``.

    Returns:
        int, exit code: 0 after training, 2 when data, level, config or history is refused.
    """
    args = parse(parser(), argv)
    with tempfile.TemporaryDirectory(prefix="lenet-") as scratch:
        try:
            train, test = load_data(args, Path(scratch))
            prepare(args)
            net = LeNet5()
            rates = cosine_rates(args, train.get_dataset_size())
            optimizer = nn.Momentum(net.trainable_params(), learning_rate=rates, momentum=0.9)
            model = boosted_model(args, net, optimizer)
            check_history(args)
        except (NotImplementedError, TypeError, ValueError) as error:
            return refuse("lenet.py", error)
        fit(args, model, train, test)
    return 0


def load_data(args: argparse.Namespace, scratch: Path) -> tuple[Any, Any]:
    """Returns the training and the test dataset; ``scratch`` has to outlive them."""
    if args.data_dir is None:
        return digits_datasets(args.batch_size)
    unpack_mnist(args.data_dir, scratch)
    return mnist_datasets(scratch, args.batch_size)


def parser() -> argparse.ArgumentParser:
    """Returns the command line of this example."""
    return make_parser(
        "lenet.py",
        "Train LeNet-5 on handwritten digits with mindspore_boost_ext.",
        data_dir="MNIST files instead of bundled digits",
        epochs=20,
        learning_rate=0.03,
    )


if __name__ == "__main__":
    sys.exit(main())
