"""What a step costs that freezes a prefix of the network, against a model of its passes.

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
the three equal c_l by separate timings of each layer's passes, because a backward pass is dearer
than a forward pass. Both leave out the loss, the optimizer and the launch of the graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from freezing import GROUPS
from harness import print_table

# isort: split
import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from networks import SmallResNet, ours, plain_step, waiting


class Pass(NamedTuple):
    """Milliseconds of one layer.

    Attributes:
        forward: the forward pass.
        inputs: gradients with respect to the inputs, the layer being frozen.
        weights: gradients with respect to the weights, with nothing trained before the layer.
        both: gradients with respect to both.
    """

    forward: float
    inputs: float
    weights: float
    both: float


def even(forward: float) -> Pass:
    """Return the plain model's passes: each as dear as the forward pass."""
    return Pass(forward, forward, forward, 2 * forward)


def modelled_cost(passes: Sequence[Pass], before: Sequence[Sequence[int]], group: int) -> float:
    """Return the cost of a step that trains the layers from ``group`` on.

    Args:
        passes: the costs of each layer.
        before: for each layer, the layers on whose output its input depends.
        group: layers before this one are frozen.
    """
    cost = 0.0
    for layer, one in enumerate(passes):
        trained = layer >= group
        behind = any(earlier >= group for earlier in before[layer])
        backward = {
            (True, True): one.both,
            (True, False): one.weights,
            (False, True): one.inputs,
            (False, False): 0.0,
        }[trained, behind]
        cost += one.forward + backward
    return cost


def relative_costs(passes: Sequence[Pass], before: Sequence[Sequence[int]]) -> list[float]:
    """Return the cost of each group over that of group 0."""
    costs = [modelled_cost(passes, before, group) for group in range(len(passes))]
    return [cost / costs[0] for cost in costs]


class Layer(NamedTuple):
    """A part of the network that is frozen as a whole.

    Attributes:
        name: where it stands.
        cell: image or features -> features.
        shape: of its input.
        before: indices of the layers on whose output its input depends.
    """

    name: str
    cell: nn.Cell
    shape: tuple[int, ...]
    before: tuple[int, ...]


