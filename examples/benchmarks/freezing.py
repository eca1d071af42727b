"""What gradient freezing saves of a training, and what accuracy it costs.

    python examples/benchmarks/freezing.py --seeds 3

The digits, trained plainly and with four schedules that take turns step by step on the same
batches, so that a busy machine slows all alike. Time saved and accuracy lost. GRAPH mode.
``freezing_groups.py`` times the step of each group, ``freezing_speed.py`` what freezing costs.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
from harness import print_table, seconds
from mindspore import Tensor, nn
from networks import LeNet5, SmallResNet, accuracy, ours, plain

from mindspore_boost_ext.bundled import digits_datasets

GROUPS = 10  # upstream's default
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

        A step is measured by the plain step of the same turn, and counts as the median of its
        group's steps, without the first one. What that took beyond the median is compilation. A
        group that comes up only once counts as a plain step. The first plain step compiles: the
        median of the others stands in its place.
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
        """Return the times over plain's, without and with compilation, and what that took."""
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
    rates = nn.cosine_decay_lr(0.0, LEARNING_RATE, steps, steps // epochs, epochs)
    optimizer = nn.Momentum(network.trainable_params(), rates, momentum=0.9)
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
    groups: int  # that came up


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
    return {
        name: RunResult(
            accuracy(one.network, kept_back),
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
            mean = statistics.mean(one.accuracy for one in runs)
            lowest = min(one.accuracy for one in runs)
            steps = statistics.median(one.steps for one in runs)
            wall = statistics.median(one.wall for one in runs)
            compilation = statistics.median(one.compilation for one in runs)
            rows.append(
                f"{network} | {name} | {mean:.4f} | {lowest:.4f} | {mean - plain_mean:+.4f} | "
                f"{steps:.3f} | {wall:.3f} | {compilation:.0f} | "
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


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description="Measure runs with gradient freezing.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each training (default: 3)")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    print_runs(args.seeds)


if __name__ == "__main__":
    main()
