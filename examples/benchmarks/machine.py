"""What the import alone does for a script that never asks for an accelerator, on this machine.

    python examples/benchmarks/machine.py
    python examples/benchmarks/machine.py --cores 1 --rounds 3 LeNet
    python examples/benchmarks/machine.py --isa AVX2 --neighbours 1 LeNet
    python examples/benchmarks/machine.py --compiled --over-graph LeNet ResNet-20

Each run is a process of its own; plain MindSpore, and the same with ``import mindspore_boost_ext``
in front, take turns. Prints the median of the ratios (tuned over plain): of the whole training of
40 steps for the CNN script, of the median step for the others. Most train by ``ms.Model``, but the
introduction, and steps that are a function of ``ms.jit``, run in a loop of their own. Instead of
the import, ``--by-hand`` sets ``ONEDNN_MAX_CPU_ISA`` and ``launch_blocking`` in the plain process.
``--isa AVX2`` sets the first in both, so that the rest is measured alone. ``--neighbours`` starts
other processes that compute all the time, or for the share ``--load`` of it. ``--compiled``
compiles the steps of PYNATIVE_MODE by this package. ``--over-graph`` compares with the import in
GRAPH_MODE, not with plain; that runs more steps, so weights differ. With AVX-512 a plain run of the
large ResNet takes more than eight minutes: name the other tasks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from processes import apart

STEPS, BATCH, CLASSES = 40, 32, 10
COMPILED = {
    "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False, "compiled_step": True}
}


def cnn(nn: Any, pool: Callable[[], Any] | None = None) -> Any:
    """Return the network of the script: two convolutions and a classifier, 3x32x32 images."""
    pool = pool or (lambda: nn.MaxPool2d(2, 2))
    first = [nn.Conv2d(3, 16, 3), nn.ReLU(), pool()]
    second = [nn.Conv2d(16, 32, 3), nn.ReLU(), pool()]
    return nn.SequentialCell([*first, *second, nn.Flatten(), nn.Dense(2048, CLASSES)])


def pooled_by_function(nn: Any) -> Any:
    """Return the same network, which calls ``ops.max_pool2d`` in place of layers."""
    from mindspore import ops

    class Pool(nn.Cell):
        def construct(self, x: Any) -> Any:
            return ops.max_pool2d(x, 2, 2)

    return cnn(nn, Pool)


def perceptron(nn: Any) -> Any:
    """Return the network of MindSpore's introduction, for 3x32x32 images."""
    dense = [nn.Dense(3072, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, CLASSES)]
    return nn.SequentialCell([nn.Flatten(), *dense])


def lenet(nn: Any) -> Any:
    """Return LeNet-5 for 3x32x32 images."""
    first = [nn.Conv2d(3, 6, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2)]
    second = [nn.Conv2d(6, 16, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2)]
    dense = [nn.Dense(400, 120), nn.ReLU(), nn.Dense(120, 84), nn.ReLU(), nn.Dense(84, CLASSES)]
    return nn.SequentialCell([*first, *second, nn.Flatten(), *dense])


def resnet(nn: Any, width: int, blocks: Sequence[int]) -> Any:
    """Return a ResNet of basic blocks for 3x32x32 images: ResNet-20 is width 16, blocks 3, 3, 3."""

    class Block(nn.Cell):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            stride = 1 if inputs == outputs else 2
            self.branch = nn.SequentialCell(
                nn.Conv2d(inputs, outputs, 3, stride),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3),
                nn.BatchNorm2d(outputs),
            )
            self.shortcut = nn.SequentialCell(
                [nn.Conv2d(inputs, outputs, 1, stride)] if stride == 2 else []
            )
            self.relu = nn.ReLU()

        def construct(self, x: Any) -> Any:
            return self.relu(self.branch(x) + self.shortcut(x))

    class Mean(nn.Cell):
        def construct(self, x: Any) -> Any:
            return x.mean((2, 3))

    layers, inputs = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()], width
    for stage, count in enumerate(blocks):
        for _ in range(count):
            layers.append(Block(inputs, width * 2**stage))
            inputs = width * 2**stage
    return nn.SequentialCell([*layers, Mean(), nn.Dense(inputs, CLASSES)])


def encoder(nn: Any) -> Any:
    """Return a transformer that reads 3x32x32 images as 128 places: two layers of width 256."""

    class Places(nn.Cell):
        def construct(self, x: Any) -> Any:
            return x.reshape((-1, 128, 24))

    class Mean(nn.Cell):
        def construct(self, x: Any) -> Any:
            return x.mean(1)

    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    first = [Places(), nn.Dense(24, 256), nn.TransformerEncoder(layer, 2)]
    return nn.SequentialCell([*first, Mean(), nn.Dense(256, CLASSES)])