class Chain(nn.Cell):
    """Cells one after another; their parameters keep their names."""

    def __init__(self, *parts: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.parts = nn.CellList(list(parts), auto_prefix=False)

    def construct(self, x: Tensor) -> Tensor:
        """Return the output of the last."""
        for part in self.parts:
            x = part(x)
        return x


class Head(nn.Cell):
    """The mean over the image, and the classifier."""

    def __init__(self, dense: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.dense = dense

    def construct(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.dense(x.mean((2, 3)))


def layers_of(network: SmallResNet, size: int = 32) -> list[Layer]:
    """Return the layers of the ResNet in the order of its parameters.

    Args:
        network: the network; only its shapes and Cells are looked at.
        size: images in a batch, 32x32 with one channel.
    """
    width, side = network.stem[0].out_channels, 32
    found = [Layer("stem", Chain(*network.stem), (size, 1, side, side), ())]
    for index, block in enumerate(network.blocks):
        earlier, here = tuple(range(len(found))), f"block {index}"
        shape = (size, width, side, side)
        width, side = block.conv1.out_channels, side // block.conv1.stride[0]
        first = Chain(block.conv1, block.bn1, block.relu)
        second = Chain(block.conv2, block.bn2, block.relu)
        found.append(Layer(f"{here}, convolution 1", first, shape, earlier))
        behind = (*earlier, len(earlier))
        found.append(Layer(f"{here}, convolution 2", second, (size, width, side, side), behind))
        if len(block.shortcut):
            found.append(Layer(f"{here}, shortcut", Chain(*block.shortcut), shape, earlier))
    shape = (size, width, side, side)
    return [*found, Layer("head", Head(network.head), shape, tuple(range(len(found))))]


class Passes(nn.Cell):
    """The passes of one Cell in one graph: forward, and gradients of some kind.

    Args:
        cell: what is timed.
        kind: a field of :class:`Pass`.
    """

    def __init__(self, cell: nn.Cell, kind: str) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.kind = kind
        self.weights = ParameterTuple(cell.trainable_params())
        self.inputs_only = ops.GradOperation(sens_param=True)
        self.weights_only = ops.GradOperation(get_by_list=True, sens_param=True)
        self.both = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def construct(self, x: Tensor, sens: Tensor) -> Tensor:
        """Return the output, after the gradients."""
        output = self.cell(x)
        if self.kind == "inputs":
            output = ops.depend(output, self.inputs_only(self.cell)(x, sens))
        if self.kind == "weights":
            output = ops.depend(output, self.weights_only(self.cell, self.weights)(x, sens))
        if self.kind == "both":
            output = ops.depend(output, self.both(self.cell, self.weights)(x, sens))
        return output


def calibrate(layers: Sequence[Layer], rounds: int = 20) -> list[Pass]:
    """Time the passes of each layer alone; layers of equal shapes share one timing.

    The launch of a graph, timed with one that does next to nothing, is taken off.
    """
    known: dict[Any, Pass] = {}
    passes = []
    for layer in layers:
        key = layer.shape, tuple(one.shape for one in layer.cell.trainable_params())
        if key not in known:
            known[key] = _timed_passes(layer, rounds)
        passes.append(known[key])
    return passes


def _timed_passes(layer: Layer, rounds: int) -> Pass:
    draw = np.random.default_rng(0)
    x = Tensor(draw.normal(size=layer.shape).astype(np.float32))
    layer.cell.set_train().set_grad()
    sens = Tensor(draw.normal(size=layer.cell(x).shape).astype(np.float32))
    one = Tensor([1.0])
    steps = [waiting(Passes(layer.cell, kind).set_train(), (x, sens)) for kind in Pass._fields]
    steps.append(waiting(Passes(nn.ReLU(), "forward"), (one, one)))
    *totals, launch = by_turns(steps, rounds)
    forward = totals[0] - launch
    return Pass(forward, *(max(total - totals[0], 0.0) for total in totals[1:]))


class GroupRow(NamedTuple):
    """One line of the table of groups; times over that of the plain step."""

    group: int
    layer: str
    parameters: int
    measured: float
    model: float
    by_pass: float


def by_turns(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median milliseconds of each step; all take turns, so bursts of noise hit all.

    Args:
        steps: each runs one step and waits for it.
        rounds: how often each of them runs, after two times of warming up.
    """
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds + 2):
        for step, kept in zip(steps, times):
            start = time.perf_counter()
            step()
            if turn >= 2:
                kept.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(kept) for kept in times]


def measured_groups(rounds: int = 30) -> tuple[list[GroupRow], float]:
    """Time the step of every group of the ResNet, and the layers for the model.

    Returns:
        The rows, and the median time of a plain step in milliseconds.
    """
    layers = layers_of(SmallResNet())
    before = [layer.before for layer in layers]
    passes = calibrate(layers)
    model = relative_costs([even(one.forward) for one in passes], before)
    by_pass = relative_costs(passes, before)
    groups = range(len(layers))
    settings = [{"param_groups": len(layers), "schedule": [one]} for one in groups]
    frozen = [waiting(ours(SmallResNet(), grad_freeze=one)) for one in settings]
    plain_ms, *times = by_turns([plain_step(SmallResNet()), *frozen], rounds)
    counts = [len(layer.cell.trainable_params()) for layer in layers]
    rows = [
        GroupRow(
            group,
            layers[group].name,
            sum(counts[group:]),
            times[group] / plain_ms,
            model[group],
            by_pass[group],
        )
        for group in groups
    ]
    return rows, plain_ms


def print_groups(rows: Sequence[GroupRow], plain_ms: float) -> None:
    """Print the step time of each group, against the model."""
    worst = max(abs(row.measured / row.model - 1) for row in rows)
    title = (
        f"Step of each group over the plain step ({plain_ms:.1f} ms); groups 0 to {GROUPS - 1} are "
        f"those of param_groups={GROUPS}"
    )
    headings = (
        "group | first trained layer | parameters | measured | model | deviation | model by pass | "
        "deviation"
    )
    table = [
        f"{row.group} | {row.layer} | {row.parameters} | {row.measured:.3f} | "
        f"{row.model:.3f} | {100 * (row.measured / row.model - 1):+.0f} % | "
        f"{row.by_pass:.3f} | {100 * (row.measured / row.by_pass - 1):+.0f} %"
        for row in rows
    ]
    print_table(title, headings, table)
    print(f"\nlargest deviation from the model {100 * worst:.0f} %, demanded: at most 20 %")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    argparse.ArgumentParser(description="Measure the step of each group.").parse_args(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    print_groups(*measured_groups())


if __name__ == "__main__":
    main()
