"""AdaSum against the mean and the sum: rounds to a loss, bytes and collectives, time.

    python examples/benchmarks/adasum.py                       # rounds and cost
    python examples/benchmarks/adasum.py --parts processes     # rounds of real processes
    python examples/benchmarks/adasum.py --parts speed --pairs 100

The task is a perceptron 64-32-10 on the bundled digits, with plain SGD and 16 samples per worker
and round. The learning rate is the one of a grid that gives ONE worker the lowest loss after one
epoch. *rounds*: rounds of N simulated workers until the loss over all digits is below the target
(the rule in float64). *cost*: bytes that a rank sends, as AdaSum counts them, over the least that
any all-reduce can send. *processes*: rounds of 4 processes by ``ms.Model`` and ``msrun``. *speed*:
AdaSum of a network's parameters over a plain all-reduce, between 4 processes, by paired timing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import mindspore as ms
import numpy as np
from harness import paired, print_table
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank
from networks import NETWORKS, Called, cross_entropy, waiting
from processes import apart

from mindspore_boost_ext.adasum import cell as module
from mindspore_boost_ext.bundled import load_digits
from mindspore_boost_ext.cli.trial_settings import only
from mindspore_boost_ext.selftest.oracle import adasum

RATES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
SAMPLES, HIDDEN, CLASSES, TARGET = 16, 32, 10, 0.35
EPOCH = 1797 // SAMPLES  # rounds of one worker
PROCESSES = 4
Weights = list[np.ndarray]


@functools.cache
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


def backward(weights: Weights, images: np.ndarray, labels: np.ndarray) -> tuple[float, Weights]:
    """Return the cross-entropy, mean over the images, and the gradients of it."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    slope, rows = powers / powers.sum(axis=1, keepdims=True), np.arange(len(labels))
    loss = float(-np.log(slope[rows, labels] + 1e-300).mean())
    slope[rows, labels] -= 1
    slope /= len(labels)
    below = slope @ weights[2].T * (hidden > 0)
    return loss, [images.T @ below, below.sum(axis=0), hidden.T @ slope, slope.sum(axis=0)]


def loss_of(weights: Weights) -> float:
    """Return the loss on all digits."""
    return backward(weights, *digits())[0]


RULES: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "average": lambda parts: sum(parts) / len(parts),
    "AdaSum": adasum,
    "sum": sum,  # type: ignore[dict-item]
}
COLUMNS = " | ".join([*RULES, "AdaSum / average"])


def train(how: str, workers: int, rate: float, seed: int) -> Iterator[Weights]:
    """Yield the weights after each round."""
    images, labels = digits()
    generator = np.random.default_rng(seed)
    weights = first_weights(generator)
    while True:
        drawn = generator.integers(0, len(labels), (workers, SAMPLES))
        parts = [backward(weights, images[one], labels[one])[1] for one in drawn]
        combined = [RULES[how](tensors) for tensors in zip(*parts)]
        weights = [one - rate * step for one, step in zip(weights, combined)]
        yield weights


def rounds_to_target(how: str, workers: int, rate: float, seed: int, most: int) -> float:
    """Return the rounds until the loss is below the target; inf if it never is."""
    with np.errstate(all="ignore"):  # a sum that diverges
        for number, weights in zip(range(1, most + 1), train(how, workers, rate, seed)):
            if loss_of(weights) < TARGET:
                return number
    return np.inf


def tuned_rate(seeds: int) -> float:
    """Return the rate that gives one worker the lowest loss after one epoch."""

    def loss(rate: float, seed: int) -> float:
        return loss_of(next(itertools.islice(train("average", 1, rate, seed), EPOCH - 1, None)))

    return min(RATES, key=lambda rate: np.mean([loss(rate, seed) for seed in range(seeds)]))


def simulated(args: argparse.Namespace) -> None:
    """Print the rounds of simulated workers."""
    rate = tuned_rate(args.seeds)

    def mean_rounds(workers: int, rate: float) -> dict[str, float]:
        seeds = range(args.seeds)
        return {
            how: np.mean([rounds_to_target(how, workers, rate, one, args.most) for one in seeds])
            for how in RULES
        }

    print_table(
        f"Rounds to loss {TARGET} at the rate tuned for one worker ({rate:g}), "
        f"mean of {args.seeds} seeds",
        f"workers | {COLUMNS}",
        (f"{workers} | {columns(mean_rounds(workers, rate))}" for workers in args.workers),
    )
    largest = max(args.workers)
    others = (f"{one} | {columns(mean_rounds(largest, one))}" for one in RATES)
    print_table(f"The same with {largest} workers at other rates", f"rate | {COLUMNS}", others)


