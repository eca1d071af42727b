"""What loss scales save: one fixed, one dynamic, one for each group of layers.

    python examples/benchmarks/loss_scaling.py --seeds 3

``step_cost.py`` measures the time of their steps.

**Four layers**: float16 layers whose gradients span 1e-10 to 1. By scheme and layer:
the share of exact zeros in the gradient that leaves the backward pass, and its relative error in
the 2-norm. The oracle is the chain rule in float64 on the same numbers::

    x_l = max(x_(l-1) W_l + b_l, 0),  loss = mean over the batch of |x_4 - t|^2 / 2
    e_4 = (x_4 - t) / batch,  d_l = e_l where x_l > 0 else 0,  e_(l-1) = d_l W_l^T
    gradient of W_l = x_(l-1)^T d_l

The gradients come out of BoostTrainOneStepWithLossScaleCell through an optimizer that only records
them, so the weights stay as they are. If a step overflows and is skipped, the gradients of its
backward pass are shown. The dynamic scale (from 2^10, window 5) and the scales of the groups (from
2^10, growth 2^(1/8)) run until each has shrunk once and a step is clean.

**LeNet on the digits**: test accuracy after training in float16 (amp level O3) and
in float32. Demanded: within 0.005 with the dynamic and with the grouped scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from harness import print_table
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from networks import BATCH_SIZE, LeNet5, cross_entropy, falling, marked

from mindspore_boost_ext import BoostTrainOneStepWithLossScaleCell, GroupLossScaleManager
from mindspore_boost_ext.bundled import digits_datasets
from mindspore_boost_ext.cli.compare import count
from mindspore_boost_ext.cli.trial_settings import only

LAYERS, WIDTH, BATCH = 4, 64, 256
GAIN = 1e-3  # from one layer's gradient to the next lower one's
SETTLING_STEPS = 2000
EPOCHS = 20  # as in examples/lenet.py


class Case(NamedTuple):
    """The numbers of the four-layer case; all of them are float16 numbers, held in float32."""

    weights: list[np.ndarray]  # [WIDTH, WIDTH] for each layer
    biases: list[np.ndarray]  # [WIDTH] for each layer
    inputs: np.ndarray  # [BATCH, WIDTH]
    targets: np.ndarray  # [BATCH, WIDTH]


def four_layer_case() -> Case:
    """Return the weights and the data: weights small, so that gradients shrink from layer to layer.

    The biases keep the activations between 0.5 and 0.9 nevertheless, and every ReLU open.
    """
    draw, deviation = np.random.default_rng(0), GAIN / WIDTH**0.5
    weights = [_half(draw.normal(0, deviation, (WIDTH, WIDTH))) for _ in range(LAYERS)]
    biases = [_half(draw.uniform(0.5, 0.9, WIDTH)) for _ in range(LAYERS)]
    inputs = _half(draw.normal(0, 1, (BATCH, WIDTH)))
    return Case(weights, biases, inputs, _half(draw.normal(0, 0.3, (BATCH, WIDTH))))


def _half(values: np.ndarray) -> np.ndarray:
    """Return the values rounded to float16, in float32: both sides start from the same numbers."""
    return values.astype(np.float16).astype(np.float32)


def oracle(case: Case) -> list[np.ndarray]:
    """Return the gradient of each layer's weights in float64, by the formula above."""
    weights = [weight.astype(np.float64) for weight in case.weights]
    outputs = [case.inputs.astype(np.float64)]
    for weight, bias in zip(weights, case.biases):
        outputs.append(np.maximum(outputs[-1] @ weight + bias, 0))
    delta = (outputs[-1] - case.targets) / len(case.inputs)
    gradients = []
    for layer in reversed(range(LAYERS)):
        delta = delta * (outputs[layer + 1] > 0)
        gradients.append(outputs[layer].T @ delta)
        delta = delta @ weights[layer].T
    return gradients[::-1]


def relative_error(gradient: np.ndarray, exact: np.ndarray) -> float:
    """Return |gradient - exact| / |exact| in the 2-norm; inf when something is not finite."""
    if not np.isfinite(gradient).all():
        return float("inf")
    return float(np.linalg.norm(gradient.astype(np.float64) - exact) / np.linalg.norm(exact))


