"""THOR against tuned momentum and Adam: steps and seconds to a fixed loss, inversions, speed.

    python examples/benchmarks/thor.py                          # ill-conditioned inputs, 3 seeds
    python examples/benchmarks/thor.py --problems lenet resnet
    python examples/benchmarks/thor.py --plot thor.png          # steps as bars (matplotlib)
    python examples/benchmarks/thor.py --speed --problems       # ratio of steps, refresh, memory

Every method gets the best learning rate of its grid, found on the first seed; then all seeds run
with it. A run that does not reach the loss within ``--max-steps`` counts with that many steps and
is marked by ``>``. Seconds are without compilation. One compiled step serves all runs of a method:
its state is reset in between.
"""

from __future__ import annotations

import harness  # sets the oneDNN variable, so it comes first

# isort: split
import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import networks
import numpy as np
from mindspore import Tensor, nn, ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import digits_datasets

from mindspore_boost_ext import THOR, BoostTrainOneStepCell

DAMPING = 0.03
EVERY_STEP, TRACE_RULE = "THOR, every step", "THOR, trace rule"
Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Problem:
    """A network, its data, and when it counts as trained.

    Attributes:
        name: as it stands in the table.
        network: makes the network without its loss.
        batches: seed -> endless pairs of inputs and labels.
        target: the loss to reach.
        smoothing: share of the past in the running mean of the loss that is compared; 0 for
            full batches.
        damping: lambda for THOR, tuned by hand for the problem.
        rates: grids of learning rates: momentum, Adam, THOR.
        omega: the threshold of the trace rule.
    """

    name: str
    network: Callable[[], nn.Cell]
    batches: Batches
    target: float
    smoothing: float
    damping: float
    rates: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    omega: float


@dataclass
class Method:
    """One optimizer of the comparison."""

    name: str
    grid: tuple[float, ...]
    make: Callable[[nn.Cell], nn.Cell]


class Outcome(NamedTuple):
    """What one run came to."""

    steps: int
    seconds: float
    inversions: int
    reached: bool


@dataclass
class Result:
    """All seeds of one method on one problem."""

    method: str
    rate: float
    outcomes: list[Outcome] = field(default_factory=list)

    def mean(self, what: str) -> float:
        """Return the mean of one figure over the seeds."""
        return statistics.mean(getattr(one, what) for one in self.outcomes)

    def reached(self) -> bool:
        """Tell whether every seed reached the loss."""
        return all(one.reached for one in self.outcomes)


# ---- the problems ----


class MLP(nn.Cell):
    """Three Dense layers, 20-32-32-5, tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(
            nn.Dense(20, 32, activation="tanh"),
            nn.Dense(32, 32, activation="tanh"),
            nn.Dense(32, 5),
        )

    def construct(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.layers(x)


def ill_conditioned(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same 256 samples: rotated inputs of condition 1e2, labels from all directions."""
    generator = np.random.default_rng(seed)
    plain = generator.normal(size=(256, 20))
    scales = np.logspace(0, -2, 20)
    rotation, _ = np.linalg.qr(generator.normal(size=(20, 20)))
    inputs = (plain * scales) @ rotation
    labels = (plain @ generator.normal(size=(20, 5))).argmax(axis=1)
    batch = Tensor(inputs.astype(np.float32)), Tensor(labels.astype(np.int32))
    while True:
        yield batch


