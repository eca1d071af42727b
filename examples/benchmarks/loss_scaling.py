"""What loss scales save and what they cost: one fixed, one dynamic, one for each group of layers.

    python examples/benchmarks/loss_scaling.py                    # everything, about 10 minutes
    python examples/benchmarks/loss_scaling.py --effect --seeds 3 --plot loss_scaling.png
    python examples/benchmarks/loss_scaling.py --speed

**Four layers** (``--effect``): float16 layers whose gradients span 1e-9 to 1. For each scheme and layer:
the share of exact zeros in the gradient that the backward pass hands over, and its relative error in
the 2-norm. The oracle is the chain rule in float64 on the same numbers::

    x_l = x_(l-1) W_l + b_l,  loss = mean over the batch of |x_4 - t|^2 / 2
    d_4 = (x_4 - t) / batch,  d_(l-1) = d_l W_l^T,  gradient of W_l = x_(l-1)^T d_l

All gradients come out of BoostTrainOneStepWithLossScaleCell through an optimizer that only records
them, so the weights stay as they are. Where a step overflows and is skipped, those of the step's own
backward pass are shown. The dynamic scale (from 2^10, window 5) and the scales of the groups (from
2^10, growth 2^(1/8)) run until each of them has shrunk once, and on to the next clean step.

**LeNet on the digits** (``--effect``): test accuracy after training in float16 (amp level O3) against
float32. Demanded: within 0.005 with the dynamic and with the grouped scale.

**Speed** (``--speed``): the loss-scaled step over nn.TrainOneStepCell, both in float32. Demanded: at
most 1.10 in GRAPH mode and 1.25 in PYNATIVE.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import MODES, paired, print_table  # sets the oneDNN variable: must come first

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from networks import LeNet5, SmallResNet, batch, momentum, with_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import digits_datasets

from mindspore_boost_ext import BoostTrainOneStepWithLossScaleCell, GroupLossScaleManager

LAYERS, WIDTH, BATCH = 4, 64, 128
GAIN = 1e-3  # from one layer's gradient to the next lower one's
SETTLING_STEPS = 2000
EPOCHS, BATCH_SIZE, LEARNING_RATE = 20, 32, 0.03  # those of examples/lenet.py
OFF = {"less_bn": False, "grad_freeze": False, "adasum": False, "grad_accumulation": False}
DEMANDED = {"GRAPH": 1.10, "PYNATIVE": 1.25}


# ------------------------------------------------------------------------------------ four layers


class Case(NamedTuple):
    """The numbers of the four-layer case; all of them are float16 numbers, held in float32.

    Attributes:
        weights: ``[WIDTH, WIDTH]`` for each layer.
        biases: ``[WIDTH]`` for each layer.
        inputs: ``[BATCH, WIDTH]``.
        targets: ``[BATCH, WIDTH]``.
    """

    weights: list[np.ndarray]
    biases: list[np.ndarray]
    inputs: np.ndarray
    targets: np.ndarray


class Outcome(NamedTuple):
    """What one scheme did to the gradients of the four layers.

    Attributes:
        scales: scale of each layer in the step that was measured.
        zeros: share of exact zeros in each layer's gradient, 0 to 1.
        errors: relative error of each layer's gradient in the 2-norm; inf after an overflow.
        overflow: whether that step overflowed, and so was skipped.
        steps: number of steps before, in which the scales settled.
    """

    scales: list[float]
    zeros: list[float]
    errors: list[float]
    overflow: bool
    steps: int


def four_layer_case(seed: int = 0, width: int = WIDTH, size: int = BATCH) -> Case:
    """Return the weights and the data: normal numbers, the weights smaller by ``GAIN``.

    Activations stay of order 1 by the biases, so each layer makes gradients smaller by ``GAIN``.
    """
    generator = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float = 1.0) -> np.ndarray:
        drawn = generator.normal(0, deviation, shape)
        return drawn.astype(np.float16).astype(np.float32)

    weights = [normal(width, width, deviation=GAIN / width**0.5) for _ in range(LAYERS)]
    biases = [normal(width) for _ in range(LAYERS)]
    return Case(weights, biases, normal(size, width), normal(size, width))


def oracle(case: Case) -> list[np.ndarray]:
    """Return the gradient of each layer's weights in float64, by the formula above."""
    weights = [weight.astype(np.float64) for weight in case.weights]
    outputs = [case.inputs.astype(np.float64)]
    for weight, bias in zip(weights, case.biases):
        outputs.append(outputs[-1] @ weight + bias)
    difference = (outputs.pop() - case.targets) / len(case.inputs)
    gradients = []
    for weight, inputs in zip(reversed(weights), reversed(outputs)):
        gradients.append(inputs.T @ difference)
        difference = difference @ weight.T
    return gradients[::-1]


