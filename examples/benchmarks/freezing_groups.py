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
is the measured forward time of layer l alone. Demanded: within 20 %. The last two columns replace
the three equal c_l by separate timings of each layer's passes, because a backward pass costs more
than a forward pass. Both leave out the loss, the optimizer and the launch of the graph.
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
from mindspore import ParameterTuple, Tensor, nn, ops
from networks import Head, SmallResNet, Step, ours, plain_step, waiting


class Pass(NamedTuple):
    """Milliseconds of one layer."""

    forward: float
    inputs: float  # gradients with respect to the inputs, the layer being frozen
    weights: float  # gradients with respect to the weights, with nothing trained before the layer
    both: float

    def cost(self, trained: bool, behind: bool) -> float:
        """Return what the layer adds to a step, if it is trained, or behind one that is."""
        if trained:
            return self.forward + (self.both if behind else self.weights)
        return self.forward + (self.inputs if behind else 0.0)


class Layer(NamedTuple):
    """A part of the network that is frozen as a whole."""

    name: str
    cell: nn.Cell
    shape: tuple[int, ...]  # of its input
    before: int  # how many of the first layers its input depends on


def relative_costs(passes: Sequence[Pass], layers: Sequence[Layer]) -> list[float]:
    """Return the modelled cost of each group's step over that of group 0."""
    costs = [
        sum(
            one.cost(index >= group, layer.before > group)
            for index, (one, layer) in enumerate(zip(passes, layers))
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


class Passes(nn.Cell):
    """The passes of one Cell in one graph: forward, and gradients; the kind is a field of Pass."""

    def __init__(self, cell: nn.Cell, kind: str) -> None:
        super().__init__(auto_prefix=False)
        self.cell, self.kind = cell, kind
        self.weights = ParameterTuple(cell.trainable_params())
        by_list = kind in ("weights", "both")
        self.gradient = ops.GradOperation(kind == "both", by_list, sens_param=True)

    def construct(self, x: Tensor, sens: Tensor) -> Tensor:
        """Return the output, after the gradients."""
        output = self.cell(x)
        if self.kind == "inputs":
            output = ops.depend(output, self.gradient(self.cell)(x, sens))
        elif self.kind != "forward":
            output = ops.depend(output, self.gradient(self.cell, self.weights)(x, sens))
        return output


def calibrate(layers: Sequence[Layer]) -> list[Pass]:
    """Time the passes of each layer alone; layers of equal shapes share one timing.

    The launch of a graph, timed with one that does next to nothing, is subtracted.
    """
    kinds = [
        (layer.shape, *(one.shape for one in layer.cell.trainable_params())) for layer in layers
    ]
    timed = {kind: timed_passes(layer) for kind, layer in dict(zip(kinds, layers)).items()}
    return [timed[kind] for kind in kinds]


def timed_passes(layer: Layer) -> Pass:
    """Return the milliseconds of a layer's passes, each in a graph of its own."""
    draw = np.random.default_rng(0)
    x = Tensor(draw.normal(size=layer.shape).astype(np.float32))
    layer.cell.set_train().set_grad()
    sens = Tensor(draw.normal(size=layer.cell(x).shape).astype(np.float32))
    one = Tensor([1.0])
    steps = [waiting(Passes(layer.cell, kind).set_train(), (x, sens)) for kind in Pass._fields]
    steps.append(waiting(Passes(nn.ReLU(), "forward"), (one, one)))
    *totals, launch = milliseconds(steps, 20)
    forward = totals[0] - launch
    return Pass(forward, *(max(total - totals[0], 0.0) for total in totals[1:]))


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
    passes = calibrate(layers)
    model = relative_costs([Pass(*(one.forward,) * 3, 2 * one.forward) for one in passes], layers)
    by_pass = relative_costs(passes, layers)
    settings = [{"param_groups": len(layers), "schedule": [one]} for one in range(len(layers))]
    frozen = [waiting(ours(SmallResNet(), grad_freeze=one)) for one in settings]
    plain_ms, *times = milliseconds([plain_step(SmallResNet()), *frozen], 30)
    measured = [one / plain_ms for one in times]
    counts = [len(layer.cell.trainable_params()) for layer in layers]
    rows = []
    for group, (layer, own, *modelled) in enumerate(zip(layers, measured, model, by_pass)):
        row = f"{group} | {layer.name} | {sum(counts[group:])} | {own:.3f}"
        for one in modelled:
            row += f" | {one:.3f} | {100 * (own / one - 1):+.0f} %"
        rows.append(row)
    print_table(
        f"Step of each group over the plain step ({plain_ms:.1f} ms); groups 0 to {GROUPS - 1} are "
        f"those of param_groups={GROUPS}",
        "group | first trained layer | parameters | measured | model | deviation | model by pass | "
        "deviation",
        rows,
    )
    worst = max(abs(own / modelled - 1) for own, modelled in zip(measured, model))
    print(f"\nlargest deviation from the model {100 * worst:.0f} %, demanded: at most 20 %")


if __name__ == "__main__":
    main()
