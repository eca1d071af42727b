"""What the examples share on the command line: arguments, their checks, and the run itself."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn

from mindspore_boost_ext import THOR, BoostConfig, BoostMonitor, ConvertModelUtils, plot_history
from mindspore_boost_ext.callbacks.history import PICTURES, HistoryWriter

THOR_DAMPING, THOR_FREQUENCY = 0.1, 20
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


def make_parser(
    prog: str, description: str, data_dir: str, epochs: int, learning_rate: float
) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all examples have.

    Args:
        prog (str): Name of the script.
        description (str): One sentence.
        data_dir (str): Help of ``--data-dir``.
        epochs (int): Default of ``--epochs``.
        learning_rate (float): Default of ``--learning-rate``.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="graph", help="execution mode of MindSpore")
    level = "boost level (default: O1 with --config, else O0)"
    add("--level", choices=("O0", "O1", "O2"), default=argparse.SUPPRESS, help=level)
    add("--config", type=Path, metavar="FILE.json", help="boost config, see examples/configs")
    add("--epochs", type=positive_int, default=epochs, help="passes over the training images")
    add("--batch-size", type=positive_int, default=32, help="images per step")
    add("--seed", type=seed, default=0, help="seed of the weights and of the order of images")
    add("--thor", action="store_true", help="train with THOR instead of momentum")
    add("--learning-rate", type=positive_float, default=learning_rate, help="in the first epoch")
    add("--data-dir", type=Path, metavar="FOLDER", help=data_dir)
    add("--progress", type=positive_int, metavar="STEPS", help="a line every STEPS, not an epoch")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write there for TensorBoard")
    add("--history", type=output_file, metavar="FILE", help="append progress as JSON lines")
    add("--plot", type=picture_file, metavar="FILE.png", help="draw the history (matplotlib)")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line; argparse exits with code 2 on a mistake."""
    args = parser.parse_args(argv)
    if "level" not in args:
        args.level = "O1" if args.config else "O0"
    if args.plot and not args.history:
        parser.error("--plot draws the history, so it needs --history FILE as well")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'mindspore_boost_ext[plot]'")
    return args


def prepare(args: argparse.Namespace) -> None:
    """Sets the mode and the seeds: of the weights, and of the shuffling of the datasets."""
    ms.set_context(mode=MODES[args.mode])
    ms.set_seed(args.seed)


def check_history(args: argparse.Namespace) -> None:
    """Refuses a history that cannot be continued now, not after an epoch."""
    if args.history:
        HistoryWriter(args.history).close()


def refuse(prog: str, error: Exception) -> int:
    """Prints why a request is refused, in one line, and returns the exit code."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def boosted_model(args: argparse.Namespace, net: nn.Cell, optimizer: nn.Cell, **more: Any) -> Any:
    """Returns the Model of a classifier with the requested boost, ready to fit.

    Args:
        args (argparse.Namespace): The command line.
        net (Cell): The network, from images to logits.
        optimizer (Cell): The optimizer.
        more: Further arguments of ``ms.Model``.
    """
    more.setdefault("metrics", {"accuracy"})
    boost = {"boost_level": args.level, "boost_config_dict": args.config}
    return ms.Model(net, classification_loss(), optimizer, **boost, **more)


def classification_loss() -> nn.Cell:
    """Returns what equals ``nn.CrossEntropyLoss()``, which takes half of a PYNATIVE step on CPU."""
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def thor_model(
    args: argparse.Namespace,
    net: nn.Cell,
    rates: Any,
    amp_level: str = "O0",
    loss_scale_manager: Any = None,
    **settings: Any,
) -> ms.Model:
    """Returns a Model that trains any network with THOR: create it, convert the Model, train.

    Args:
        args (argparse.Namespace): The command line.
        net (Cell): The network, from images to logits.
        rates (Any): Learning rate of each step.
        amp_level (str): As for ``ms.Model``. Default: ``"O0"``.
        loss_scale_manager (LossScaleManager, optional): As for ``ms.Model``. Default: None.
        settings: Further arguments of ``THOR``.
    """
    opt = THOR(net, rates, THOR_DAMPING, 0.9, batch_size=args.batch_size, **settings)
    model = boosted_model(args, net, opt)
    return ConvertModelUtils().convert_to_thor_model(
        model,
        net,
        classification_loss(),
        opt,
        {"accuracy"},
        amp_level,
        loss_scale_manager,
        frequency=THOR_FREQUENCY,
    )


def cosine_rates(args: argparse.Namespace, steps_per_epoch: int) -> list[float]:
    """Returns rates that fall from ``--learning-rate`` along a half cosine, once per epoch.

    One for each update: where gradients are accumulated, several steps make one.
    """
    steps = args.epochs * steps_per_epoch
    rates = nn.cosine_decay_lr(0.0, args.learning_rate, steps, steps_per_epoch, args.epochs)
    config = BoostConfig.parse(args.level, args.config)
    wanted = {one.algorithm for one in config.plan() if one.wanted}
    window = config.grad_accumulation.grad_accumulation_step
    return rates[:: window if "grad_accumulation" in wanted else 1]


def fit(
    args: argparse.Namespace,
    model: ms.Model,
    train: Any,
    test: Any,
    callbacks: Sequence[Any] = (),
    first_epoch: int = 0,
    shows: bool = True,
) -> None:
    """Trains with progress on the screen, and prints the final accuracy if ``shows`` is set."""
    started = time.perf_counter()
    monitor = BoostMonitor(
        args.history, log_interval=args.progress, tensorboard_dir=args.tensorboard
    )
    model.fit(args.epochs, train, test, callbacks=[monitor, *callbacks], initial_epoch=first_epoch)
    accuracy = model.eval(test)["accuracy"]
    seconds = time.perf_counter() - started
    if not shows:
        return
    print(f"test accuracy {accuracy:.4f} after {args.epochs} epochs in {seconds:.1f} s")
    if args.plot:
        plot_history(args.history, args.plot)


def positive_int(text: str) -> int:
    """Argument type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """Argument type: an integer that NumPy and MindSpore both take as a seed."""
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer in 0..2**32-1, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def picture_file(text: str) -> Path:
    """Argument type: a file to write whose suffix is that of a picture."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(PICTURES)}, got {text!r}")
    return path


def output_file(text: str) -> Path:
    """Argument type: a file to write, in a folder that exists (found out before training)."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    return path
