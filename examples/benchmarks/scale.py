"""What a step costs on 8 to 4,096 workers, on paper, with constants measured on 2, 4 and 8.

    python examples/benchmarks/scale.py                 # measures, checks, prints: 3 minutes
    python examples/benchmarks/scale.py --assume 5 12.5 100   # us, GB/s, TFLOP/s of a cluster

*Measured*: AllReduce and AllGather of MindSpore between processes of this machine. The model of a
collective is ``latency * messages + bytes / bandwidth``, in a ring; processes that share a core
take turns. The constants are fitted to two counts of processes, and checked on the third. The Cell
AdaSum, with a server for each process, is checked so, too: its collectives need these constants,
and each byte that a rank combines a time, which the same two counts give.

*On paper*: a step of ResNet-50 (batch 32 per worker) and of a transformer with 7 billion weights
(2,048 tokens per worker) is its arithmetic plus its collectives, one after the other. AdaSum has
servers of 8 devices, and sends pieces as Ascend does. It saves time if it needs at most the printed
share of the rounds that the mean needs (``adasum.py`` counts rounds). Accumulation sends once in
four batches; "gain" is the plain time for a batch over that with accumulation.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import mindspore as ms
import numpy as np
from harness import print_table, seconds_of
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.communication import get_group_size, get_rank
from networks import Called, waiting
from processes import apart

from mindspore_boost_ext import AdaSum

COUNTS = (2, 4, 8)
# Bytes of a float32 buffer; MindSpore's AllGather on CPU has failed at 16 MiB.
SIZES = tuple(4 * 2**power for power in (8, 12, 16, 18, 20))
ADASUM, ADASUM_SIZES = "AdaSum", SIZES[-2:]  # smaller ones are gathered whole, and combined alike
WORKERS = (8, 16, 64, 256, 1024, 4096)
DEVICES, WINDOW = 8, 4
REPEATS = 15

Need = tuple[float, float]  # messages and bytes of a collective, in a ring


class Machine(NamedTuple):
    """The constants of a step's time: seconds per message, bytes and operations per second."""

    latency: float
    bandwidth: float
    speed: float = 0.0

    def seconds(self, need: Need) -> float:
        """Return the seconds of a collective: messages one after the other, and bytes."""
        messages, sent = need
        return messages * self.latency + sent / self.bandwidth


def all_reduce(workers: int, size: float) -> Need:
    """Return what an AllReduce of ``size`` bytes needs."""
    return 2 * (workers - 1), 2 * size * (workers - 1) / workers


def all_gather(workers: int, size: float) -> Need:
    """Return what an AllGather of ``size`` bytes of every worker needs."""
    return workers - 1, size * (workers - 1)


class Model(NamedTuple):
    """What is trained: weights, tensors, operations of a batch on a worker."""

    name: str
    weights: float
    tensors: int
    operations: float


# Forward and backward; 4.1e9 multiply-adds per image (He et al., 2016), 6 operations per weight and
# token (Kaplan et al., 2020).
MODELS = (
    Model("ResNet-50", 25.6e6, 161, 3 * 2 * 4.1e9 * 32),
    Model("7 billion", 7e9, 291, 6 * 7e9 * 2048),
)


def adasum(machine: Machine, model: Model, workers: int) -> float:
    """Return the seconds of AdaSum: mean in a server, swaps of halves, sums, the last gather."""
    size, servers = 4 * model.weights, workers // DEVICES
    levels = round(math.log2(servers))
    sums = 4 * (model.tensors + 1) * 6  # two squares and a product of each tensor, and scales
    swapped = size / DEVICES * (1 - 1 / servers)
    return (
        machine.seconds(all_reduce(DEVICES, size))
        + machine.seconds((levels, swapped))
        + levels * machine.seconds(all_gather(workers, sums))
        + machine.seconds(all_gather(workers, size / workers))
    )


def table(title: str, machine: Machine) -> None:
    """Print a step's time for every model and number of workers."""
    rows = []
    for model in MODELS:
        work, size = model.operations / machine.speed, 4 * model.weights
        for workers in WORKERS:
            sent = machine.seconds(all_reduce(workers, size))
            plain, windowed = work + sent, work + sent / WINDOW
            share = "-"
            if workers > DEVICES:
                share = f"{plain / (work + adasum(machine, model, workers)):.2f}"
            step = f"{plain:.3g} | {sent / plain:.2f} | {plain / windowed:.2f}"
            rows.append(f"{model.name} | {workers} | {step} | {share}")
    print_table(
        f"{title}: {machine.latency * 1e6:.3g} us, {machine.bandwidth / 1e9:.3g} GB/s, "
        f"{machine.speed / 1e12:.3g} TFLOP/s a worker",
        f"network | workers | plain step, s | of it AllReduce | accumulation of {WINDOW}: gain | "
        "AdaSum pays up to, of the mean's rounds",
        rows,
    )


