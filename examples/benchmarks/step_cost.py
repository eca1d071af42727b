"""The time of this package's step over nn.TrainOneStepCell, by pairs.

    python examples/benchmarks/step_cost.py                  # all cases, about 15 minutes
    python examples/benchmarks/step_cost.py --cases dynamic grouped --modes GRAPH
    python examples/benchmarks/step_cost.py --cases centralized --networks resnet18 --pairs 10

The cases: nothing switched on; one dynamic loss scale, and a scale for each of two groups of
layers, both in float32; centralized gradients. ``import_time.py`` measures what the import costs,
``first_steps.py`` what compiling a step costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import mindspore as ms
import networks
from harness import MODES, paired, print_table
from mindspore import nn
from networks import batch, grouped, momentum, ours, plain, plain_step, waiting, with_loss

from mindspore_boost_ext import BoostTrainOneStepCell, OptimizerProcess

NETWORKS: dict[str, Callable[[], nn.Cell]] = {**networks.NETWORKS, "resnet18": networks.resnet18}


def nothing(name: str) -> nn.Cell:
    """Return the step of a network with nothing switched on."""
    network = NETWORKS[name]()
    return BoostTrainOneStepCell(with_loss(network), momentum(network))


def dynamic(name: str) -> nn.Cell:
    """Return the step of a network with one dynamic scale."""
    return ours(NETWORKS[name](), manager=ms.DynamicLossScaleManager(2**16, 2, 1000))


def centralized(name: str) -> nn.Cell:
    """Return MindSpore's own step of a network, with an optimizer that centralizes gradients."""
    network = NETWORKS[name]()
    process = OptimizerProcess(momentum(network))
    process.add_grad_centralization(network)
    return plain(network, process.generate_new_optimizer())


# The step, and what it may take in each mode.
CASES: dict[str, tuple[Callable[[str], nn.Cell], dict[str, float]]] = {
    "nothing": (nothing, {"GRAPH": 1.02, "PYNATIVE": 1.02}),
    "dynamic": (dynamic, {"GRAPH": 1.10, "PYNATIVE": 1.25}),
    "grouped": (lambda name: grouped(name, 2.0**16), {"GRAPH": 1.10, "PYNATIVE": 1.25}),
    "centralized": (centralized, {"GRAPH": 1.03, "PYNATIVE": 1.03}),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--networks", nargs="+", choices=NETWORKS, default=list(networks.NETWORKS))
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--pairs", type=int, default=40)
    add("--steps", type=int, default=5, help="steps in each half of a pair")
    args = parser.parse_args()
    if "grouped" in args.cases and not set(args.networks) <= set(networks.NETWORKS):
        known = " and ".join(networks.NETWORKS)
        parser.error(f"of the cases, grouped is for {known} alone: give --cases without it")
    rows = []
    for mode in args.modes:
        ms.set_context(mode=MODES[mode])
        for name in args.networks:
            channels = 1 if name in networks.NETWORKS else 3
            inputs = batch(shape=(channels, 32, 32))
            for case in args.cases:
                make, demanded = CASES[case]
                ms.set_seed(0)
                reference = plain_step(NETWORKS[name](), inputs)
                ratio = paired(waiting(make(name), inputs), reference, args.pairs, args.steps)
                rows.append(f"{name} | {mode} | {case} | {ratio.row} | {demanded[mode]:.2f}")
    headings = "network | mode | step | plain step, ms | ratio | quartiles | demanded"
    print_table("Steps over nn.TrainOneStepCell, batch 32, 32x32 images", headings, rows)


if __name__ == "__main__":
    main()
