"""How long until plain training's final accuracy is reached and kept, compilation included?

    python examples/benchmarks/time_to_accuracy.py                       # all tasks, three seeds
    python examples/benchmarks/time_to_accuracy.py --task lenet --run fast --seeds 3 --plot race.png
    python examples/benchmarks/time_to_accuracy.py --task resnet-20 --run my_settings.json
    python examples/benchmarks/time_to_accuracy.py --task small --run fast --run plain:0.6

A file of settings may hold "STEPS" for the number of updates; an optimizer other than the task's,
with its highest rate, as in ``"optimizer": {"momentum": 0.03}`` (or ``adamw``); and
``"mixed_precision": "O2"``, float16 except normalisation. The recipe fp16 gets that, too.
``plain:0.6`` is plain training with learning rates made for 60 % of the batches: what a shorter
training gives by itself.

Every run is a process of its own on one core, with the data and the batches of its seed. The wall
time of the steps counts, compilation included; data and evaluation do not count. A run is evaluated
20 times; seconds and results are means over the seeds. The target is the final result of plain
training. It is reached at the first evaluation from which on all meet it. Prints the time to that
over plain training's whole time, the same over the time in which plain training itself reaches the
target so, and the difference of the final results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from harness import drawn, print_table, seconds
from mindspore import Tensor, nn
from networks import accuracy, wait
from processes import apart
from tasks import OPTIMIZERS, TASKS, Arrays, Task, loss_of

from mindspore_boost_ext import BoostTrainOneStepCell, recipe
from mindspore_boost_ext.cli.results import for_good
from mindspore_boost_ext.recipes import NAMES

PLAIN, EVALUATIONS, FIRST_SEED = "plain", 20, 10  # settings were tried on seeds 0 to 9
HEADINGS = (
    "task | run | to plain's final result, share of plain's whole time | "
    "over plain's own time to it | whole time | final accuracy (text: loss) | minus plain's"
)


class Course(NamedTuple):
    """What a run did: seconds of its steps up to each evaluation, and the results there."""

    seconds: list[float]
    results: list[float]

    def reaches(self, target: float, is_loss: bool) -> float | None:
        """Return the seconds after which the target was always met; None if there are none."""
        sign = -1 if is_loss else 1
        return for_good(*self, lambda value: sign * value >= sign * target)


def settings_of(run: str, task: Task) -> dict[str, Any]:
    """Return the configuration of a run: a recipe, or a file with total_steps filled in."""
    if run in NAMES:
        return recipe(run, task.steps)
    text = Path(run).read_text("utf-8") if Path(run).is_file() else run
    return json.loads(text.replace('"STEPS"', str(task.steps)))


def course_of(task: Task, run: str, seed: int) -> Course:
    """Train in this process."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(seed)
    run, _, share = run.partition(":") if run.startswith(PLAIN) else (run, "", "")
    task = replace(task, steps=round(float(share or 1) * task.steps))
    train, test = task.data()
    network, make_optimizer = task.network(), task.optimizer
    boost: dict[str, Any] = {"boost_level": "O0"}
    if run != PLAIN:
        settings = settings_of(run, task)
        level = settings.pop("mixed_precision", "O2" if run == "fp16" else "O0")
        network = ms.amp.auto_mixed_precision(network, level)
        for kind, highest in settings.pop("optimizer", {}).items():
            make_optimizer = OPTIMIZERS[kind](highest)
        boost = {"boost_level": "O1", "boost_config_dict": settings}
    optimizer = make_optimizer(network.trainable_params(), task.steps)
    model = ms.Model(network, loss_of(task), optimizer, **boost)
    step, evaluated = model.train_network.set_train(), Course([], [])
    generator, took, order = np.random.default_rng(seed), 0.0, np.empty(0, int)
    batches = task.steps
    for number in range(1, task.steps + 1):
        if len(order) < task.batch:
            order = generator.permutation(len(train[0]))
        chosen, order = order[: task.batch], order[task.batch :]
        batch = [Tensor(one[chosen]) for one in train]
        took += seconds(lambda: wait(step(*batch)))  # noqa: B023
        if number == 1:
            batches = batches_of(step, task)  # a language model's first batch may change it
        if number * EVALUATIONS // batches > (number - 1) * EVALUATIONS // batches:
            evaluated.seconds.append(took)
            evaluated.results.append(result_of(task, network, test))
            step.set_train()
        if number == batches:
            break
    print(step.report(), file=sys.stderr)
    return evaluated


def batches_of(step: nn.Cell, task: Task) -> int:
    """Return how many batches a run takes: fewer than plain training if its schedule is short."""
    if not isinstance(step, BoostTrainOneStepCell):
        return task.steps
    updates = step.report()["short_schedule"].counts.get("updates")
    return task.steps if updates is None else updates * step.window() // step.updates_per_batch


