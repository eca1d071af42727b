"""What gradient freezing saves in a training, and what it costs in accuracy and time.

    python examples/benchmarks/freezing.py --seeds 3
    python examples/benchmarks/freezing.py --parts speed

*runs*: the digits, trained plainly and with four schedules that take turns step by step on the same
batches, so that a busy machine slows all alike. Time saved and accuracy lost. Demanded: schedule
"step", which freezes half of the small ResNet, takes at most 0.8 of plain's time.

*speed*: unfrozen steps, as ratios of paired runs in one process, and first steps, each in a process
of its own, with compilation. Demanded, at most: first step with 10 groups 2.5 times the plain first
step; an unfrozen step among 10 groups 1.03; a micro-step of accumulation 1.05.

GRAPH mode. ``freezing_groups.py`` times the step of each group.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import networks
from harness import by_turns, paired, print_table, seconds
from mindspore import Tensor, nn
from networks import LeNet5, SmallResNet, batch, ours, plain, plain_step, waiting
from processes import apart

from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.cli.compare import count

GROUPS = 10  # upstream's default
WINDOW = 4
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


class Trainee(NamedTuple):
    """One training among those that take turns."""

    network: nn.Cell  # without its loss
    step: nn.Cell
    groups: list[int]  # of each step
    seconds: list[float]  # of each step so far

    def train(self, inputs: Sequence[Tensor]) -> None:
        """Train one step, and note its time."""
        self.seconds.append(seconds(lambda: self.step(*inputs).asnumpy()))

    def times(self, plain: Trainee) -> tuple[float, float]:
        """Return what the steps and the compilation took, in steps of the plain run beside it.

        A step is divided by the plain step of the same turn. Each step counts as the median of its
        group's steps after the first one. What the first one took beyond the median is compilation.
        A group that occurs only once counts as a plain step. The first plain step compiles: the
        median of the others replaces it.
        """
        beside = [statistics.median(plain.seconds[1:]), *plain.seconds[1:]]
        ratios: dict[int, list[float]] = {}
        for group, own, other in zip(self.groups, self.seconds, beside):
            ratios.setdefault(group, []).append(own / other)
        trained = compilation = 0.0
        for kept in ratios.values():
            usual = statistics.median(kept[1:]) if kept[1:] else 1.0
            trained += usual * len(kept)
            compilation += max(kept[0] - usual, 0.0)
        return trained, compilation

    def over(self, plain: Trainee) -> tuple[float, float, float]:
        """Return the times over plain's without and with compilation, and the compilation."""
        (trained, compilation), (plain_trained, plain_compilation) = (
            one.times(plain) for one in (self, plain)
        )
        with_compilation = (trained + compilation) / (plain_trained + plain_compilation)
        return trained / plain_trained, with_compilation, compilation


def trainee(
    make: Callable[[], nn.Cell], settings: dict[str, Any], steps: int, epochs: int, seed: int
) -> Trainee:
    """Return a training that has not begun; equal seeds give equal initial weights.

    Without settings it is a plain one. The rate falls along a half cosine, once per epoch.
    """
    ms.set_seed(seed)
    network = make()
    optimizer = networks.falling(network, steps, epochs)
    if not settings:
        return Trainee(network, plain(network, optimizer), [0] * steps, [])
    drawn = {} if "schedule" in settings else {"seed": seed}
    settings = {"param_groups": GROUPS, "total_steps": steps, **drawn, **settings}
    step = ours(network, optimizer, grad_freeze=settings)
    return Trainee(network, step, [step.optimizer.schedule.at(i) for i in range(steps)], [])


class RunResult(NamedTuple):
    """What one schedule did in one run."""

    accuracy: float  # on the test images, at the end, 0 to 1
    steps: float  # their time over plain training, without compilation
    wall: float  # the same with compilation
    compilation: float  # of all groups that came up, in plain steps
    full_share: float  # of the steps that trained everything
    groups: int  # that occurred


def take_turns(trainees: Iterable[Trainee], batches: Iterable[Sequence[Tensor]]) -> None:
    """Train each on every batch, one after another, so that a busy machine slows all alike."""
    trainees = deque(trainees)
    for inputs in batches:
        for one in trainees:
            one.train(inputs)
        trainees.rotate(1)  # the first one shares the cores with the data pipeline