class FourLayers(nn.Cell):
    """The network with its loss: weights in float32, layers in float16, loss in float32.

    With a manager there is a marker above each layer.
    """

    def __init__(self, case: Case, manager: GroupLossScaleManager | None) -> None:
        super().__init__()
        self.layers = ParameterTuple(
            [Parameter(Tensor(weight), name=f"w{i}") for i, weight in enumerate(case.weights, 1)]
        )
        self.biases = [Tensor(bias, ms.float16) for bias in case.biases]
        self.manager = manager

    def construct(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, float32, shape ()."""
        x = ops.cast(inputs, ms.float16)
        for index in range(LAYERS):
            if self.manager is not None and index > 0:
                x = self.manager(x, index, index + 1)
            weight = ops.cast(self.layers[index], ms.float16)
            x = ops.relu(ops.matmul(x, weight) + self.biases[index])
        x = ops.cast(x, ms.float32)
        if self.manager is not None:  # in float32: before the scale the last gradient is small
            x = self.manager(x, LAYERS, LAYERS + 1)
        return (ops.square(x - targets) / 2).sum() / x.shape[0]


class Recorder(nn.Optimizer):
    """An optimizer that keeps the gradients it is given and leaves the weights alone."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(0.0, parameters)
        self.recorded = self._parameters.clone(prefix="recorded", init="zeros")

    def construct(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Keep the gradients."""
        done = ()
        for kept, gradient in zip(self.recorded, gradients):
            done += (ops.assign(kept, gradient),)
        return done[0]


SCHEMES: dict[str, Callable[[], Any]] = {
    "no scale": lambda: Tensor(1.0, ms.float32),
    "2^10": lambda: Tensor(2.0**10, ms.float32),
    "2^16": lambda: Tensor(2.0**16, ms.float32),
    "2^20": lambda: Tensor(2.0**20, ms.float32),
    "dynamic": lambda: nn.DynamicLossScaleUpdateCell(2.0**10, scale_factor=2, scale_window=5),
    "grouped": lambda: GroupLossScaleManager(2.0**10, [], growth_factor=2 ** (1 / 8)),
}


def row(scheme: str, case: Case, exact: Sequence[np.ndarray]) -> str:
    """Train until the scales have settled; return the row of the last step's gradients."""
    scale = SCHEMES[scheme]()
    grouped = isinstance(scale, GroupLossScaleManager)
    network = FourLayers(case, scale if grouped else None)
    if grouped:
        scale.loss_scale_groups = [[weight] for weight in network.layers]
    recorder = Recorder(network.trainable_params())
    step = BoostTrainOneStepWithLossScaleCell(network, recorder, scale).set_train()
    data = Tensor(case.inputs), Tensor(case.targets)
    steps, overflow, used = settled(step, data, changes=isinstance(scale, nn.Cell))
    gradients = [kept.asnumpy() for kept in recorder.recorded]
    if overflow:
        kept = step.grad(network, step.weights)(*data, Tensor(used))
        gradients = [gradient.asnumpy() / used for gradient in kept]
    cells = [
        f"{100 * np.mean(one == 0):.1f} %, {relative_error(one, right):.1e}"
        for one, right in zip(gradients, exact)
    ]
    update = "skipped: overflow" if overflow else "done"
    scales = dict.fromkeys(np.broadcast_to(used, LAYERS).tolist())  # equal ones are named once
    exponents = ", ".join(f"{np.log2(one):.1f}" for one in scales)
    return " | ".join([scheme, *cells, update, exponents, str(steps)])


def settled(step: nn.Cell, data: Sequence[Tensor], changes: bool) -> tuple[int, bool, np.ndarray]:
    """Train until each scale has shrunk once and a step is clean; one step if the scale is fixed.

    Returns the number of steps, whether the last one overflowed, and the scales used in it.
    """
    before, shrunk = np.float32(0), np.False_
    for steps in range(1, SETTLING_STEPS + 1):
        _, overflow, scales = step(*data)
        used = scales.asnumpy()
        shrunk, before = np.logical_or(shrunk, used < before), used
        if not changes or (np.all(shrunk) and not overflow):
            return steps, bool(overflow), used
    raise RuntimeError(f"the scales had not settled after {SETTLING_STEPS} steps: {before}")


# Scheme -> amp level and a fresh loss-scale manager.
TRAININGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "float32, no scale": ("O0", lambda: None),
    "float16, no scale": ("O3", lambda: None),
    "float16, dynamic": ("O3", lambda: ms.amp.DynamicLossScaleManager(2**24, 2, 1000)),
    "float16, grouped": ("O3", lambda: GroupLossScaleManager(2.0**12, [])),
}


def train_lenet(scheme: str, seed: int) -> float:
    """Train LeNet-5 on the bundled digits with one scheme; return its test accuracy."""
    level, make_manager = TRAININGS[scheme]
    ms.set_seed(seed)
    train, test = digits_datasets(BATCH_SIZE)
    manager = make_manager()
    grouped = isinstance(manager, GroupLossScaleManager)
    network = marked("LeNet", manager) if grouped else LeNet5()
    model = ms.Model(
        network,
        cross_entropy(),
        falling(network, EPOCHS * train.get_dataset_size(), EPOCHS),
        metrics={"accuracy"},
        amp_level=level,
        loss_scale_manager=manager,
        boost_level="O1",
        boost_config_dict=only("loss_scale_group") if grouped else only(),
    )
    model.fit(EPOCHS, train, test)
    return float(model.eval(test)["accuracy"])


def print_four_layers() -> None:
    """Print the gradients' sizes and the table of the schemes."""
    case = four_layer_case()
    exact = oracle(case)
    sizes = [
        f"{np.sqrt(np.mean(gradient**2)):.0e} ({np.abs(gradient).max():.0e})" for gradient in exact
    ]
    layers = [f"layer {index}" for index in range(1, LAYERS + 1)]
    title = "Four layers, from the input up: exact zeros and relative error of the gradients"
    headings = " | ".join(["scheme", *layers, "update", "log2 of the scales", "steps"])
    first = " | ".join(["size: typical (largest)", *sizes, "", "", ""])
    print_table(title, headings, [first, *(row(scheme, case, exact) for scheme in SCHEMES)])


def print_accuracies(seeds: int) -> None:
    """Print the final test accuracies of LeNet, and how far they are from those of float32."""
    rows, means = [], []
    for scheme in TRAININGS:
        found = [train_lenet(scheme, seed) for seed in range(seeds)]
        means.append(np.mean(found))
        rows.append(f"{scheme} | {means[-1]:.4f} | {min(found):.4f} | {means[-1] - means[0]:+.4f}")
    title = f"LeNet on the digits: test accuracy after {EPOCHS} epochs, seeds 0 to {seeds - 1}"
    print_table(title, "training | mean | lowest | minus float32", rows)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Measure what loss scales save.")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each training (default: 3)")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    print_four_layers()
    print_accuracies(args.seeds)


if __name__ == "__main__":
    main()