def digits(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 32 digits, shuffled by ``seed``, without end."""
    ms.set_seed(seed)
    train, _ = digits_datasets(32)
    while True:
        yield from train.create_tuple_iterator()


PROBLEMS = {
    "ill-conditioned": Problem(
        "ill-conditioned inputs",
        MLP,
        ill_conditioned,
        target=0.1,
        smoothing=0.0,
        damping=1e-3,
        rates=((0.1, 0.3, 0.5, 1.0, 2.0), (0.01, 0.03, 0.1, 0.3), (0.01, 0.03, 0.1, 0.3, 1.0)),
        omega=0.8,
    ),
    "lenet": Problem(
        "LeNet, digits",
        networks.LeNet5,
        digits,
        target=0.15,
        smoothing=0.9,
        damping=0.1,
        rates=((0.01, 0.03, 0.1), (0.001, 0.003, 0.01), (0.003, 0.01, 0.03)),
        omega=0.5,
    ),
    "resnet": Problem(
        "small ResNet, digits",
        networks.SmallResNet,
        digits,
        target=0.15,
        smoothing=0.9,
        damping=0.1,
        rates=((0.03, 0.1, 0.3), (0.001, 0.003, 0.01), (0.003, 0.01, 0.03)),
        omega=0.5,
    ),
}


def methods(problem: Problem, frequency: int) -> list[Method]:
    """Return the optimizers of the comparison."""

    def second(**settings: Any) -> Callable[[nn.Cell], nn.Cell]:
        return lambda net: THOR(net, 0.1, problem.damping, 0.9, **settings)

    first, adam, thor = problem.rates
    rule = (problem.omega, 0.0)
    return [
        Method("momentum", first, lambda net: nn.Momentum(net.trainable_params(), 0.1, 0.9)),
        Method("Adam", adam, lambda net: nn.Adam(net.trainable_params(), 0.1)),
        Method(EVERY_STEP, thor, second(frequency=1)),
        Method(f"THOR, frequency {frequency}", thor, second(frequency=frequency)),
        Method(TRACE_RULE, thor, second(frequency=1, trace_rule=rule)),
        Method("THOR, every step, pi", thor, second(frequency=1, pi_damping=True)),
    ]


# ---- training to a loss ----


class Trainer:
    """One compiled step that is reset for every run."""

    def __init__(self, problem: Problem, method: Method) -> None:
        """Build the network and its step."""
        ms.set_seed(0)
        self.problem = problem
        self.net = problem.network()
        self.optimizer = method.make(self.net)
        self.step = BoostTrainOneStepCell(networks.with_loss(self.net), self.optimizer)
        self.step.set_train()
        self.start = {one.name: one.asnumpy().copy() for one in self.step.get_parameters()}
        batch = next(problem.batches(0))
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
        batches = self.problem.batches(seed)
        mean, seconds, steps, reached = 0.0, 0.0, 0, False
        while steps < limit and not reached:
            batch = next(batches)
            started = time.perf_counter()
            loss = float(self.step(*batch).asnumpy())
            seconds += time.perf_counter() - started
            steps += 1
            share = self.problem.smoothing
            mean = share * mean + (1 - share) * loss
            reached = mean / (1 - share**steps) <= self.problem.target
            if not np.isfinite(loss):
                steps = limit
        observed = self.step.observations()
        return Outcome(steps, seconds, observed.get("thor.inversions", 0), reached)


def compare(problem: Problem, seeds: int, limit: int, frequency: int) -> list[Result]:
    """Tune every method on the first seed and run it on all.

    The trace rule wants smaller steps than fresh factors do, so its inversions are also compared
    with those of every step at the trace rule's own rate: the last row.
    """
    results, trainers = [], {}
    for method in methods(problem, frequency):
        trainer = trainers[method.name] = Trainer(problem, method)
        tried = {rate: trainer.run(rate, 0, limit) for rate in method.grid}
        best = min(tried, key=lambda rate: (not tried[rate].reached, tried[rate].steps))
        result = Result(method.name, best, [tried[best]])
        result.outcomes += [trainer.run(best, seed, limit) for seed in range(1, seeds)]
        results.append(result)
    rate = next(one.rate for one in results if one.method == TRACE_RULE)
    same = Result(f"{EVERY_STEP}, at {rate:g}", rate)
    same.outcomes = [trainers[EVERY_STEP].run(rate, seed, limit) for seed in range(seeds)]
    return [*results, same]


def print_results(problem: Problem, results: Sequence[Result]) -> None:
    """Print one table for a problem."""
    best = results[0].mean("steps")
    rows = []
    for one in results:
        mark = "" if one.reached() else ">"
        rows.append(
            (
                one.method,
                f"{one.rate:g}",
                f"{mark}{one.mean('steps'):.0f}",
                f"{one.mean('steps') / best:.2f}",
                f"{one.mean('seconds'):.2f}",
                f"{one.mean('inversions'):.0f}",
            )
        )
    headings = ("method", "learning rate", "steps", "of momentum's", "seconds", "inversions")
    title = f"{problem.name}: to a loss of {problem.target}, {len(results[0].outcomes)} seeds"
    harness.print_table(title, headings, rows)


def plot(path: Path, found: dict[str, list[Result]]) -> None:
    """Draw the steps of every method, one panel a problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(5 * len(found), 3.5), squeeze=False)
    for axis, (name, results) in zip(axes[0], found.items()):
        names = [one.method for one in results]
        axis.barh(names, [one.mean("steps") for one in results])
        for place, one in enumerate(results):
            axis.plot([run.steps for run in one.outcomes], [place] * len(one.outcomes), "k.")
        axis.set_title(name)
        axis.set_xlabel("steps to the loss (dots: seeds)")
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- speed and memory ----


def refresh_flops(optimizer: THOR, positions: Sequence[int]) -> tuple[float, float]:
    """Return the flops of a refresh: of matrix products, and of inverses.

    Products: 2·M·n² for each factor's Gram matrix and 6·n³ for the Newton step and its check;
    inverses: 2·n³.

    Args:
        optimizer: whose layers are counted.
        positions: M, the rows of the batch, for each layer.
    """
    products = inverses = 0.0
    for plan, rows in zip(optimizer.curvature.plans, positions):
        for size in (plan.a_size, plan.g_size):
            products += 2.0 * rows * size**2 + 6.0 * size**3
            inverses += 2.0 * size**3
    return products, inverses


