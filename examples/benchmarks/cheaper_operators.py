"""What cheaper operators save: each alone, forward and backward, and in a training step.

    taskset -c 0 python examples/benchmarks/cheaper_operators.py
    taskset -c 0 python examples/benchmarks/cheaper_operators.py --only clip_by_global_norm
    taskset -c 0 python examples/benchmarks/cheaper_operators.py --mode PYNATIVE --pairs 10
    taskset -c 0 python examples/benchmarks/cheaper_operators.py --only none --mindcv swin_tiny
    python examples/benchmarks/cheaper_operators.py --only none --mindcv swinv2_tiny_window8 \
        --size 256 --pairs 2
    python examples/benchmarks/cheaper_operators.py --only "step of transformer" --memory O1

Both kinds take turns in one process. Prints medians of the ratios, and MindSpore's own time; also
for ``clip_by_global_norm``, which the import replaces, alone on gradients of a network's shapes.
With ``--memory`` it prints how much steps at level O1 (cheaper operators) or O0 (MindSpore's own)
add to the process's peak memory; run it once for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from harness import MODES, added_mib, paired, print_table
from mindspore import Parameter, Tensor, nn, ops
from networks import Called, Step, batch, cross_entropy, resnet18
from tasks import TASKS, Task, Transformer, loss_of

from mindspore_boost_ext import make_train_step
from mindspore_boost_ext.cli.trial_settings import only
from mindspore_boost_ext.runtime import clipping

ON = only("cheaper_operators")
HIDDEN, SCORES, IMAGES, ROWS = (16, 128, 512), (16, 4, 128, 128), (32, 6, 28, 28), (64, 512)
HARDLY = functools.partial(nn.SGD, learning_rate=1e-6)  # changes weights that are inputs
MAPS = (16, 32, 28, 28)
SEQUENCES = (32, 32, 64)  # steps, samples, features
LOSSES = {"nn.CrossEntropyLoss, 32x10": (32, 10), "nn.CrossEntropyLoss, 512x8000": (512, 8000)}

OPERATORS: dict[str, tuple[Callable[[], nn.Cell | ops.Primitive], tuple[int, ...]]] = {
    "nn.GELU": (nn.GELU, HIDDEN),
    "nn.LayerNorm": (lambda: nn.LayerNorm((HIDDEN[-1],)), HIDDEN),
    "nn.Softmax": (nn.Softmax, SCORES),
    "nn.LogSoftmax": (nn.LogSoftmax, HIDDEN),
    "nn.LeakyReLU": (nn.LeakyReLU, HIDDEN),
    "nn.ELU": (nn.ELU, HIDDEN),
    "nn.CELU": (nn.CELU, HIDDEN),
    "nn.SeLU": (nn.SeLU, HIDDEN),
    "nn.GroupNorm": (lambda: nn.GroupNorm(8, MAPS[1]), MAPS),
    "nn.BatchNorm1d": (lambda: nn.BatchNorm1d(ROWS[-1]), ROWS),
    "ops.L2Normalize(1)": (lambda: ops.L2Normalize(1), ROWS),
    "nn.MaxPool2d(2, 2)": (lambda: nn.MaxPool2d(2, 2), IMAGES),
    "nn.Pad": (lambda: nn.Pad(((0, 0), (0, 0), (1, 1), (1, 1))), MAPS),
    "nn.GRU(64, 128)": (lambda: nn.GRU(64, 128), SEQUENCES),
    "nn.GRU of two layers, both ways": (lambda: nn.GRU(64, 64, 2, bidirectional=True), SEQUENCES),
    "nn.RNN(64, 128)": (lambda: nn.RNN(64, 128), SEQUENCES),
}


class One(nn.Cell):
    """A layer whose inputs are weights, so that a step goes through it forward and backward."""

    def __init__(self, layer: nn.Cell | ops.Primitive, shape: tuple[int, ...]) -> None:
        super().__init__()
        values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        self.layer, self.values = layer, Parameter(values, name="values")

    def construct(self, factor: Tensor) -> Tensor:
        """Return the outputs of the layer, times the factor; of a recurrent one all its states."""
        outputs = self.layer(self.values)
        return (outputs[0] if isinstance(outputs, tuple) else outputs) * factor


def total(outputs: Tensor, factor: Tensor) -> Tensor:
    """Return the sum of all outputs as the loss, shape ()."""
    return (outputs * factor).sum()


Steps = tuple[Step, Step]


def steps(
    network: Callable[[], nn.Cell],
    loss: Callable[[], nn.Cell],
    optimizer: Callable[[list[Parameter]], nn.Cell],
    inputs: Sequence[Tensor],
) -> Steps:
    """Return a step with cheaper operators, and one with MindSpore's."""

    def one(level: str) -> Step:
        net = network()
        config = ON if level == "O1" else None
        made = optimizer(net.trainable_params())
        step = make_train_step(net, loss(), made, level=level, config=config)
        return lambda: step(*inputs).asnumpy()

    return one("O1"), one("O0")


