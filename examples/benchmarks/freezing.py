"""What gradient freezing saves and what it costs, and what a micro-step of accumulation costs.

    python examples/benchmarks/freezing.py                        # everything, about 8 minutes
    python examples/benchmarks/freezing.py --runs --seeds 3 --plot freezing.png
    python examples/benchmarks/freezing.py --groups --speed

GRAPH mode, ratios of paired runs in one process. The ResNet is ``networks.SmallResNet``: 53
parameters in 18 layers (a convolution with its BatchNorm and ReLU, or the head), the parts that
freezing cuts it into. ``param_groups`` 10, upstream's default, can freeze the first 9 of them.

**Groups** (``--groups``): the step of each group over the plain step, against the cost model::

    cost(k) = sum of c_l                                     (forward, everything)
            + sum of c_l over layers behind a trained one    (gradients for inputs)
            + sum of c_l over trained layers, l >= k         (gradients for weights)

In a chain "behind a trained one" means l > k; here the two branches of a block are told apart. c_l
is the measured forward time of layer l alone. Demanded: within 20 %. The last two columns replace
the three equal c_l by separate timings of each layer's passes, because a backward pass is dearer
than a forward pass. Both leave out the loss, the optimizer and the launch of the graph.

**Runs** (``--runs``): the digits, trained plainly and with four schedules that take turns step by
step on the same batches, so that a busy machine slows all alike. Time saved and accuracy lost.

**Speed** (``--speed``), demanded: first step with 10 groups at most 2.5 times the plain first step;
an unfrozen step among 10 groups 1.03; a run that freezes half the network 0.8; a micro-step of
accumulation 1.05. First steps run in processes of their own and include compilation.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import Ratio, paired, print_table

# isort: split
import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops
from networks import LeNet5, SmallResNet, batch, momentum, with_loss

from mindspore_boost_ext import AutoBoost, BoostTrainOneStepCell
from mindspore_boost_ext.bundled import digits_datasets

GROUPS = 10  # upstream's default
WINDOW = 4
OFF = {"less_bn": False, "grad_freeze": False, "adasum": False, "grad_accumulation": False}
BATCH_SIZE, LEARNING_RATE = 32, 0.03  # those of examples/lenet.py
RUNS: dict[str, tuple[Callable[[], nn.Cell], int]] = {  # network, epochs
    "small ResNet": (SmallResNet, 4),
    "LeNet": (LeNet5, 10),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "defaults": {"freeze_type": 1, "freeze_p": 0.7},
    "linear": {"schedule": "linear", "prefix_start": 0.5},
    "cubic": {"schedule": "cubic", "prefix_start": 0.5},
    "step": {"schedule": "step", "prefix_start": 0.1},
}
Step = Callable[[], object]


# ------------------------------------------------------------------------------- the cost model


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


# ------------------------------------------------------------------------------------------ steps


def waiting(cell: nn.Cell, inputs: Sequence[Tensor]) -> Step:
    """Return a function that runs one step and waits for its loss."""
    return lambda: cell(*inputs).asnumpy()


def boosted(
    network: nn.Cell, optimizer: nn.Cell, settings: dict[str, Any], switch: str = "grad_freeze"
) -> nn.Cell:
    """Return the step cell with one algorithm switched on.

    Args:
        network: the network without its loss.
        optimizer: the optimizer over its parameters.
        settings: the section of that algorithm.
        switch: name of the algorithm and of its section.
    """
    config = {"boost": {"mode": "manual", **OFF, switch: True}, switch: settings}
    network, optimizer = AutoBoost("O1", config).network_auto_process_train(network, optimizer)
    return BoostTrainOneStepCell(with_loss(network), optimizer).set_train()


def plain(network: nn.Cell, optimizer: nn.Cell) -> nn.Cell:
    """Return MindSpore's own step cell."""
    return nn.TrainOneStepCell(with_loss(network), optimizer).set_train()


