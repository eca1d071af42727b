"""The cost of a step that freezes a prefix of the network, against a model of its passes.

    python examples/benchmarks/freezing_groups.py

GRAPH mode; the steps of all groups take turns. The ResNet is ``networks.SmallResNet``: 53
parameters in 18 layers (a convolution with its BatchNorm and ReLU, or the head), the parts that
freezing cuts it into. ``param_groups`` 10, upstream's default, can freeze the first 9 of them.

The step of each group over the plain step, against the cost model::

    cost(k) = sum of c_l                                     (forward, everything)
            + sum of c_l over layers behind a trained one    (gradients for inputs)
            + sum of c_l over trained layers, l >= k         (gradients for weights)

In a chain "behind a trained one" means l > k; here the two branches of a block are told apart. c_l
is the measured forward time of layer l alone. Demanded: within 20 %. The model leaves out the loss,
the optimizer and the launch of the graph, and takes a backward pass for as long as a forward pass.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mindspore as ms
import numpy as np
from freezing import GROUPS
from harness import by_turns, print_table, seconds
from mindspore import Tensor, nn
from networks import Head, SmallResNet, Step, ours, plain_step, waiting


class Layer(NamedTuple):
    """A part of the network that is frozen as a whole."""

    name: str
    cell: nn.Cell
    shape: tuple[int, ...]  # of its input
    before: int  # how many of the first layers its input depends on


def relative_costs(times: Sequence[float], layers: Sequence[Layer]) -> list[float]:
    """Return the modelled cost of each group's step over that of group 0."""
    costs = [
        sum(
            time * (1 + (layer.before > group) + (index >= group))
            for index, (time, layer) in enumerate(zip(times, layers))
        )
        for group in range(len(layers))
    ]
    return [cost / costs[0] for cost in costs]


def layers_of(network: SmallResNet, size: int = 32) -> list[Layer]:
    """Return the layers of the ResNet in the order of its parameters, for ``size`` images."""
    width, side = network.stem[0].out_channels, 32
    found = [Layer("stem", network.stem, (size, 1, side, side), 0)]
    for index, block in enumerate(network.blocks):
        before, here = len(found), f"block {index}"
        shape = (size, width, side, side)
        width, side = block.conv1.out_channels, side // block.conv1.stride[0]
        first = nn.SequentialCell(block.conv1, block.bn1, block.relu)
        second = nn.SequentialCell(block.conv2, block.bn2, block.relu)
        found.append(Layer(f"{here}, convolution 1", first, shape, before))
        inner = (size, width, side, side)
        found.append(Layer(f"{here}, convolution 2", second, inner, before + 1))
        if len(block.shortcut):
            found.append(Layer(f"{here}, shortcut", block.shortcut, shape, before))
    return [*found, Layer("head", Head(network.head), inner, len(found))]


def forward_times(layers: Sequence[Layer]) -> list[float]:
    """Return the milliseconds of each layer's forward pass, in a graph of its own.

    Layers of equal shapes share one timing. The launch of a graph, timed with one that does next to
    nothing, is subtracted.
    """
    kinds = [
        (layer.shape, *(one.shape for one in layer.cell.trainable_params())) for layer in layers
    ]
    distinct, draw = dict(zip(kinds, layers)), np.random.default_rng(0)
    steps = [
        waiting(layer.cell, [Tensor(draw.normal(size=layer.shape).astype(np.float32))])
        for layer in distinct.values()
    ]
    *times, launch = milliseconds([*steps, waiting(nn.ReLU(), [Tensor([1.0])])], 20)
    found = dict(zip(distinct, times))
    return [found[kind] - launch for kind in kinds]


def milliseconds(steps: Sequence[Step], rounds: int) -> list[float]:
    """Return the median of each step; all take turns, so bursts of noise hit all."""
    times = by_turns([partial(seconds, step) for step in steps], 2 + rounds)
    return [statistics.median(each[2:]) * 1e3 for each in times]  # the first two warm up


def main() -> None:
    """Time the step of every group, and the layers for the model; print both."""
    argparse.ArgumentParser(description="Measure the step of each group.").parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    layers = layers_of(SmallResNet())
    model = relative_costs(forward_times(layers), layers)
    settings = [{"param_groups": len(layers), "schedule": [one]} for one in range(len(layers))]
    frozen = [waiting(ours(SmallResNet(), grad_freeze=one)) for one in settings]
    plain_ms, *times = milliseconds([plain_step(SmallResNet()), *frozen], 30)
    measured = [one / plain_ms for one in times]
    counts = [len(layer.cell.trainable_params()) for layer in layers]
    rows = [
        f"{group} | {layer.name} | {sum(counts[group:])} | {own:.3f} | {modelled:.3f} | "
        f"{100 * (own / modelled - 1):+.0f} %"
        for group, (layer, own, modelled) in enumerate(zip(layers, measured, model))
    ]
    print_table(
        f"Step of each group over the plain step ({plain_ms:.1f} ms); groups 0 to {GROUPS - 1} are "
        f"those of param_groups={GROUPS}",
        "group | first trained layer | parameters | measured | model | deviation",
        rows,
    )
    worst = max(abs(own / modelled - 1) for own, modelled in zip(measured, model))
    print(f"\nlargest deviation from the model {100 * worst:.0f} %, demanded: at most 20 %")


if __name__ == "__main__":
    main()