def operator(name: str) -> Steps:
    """Return the two steps of one operator."""
    layer, shape = OPERATORS[name]
    inputs = [Tensor(1.0, ms.float32), Tensor(1.0, ms.float32)]
    return steps(lambda: One(layer(), shape), lambda: Called(total), HARDLY, inputs)


def of_loss(name: str) -> Steps:
    """Return the two steps of a loss on rows of logits; the rows are weights."""
    rows, classes = LOSSES[name]
    inputs = [Tensor(1.0, ms.float32), Tensor(np.arange(rows) % classes, ms.int32)]
    return steps(lambda: One(nn.Identity(), (rows, classes)), nn.CrossEntropyLoss, HARDLY, inputs)


def of_clipping(network: Callable[[], nn.Cell]) -> Steps:
    """Return this package's clipping and MindSpore's, of gradients of a network's shapes."""
    random, weights = np.random.default_rng(0), network().trainable_params()
    gradients = [Tensor(random.normal(size=one.shape), ms.float32) for one in weights]

    def one(function: Callable[..., Sequence[Tensor]]) -> Step:
        def clipped(*gradients: Tensor) -> Sequence[Tensor]:
            return function(gradients, 1.0)

        cell = Called(clipped)
        return lambda: cell(*gradients)[-1].asnumpy()

    return one(clipping.clip_by_global_norm), one(clipping.ORIGINAL)


class ByFunction(nn.Cell):
    """Calls a function that the transformer otherwise has as a layer."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.softmax = softmax

    def construct(self, x: Tensor) -> Tensor:
        """Return what the layer does, of the shape of ``x``."""
        return ops.softmax(x) if self.softmax else ops.gelu(x, approximate="tanh")


def of_functions() -> nn.Cell:
    """Return the transformer with calls of functions in place of some layers."""
    net = Transformer()
    for layer in net.layers:
        layer.gelu, layer.softmax = ByFunction(softmax=False), ByFunction(softmax=True)
    return net


def training(task: Task) -> Steps:
    """Return the two steps of a task."""
    train, _ = task.data()
    inputs = [Tensor(one[: task.batch]) for one in train]
    return steps(
        task.network,
        lambda: loss_of(task),
        lambda parameters: task.optimizer(parameters, task.steps),
        inputs,
    )


def of_mindcv(name: str, size: int) -> Steps:
    """Return the two steps of a network of MindCV, on four images of noise."""
    import mindcv

    return steps(
        lambda: mindcv.create_model(name, num_classes=10),
        cross_entropy,
        lambda parameters: nn.Momentum(parameters, 1e-4, 0.9),
        batch(4, shape=(3, size, size)),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Cheaper operators, alone and in a step.")
    parser.add_argument("--mode", default="GRAPH", choices=list(MODES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="the beginning of a name")
    parser.add_argument("--mindcv", nargs="*", default=[], help="networks of MindCV, too")
    parser.add_argument("--size", type=int, default=224, help="of the images of these")
    parser.add_argument("--memory", choices=["O0", "O1"], help="MiB in place of milliseconds")
    options = parser.parse_args()
    ms.set_context(mode=MODES[options.mode])
    made = {name: (operator, name) for name in OPERATORS}
    made |= {name: (of_loss, name) for name in LOSSES}
    tasks = {name: task for name, task in TASKS.items() if "ResNet" not in name}
    text = TASKS["transformer, text"]
    tasks["a transformer of functions"] = dataclasses.replace(text, network=of_functions)
    made |= {f"step of {name}": (training, task) for name, task in tasks.items()}
    clipped = {"LeNet": tasks["LeNet, digits"].network, "transformer": text.network}
    clipped["ResNet-18"] = resnet18
    functions = {f"clip_by_global_norm, {one}": (of_clipping, net) for one, net in clipped.items()}
    # Functions that the import replaces are measured only if they are named.
    made |= functions if options.only else {}
    made = {title: one for title, one in made.items() if title.startswith(options.only)}
    sized = functools.partial(of_mindcv, size=options.size)
    made |= {f"step of {name}": (sized, name) for name in options.mindcv}

    if options.memory:
        for title, (make, name) in made.items():
            step = make(name)[options.memory == "O0"]
            print(f"{title}, {options.memory}: {added_mib(step):.0f} MiB")
        return

    rows = (
        f"{title} | {paired(*make(name), options.pairs, steps=3, warm_up=2).row}"
        for title, (make, name) in made.items()
    )
    headings = "what | MindSpore's own, ms | ratio | quartiles"
    print_table(f"Cheaper operators, {options.mode}_MODE", headings, rows)


if __name__ == "__main__":
    main()
