"""AdaSum against the mean and the sum: rounds to a loss, bytes and collectives.

    python examples/benchmarks/adasum.py                       # both parts
    python examples/benchmarks/adasum.py --parts rounds        # simulated workers, NumPy only
    python examples/benchmarks/adasum.py --plot rounds.png     # needs matplotlib

The task is a perceptron 64-32-10 on the bundled digits, 16 samples a worker and round, plain SGD.
The learning rate is the one of a grid that gives ONE worker the lowest loss after one epoch.
*rounds*: until the loss over all digits is below the target, for N simulated workers (the rule in
float64). *cost*: what a rank sends, by AdaSum's own account, over the least that any all-reduce can
send. Real processes are in ``adasum_processes.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
from harness import drawn, print_table
from networks import NETWORKS

from mindspore_boost_ext.adasum import cell as module
from mindspore_boost_ext.bundled import load_digits
from mindspore_boost_ext.selftest.oracle import adasum

RATES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
SAMPLES, HIDDEN, CLASSES, TARGET = 16, 32, 10, 0.35
Weights = list[np.ndarray]


# ---- The task, in NumPy ----


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return centred images float64 ``[1797, 64]`` and labels int32 ``[1797]``."""
    bundled = load_digits()
    images, labels = bundled.images.reshape(-1, 64) / 16, bundled.labels
    return images - images.mean(axis=0), labels.astype(np.int32)


def first_weights(generator: np.random.Generator) -> Weights:
    """Return the weights and biases of the perceptron before training."""
    return [
        generator.normal(size=(64, HIDDEN)) * np.sqrt(2 / 64),
        np.zeros(HIDDEN),
        generator.normal(size=(HIDDEN, CLASSES)) * np.sqrt(1 / HIDDEN),
        np.zeros(CLASSES),
    ]


def forward(weights: Weights, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden values and the probabilities of the classes."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def loss_of(weights: Weights, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the cross-entropy, mean over the images."""
    _, chances = forward(weights, images)
    return float(-np.log(chances[np.arange(len(labels)), labels] + 1e-300).mean())


def gradients(weights: Weights, images: np.ndarray, labels: np.ndarray) -> Weights:
    """Return the gradients of :func:`loss_of`."""
    hidden, slope = forward(weights, images)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= len(labels)
    below = slope @ weights[2].T * (hidden > 0)
    return [images.T @ below, below.sum(axis=0), hidden.T @ slope, slope.sum(axis=0)]


RULES: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "average": lambda parts: sum(parts) / len(parts),
    "AdaSum": adasum,
    "sum": sum,  # type: ignore[dict-item]
}
HOW = tuple(RULES)
COLUMNS = " | ".join([*HOW, "AdaSum / average"])


def train(how: str, workers: int, rate: float, seed: int) -> Iterator[Weights]:
    """Yield the weights after each round."""
    images, labels = digits()
    generator = np.random.default_rng(seed)
    weights = first_weights(generator)
    while True:
        drawn = generator.integers(0, len(labels), (workers, SAMPLES))
        parts = [gradients(weights, images[one], labels[one]) for one in drawn]
        combined = [RULES[how](tensors) for tensors in zip(*parts)]
        weights = [one - rate * step for one, step in zip(weights, combined)]
        yield weights


def rounds_to_target(how: str, workers: int, rate: float, seed: int, most: int) -> float:
    """Return the rounds until the loss is below the target; inf if it never is."""
    images, labels = digits()
    with np.errstate(all="ignore"):  # a sum that diverges
        for number, weights in zip(range(1, most + 1), train(how, workers, rate, seed)):
            if loss_of(weights, images, labels) < TARGET:
                return number
    return np.inf


def tuned_rate(rates: Sequence[float], seeds: int, rounds: int = 112) -> float:
    """Return the rate that gives one worker the lowest loss after one epoch."""
    images, labels = digits()

    def loss(rate: float, seed: int) -> float:
        *_, (_, weights) = zip(range(rounds), train("average", 1, rate, seed))
        return loss_of(weights, images, labels)

    return min(rates, key=lambda rate: np.mean([loss(rate, seed) for seed in range(seeds)]))