def result_of(task: Task, network: nn.Cell, test: Arrays) -> float:
    """Return the accuracy on the test data, or the loss."""
    parts = [slice(begin, begin + 64) for begin in range(0, len(test[0]), 64)]
    batches = [[Tensor(one[part]) for one in test] for part in parts]
    if not task.is_loss:
        return accuracy(network, batches)
    network.set_train(False)
    loss = loss_of(task)
    losses = [float(loss(network(inputs), labels).asnumpy()) for inputs, labels in batches]
    return float(np.average(losses, weights=[len(labels) for _, labels in batches]))


def in_own_process(task: str, run: str, seed: int, core: int) -> Course:
    """Return what a run did, in a process of its own on one core."""
    return Course(*apart(_on_core, task, run, seed, core))


def _on_core(task: str, run: str, seed: int, core: int) -> Course:
    os.sched_setaffinity(0, {core})
    return course_of(TASKS[task], run, seed)


def mean_of(courses: Sequence[Course]) -> Course:
    """Return the mean over the seeds, evaluation by evaluation."""
    seconds, results = (np.mean(part, axis=0).tolist() for part in zip(*courses))
    return Course(seconds, results)


def row_of(name: str, run: str, plain: Course, course: Course) -> str:
    """Return a row of the table: the mean course of a run against that of plain training."""
    is_loss, target, whole = TASKS[name].is_loss, plain.results[-1], plain.seconds[-1]
    own, reached = plain.reaches(target, is_loss), course.reaches(target, is_loss)
    share = "not reached" if reached is None else f"{reached / whole:.2f}"
    over = "-" if reached is None or own is None else f"{reached / own:.2f}"
    return (
        f"{name} | {run} | {share} | {over} | {course.seconds[-1] / whole:.2f} of {whole:.0f} s | "
        f"{course.results[-1]:.4f} | {course.results[-1] - target:+.4f}"
    )


def draw(path: Path, courses: dict[tuple[str, str], list[Course]]) -> None:
    """Draw the results over seconds, a panel for each task: seeds thin, their mean thick."""
    names = list(dict.fromkeys(name for name, _ in courses))
    with drawn(path, len(names), 4.2, 3.4) as panels:
        for name, panel in zip(names, panels):
            target = statistics.mean(one.results[-1] for one in courses[name, PLAIN])
            panel.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
            for number, run in enumerate(run for task, run in courses if task == name):
                for one in courses[name, run]:
                    panel.plot(*one, color=f"C{number}", linewidth=0.7, alpha=0.4)
                mean = mean_of(courses[name, run])
                panel.plot(*mean, color=f"C{number}", linewidth=1.8, label=run)
            loss = TASKS[name].is_loss
            below, above = (0.1, 1.2) if loss else (0.12, 0.015)
            panel.set(title=name, xlabel="seconds, compilation included")
            panel.set_ylabel(f"{'loss' if loss else 'accuracy'} on test data")
            panel.set_ylim(target - below, target + above)
            panel.legend(loc="best").set_in_layout(False)  # long names would squeeze the panel


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything that was asked for and print the table."""
    parser = argparse.ArgumentParser(description="Time until plain's final result is reached.")
    parser.add_argument("--task", default="", help="the beginning of a task's name")
    parser.add_argument(
        "--run", action="append", help=f"{', '.join(NAMES)}, plain:SHARE, or a JSON file"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", metavar="FILE", help="write, and go on from, all that was run")
    options = parser.parse_args(argv)
    tasks = [name for name in TASKS if name.lower().startswith(options.task.lower())]
    if not tasks:
        parser.error(f"--task: unknown {options.task!r}, known are {', '.join(TASKS)}")
    runs = [PLAIN, *(options.run or ("fast",))]
    done: dict[str, Any] = {}
    if options.json and Path(options.json).is_file():
        done = json.loads(Path(options.json).read_text("utf-8"))
    courses: dict[tuple[str, str], list[Course]] = {}

    def rows() -> Iterator[str]:
        for name in tasks:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for run in runs:
                    key = f"{name}|{run}|{seed}"
                    if key not in done:
                        done[key] = in_own_process(name, run, seed, options.core)
                        if options.json:
                            Path(options.json).write_text(json.dumps(done), "utf-8")
                    courses.setdefault((name, run), []).append(Course(*done[key]))
            for run in runs[1:]:
                yield row_of(name, run, *(mean_of(courses[name, one]) for one in (PLAIN, run)))

    print_table(f"{options.seeds} seeds from {options.first_seed} on, one core", HEADINGS, rows())
    if options.plot:
        draw(options.plot, courses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