def race(make: Callable[[], nn.Cell], epochs: int, seed: int) -> dict[str, RunResult]:
    """Train with all schedules by turns, step by step, on the same batches of digits."""
    ms.set_seed(seed)
    train, test = digits_datasets(networks.BATCH_SIZE)
    steps = epochs * train.get_dataset_size()
    trainees = {
        name: trainee(make, settings, steps, epochs, seed) for name, settings in SCHEDULES.items()
    }
    iterator = train.create_tuple_iterator(num_epochs=epochs)
    take_turns(trainees.values(), (inputs for _ in range(epochs) for inputs in iterator))
    kept_back = list(test.create_tuple_iterator(num_epochs=1))
    return {
        name: RunResult(
            networks.accuracy(one.network, kept_back),
            *one.over(trainees["plain"]),
            one.groups.count(0) / steps,
            len(set(one.groups)),
        )
        for name, one in trainees.items()
    }


def print_runs(seeds: int) -> None:
    """Train, and print accuracy and time of every schedule; ratios are medians over the seeds."""
    rows = []
    for network, (make, epochs) in RUNS.items():
        races = [race(make, epochs, seed) for seed in range(seeds)]
        plain_mean = statistics.mean(one["plain"].accuracy for one in races)
        for name in SCHEDULES:
            runs = [one[name] for one in races]
            accuracies, *times, _, _ = zip(*runs)  # in the order of the fields
            mean = statistics.mean(accuracies)
            steps, wall, compilation = map(statistics.median, times)
            rows.append(
                f"{network} | {name} | {mean:.4f} | {min(accuracies):.4f} | "
                f"{mean - plain_mean:+.4f} | {steps:.3f} | {wall:.3f} | {compilation:.0f} | "
                f"{100 * runs[0].full_share:.0f} % | {runs[0].groups}"
            )
    headings = (
        "network | schedule | accuracy, mean | lowest | minus plain | time of the steps | "
        "with compilation | compilation, plain steps | full steps | groups"
    )
    lengths = ", ".join(f"{name} {epochs}" for name, (_, epochs) in RUNS.items())
    title = f"Digits, seeds 0 to {seeds - 1}, epochs: {lengths}; times over those of plain training"
    print_table(title, headings, rows)
    print(f"\nA difference of 0.01 is 4 of the 360 test images. Settings: param_groups={GROUPS}")
    for name, settings in SCHEDULES.items():
        if settings:
            print(f"- {name}: " + ", ".join(f"{key}={one}" for key, one in settings.items()))


def first_step_seconds(kind: str) -> float:
    """Build a step cell and run it once; return the seconds of both, compilation included.

    Args:
        kind: ``"plain"``; ``"first"`` of 10 groups; or ``"graph"``, the same with the choice made
            in the graph of a Cell around.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    network, inputs, settings = SmallResNet(), batch(), {"param_groups": GROUPS}
    start = time.perf_counter()
    cell = plain(network) if kind == "plain" else ours(network, grad_freeze=settings)
    cell = networks.Called(cell).set_train() if kind == "graph" else cell
    cell(*inputs).asnumpy()
    return time.perf_counter() - start


def first_steps(kinds: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median seconds of first steps, each in a process of its own, by turns."""
    turns = by_turns([partial(apart, first_step_seconds, kind) for kind in kinds], rounds)
    return dict(zip(kinds, map(statistics.median, turns)))


def print_speed() -> None:
    """Measure, and print the table of speeds."""
    first = first_steps(("plain", "first"), 5) | first_steps(("graph",), 2)
    first = {kind: value / first["plain"] for kind, value in first.items()}
    settings = {"param_groups": GROUPS, "schedule": [*range(1, GROUPS), *[0] * 9999]}
    unfrozen = waiting(ours(SmallResNet(), grad_freeze=settings))
    full = paired(unfrozen, plain_step(SmallResNet()), pairs=30, steps=2, warm_up=GROUPS + 2)
    settings = {"grad_accumulation_step": WINDOW}
    accumulating = waiting(ours(SmallResNet(), grad_accumulation=settings))
    window = paired(accumulating, plain_step(SmallResNet()), pairs=24, steps=WINDOW, warm_up=WINDOW)
    rows = [
        f"first step, {GROUPS} groups | {first['first']:.2f} |  | 2.50",
        f"first step, groups chosen in the graph | {first['graph']:.2f} |  | ",
        f"unfrozen step among {GROUPS} groups | {full.shown} | 1.03",
        f"micro-step of accumulation, window {WINDOW} | {window.shown} | 1.05",
    ]
    headings = "over plain | ratio | quartiles | demanded at most"
    print_table("Speed, small ResNet, batch 32, GRAPH mode", headings, rows)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description="Measure gradient freezing.")
    parser.add_argument("--parts", nargs="+", choices=["runs", "speed"], default=["runs"])
    parser.add_argument("--seeds", type=count, default=3, help="runs of each training (default: 3)")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    if "runs" in args.parts:
        print_runs(args.seeds)
    if "speed" in args.parts:
        print_speed()


if __name__ == "__main__":
    main()