def zero_share(gradient: np.ndarray) -> float:
    """Return the share of exact zeros, 0 to 1."""
    return float(np.mean(gradient == 0))


def relative_error(gradient: np.ndarray, exact: np.ndarray) -> float:
    """Return |gradient - exact| / |exact| in the 2-norm; inf when something is not finite."""
    if not np.isfinite(gradient).all():
        return float("inf")
    return float(np.linalg.norm(gradient.astype(np.float64) - exact) / np.linalg.norm(exact))


class FourLayers(nn.Cell):
    """The network with its loss: weights in float32, layers in float16, loss in float32.

    Args:
        case: weights and biases.
        manager: scales by layer, with a marker above each of them; None for one scale.
    """

    def __init__(self, case: Case, manager: GroupLossScaleManager | None = None) -> None:
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
            x = ops.matmul(x, ops.cast(self.layers[index], ms.float16)) + self.biases[index]
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


def dynamic_scale(first: float = 2.0**16, window: int = 1000) -> nn.Cell:
    """Return a dynamic scale: halved on overflow, doubled after ``window`` clean steps."""
    return nn.DynamicLossScaleUpdateCell(first, scale_factor=2, scale_window=window)


SCHEMES: dict[str, Callable[[], Any]] = {
    "no scale": lambda: Tensor(1.0, ms.float32),
    "2^10": lambda: Tensor(2.0**10, ms.float32),
    "2^16": lambda: Tensor(2.0**16, ms.float32),
    "2^20": lambda: Tensor(2.0**20, ms.float32),
    "dynamic": lambda: dynamic_scale(2.0**10, window=5),
    "grouped": lambda: GroupLossScaleManager(2.0**10, [], growth_factor=2 ** (1 / 8)),
}


def run_scheme(case: Case, scale: Any) -> Outcome:
    """Train until the scales have settled, and look at the gradients of the step after that.

    Args:
        case: weights and data.
        scale: what the step cell takes as ``scale_sense``.
    """
    grouped = isinstance(scale, GroupLossScaleManager)
    network = FourLayers(case, scale if grouped else None)
    if grouped:
        scale.loss_scale_groups = [[weight] for weight in network.layers]
    recorder = Recorder(network.trainable_params())
    step = BoostTrainOneStepWithLossScaleCell(network, recorder, scale).set_train()
    data = Tensor(case.inputs), Tensor(case.targets)
    steps = settle(step, data) if isinstance(scale, nn.Cell) else 0
    _, overflow, used = step(*data)
    gradients = [kept.asnumpy() for kept in recorder.recorded]
    if overflow:
        gradients = [one.asnumpy() for one in step.grad(network, step.weights)(*data, used)]
    exact = oracle(case)
    return Outcome(
        [float(one) for one in np.broadcast_to(used.asnumpy(), LAYERS)],
        [zero_share(gradient) for gradient in gradients],
        [relative_error(gradient, true) for gradient, true in zip(gradients, exact)],
        bool(overflow),
        steps,
    )


def settle(step: nn.Cell, data: Sequence[Tensor]) -> int:
    """Train until each scale has shrunk once and a step was clean; return the number of steps."""
    shrunk, before = False, None
    for done in range(SETTLING_STEPS):
        _, overflow, scales = step(*data)
        scales = scales.asnumpy()
        if before is not None:
            shrunk = np.logical_or(shrunk, scales < before)
        before = scales
        # The scales follow fixed data by a fixed rule: the next step may overflow, this one is
        # known not to. Shrinking all of them by one step's growth gives room for it.
        if np.all(shrunk) and not overflow and will_be_clean(step, data):
            return done + 1
    raise RuntimeError(f"the scales had not settled after {SETTLING_STEPS} steps: {before}")
