"""THOR against tuned momentum and Adam: steps and seconds to a fixed loss, inversions.

    python examples/benchmarks/thor.py                          # ill-conditioned inputs, 3 seeds
    python examples/benchmarks/thor.py --problems settling      # what the trace rule saves
    python examples/benchmarks/thor.py --problems lenet resnet
    python examples/benchmarks/thor.py --plot thor.png          # steps as bars (matplotlib)

Every method gets the best learning rate of its grid, found on seed 3, which is in no table; then
all other seeds run with it. A run that does not reach the loss within ``--max-steps`` counts with
that many steps and is marked by ``>``. Seconds are without compilation. One compiled step serves
all runs of a method: its state is reset in between. Each row is printed when it is ready.
``thor_speed.py`` measures what a step costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import mindspore as ms
import networks
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import THOR, BoostTrainOneStepCell
from mindspore_boost_ext.bundled import digits_datasets

EVERY_STEP, TRACE_RULE = "THOR, every step", "THOR, trace rule"
TUNING_SEED = 3
Data = tuple[Iterator[tuple[Tensor, Tensor]], float]  # batches without end, the loss to reach


@dataclass(frozen=True)
class Problem:
    """A network, its data, and when it counts as trained."""

    name: str
    network: Callable[[], nn.Cell]  # without its loss
    data: Callable[[int], Data]  # for a seed
    goal: str  # the loss to reach, in words
    damping: float  # lambda for THOR, chosen before the runs
    rates: tuple[tuple[float, ...], ...]  # grids of momentum, Adam, THOR; one without is left out
    smoothing: float = 0.0  # share of the past in the running mean of the loss of small batches
    rules: tuple[tuple[float, float], ...] = ((0.5, 0.0),)  # the trace rules to try


class Method(NamedTuple):
    """One optimizer of the comparison."""

    name: str
    grid: tuple[float, ...]
    make: Callable[[nn.Cell], nn.Cell]


class Outcome(NamedTuple):
    """The result of one run."""

    steps: int
    seconds: float
    inversions: int
    reached: bool


class Result(NamedTuple):
    """All seeds of one method on one problem."""

    method: str
    rate: float
    outcomes: list[Outcome]

    def mean(self, what: str) -> float:
        """Return the mean of one figure over the seeds."""
        return statistics.mean(getattr(one, what) for one in self.outcomes)


def perceptron() -> nn.Cell:
    """Return three Dense layers, 20-32-32-5, tanh."""
    hidden = nn.Dense(20, 32, activation="tanh"), nn.Dense(32, 32, activation="tanh")
    return nn.SequentialCell(*hidden, nn.Dense(32, 5))


def again(inputs: np.ndarray, labels: np.ndarray, target: float) -> Data:
    """Return the same samples again and again."""
    batch = Tensor(inputs.astype(np.float32)), Tensor(labels.astype(np.int32))
    return itertools.repeat(batch), target


def ill_conditioned(seed: int) -> Data:
    """Return the same 256 samples: rotated inputs of condition 1e2, labels from all directions."""
    generator = np.random.default_rng(seed)
    plain = generator.normal(size=(256, 20))
    rotation, _ = np.linalg.qr(generator.normal(size=(20, 20)))
    labels = (plain @ generator.normal(size=(20, 5))).argmax(axis=1)
    return again((plain * np.logspace(0, -2, 20)) @ rotation, labels, 0.1)


def settling(seed: int) -> Data:
    """Return the same 2048 inputs of condition 1e2; labels and target are a softmax of them.

    No model can predict such labels, so losses, gradients and factors settle.
    """
    generator = np.random.default_rng(seed)
    plain = generator.normal(size=(2048, 20))
    logits = plain @ generator.normal(size=(20, 5)) / np.sqrt(20) * 2
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    rotation, _ = np.linalg.qr(generator.normal(size=(20, 20)))
    log_sum = np.log(np.exp(logits).sum(axis=1))
    loss = float((log_sum - logits[np.arange(len(labels)), labels]).mean())
    return again((plain * np.logspace(0, -2, 20)) @ rotation, labels, loss)


def digits(seed: int) -> Data:
    """Return batches of 32 digits, shuffled by ``seed``."""
    ms.set_seed(seed)
    train, _ = digits_datasets(32)
    epochs = (train.create_tuple_iterator() for _ in itertools.count())
    return itertools.chain.from_iterable(epochs), 0.15


DIGITS: dict[str, Any] = {
    "data": digits,
    "goal": "a running loss of 0.15",
    "smoothing": 0.9,
    "damping": 0.1,
}
PROBLEMS = {
    "ill-conditioned": Problem(
        "ill-conditioned inputs, perceptron",
        perceptron,
        ill_conditioned,
        goal="a loss of 0.1",
        damping=1e-3,
        rates=((0.1, 0.3, 1.0, 3.0), (0.01, 0.03, 0.1, 0.3), (0.03, 0.1, 0.3, 1.0)),
    ),
    "settling": Problem(
        "noisy labels, perceptron",
        perceptron,
        settling,
        goal="the loss of the model that made the labels",
        damping=1e-3,
        rates=((), (), (0.003,)),
        rules=((0.01, 0.0), (0.01, 0.001), (0.1, 0.0)),
    ),
    "lenet": Problem(
        "LeNet, digits",
        networks.LeNet5,
        rates=((0.01, 0.03, 0.1), (0.001, 0.003, 0.01), (0.003, 0.01, 0.03)),
        **DIGITS,
    ),
    "resnet": Problem(
        "small ResNet, digits",
        networks.SmallResNet,
        rates=((0.03, 0.1, 0.3), (0.001, 0.003, 0.01), (0.003, 0.01, 0.03)),
        **DIGITS,
    ),
}


def methods(problem: Problem) -> list[Method]:
    """Return the optimizers of the comparison."""
    first, adam, grid = problem.rates
    thor: dict[str, dict[str, Any]] = {
        EVERY_STEP: {},
        "THOR, frequency 20": {"frequency": 20},
        **{f"{TRACE_RULE} {rule}": {"trace_rule": rule} for rule in problem.rules},
        "THOR, every step, pi": {"pi_damping": True},
    }
    usual = {"learning_rate": 0.1, "damping": problem.damping, "momentum": 0.9, "frequency": 1}
    found = [
        Method("momentum", first, lambda net: networks.momentum(net, 0.1)),
        Method("Adam", adam, lambda net: nn.Adam(net.trainable_params(), 0.1)),
        *(Method(name, grid, partial(THOR, **{**usual, **one})) for name, one in thor.items()),
    ]
    return [method for method in found if method.grid]


class Trainer:
    """One compiled step that is reset for every run."""

    def __init__(self, problem: Problem, method: Method) -> None:
        ms.set_seed(0)
        self.problem = problem
        self.net = problem.network()
        self.optimizer = method.make(self.net)
        self.step = BoostTrainOneStepCell(networks.with_loss(self.net), self.optimizer)
        self.step.set_train()
        self.start = {one.name: one.asnumpy().copy() for one in self.step.get_parameters()}
        batch = next(problem.data(0)[0])
        for _ in range(2):  # compiles the capturing and the ordinary step
            self.step(*batch)
            next_refresh = getattr(self.optimizer, "next_refresh", None)
            if next_refresh is not None:
                ops.assign(next_refresh, Tensor(2**31 - 1, ms.int32))

    def reset(self, rate: float, seed: int) -> None:
        """Put everything back to its start; weights are drawn from ``seed``."""
        for one in self.step.get_parameters():
            ops.assign(one, Tensor(self.start[one.name], one.dtype))
        ops.assign(self.optimizer.learning_rate, Tensor(rate, ms.float32))
        ms.set_seed(seed)
        fresh = self.problem.network()
        for own, other in zip(self.net.trainable_params(), fresh.trainable_params()):
            ops.assign(own, Tensor(other.asnumpy().copy(), own.dtype))

    def run(self, rate: float, seed: int, limit: int) -> Outcome:
        """Train until the loss is reached, or for ``limit`` steps."""
        self.reset(rate, seed)
        batches, target = self.problem.data(seed)
        mean, seconds, steps, reached = 0.0, 0.0, 0, False
        while steps < limit and not reached:
            batch = next(batches)
            started = time.perf_counter()
            loss = float(self.step(*batch).asnumpy())
            seconds += time.perf_counter() - started
            steps += 1
            share = self.problem.smoothing
            mean = share * mean + (1 - share) * loss
            reached = mean / (1 - share**steps) <= target
            if not np.isfinite(loss):
                steps = limit
        observed = self.step.observations()
        return Outcome(steps, seconds, observed.get("thor.inversions", 0), reached)


def tuned(trainer: Trainer, grid: Sequence[float], limit: int) -> float:
    """Return the rate that reaches the loss in the fewest steps; slower runs are cut short."""
    best = grid[len(grid) // 2]
    for rate in grid if len(grid) > 1 else ():
        outcome = trainer.run(rate, TUNING_SEED, limit)
        if outcome.reached:
            best, limit = rate, outcome.steps - 1
    return best


def compare(problem: Problem, seeds: int, limit: int) -> Iterator[Result]:
    """Tune the methods and run them on all seeds.

    The trace rule needs a smaller learning rate than fresh factors. If the rates differ, the last
    row is a run that inverts in every step at the trace rule's rate, to compare inversions.
    """
    chosen = [seed for seed in range(seeds + 1) if seed != TUNING_SEED][:seeds]
    rates = {}
    for method in methods(problem):
        trainer = Trainer(problem, method)
        rate = rates[method.name] = tuned(trainer, method.grid, limit)
        yield Result(method.name, rate, [trainer.run(rate, seed, limit) for seed in chosen])
        if method.name == EVERY_STEP:
            every_step = trainer
    others = {rate for name, rate in rates.items() if name.startswith(TRACE_RULE)}
    for rate in others - {rates[EVERY_STEP]}:
        outcomes = [every_step.run(rate, seed, limit) for seed in chosen]
        yield Result(f"{EVERY_STEP}, at {rate:g}", rate, outcomes)


def print_results(problem: Problem, results: Iterable[Result], seeds: int) -> list[Result]:
    """Print one table for a problem, and return its rows."""
    found: list[Result] = []

    def rows() -> Iterator[str]:
        for one in results:
            found.append(one)
            steps = ", ".join(str(run.steps) for run in one.outcomes)
            mark = "" if all(run.reached for run in one.outcomes) else ">"
            yield (
                f"{one.method} | {one.rate:g} | {mark}{one.mean('steps'):.0f} ({steps}) | "
                f"{one.mean('steps') / found[0].mean('steps'):.2f} | "
                f"{one.mean('seconds'):.2f} | {one.mean('inversions'):.0f}"
            )

    headings = "method | learning rate | steps (seeds) | of the first | seconds | inversions"
    harness.print_table(f"{problem.name}: to {problem.goal}, {seeds} seeds", headings, rows())
    return found


def plot(path: Path, found: dict[str, list[Result]]) -> None:
    """Draw the steps of every method, one panel a problem."""
    with harness.drawn(path, len(found), height=3.5) as axes:
        for axis, (name, results) in zip(axes, found.items()):
            names = [one.method for one in results]
            axis.barh(names, [one.mean("steps") for one in results])
            for place, one in enumerate(results):
                axis.plot([run.steps for run in one.outcomes], [place] * len(one.outcomes), "k.")
            axis.set_title(name)
            axis.set_xlabel("steps to the loss (dots: seeds)")
            axis.invert_yaxis()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=["ill-conditioned"])
    parser.add_argument("--seeds", type=int, default=3, help="runs of every method")
    parser.add_argument("--max-steps", type=int, default=1000, help="where a run gives up")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    found = {}
    for name in args.problems:
        problem = PROBLEMS[name]
        results = compare(problem, args.seeds, args.max_steps)
        found[problem.name] = print_results(problem, results, args.seeds)
    if args.plot and found:
        plot(args.plot, found)


if __name__ == "__main__":
    main()