def simulated(args: argparse.Namespace) -> None:
    """Print the rounds of simulated workers; draw them if asked."""
    rate = tuned_rate(RATES, args.seeds)

    def mean_rounds(workers: int, rate: float) -> dict[str, float]:
        seeds = range(args.seeds)
        return {
            how: np.mean([rounds_to_target(how, workers, rate, one, args.most) for one in seeds])
            for how in HOW
        }

    table = {workers: mean_rounds(workers, rate) for workers in args.workers}
    print_table(
        f"Rounds to loss {TARGET} at the rate tuned for one worker ({rate:g}), "
        f"mean of {args.seeds} seeds",
        f"workers | {COLUMNS}",
        (_row(workers, rounds) for workers, rounds in table.items()),
    )
    largest = max(args.workers)
    others = (_row(one, mean_rounds(largest, one)) for one in RATES)
    print_table(f"The same with {largest} workers at other rates", f"rate | {COLUMNS}", others)
    if args.plot:
        draw(args.plot, table)


def _row(first: float, rounds: dict[str, float]) -> str:
    cells = [f"{one:.1f}" if np.isfinite(one) else "never" for one in rounds.values()]
    return " | ".join([str(first), *cells, ratio(rounds["AdaSum"], rounds["average"])])


def ratio(value: float, reference: float) -> str:
    """Return a ratio in words, of what may never have been reached."""
    return f"{value / reference:.2f}" if np.isfinite(reference) else "-"


def draw(path: Path, table: dict[int, dict[str, float]]) -> None:
    """Draw rounds over workers."""
    with drawn(path, width=6) as (axes,):
        for how in HOW:
            axes.plot([*table], [rounds[how] for rounds in table.values()], marker="o", label=how)
        axes.set(xlabel="workers", ylabel=f"rounds to loss {TARGET}", xscale="log", ylim=(0, None))
        axes.set_xticks([*table], [str(one) for one in table])
        axes.legend()


def cost(_: argparse.Namespace) -> None:
    """Print bytes and collectives of a step for several clusters, without starting any."""
    parameters = NETWORKS["small ResNet"]().trainable_params()
    values, rows = sum(one.size for one in parameters), []
    gathered = ((2, 1, module.GATHERED_BYTES), (4, 1, module.GATHERED_BYTES))
    halved = ((2, 1, 0), (3, 1, 0), (4, 1, 0), (8, 1, 0), (8, 2, 0), (16, 8, 0))
    for ranks, devices, limit in (*gathered, *halved):
        with (
            mock.patch.object(module, "rank_count", return_value=ranks),
            mock.patch.object(module, "make_swap", return_value=None),
            mock.patch.object(module, "GATHERED_BYTES", limit),
        ):
            cell = module.AdaSum(0, devices, ranks // devices, parameters, equal_in_server=True)
        sent = cell.bytes_sent()
        on_cpu, least = sum(sent.values()), 8 * values * (ranks - 1) / ranks
        elsewhere = on_cpu - sent["swaps"] // 2
        steps = "gathered" if cell.gathers else "halved"
        shares = f"{on_cpu / least:.2f} | {elsewhere / least:.2f}"
        counts = f"{cell.collectives()} | {on_cpu} | {elsewhere}"
        rows.append(f"{ranks} | {devices} | {steps} | {counts} | {shares}")
    print_table(
        f"What AdaSum sends on rank 0 a step, {values} parameters in {len(parameters)} tensors "
        "(the reduction of gradients inside a server comes on top)",
        "ranks | device_number | steps are | collectives | bytes (CPU) | bytes (Send/Receive)"
        " | over the least (CPU) | over the least (Send/Receive)",
        rows,
    )


PARTS = {"rounds": simulated, "cost": cost}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--workers", nargs="+", type=int, default=[2, 4, 8], help="simulated; powers of two")
    add("--seeds", type=int, default=5)
    add("--most", type=int, default=400, help="rounds after which a run has failed")
    add("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