def columns(rounds: dict[str, float]) -> str:
    """Return the rounds of each rule and their ratio; a rule may never have reached the target."""
    cells = [f"{one:.1f}" if np.isfinite(one) else "never" for one in rounds.values()]
    average = rounds["average"]
    cells.append(f"{rounds['AdaSum'] / average:.2f}" if np.isfinite(average) else "-")
    return " | ".join(cells)


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


def real_rounds(how: str, rate: float, most: int) -> int | None:
    """Train through ms.Model on this rank's samples; return the rounds to the target."""
    ms.set_context(mode=ms.GRAPH_MODE)
    images, labels = digits()
    generator = np.random.default_rng(0)
    weights = first_weights(generator)
    net = nn.SequentialCell(nn.Dense(64, HIDDEN), nn.ReLU(), nn.Dense(HIDDEN, CLASSES))
    for parameter, value in zip(net.trainable_params(), weights):
        parameter.set_data(Tensor(np.float32(value.T)))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=how != "sum")
    switches = ["adasum"] if how == "AdaSum" else []
    model = ms.Model(
        net,
        cross_entropy(),
        nn.SGD(net.trainable_params(), rate),
        boost_level="O2",
        boost_config_dict=only(*switches, common={"device_number": 1}),
    )
    for number in range(1, most + 1):
        own = generator.integers(0, len(labels), (get_group_size(), SAMPLES))[get_rank()]
        model.train_network(Tensor(np.float32(images[own])), Tensor(labels[own]))
        if loss_of([np.float64(one.asnumpy()).T for one in net.trainable_params()]) < TARGET:
            return number
    return None


def real(args: argparse.Namespace) -> None:
    """Print the rounds of real processes."""
    rate = tuned_rate(args.seeds)
    found = {
        how: apart(real_rounds, how, rate, args.most, ranks=PROCESSES) or np.inf for how in RULES
    }
    title = f"Rounds to loss {TARGET} with {PROCESSES} processes under msrun, rate {rate:g}, seed 0"
    print_table(title, COLUMNS, [columns(found)])


def speed_of(network: str, pairs: int) -> list[str]:
    """Time AdaSum over a plain all-reduce of a network's parameters, on this rank; return rows."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ranks = get_group_size()
    parameters = NETWORKS[network]().trainable_params()
    cell = module.AdaSum(get_rank(), 1, ranks, parameters, equal_in_server=True)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    packing, weights, all_reduce = cell.packing, ParameterTuple(parameters), ops.AllReduce()
    reducer = nn.DistributedGradReducer(parameters, True, ranks)

    def combined(old: Tensor) -> Tensor:
        return cell.update_since(old)[0]

    def one_buffer(old: Tensor) -> Tensor:
        return packing.write(all_reduce(packing.pack(weights)) / ranks, weights)[0]

    def tensor_by_tensor(old: Tensor) -> Tensor:
        total = ()
        for one in reducer(packing.unpack(old)):  # all, or the compiler drops them
            total += (one.reshape(-1)[:1],)
        return ops.concat(total)

    old = Tensor(cell.snapshot().asnumpy() + 1)
    ours, *others = (
        waiting(Called(one), [old]) for one in (combined, one_buffer, tensor_by_tensor)
    )
    size = f"{sum(one.size for one in parameters)} in {len(parameters)}"
    return [
        f"{network} | {size} | {name} | {paired(ours, other, pairs).row}"
        for name, other in zip(("one buffer", "tensor by tensor"), others)
    ]


def speed(args: argparse.Namespace) -> None:
    """Print the time of AdaSum over that of a plain all-reduce."""
    found = [apart(speed_of, network, args.pairs, ranks=PROCESSES) for network in NETWORKS]
    print_table(
        f"AdaSum over a plain all-reduce of the same parameters, {PROCESSES} processes, GRAPH mode",
        "network | values in tensors | all-reduce | all-reduce, ms | ratio | quartiles",
        [row for rows in found for row in rows],
    )


PARTS = {"rounds": simulated, "cost": cost, "processes": real, "speed": speed}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["rounds", "cost"])
    add("--workers", nargs="+", type=int, default=[2, 4, 8], help="simulated; powers of two")
    add("--seeds", type=int, default=5, help="of the rounds; by which the rate is tuned")
    add("--most", type=int, default=400, help="rounds after which a run has failed")
    add("--pairs", type=int, default=40, help="of the speed")
    args = parser.parse_args(argv)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