def masked(nn: Any) -> Any:
    """Return an attention over 3x32x32 images as 256 places, each of which sees those before it."""
    import mindspore as ms
    from mindspore import ops

    class Attention(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Dense(12, 192)
            self.later = ms.Tensor(np.triu(np.ones((256, 256), bool), 1))

        def construct(self, x: Any) -> Any:
            parts = self.project(x.reshape((-1, 256, 12))).reshape((-1, 256, 3, 4, 16))
            query, key, value = ops.unstack(parts.transpose((2, 0, 3, 1, 4)))
            scores = ops.matmul(query, key.swapaxes(2, 3)) / 4
            shares = ops.softmax(ops.masked_fill(scores, self.later, -1e9), -1)
            return ops.matmul(shares, value).mean(2).reshape((-1, 64))

    return nn.SequentialCell(Attention(), nn.Dense(64, CLASSES))


# Name: the network, the mode (None is MindSpore's default), what counts, and the number of steps.
# "training" counts the whole training with its start, the others the median step after the first
# three. "looped step" and "jitted step" (a function of ms.jit) run in a loop of their own.
TASKS: dict[str, tuple[Callable[[Any], Any], str | None, str, int]] = {
    "CNN script": (cnn, None, "training", STEPS),
    "CNN script in GRAPH_MODE": (cnn, "GRAPH_MODE", "training", STEPS),
    "CNN of ops.max_pool2d": (pooled_by_function, None, "step", 8),
    "CNN of ops.max_pool2d in GRAPH_MODE": (pooled_by_function, "GRAPH_MODE", "step", 8),
    "introduction": (perceptron, None, "looped step", STEPS),
    "LeNet": (lenet, None, "step", STEPS),
    "LeNet by ms.jit": (lenet, None, "jitted step", STEPS),
    "LeNet by ms.jit in GRAPH_MODE": (lenet, "GRAPH_MODE", "jitted step", STEPS),
    "ResNet-20 by ms.jit": (lambda nn: resnet(nn, 16, (3, 3, 3)), None, "jitted step", 15),
    "ResNet-20": (lambda nn: resnet(nn, 16, (3, 3, 3)), None, "step", 15),
    "ResNet-18 of width 64": (lambda nn: resnet(nn, 64, (2, 2, 2, 2)), None, "step", 6),
    "TransformerEncoder": (encoder, None, "step", 8),
    "TransformerEncoder in GRAPH_MODE": (encoder, "GRAPH_MODE", "step", 8),
    "masked attention": (masked, None, "step", 8),
    "masked attention in GRAPH_MODE": (masked, "GRAPH_MODE", "step", 8),
    "LeNet in GRAPH_MODE": (lenet, "GRAPH_MODE", "step", 200),
    "ResNet-20 in GRAPH_MODE": (lambda nn: resnet(nn, 16, (3, 3, 3)), "GRAPH_MODE", "step", 30),
}


def by_model(net: Any, loss: Any, optimizer: Any, data: Any, how: str) -> list[float]:
    """Train by ``ms.Model``; return when each step ended."""
    import mindspore as ms

    boosted = {"boost_level": "O1", "boost_config_dict": COMPILED} if how == "compiled" else {}
    model = ms.Model(net, loss, optimizer, **boosted)
    ends: list[float] = []

    def note(run_context: Any) -> None:
        run_context.original_args().net_outputs.asnumpy()  # waits for the step
        ends.append(time.perf_counter())

    model.train(1, data, callbacks=[ms.train.LambdaCallback(on_train_step_end=note)])
    return ends


def by_function(net: Any, loss: Any, optimizer: Any, data: Any, jitted: bool) -> list[float]:
    """Train in a loop whose step may be a function of ``ms.jit``; return when each step ended."""
    import mindspore as ms

    net.set_train()

    def forward(x: Any, y: Any) -> Any:
        return loss(net(x), y)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x: Any, y: Any) -> Any:
        value, found = gradients(x, y)
        optimizer(found)
        return value

    run, ends = ms.jit(step) if jitted else step, []
    for x, y in data.create_tuple_iterator():
        run(x, y).asnumpy()  # waits for the step
        ends.append(time.perf_counter())
    return ends


