"""How LessBN, the normalised head and gradient centralization change accuracy and the step.

    python examples/benchmarks/less_bn.py                     # everything, about 15 minutes
    python examples/benchmarks/less_bn.py --runs --seeds 3
    python examples/benchmarks/less_bn.py --counts --speed --pairs 40

**Runs** (``--runs``): the digits, trained plainly and with the methods; steps, seeds, batches and
learning rates are equal. Demanded: within 2 points of plain. Epochs and the head's multiplier, 10
at the start, were tried on seed 3 first, which is not among the default seeds 0 to 2.

**Gains** (``--gains``): do layers lose accuracy because of their scale at the start? The same runs
with other gains at the start: of the BatchNorm that is left in each branch (0 as in SkipInit; De
and Smith, 2020), and of the convolution on a shortcut. With its gain, this convolution keeps the
variance of its input, as the BatchNorm that was there did.

**Counts** (``--counts``): BatchNorms and normalised elements before and after; in bottlenecks a
third fewer elements are expected. ResNet-50 is MindCV's; without MindCV it is left out.

**Speed** (``--speed``), ratios of paired runs in one process, both modes: the step with less_bn
over the plain one (no demand); with the head over with a Dense (demanded: at most 1.2); with
centralization over without (at most 1.03). The lines "alone" are a classifier and nothing else:
with 512 features and 10 classes they measure little more than starting the operators.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import networks
import numpy as np
from harness import MODES, paired, print_table
from mindspore import Tensor, nn
from networks import BATCH_SIZE, LeNet5, SmallResNet, Step, batch, ours, plain, plain_step, waiting

from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.less_batch_normalization.rewrite import CommonHeadLastFN, less_bn

SIDE = 16  # of the digits in the runs: they are 8x8, and 32x32 would only take four times as long
WIDTH, EPOCHS = 8, 8


class Training(NamedTuple):
    """How a network is trained: settings of section less_bn, or plainly; gains at the start."""

    settings: dict[str, Any] | None
    branches: float = 1.0  # of a branch's last BatchNorm
    shortcuts: float = 1.0  # of a shortcut's convolution


NO_HEAD = {"fn_flag": False, "gc_flag": False}
HEAD = {"fn_flag": True, "multiplier": 10.0}  # at the start
METHODS = {
    "plain": Training(None),
    "less_bn": Training(NO_HEAD),
    "less_bn, head": Training({**HEAD, "gc_flag": False}),
    "less_bn, head, centralization": Training({**HEAD, "gc_flag": True}),
}
GAINS = {
    "plain": Training(None),
    "plain, branches 0": Training(None, branches=0.0),
    "less_bn": Training(NO_HEAD),
    "less_bn, branches 0": Training(NO_HEAD, branches=0.0),
    "less_bn, branches 0.5": Training(NO_HEAD, branches=0.5),
    "less_bn, keep_shortcut": Training({**NO_HEAD, "keep_shortcut": True}),
    # nn.Conv2d draws weights of variance 1 / (3 fan_in).
    "less_bn, shortcuts 1.73": Training(NO_HEAD, shortcuts=3**0.5),
    "less_bn, branches 0, shortcuts 1.73": Training(NO_HEAD, branches=0.0, shortcuts=3**0.5),
}
HEAD_DEMAND, CENTRALIZATION_DEMAND, ACCURACY_DEMAND = 1.2, 1.03, 0.02


def trained_accuracy(seed: int, training: Training) -> float:
    """Train the small ResNet on the digits and return its accuracy on the test images, 0 to 1."""
    ms.set_seed(seed)
    train, test = digits_datasets(BATCH_SIZE, SIDE)
    network = SmallResNet(WIDTH)
    for block in network.blocks:
        block.bn2.gamma.set_data(block.bn2.gamma * training.branches)
        for convolution in list(block.shortcut)[:1]:
            convolution.weight.set_data(convolution.weight * training.shortcuts)
    optimizer = networks.falling(network, EPOCHS * train.get_dataset_size(), EPOCHS)
    if training.settings is None:
        step = plain(network, optimizer)
    else:
        step = ours(network, optimizer, less_bn=training.settings)
    for _ in range(EPOCHS):
        for inputs in train.create_tuple_iterator():
            step(*inputs)
    return networks.accuracy(network, test.create_tuple_iterator())


def print_runs(title: str, trainings: dict[str, Training], seeds: Sequence[int]) -> None:
    """Print the accuracy of each training over the seeds; the first one is plain."""
    rows, plain = [], None
    for name, training in trainings.items():
        found = []
        for seed in seeds:
            found.append(trained_accuracy(seed, training))
            print(f"{name}, seed {seed}: {found[-1]:.4f}", file=sys.stderr, flush=True)
        mean = statistics.mean(found)
        plain = mean if plain is None else plain
        kept = "yes" if mean >= plain - ACCURACY_DEMAND else "no"
        shown = ", ".join(f"{one:.4f}" for one in found)
        rows.append(f"{name} | {mean:.4f} | {mean - plain:+.4f} | {kept} | {shown}")
    title = f"Digits, small ResNet (width {WIDTH}), {EPOCHS} epochs: {title}"
    print_table(title, "method | mean test accuracy | minus plain | within 0.02 | seeds", rows)


def normalised(network: nn.Cell, images: Tensor) -> tuple[int, int]:
    """Return how many BatchNorms a network calls, and how many elements they give per image."""
    norms = [cell for _, cell in network.cells_and_names() if isinstance(cell, nn.BatchNorm2d)]
    called = networks.outputs_of(norms, network.set_train(False), images)
    return len(called), sum(output.size // len(images) for _, output in called)


def print_counts() -> None:
    """Print BatchNorms and normalised elements before and after."""
    counted: dict[str, tuple[Callable[[], nn.Cell], tuple[int, ...]]] = {
        "small ResNet": (SmallResNet, (1, 1, 32, 32))
    }
    try:
        from mindcv.models import resnet18, resnet50
    except ImportError:
        print("MindCV is not installed: its ResNets are left out")
    else:
        counted["ResNet-18"] = (resnet18, (1, 3, 64, 64))
        counted["ResNet-50"] = (resnet50, (1, 3, 64, 64))
    rows = []
    for name, (make, shape) in counted.items():
        network, images = make(), Tensor(np.zeros(shape, np.float32))
        norms, elements = normalised(network, images)
        less_bn(network)
        norms_left, left = normalised(network, images)
        change = f"{left / elements - 1:+.0%}"
        rows.append(f"{name} | {norms} | {norms_left} | {elements:,} | {left:,} | {change}")
    headings = "network | BatchNorms | left | elements an image | left | change"
    print_table("What is normalised", headings, rows)


def alone(kind: Callable[[int, int], nn.Cell], features: int, classes: int) -> Step:
    """Return the step of a classifier without a network."""
    inputs = batch(BATCH_SIZE, shape=(features,), classes=classes)
    return plain_step(kind(features, classes), inputs)


def pairs_to_time() -> dict[str, tuple[Step, Step, float | None]]:
    """Return candidate, reference and demand of each comparison."""
    headed = LeNet5()
    less_bn(headed, True, include=[])  # normalises the classifier alone

    def step(name: str) -> Step:
        return waiting(ours(SmallResNet(), less_bn=METHODS[name].settings))

    third, last = "less_bn, head", "less_bn, head, centralization"
    pairs = {
        "less_bn over plain": (step("less_bn"), plain_step(SmallResNet()), None),
        "head over Dense": (step(third), step("less_bn"), HEAD_DEMAND),
        "centralization": (step(last), step(third), CENTRALIZATION_DEMAND),
        "head over Dense, LeNet": (plain_step(headed), plain_step(LeNet5()), HEAD_DEMAND),
    }
    for size in (512, 10), (2048, 1000):
        steps = (alone(kind, *size) for kind in (CommonHeadLastFN, nn.Dense))
        pairs[f"head over Dense, alone, {size[0]} to {size[1]}"] = (*steps, None)
    return pairs


def print_speed(pairs: int, steps: int, modes: Sequence[str]) -> None:
    """Print the ratio of each comparison in some modes."""
    rows = []
    for mode in modes:
        ms.set_context(mode=MODES[mode])
        for name, (candidate, reference, demand) in pairs_to_time().items():
            ratio = paired(candidate, reference, pairs=pairs, steps=steps)
            demanded = "" if demand is None else f"<= {demand:g}"
            rows.append(f"{name} | {mode} | {ratio.row} | {demanded}")
    headings = "step | mode | reference, ms | ratio | quartiles | demand"
    print_table("Small ResNet, batch 32", headings, rows)


def main() -> None:
    """Run the parts that are asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for part in ("runs", "gains", "counts", "speed"):
        parser.add_argument(f"--{part}", action="store_true", help="only the parts given")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--first-seed", type=int, default=0, help="the seeds count up from here")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of each comparison")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of --speed")
    parser.add_argument("--steps", type=int, default=5, help="steps in each half of a pair")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    parts = {
        "runs": lambda: print_runs("methods", METHODS, seeds),
        "gains": lambda: print_runs("gains at the start", GAINS, seeds),
        "counts": print_counts,
        "speed": lambda: print_speed(args.pairs, args.steps, args.modes),
    }
    for part in [one for one in parts if getattr(args, one)] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
