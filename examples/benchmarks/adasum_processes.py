"""AdaSum between real processes: rounds to a loss, and time over a plain all-reduce.

    python examples/benchmarks/adasum_processes.py                       # both parts
    python examples/benchmarks/adasum_processes.py --parts speed --pairs 100

*rounds*: the task of ``adasum.py`` with 4 processes through ``ms.Model`` and ``msrun``. *speed*:
AdaSum of a network's parameters over a plain all-reduce of them, by paired timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from adasum import (
    CLASSES,
    COLUMNS,
    HIDDEN,
    HOW,
    RATES,
    SAMPLES,
    TARGET,
    digits,
    first_weights,
    loss_of,
    ratio,
    tuned_rate,
)
from harness import paired, print_table
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank
from networks import NETWORKS
from processes import apart

from mindspore_boost_ext import AdaSum

PROCESSES = 4


def real_rounds(how: str, rate: float, seed: int, most: int) -> int | None:
    """Train through ms.Model on this rank's samples; return the rounds to the target."""
    ms.set_context(mode=ms.GRAPH_MODE)
    images, labels = digits()
    generator = np.random.default_rng(seed)
    weights = first_weights(generator)
    net = nn.SequentialCell(nn.Dense(64, HIDDEN), nn.ReLU(), nn.Dense(HIDDEN, CLASSES))
    for parameter, value in zip(net.trainable_params(), weights):
        parameter.set_data(Tensor(np.float32(value.T)))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=how != "sum")
    switches = {"less_bn": False, "grad_freeze": False, "adasum": how == "AdaSum"}
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.SGD(net.trainable_params(), rate),
        boost_level="O2",
        boost_config_dict={"boost": {"mode": "manual", **switches}, "common": {"device_number": 1}},
    )
    for number in range(1, most + 1):
        own = generator.integers(0, len(labels), (get_group_size(), SAMPLES))[get_rank()]
        model.train_network(Tensor(np.float32(images[own])), Tensor(labels[own]))
        now = [np.float64(one.asnumpy()).T for one in net.trainable_params()]
        if loss_of(now, images, labels) < TARGET:
            return number
    return None


def real(args: argparse.Namespace) -> None:
    """Print the rounds of real processes."""
    rate = tuned_rate(RATES, args.seeds)
    found = {how: apart(real_rounds, how, rate, 0, args.most, ranks=PROCESSES) for how in HOW}
    title = f"Rounds to loss {TARGET} with {PROCESSES} processes under msrun, rate {rate:g}, seed 0"
    cells = [str(found[how] or "never") for how in HOW]
    cells.append(ratio(found["AdaSum"] or np.inf, found["average"] or np.inf))
    print_table(title, COLUMNS, [" | ".join(cells)])


def speed_of(network: str, pairs: int) -> list[str]:
    """Time AdaSum over a plain all-reduce of a network's parameters, on this rank; return rows."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ranks = get_group_size()
    parameters = NETWORKS[network]().trainable_params()
    cell = AdaSum(get_rank(), 1, ranks, parameters, equal_in_server=True)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)

    class Combine(nn.Cell):
        """A snapshot, a change, and the combination of all changes."""

        def __init__(self) -> None:
            super().__init__(auto_prefix=False)
            self.adasum = cell

        def construct(self, old: Tensor) -> Tensor:
            return self.adasum.update_since(old)[0]

    class Reduce(nn.Cell):
        """The plain all-reduce of the same tensors: one by one, or as one buffer."""

        def __init__(self, fused: bool) -> None:
            super().__init__(auto_prefix=False)
            self.fused, self.packing = fused, cell.packing
            self.parameters = ParameterTuple(parameters)
            self.all_reduce = ops.AllReduce()
            self.reducer = nn.DistributedGradReducer(parameters, True, ranks)

        def construct(self, old: Tensor) -> Tensor:
            if self.fused:
                mean = self.all_reduce(self.packing.pack(self.parameters)) / ranks
                return self.packing.write(mean, self.parameters)[0]
            total = ()
            for one in self.reducer(self.packing.unpack(old)):  # all, or the compiler drops them
                total += (one.reshape(-1)[:1],)
            return ops.concat(total)

    combine, fused, single = Combine(), Reduce(True), Reduce(False)
    old = Tensor(cell.snapshot().asnumpy() + 1)
    size = f"{sum(one.size for one in parameters)} in {len(parameters)}"
    rows = []
    for name, reference in (("one buffer", fused), ("tensor by tensor", single)):
        timed = paired(
            lambda: combine(old).asnumpy(),
            lambda reference=reference: reference(old).asnumpy(),  # type: ignore[misc]
            pairs,
        )
        ratios = f"{timed.median:.2f} | {timed.low:.2f} to {timed.high:.2f}"
        rows.append(f"{network} | {size} | {name} | {timed.reference_ms:.1f} | {ratios}")
    return rows


def speed(args: argparse.Namespace) -> None:
    """Print the time of AdaSum over that of a plain all-reduce."""
    found = [apart(speed_of, network, args.pairs, ranks=PROCESSES) for network in NETWORKS]
    print_table(
        f"AdaSum over a plain all-reduce of the same parameters, {PROCESSES} processes, GRAPH mode",
        "network | values in tensors | all-reduce | all-reduce, ms | ratio | quartiles",
        [row for rows in found for row in rows],
    )


PARTS = {"rounds": real, "speed": speed}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--seeds", type=int, default=5, help="by which the rate is tuned")
    add("--most", type=int, default=400, help="rounds after which a run has failed")
    add("--pairs", type=int, default=40)
    args = parser.parse_args(argv)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