def measured() -> list[tuple[str, int, float]]:
    """Return operator, bytes and median seconds of every collective, on this rank."""
    ms.set_context(mode=ms.GRAPH_MODE)

    def timed(size: int, function: Callable[..., Tensor], inputs: int = 1) -> float:
        ones = [Tensor(np.ones(size // 4, np.float32)) for _ in range(inputs)]
        return seconds_of(waiting(Called(function), ones), REPEATS, warm_up=3)

    operators = {"AllReduce": ops.AllReduce(), "AllGather": ops.AllGather()}
    found = [(name, size, timed(size, operators[name])) for name in operators for size in SIZES]
    for size in ADASUM_SIZES:
        weights = ParameterTuple([Parameter(np.ones(size // 4, np.float32), name="weight")])
        adasum = AdaSum(get_rank(), 1, get_group_size(), weights)

        def combined(step: Tensor, old: Tensor) -> Tensor:
            return adasum((step,), weights, (old,))[0]  # noqa: B023

        found.append((ADASUM, size, timed(size, combined, inputs=2)))
    return found


Found = list[tuple[str, int, int, float]]  # operator, processes, bytes, seconds


def turns_of(count: int) -> float:
    """Return how many processes share a core here."""
    return max(1.0, count / (os.cpu_count() or 1))


def needs(name: str, count: int, size: int) -> Need:
    """Return what a collective needs here, where processes take turns on a core."""
    if name == ADASUM:  # on CPU a swap is an AllReduce of twice the piece between two
        levels = round(math.log2(count))
        messages = levels * (2 + count - 1) + count - 1  # swaps, sums, the last gather
        swapped = sum(2 * size / 2**level for level in range(1, levels + 1))
        sent = swapped + size * (count - 1) / count
    else:
        messages, sent = (all_reduce if name == "AllReduce" else all_gather)(count, size)
    return messages * turns_of(count), sent * turns_of(count)


def bytes_combined(count: int, size: int) -> float:
    """Return the bytes that AdaSum goes over on a rank: the buffer, its half, its quarter ..."""
    levels = round(math.log2(count))
    return turns_of(count) * sum(size / 2**level for level in range(levels + 1))


def fitted(found: Found) -> Machine:
    """Return latency and bandwidth: the least squares of relative errors."""
    rows = [np.array(needs(*run)) / seconds for *run, seconds in found if run[0] != ADASUM]
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return Machine(float(latency), float(1 / per_byte))


def combining_rate(found: Found, machine: Machine) -> float:
    """Return the seconds that AdaSum needs for a byte, beside those of its collectives."""
    rates = [
        (seconds - machine.seconds(needs(name, count, size))) / bytes_combined(count, size)
        for name, count, size, seconds in found
        if name == ADASUM
    ]
    return float(np.mean(rates))


def speed_here() -> float:
    """Return the operations a second of a matrix product on this machine."""
    one = Tensor(np.ones((1024, 1024), np.float32), ms.float32)
    return 2 * 1024**3 / seconds_of(lambda: ops.matmul(one, one).asnumpy(), 20)


def check() -> Machine:
    """Measure, print the model beside what was measured, and return the constants of all."""
    found = [
        (name, count, size, seconds)
        for count in COUNTS
        for name, size, seconds in apart(measured, ranks=count)
    ]
    rows = []
    for name, count, size, seconds in found:
        others = [one for one in found if one[1] != count]
        machine = fitted(others)
        model = machine.seconds(needs(name, count, size))
        if name == ADASUM:
            model += bytes_combined(count, size) * combining_rate(others, machine)
        figures = f"{seconds * 1e3:.3f} | {model * 1e3:.3f} | {model / seconds:.2f}"
        rows.append(f"{count} | {name} | {size} | {figures}")
    headings = "processes | collective | bytes | measured, ms | model, ms | model / measured"
    print_table("Collectives here; the model knows the other two counts alone", headings, rows)
    return fitted(found)._replace(speed=speed_here())


def main() -> None:
    """Measure and print, or print for an assumed cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--assume",
        nargs=3,
        type=float,
        metavar=("LATENCY_US", "GB_PER_S", "TFLOP_PER_S"),
        help="of one worker; measures nothing",
    )
    args = parser.parse_args()
    if args.assume:
        latency, bandwidth, speed = args.assume
        table("Assumed", Machine(latency * 1e-6, bandwidth * 1e9, speed * 1e12))
    else:
        table("With what was measured here", check())


if __name__ == "__main__":
    main()
