"""What gradient centralization adds to a training step of a ResNet.

    python examples/benchmarks/centralization.py
    python examples/benchmarks/centralization.py --networks resnet18 --side 32 --pairs 10

Prints the step time with centralized gradients over the plain one, by pairs (demanded: at most
1.03). Takes 10 minutes; ``small ResNet`` alone takes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import mindspore as ms
from harness import MODES, paired, print_table
from mindspore import nn
from networks import SmallResNet, batch, momentum, plain, waiting

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from resnets import resnet18, resnet50

from mindspore_boost_ext import OptimizerProcess

NETWORKS: dict[str, tuple[Callable[[], nn.Cell], int]] = {
    "small ResNet": (SmallResNet, 1),
    "resnet18": (resnet18, 3),
    "resnet50": (resnet50, 3),
}


def make_step(name: str, centralized: bool, batch_size: int, side: int) -> Callable[[], object]:
    """Return a function that trains one step, and waits for it."""
    network, channels = NETWORKS[name]
    ms.set_seed(0)
    net = network()
    optimizer = momentum(net, weight_decay=1e-4)
    if centralized:
        process = OptimizerProcess(optimizer)
        process.add_grad_centralization(net)
        optimizer = process.generate_new_optimizer()
    return waiting(plain(net, optimizer), batch(batch_size, shape=(channels, side, side)))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="steps in each half of a pair")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--side", type=int, default=16, help="height and width of the images")
    args = parser.parse_args(argv)
    rows = []
    for mode in args.modes:
        ms.set_context(mode=MODES[mode])
        for name in args.networks:
            ratio = paired(
                make_step(name, True, args.batch_size, args.side),
                make_step(name, False, args.batch_size, args.side),
                pairs=args.pairs,
                steps=args.steps,
                warm_up=2,
            )
            rows.append(f"{name} | {mode} | {ratio.row}")
    headings = "network | mode | plain step, ms | ratio | quartiles"
    images = f"batch {args.batch_size}, {args.side}x{args.side} images"
    title = f"Centralized gradients over plain ones, {images}"
    print_table(title, headings, rows)


if __name__ == "__main__":
    main()