def plain_step() -> Step:
    """Return a plain step of a new ResNet on random images."""
    network = SmallResNet()
    return waiting(plain(network, momentum(network)), batch())


def boosted_step(settings: dict[str, Any], switch: str = "grad_freeze") -> Step:
    """Return a step of a new ResNet with one algorithm, on random images."""
    network = SmallResNet()
    return waiting(boosted(network, momentum(network), settings, switch), batch())


# ----------------------------------------------------------------------------------------- groups


class GroupRow(NamedTuple):
    """One line of the table of groups; times over that of the plain step."""

    group: int
    layer: str
    parameters: int
    measured: float
    model: float
    by_pass: float


def by_turns(steps: Sequence[Step], rounds: int) -> list[float]:
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
    frozen = [boosted_step({"param_groups": len(layers), "schedule": [one]}) for one in groups]
    plain_ms, *times = by_turns([plain_step(), *frozen], rounds)
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
        "group",
        "first trained layer",
        "parameters",
        "measured",
        "model",
        "deviation",
        "model by pass",
        "deviation",
    )
    table = [
        (
            row.group,
            row.layer,
            row.parameters,
            f"{row.measured:.3f}",
            f"{row.model:.3f}",
            f"{100 * (row.measured / row.model - 1):+.0f} %",
            f"{row.by_pass:.3f}",
            f"{100 * (row.measured / row.by_pass - 1):+.0f} %",
        )
        for row in rows
    ]
    print_table(title, headings, table)
    print(f"\nlargest deviation from the model {100 * worst:.0f} %, demanded: at most 20 %")


# ------------------------------------------------------------------------------------------- runs


class Times(NamedTuple):
    """What a run took, in steps of the plain run beside it.

    Attributes:
        steps: of the run; what it would take if every step were plain.
        trained: the steps, without compilation.
        compilation: of all groups that came up.
    """

    steps: int
    trained: float
    compilation: float

    def over(self, plain: Times) -> tuple[float, float]:
        """Return the ratios to a plain run: without compilation, and with it."""
        with_compilation = self.trained + self.compilation
        return self.trained / plain.trained, with_compilation / (plain.trained + plain.compilation)


def run_times(seconds: Sequence[float], plain: Sequence[float], groups: Sequence[int]) -> Times:
    """Return what a run takes whose steps took turns with plain ones.

    A step is measured by the plain step of the same turn, and counts as the median of its group's
    steps, without the first one. What that took beyond the median is compilation. A group that
    comes up only once counts as a plain step.

    Args:
        seconds: of each step.
        plain: of each plain step; the first one compiles, and is left out.
        groups: the group of each step.
    """
    plain_step = statistics.median(plain[1:])
    ratios: dict[int, list[float]] = {}
    for turn, group in enumerate(groups):
        beside = plain[turn] if turn else plain_step
        ratios.setdefault(group, []).append(seconds[turn] / beside)
    usual = {
        group: statistics.median(kept[1:]) if kept[1:] else 1.0 for group, kept in ratios.items()
    }
    trained = sum(usual[group] * len(kept) for group, kept in ratios.items())
    compilation = sum(max(kept[0] - usual[group], 0.0) for group, kept in ratios.items())
    return Times(len(groups), trained, compilation)


class Trainee(NamedTuple):
    """One training among those that take turns.

    Attributes:
        network: the network without its loss.
        step: its step cell.
        groups: the group of each step.
        seconds: of each step so far.
    """

    network: nn.Cell
    step: nn.Cell
    groups: list[int]
    seconds: list[float]

    def train(self, inputs: Sequence[Tensor]) -> None:
        """Train one step, and note its time."""
        start = time.perf_counter()
        self.step(*inputs).asnumpy()
        self.seconds.append(time.perf_counter() - start)

    def times(self, plain: Trainee) -> Times:
        """Return what the run took, measured by the plain one that took turns with it."""
        return run_times(self.seconds, plain.seconds, self.groups)