def one(task: str, how: str, cores: int, isa: str, script: str) -> dict[str, float]:
    """Train plainly in this process; return the seconds that count and a sum over the weights."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    for name in [name for name in os.environ if "DNN_MAX_CPU_ISA" in name]:
        del os.environ[name]  # set by the import in the process that prints the table
    if isa or how == "by hand":
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2" if how == "by hand" else isa
    import mindspore as ms
    import numpy as np
    from mindspore import nn

    if how in ("tuned", "compiled"):
        import mindspore_boost_ext  # noqa: F401
    if how == "by hand":
        ms.runtime.launch_blocking()
    network, mode, counted, steps = importlib.import_module(script).TASKS[task]
    if mode:
        ms.set_context(mode=getattr(ms, mode))
    ms.set_seed(0)
    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH * steps, 3, 32, 32)).astype(np.float32)
    labels = random.integers(0, CLASSES, BATCH * steps).astype(np.int32)
    dataset = ms.dataset.NumpySlicesDataset((images, labels), shuffle=False).batch(BATCH)
    net = network(nn)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    loss = nn.CrossEntropyLoss() if counted == "looped step" else loss
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    started = time.perf_counter()
    if counted in ("looped step", "jitted step"):
        ends = by_function(net, loss, optimizer, dataset, jitted=counted == "jitted step")
    else:
        ends = by_model(net, loss, optimizer, dataset, how)
    times = [after - before for before, after in zip(ends[2:], ends[3:])]
    seconds = ends[-1] - started if counted == "training" else statistics.median(times)
    weights = sum(float(np.abs(one.asnumpy()).sum()) for one in net.trainable_params())
    return {"seconds": seconds, "weights": weights}


def in_own_process(task: str, how: str, cores: int, isa: str, script: str) -> dict[str, float]:
    """Run ``one`` in a process that may use so many cores, with an instruction set if given."""
    try:
        return apart(one, task, how, cores, isa, script, quiet=True)
    except RuntimeError as error:
        raise SystemExit(f"{task}, {how}: {str(error)[-2000:]}") from error


# A share of each 30 ms, until the process that has started it ends, however it ends.
_COMPUTES = """import os, sys, time
parent, load = os.getppid(), float(sys.argv[1])
while os.getppid() == parent:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.03 * load:
        pass
    time.sleep(0.03 * (1 - load))
"""


@contextmanager
def neighbours(number: int, load: float) -> Iterator[None]:
    """Let other processes compute beside what is measured, for a share of the time."""
    command = [sys.executable, "-c", _COMPUTES, str(load)]
    busy = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


Run = tuple[str, str]  # a task, and how it is run


def row(candidate: Run, reference: Run, options: Any, cores: int, script: str) -> str:
    """Return a line of the table: cores, both times, ratios, and how much weights differ."""
    pairs = []
    for number in range(options.rounds):
        order = (reference, candidate) if number % 2 else (candidate, reference)
        with neighbours(options.neighbours, options.load):
            results = {run: in_own_process(*run, cores, options.isa, script) for run in order}
        pairs.append((results[reference], results[candidate]))
    ratios = [theirs["seconds"] / plain["seconds"] for plain, theirs in pairs]
    plain, theirs = (statistics.median(pair[i]["seconds"] for pair in pairs) for i in (0, 1))
    change = max(abs(b["weights"] / a["weights"] - 1) for a, b in pairs)
    spread = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f}"
    times = f"{plain * 1e3:.1f} | {theirs * 1e3:.1f}"
    return f"{cores} | {times} | {spread} | {change:.1e}"


def main(argv: Sequence[str] | None = None, script: str = "machine") -> None:
    """Run the tasks of a script and print the table."""
    known: dict[str, Any] = importlib.import_module(script).TASKS
    parser = argparse.ArgumentParser(description="What the import does for a plain script.")
    parser.add_argument("tasks", nargs="*", default=list(known), metavar="TASK")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes for each task")
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--by-hand", action="store_true", help="see above")
    how.add_argument("--compiled", action="store_true", help="a compiled step")
    parser.add_argument("--isa", default="", help="oneDNN's instruction set in both processes")
    parser.add_argument("--neighbours", type=int, default=0, help="other processes that compute")
    parser.add_argument("--load", type=float, default=1.0, help="share of the time that they do")
    parser.add_argument("--over-graph", action="store_true", help="over GRAPH_MODE, not plain")
    options = parser.parse_args(argv)
    suffix, reference = (" in GRAPH_MODE", "tuned") if options.over_graph else ("", "plain")
    unknown = sorted({*options.tasks, *(task + suffix for task in options.tasks)} - set(known))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    others = [task for task in options.tasks if known[task][1:3] != (None, "step")]
    if options.compiled and others:
        parser.error(f"--compiled takes steps of a Model in PYNATIVE_MODE, not {', '.join(others)}")
    from harness import print_table

    from mindspore_boost_ext import tune_machine

    for cure in tune_machine():
        print(f"{cure.algorithm}: {cure.status}, {cure.reason}")
    candidate = "by hand" if options.by_hand else "compiled" if options.compiled else "tuned"
    rows = (
        f"{task}, {known[task][2]} | "
        f"{row((task, candidate), (task + suffix, reference), options, cores, script)}"
        for task in options.tasks
        for cores in options.cores
    )
    other = reference + suffix
    headings = f"task | cores | {other}, ms | {candidate}, ms | ratio | range | weights differ"
    print_table(f"{candidate} over {other}, {options.rounds} rounds", headings, rows)


if __name__ == "__main__":
    main()