def rows_of_layers(net: nn.Cell, optimizer: THOR, images: Tensor) -> list[int]:
    """Return for each preconditioned layer the rows of its output in one forward pass."""
    counted: dict[int, int] = {}

    def count(cell: nn.Cell, inputs: Any, output: Tensor) -> None:
        counted[id(cell)] = output.size // output.shape[1]

    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    hooks = [plan.layer.register_forward_hook(count) for plan in optimizer.curvature.plans]
    net(images)
    for hook in hooks:
        hook.remove()
    ms.set_context(mode=before)
    return [counted[id(plan.layer)] for plan in optimizer.curvature.plans]


def rate_of(run: Callable[[], Tensor], flops: float, times: int = 20) -> float:
    """Return the flops per second of an operator, as the median over ``times`` calls."""
    run().asnumpy()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run().asnumpy()
        seconds.append(time.perf_counter() - started)
    return flops / statistics.median(seconds)


def machine_rates(size: int = 256) -> tuple[float, float]:
    """Return the rates of matrix products and of inverses on this machine."""
    matrix = Tensor(np.eye(size, dtype=np.float32) + 0.01)
    product = rate_of(lambda: ops.matmul(matrix, matrix), 2.0 * size**3)
    return product, rate_of(lambda: ops.inverse(matrix), 2.0 * size**3)


def speed(pairs: int) -> None:
    """Print the cost of THOR's steps over plain momentum, and of a refresh over its flop model."""
    rows = []
    for name, network in networks.NETWORKS.items():
        batch = networks.batch()
        net = network()
        plain = nn.TrainOneStepCell(networks.with_loss(net), networks.momentum(net)).set_train()
        own = network()
        optimizer = THOR(own, 1e-3, DAMPING, 0.9, frequency=10**6)
        step = BoostTrainOneStepCell(networks.with_loss(own), optimizer).set_train()
        rows_of = rows_of_layers(own, optimizer, batch[0])
        first = _once(lambda: step(*batch))  # noqa: B023  (compiles the capturing step)
        ratio = harness.paired(lambda: step(*batch), lambda: plain(*batch), pairs)  # noqa: B023
        due = Tensor(0, ms.int32)
        refreshes = []
        for _ in range(max(pairs // 4, 3)):
            ops.assign(optimizer.next_refresh, due)
            refreshes.append(_once(lambda: step(*batch)))  # noqa: B023
        refresh = statistics.median(refreshes)
        ordinary = ratio.median * ratio.reference_ms / 1e3
        product_rate, inverse_rate = machine_rates()
        products, inverses = refresh_flops(optimizer, rows_of)
        model = products / product_rate + inverses / inverse_rate
        at_hundred = (99 * ordinary + refresh) / 100 / (ratio.reference_ms / 1e3)
        rows.append(
            (
                name,
                f"{ratio.reference_ms:.1f}",
                f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
                f"{at_hundred:.3f}",
                f"{refresh * 1e3:.1f}",
                f"{(refresh - ordinary) / model:.2f}",
                f"{memory_ratio(step, plain, optimizer):.3f}",
                f"{first:.1f}",
            )
        )
    headings = (
        *("network", "momentum, ms", "ordinary step / momentum", "mean at frequency 100"),
        *("refresh, ms", "refresh / flop model", "memory / estimate", "compilation, s"),
    )
    harness.print_table("Speed and memory of THOR, GRAPH mode", headings, rows)


def _once(run: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    run().asnumpy()
    return time.perf_counter() - started


def memory_ratio(step: nn.Cell, plain: nn.Cell, optimizer: THOR) -> float:
    """Return the bytes that THOR's step holds beyond momentum's, over the report's estimate."""

    def held(cell: nn.Cell) -> int:
        return sum(int(one.nbytes) for one in cell.get_parameters())

    return (held(step) - held(plain)) / optimizer.counts()["bytes"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=["ill-conditioned"])
    parser.add_argument("--seeds", type=int, default=3, help="runs of every method")
    parser.add_argument("--max-steps", type=int, default=1000, help="where a run gives up")
    parser.add_argument("--frequency", type=int, default=20, help="of 'THOR, frequency'")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the steps")
    parser.add_argument("--speed", action="store_true", help="also time the steps")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of the timing")
    args = parser.parse_args(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    found = {}
    for name in args.problems:
        problem = PROBLEMS[name]
        found[problem.name] = compare(problem, args.seeds, args.max_steps, args.frequency)
        print_results(problem, found[problem.name])
    if args.plot and found:
        plot(args.plot, found)
    if args.speed:
        speed(args.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