def trainee(
    make: Callable[[], nn.Cell], settings: dict[str, Any], steps: int, epochs: int, seed: int
) -> Trainee:
    """Return a training that has not begun; equal seeds give equal initial weights.

    Args:
        make: returns a new network.
        settings: the section ``grad_freeze`` but for groups and steps; empty for plain training.
        steps: of the whole training.
        epochs: of the whole training; the rate falls along a half cosine, once per epoch.
        seed: of the weights.
    """
    ms.set_seed(seed)
    network = make()
    rates = nn.cosine_decay_lr(0.0, LEARNING_RATE, steps, steps // epochs, epochs)
    optimizer = nn.Momentum(network.trainable_params(), rates, momentum=0.9)
    if not settings:
        return Trainee(network, plain(network, optimizer), [0] * steps, [])
    settings = {"param_groups": GROUPS, "total_steps": steps, "seed": seed, **settings}
    step = boosted(network, optimizer, settings)
    return Trainee(network, step, [step.optimizer.schedule.at(i) for i in range(steps)], [])


def accuracy(network: nn.Cell, batches: Sequence[Sequence[Tensor]]) -> float:
    """Return the share of correct answers over all batches, in evaluation mode."""
    network.set_train(False)
    correct = [
        network(images).asnumpy().argmax(1) == labels.asnumpy() for images, labels in batches
    ]
    return float(np.mean(np.concatenate(correct)))


class RunResult(NamedTuple):
    """What one schedule did in one run.

    Attributes:
        accuracy: on the test images, at the end, 0 to 1.
        steps: time of the steps over plain training, without compilation.
        wall: the same with compilation.
        compilation: of all groups that came up, in plain steps.
        full_share: share of the steps that trained everything.
        groups: how many different groups came up.
    """

    accuracy: float
    steps: float
    wall: float
    compilation: float
    full_share: float
    groups: int


def take_turns(trainees: Iterable[Trainee], batches: Iterable[Sequence[Tensor]]) -> None:
    """Train each on every batch, one after another, so that a busy machine slows all alike."""
    trainees = deque(trainees)
    for inputs in batches:
        for one in trainees:
            one.train(inputs)
        trainees.rotate(1)  # whoever comes first shares the cores with the data pipeline


def race(make: Callable[[], nn.Cell], epochs: int, seed: int) -> dict[str, RunResult]:
    """Train with all schedules by turns, step by step, on the same batches of digits."""
    ms.set_seed(seed)
    train, test = digits_datasets(BATCH_SIZE)
    steps = epochs * train.get_dataset_size()
    trainees = {
        name: trainee(make, settings, steps, epochs, seed) for name, settings in SCHEDULES.items()
    }
    iterator = train.create_tuple_iterator(num_epochs=epochs)
    take_turns(trainees.values(), (inputs for _ in range(epochs) for inputs in iterator))
    kept_back = list(test.create_tuple_iterator(num_epochs=1))
    return {name: _result(one, trainees["plain"], kept_back) for name, one in trainees.items()}


def _result(one: Trainee, plain: Trainee, test: Sequence[Sequence[Tensor]]) -> RunResult:
    times = one.times(plain)
    return RunResult(
        accuracy(one.network, test),
        *times.over(plain.times(plain)),
        times.compilation,
        one.groups.count(0) / times.steps,
        len(set(one.groups)),
    )


def races(seeds: int) -> dict[str, dict[str, list[RunResult]]]:
    """Return the results by network, schedule and seed."""
    found = {}
    for name, (make, epochs) in RUNS.items():
        by_seed = [race(make, epochs, seed) for seed in range(seeds)]
        found[name] = {key: [one[key] for one in by_seed] for key in SCHEDULES}
    return found


def print_runs(results: dict[str, dict[str, list[RunResult]]]) -> None:
    """Print accuracy and time of every schedule; ratios are medians over the seeds."""
    rows = []
    for network, schedules in results.items():
        plain_mean = statistics.mean(one.accuracy for one in schedules["plain"])
        for name, runs in schedules.items():
            mean = statistics.mean(one.accuracy for one in runs)
            rows.append(
                (
                    network,
                    name,
                    f"{mean:.4f}",
                    f"{min(one.accuracy for one in runs):.4f}",
                    f"{mean - plain_mean:+.4f}",
                    f"{statistics.median(one.steps for one in runs):.3f}",
                    f"{statistics.median(one.wall for one in runs):.3f}",
                    f"{statistics.median(one.compilation for one in runs):.0f}",
                    f"{100 * runs[0].full_share:.0f} %",
                    runs[0].groups,
                )
            )
    headings = (
        "network",
        "schedule",
        "accuracy, mean",
        "lowest",
        "minus plain",
        "time of the steps",
        "with compilation",
        "compilation, plain steps",
        "full steps",
        "groups",
    )
    lengths = ", ".join(f"{name} {epochs}" for name, (_, epochs) in RUNS.items())
    seeds = len(next(iter(results.values()))["plain"])
    title = f"Digits, seeds 0 to {seeds - 1}, epochs: {lengths}; times over those of plain training"
    print_table(title, headings, rows)
    print(f"\nA difference of 0.01 is 4 of the 360 test images. Settings: param_groups={GROUPS}")
    for name, settings in SCHEDULES.items():
        if settings:
            print(f"- {name}: " + ", ".join(f"{key}={one}" for key, one in settings.items()))


# ------------------------------------------------------------------------------------------ speed

FIRST = """
import freezing
print(freezing.first_step_seconds({kind!r}))
"""


class Within(nn.Cell):
    """A Cell around a step cell, in whose graph the group is chosen."""

    def __init__(self, step: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return self.step(images, labels)


def first_step_seconds(kind: str) -> float:
    """Build a step cell and run it once; return the seconds of both, compilation included.

    Args:
        kind: ``"plain"``; ``"first"`` of 10 groups; ``"every"`` group's first step, in a row; or
            ``"graph"``, the first of 10 groups with the choice made in the graph of a Cell around.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    network, inputs = SmallResNet(), batch()
    optimizer = momentum(network)
    start = time.perf_counter()
    if kind == "plain":
        cell = plain(network, optimizer)
    else:
        schedule = {"schedule": list(range(GROUPS))} if kind == "every" else {}
        cell = boosted(network, optimizer, {"param_groups": GROUPS, **schedule})
    cell = Within(cell).set_train() if kind == "graph" else cell
    for _ in range(GROUPS if kind == "every" else 1):
        cell(*inputs).asnumpy()
    return time.perf_counter() - start


def first_steps(kinds: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median seconds of first steps, each in a process of its own, by turns."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, kept in times.items():
            command = [sys.executable, "-c", FIRST.format(kind=kind)]
            folder = Path(__file__).resolve().parent
            run = subprocess.run(command, capture_output=True, check=True, cwd=folder)
            kept.append(float(run.stdout.split()[-1]))
    return {kind: statistics.median(kept) for kind, kept in times.items()}


def half_run(steps: int = 100) -> tuple[float, float]:
    """Return the ratios of a run that freezes half the network, without and with compilation."""
    images = [batch(seed=seed) for seed in range(8)]
    pair = [trainee(SmallResNet, SCHEDULES[name], steps, 1, 0) for name in ("plain", "step")]
    take_turns(pair, (images[index % len(images)] for index in range(steps)))
    reference, frozen = pair
    return frozen.times(reference).over(reference.times(reference))


def speed_rows() -> list[tuple[str, ...]]:
    """Return the table of speeds."""
    seconds = first_steps(("plain", "first"), 5)
    more = first_steps(("every", "graph"), 2)
    others = {kind: value / seconds["plain"] for kind, value in more.items()}
    unfrozen = boosted_step({"param_groups": GROUPS, "schedule": [*range(1, GROUPS), *[0] * 9999]})
    full = paired(unfrozen, plain_step(), pairs=30, steps=2, warm_up=GROUPS + 2)
    runs = [half_run() for _ in range(3)]
    accumulating = boosted_step({"grad_accumulation_step": WINDOW}, "grad_accumulation")
    window = paired(accumulating, plain_step(), pairs=24, steps=WINDOW, warm_up=WINDOW)
    without, including = (statistics.median(one) for one in zip(*runs))
    ranges = [f"{min(one):.3f} to {max(one):.3f}" for one in zip(*runs)]
    return [
        (f"first step, {GROUPS} groups", f"{seconds['first'] / seconds['plain']:.2f}", "", "2.50"),
        ("first step of every group, together", f"{others['every']:.2f}", "", ""),
        ("first step, groups chosen in the graph", f"{others['graph']:.2f}", "", ""),
        (f"unfrozen step among {GROUPS} groups", *_shown(full), "1.03"),
        ("100 steps, half the network frozen from 10 on", f"{without:.3f}", ranges[0], "0.80"),
        ("the same with compilation", f"{including:.3f}", ranges[1], ""),
        (f"micro-step of accumulation, window {WINDOW}", *_shown(window), "1.05"),
    ]


def _shown(ratio: Ratio) -> tuple[str, str]:
    return f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"


# ------------------------------------------------------------------------- the plot and the command


def draw(
    rows: Sequence[GroupRow] | None,
    results: dict[str, dict[str, list[RunResult]]] | None,
    path: Path,
) -> None:
    """Draw step times against the model, and accuracy against time; what is None is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (rows is not None) + len(results or {})
    figure = Figure(figsize=(5 * panels, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if rows is not None:
        panel, groups = axes.pop(0), [row.group for row in rows]
        model = np.array([row.model for row in rows])
        panel.fill_between(groups, 0.8 * model, 1.2 * model, alpha=0.2, label="model, 20 %")
        panel.plot(groups, model, label="model")
        panel.plot(groups, [row.by_pass for row in rows], "--", label="model by pass")
        panel.plot(groups, [row.measured for row in rows], "ko", ms=4, label="measured")
        panel.set(title="Step over plain step", xlabel="group", ylim=(0, None))
        panel.legend(fontsize="small")
    for panel, (network, schedules) in zip(axes, (results or {}).items()):
        for name, runs in schedules.items():
            panel.plot([r.steps for r in runs], [r.accuracy for r in runs], "o", label=name)
        panel.set(title=f"{network}: test accuracy", xlabel="time of the steps over plain")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; without a choice of parts, choose all."""
    parser = argparse.ArgumentParser(description="Measure gradient freezing and accumulation.")
    parser.add_argument("--groups", action="store_true", help="step of each group, and the model")
    parser.add_argument("--runs", action="store_true", help="digits: time saved, accuracy lost")
    parser.add_argument("--speed", action="store_true", help="first steps, unfrozen steps, runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each training (default: 3)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw groups and runs")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    if not (args.groups or args.runs or args.speed):
        args.groups = args.runs = args.speed = True
    if args.plot and not (args.groups or args.runs):
        parser.error("--plot draws groups and runs: give --groups or --runs as well")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables that were asked for."""
    args = parse_arguments(argv)
    print(" ".join(["python", *sys.argv]))
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    rows = results = None
    if args.groups:
        rows, plain_ms = measured_groups()
        print_groups(rows, plain_ms)
    if args.runs:
        results = races(args.seeds)
        print_runs(results)
    if args.speed:
        headings = ("over plain", "ratio", "quartiles (of runs: range)", "demanded at most")
        print_table("Speed, small ResNet, batch 32, GRAPH mode", headings, speed_rows())
    if args.plot:
        draw(rows, results, args.plot)


if __name__ == "__main__":
    main()
