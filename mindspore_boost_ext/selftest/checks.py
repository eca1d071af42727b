"""The checks: each trains a small network with one algorithm and returns its error.

With several ranks, each trains on its part of every batch; the oracle trains on whole batches.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.amp import LossScaleManager

from mindspore_boost_ext import _compat
from mindspore_boost_ext.adasum import cell
from mindspore_boost_ext.bundled import BasicBlock
from mindspore_boost_ext.cheaper_operators.rows import CheaperLayerNorm
from mindspore_boost_ext.cli.trial_settings import only
from mindspore_boost_ext.group_loss_scale_manager.manager import GroupLossScaleManager
from mindspore_boost_ext.integration.model import BoostModel
from mindspore_boost_ext.less_batch_normalization.head import CommonHeadLastFN
from mindspore_boost_ext.runtime.ranks import rank_and_count
from mindspore_boost_ext.selftest import oracle
from mindspore_boost_ext.selftest.oracle import Array, Batch, Weights
from mindspore_boost_ext.stages.overflow import (
    DeviceFacts,
    FiniteDetector,
    OverflowDetector,
    choose_detector,
)

STEPS = 4
_OVERFLOWS = 2  # the batch whose labels hold inf, from 0
_HALF_AT_FIRST = {"phases": [[0.5, 0.5]], "total_steps": STEPS}
_VALUES = 40  # of a gradient that may overflow
_CLIP, _DAMPING, _MULTIPLIER, _COMPONENTS, _SMOOTHING = 0.3, 0.1, 2.0, 2, 0.2


class Net(nn.Cell):
    """The oracle's network. A ``GroupLossScaleManager`` marks the passages between its layers."""

    def __init__(self, manager: nn.Cell | None = None) -> None:
        super().__init__()
        self.first = nn.Dense(oracle.FEATURES, oracle.HIDDEN)
        self.middle = nn.Dense(oracle.HIDDEN, oracle.HIDDEN)
        self.last = nn.Dense(oracle.HIDDEN, oracle.OUTPUTS)
        self.manager = manager
        for name, value in oracle.first_weights().items():
            layer, _, kind = name.partition(".")
            getattr(getattr(self, layer), kind).set_data(Tensor(value))

    def mark(self, x: Tensor, one: int, two: int) -> Tensor:
        """Mark a passage between groups."""
        return x if self.manager is None else self.manager(x, one, two)

    def construct(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        x = ops.tanh(self.first(self.mark(x, 0, 1)))
        x = ops.tanh(self.middle(self.mark(x, 1, 2)))
        return self.mark(self.last(self.mark(x, 2, 3)), 3, 4)


class PerPixel(Net):
    """The oracle's network on every pixel of images ``[n, features, height, width]``."""

    def construct(self, x: Tensor) -> Tensor:
        """Return outputs ``[n, height, width, outputs]``."""
        return super().construct(ops.transpose(x, (0, 2, 3, 1)))


def residual(fewer: bool) -> nn.Cell:
    """Return a convolution, a residual block and a Dense; ``fewer`` omits the first BatchNorm."""
    block = BasicBlock(4, 4)
    if fewer:
        block.bn1 = nn.Identity()
    stem = nn.Conv2d(1, 4, 3), nn.ReLU()
    return nn.SequentialCell(*stem, block, nn.Flatten(), nn.Dense(64, oracle.OUTPUTS))


def train(
    data: Sequence[Batch],
    switches: Sequence[str] = (),
    net: nn.Cell | None = None,
    manager: LossScaleManager | None = None,
    loss: nn.Cell | None = None,
    rate: float | list[float] = oracle.RATE,
    **sections: Mapping[str, Any],
) -> tuple[Weights, nn.Cell]:
    """Train by momentum with some switches on; return weights and training step."""
    net = Net() if net is None else net
    model = BoostModel(
        net,
        loss or nn.MSELoss(),
        nn.Momentum(net.trainable_params(), rate, oracle.MOMENTUM),
        boost_level="O1",
        boost_config_dict=only(*switches, **sections),
        **({} if manager is None else {"loss_scale_manager": manager}),
    )
    return after_steps(model.train_network, net, data), model.train_network


def after_steps(step: nn.Cell, net: nn.Cell, data: Sequence[Batch]) -> Weights:
    """Take a step on this rank's part of each batch; return the weights."""
    rank, ranks = rank_and_count()
    for batch in data:
        step(*(Tensor(np.array_split(one, ranks)[rank].copy()) for one in batch))
    return {parameter.name: parameter.asnumpy() for parameter in net.trainable_params()}


def furthest(found: Weights, expected: Weights, start: Weights | None = None) -> float:
    """Return the largest difference of a weight, as a share of its largest change."""
    start = oracle.first_weights() if start is None else start
    shares = [
        np.abs(found[name] - end).max() / np.abs(end - start[name]).max()
        for name, end in expected.items()
    ]
    return float(np.max(shares))  # NaN if one is


# ---- The checks ----


def by_rule(
    *switches: str,
    rule: Callable[[oracle.Backward], Weights] = lambda backward: backward.gradients,
    **arguments: Any,
) -> float:
    """Compare training with some switches on to the oracle, whose gradients ``rule`` makes."""
    data = oracle.batches(STEPS)
    found, _ = train(data, switches, **arguments)
    return furthest(found, oracle.trained(data, rule))


def accumulation() -> float:
    """Train with windows of two batches."""
    data = oracle.batches(STEPS)
    window = {"grad_accumulation_step": 2}
    found, _ = train(data, ["grad_accumulation"], grad_accumulation=window)
    pairs = [_joined(pair, np.concatenate) for pair in zip(data[::2], data[1::2])]
    return furthest(found, oracle.trained(pairs))


def short_sequences() -> float:
    """Train on sequences of length 4; the first half of the steps takes their first half."""
    steps = [oracle.batches(4 * STEPS)[4 * number :][:4] for number in range(STEPS)]
    data = [_joined(step, lambda parts: np.stack(parts, axis=1)) for step in steps]
    short = [step[: 2 if number < STEPS // 2 else 4] for number, step in enumerate(steps)]
    found, _ = train(data, ["seq_length_warmup"], seq_length_warmup=_HALF_AT_FIRST)
    return furthest(found, oracle.trained([_joined(step, np.concatenate) for step in short]))


def _joined(parts: Sequence[Batch], join: Callable[[Sequence[Array]], Array]) -> Batch:
    return join([x for x, _ in parts]), join([y for _, y in parts])


def small_images() -> float:
    """Train on images of 4 x 4; the first half of the steps takes the means of 2 x 2 pixels."""
    generator = np.random.default_rng(4)
    size = (oracle.BATCH, oracle.FEATURES, 4, 4)
    images = [generator.normal(size=size).astype(np.float32) for _ in range(STEPS)]
    targets = [y[:, None, None] for _, y in oracle.batches(STEPS)]
    data = list(zip(images, targets))
    found, _ = train(
        data, ["progressive_resizing"], PerPixel(), progressive_resizing=_HALF_AT_FIRST
    )
    means = [one.reshape(*size[:2], 2, 2, 2, 2).mean(axis=(3, 5)) for one in images[: STEPS // 2]]
    rows = [_pixels(*batch) for batch in zip([*means, *images[STEPS // 2 :]], targets)]
    return furthest(found, oracle.trained(rows))


def _pixels(images: Array, targets: Array) -> Batch:
    """Return the pixels as samples of their own, each with the target of its image."""
    rows = images.transpose(0, 2, 3, 1)
    target = np.broadcast_to(targets, (*rows.shape[:3], targets.shape[-1]))
    return rows.reshape(-1, rows.shape[-1]), target.reshape(-1, target.shape[-1])


def short_schedule() -> float:
    """Make half of the updates of a schedule; the others have a learning rate of 10."""
    section = {"share": 0.5, "total_steps": 2 * STEPS}
    return by_rule("short_schedule", rate=[oracle.RATE, 10.0] * STEPS, short_schedule=section)


def smoothed_labels() -> float:
    """Take a step of a Dense layer on smoothed class labels."""
    features, values = oracle.batches(1)[0]
    labels, generator = values.argmax(axis=1).astype(np.int32), np.random.default_rng(5)
    first = generator.normal(size=(oracle.OUTPUTS, oracle.FEATURES)).astype(np.float32)
    # Every rank begins with the same weights.
    dense = nn.Dense(oracle.FEATURES, oracle.OUTPUTS, Tensor(first), bias_init="zeros")
    start = {parameter.name: parameter.asnumpy().copy() for parameter in dense.trainable_params()}
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    section = {"smoothing": _SMOOTHING}
    found, _ = train(
        [(features, labels)], ["label_smoothing"], dense, loss=loss, label_smoothing=section
    )
    step = oracle.step_on_smoothed_labels(start, features, labels, _SMOOTHING)
    return furthest(found, {name: start[name] - oracle.RATE * step[name] for name in step}, start)


def freezing() -> float:
    """Train with all but the last layer frozen in every second step."""
    section = {"param_groups": 2, "schedule": [1, 0]}
    rule = oracle.only_last([True, False] * (STEPS // 2))
    return by_rule("grad_freeze", rule=rule, grad_freeze=section)


def head() -> float:
    """Check the cosine classifier, and that gradients are orthogonal to the weights, by rows."""
    features, target = oracle.batches(1)[0]
    made = CommonHeadLastFN(oracle.FEATURES, oracle.OUTPUTS, has_bias=False, multiplier=_MULTIPLIER)
    weight = oracle.first_weights()["first.weight"][: oracle.OUTPUTS]
    made.weight.set_data(Tensor(weight))
    loss = nn.WithLossCell(made, nn.MSELoss())
    outputs = made(Tensor(features)).asnumpy()
    gradients = ops.GradOperation(get_by_list=True)(loss, ParameterTuple([made.weight]))
    product = gradients(Tensor(features), Tensor(target))[0].asnumpy() * weight
    along = np.abs(product.sum(axis=1)).max() / np.abs(product).max()
    expected = oracle.cosine_outputs(features, weight, _MULTIPLIER)
    return max(float(np.abs(outputs - expected).max() / _MULTIPLIER), float(along))


def fewer_norms() -> float:
    """Compare ``less_bn`` to MindSpore on a network that is written with fewer BatchNorms."""
    generator, (_, target) = np.random.default_rng(3), oracle.batches(1)[0]
    images = generator.normal(size=(oracle.BATCH, 1, 4, 4)).astype(np.float32)
    written, made = residual(fewer=True), residual(fewer=False)
    start = {parameter.name: parameter.asnumpy().copy() for parameter in written.get_parameters()}
    for name, one in made.parameters_dict().items():  # loading would share the memory
        if name in start:
            one.set_data(Tensor(start[name].copy()))
    data = [(images + number, target) for number in range(STEPS)]
    found, _ = train(data, ["less_bn"], made, less_bn={"fn_flag": False, "gc_flag": False})
    expected = _by_mindspore(written, data)
    if found.keys() != expected.keys():
        raise AssertionError(f"it trained {', '.join(found)}, not {', '.join(expected)}")
    return furthest(found, expected, start)


def _by_mindspore(net: nn.Cell, data: Sequence[Batch]) -> Weights:
    optimizer = nn.Momentum(net.trainable_params(), oracle.RATE, oracle.MOMENTUM)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
    return after_steps(step, net, data)


def cheaper() -> float:
    """Compare training with cheaper operators to MindSpore with its own."""
    target = ms.get_context("device_target")
    if target != "CPU":
        raise NotImplementedError(f"{target} keeps its own operators")

    # Smaller inputs are left to MindSpore's operators.
    x = np.tile(oracle.batches(1)[0][0], (CheaperLayerNorm.least // oracle.HIDDEN, 1))
    target_shares = np.random.default_rng(3).dirichlet(np.ones(oracle.HIDDEN), len(x))
    data = [(x * (1 + number), target_shares.astype(np.float32)) for number in range(STEPS)]
    start = {one.name: one.asnumpy().copy() for one in _slow_net().trainable_params()}
    found, _ = train(data, ["cheaper_operators"], _slow_net())
    return furthest(found, _by_mindspore(_slow_net(), data), start)


def _slow_net() -> nn.Cell:
    layers = [nn.LayerNorm((oracle.HIDDEN,)), nn.GELU(), nn.LeakyReLU(), nn.Softmax()]
    dense = nn.Dense(oracle.FEATURES, oracle.HIDDEN, bias_init="zeros")
    made = nn.SequentialCell(dense, *layers)
    made.trainable_params()[0].set_data(Tensor(oracle.first_weights()["first.weight"]))
    return made


class Watched(nn.Cell):
    """Three weights, whose gradients are the inputs times a scale; says whether one overflows."""

    def __init__(self, dtype: ms.Type, detector: OverflowDetector) -> None:
        super().__init__()
        zeros = np.zeros(_VALUES, np.float32)
        names = ("one", "two", "three")
        self.weights = ParameterTuple([Parameter(Tensor(zeros, dtype), name) for name in names])
        self.product, self.detector = Product(self.weights), detector
        self.differentiate = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, scale: Tensor, *factors: Tensor) -> Tensor:
        """Return whether a gradient overflows, bool []."""
        status, scale = self.detector.start(scale, self.product(*factors))
        gradients = self.differentiate(self.product, self.weights)(*factors, scale)
        return self.detector(status, gradients)


class Product(nn.Cell):
    """The sum of the products of each weight with its input."""

    def __init__(self, weights: ParameterTuple) -> None:
        super().__init__()
        self.weights = weights

    def construct(self, one: Tensor, two: Tensor, three: Tensor) -> Tensor:
        """Return the sum, []."""
        first, second, third = self.weights
        return (first * one).sum() + (second * two).sum() + (third * three).sum()


def overflow_detection() -> float:
    """Check, for each dtype, that one overflowing value is seen, and nothing if there is none."""
    types = {"float16": 2.0**10, "float32": 2.0**120}
    facts = DeviceFacts.read()
    if facts.target == "Ascend" and not facts.saturates()[0]:  # others have no kernels for it
        types["bfloat16"] = 2.0**120
    detector = choose_detector()
    sees_nan = isinstance(detector, FiniteDetector)  # a status register sees arithmetic only
    for name, large in types.items():
        dtype = getattr(ms, name)
        watched, scale = Watched(dtype, detector), Tensor(2.0**10, dtype)
        values = {"nothing": 1.0, "a product": large, **({"nan": np.nan} if sees_nan else {})}
        for (kind, value), place in itertools.product(values.items(), range(3)):
            factors = np.ones((3, _VALUES), np.float32)
            factors[place, -1] = value
            seen = bool(watched(scale, *(Tensor(factor, dtype) for factor in factors)))
            if seen != (kind != "nothing"):
                words = f"{kind} that overflows in gradient {place + 1} of 3"
                raise AssertionError(f"{detector.name}, {name}: {words}: seen is {seen}")
    return 0.0


def dynamic_scale() -> float:
    """Train with a dynamic loss scale and one overflow: that step is skipped, the scale halved."""
    data = oracle.batches(STEPS)
    data[_OVERFLOWS][1][0, 0] = np.inf  # a label of rank 0 alone
    found, step = train(data, manager=ms.DynamicLossScaleManager(2**10, 2, 1000))
    scale = step.observations()["loss_scale"]
    if scale != 2**9:
        raise AssertionError(f"the scale is {scale:g} after one overflow at 1024, not 512")
    kept = [batch for number, batch in enumerate(data) if number != _OVERFLOWS]
    return furthest(found, oracle.trained(kept))


def grouped_scale() -> float:
    """Train with a loss scale for each layer."""
    data = oracle.batches(STEPS)
    manager = GroupLossScaleManager([2.0**10, 2.0**4, 2.0**6], [])
    net = Net(manager)
    layers = (net.first, net.middle, net.last)
    manager.loss_scale_groups = [layer.trainable_params() for layer in layers]
    found, _ = train(data, ["loss_scale_group"], net, manager)
    grown = [scale * 2 ** (STEPS / 1000) for scale in (2.0**10, 2.0**4, 2.0**6)]
    off = np.abs(np.array(manager.group_scales()) / grown - 1).max()
    return max(furthest(found, oracle.trained(data)), float(off))


def thor() -> float:
    """Train by THOR with a refresh in every step."""
    _, ranks = rank_and_count()
    section = {"damping": _DAMPING, "frequency": 1, "batch_size": oracle.BATCH // ranks}
    return by_rule("thor", rule=oracle.preconditioned(_DAMPING), thor=section)


def adasum(gathered_bytes: int = cell.GATHERED_BYTES) -> float:
    """Train one step with AdaSum; ranks exchange more than ``gathered_bytes`` bytes in halves."""
    _, ranks = rank_and_count()
    if ranks < 2 or ranks & (ranks - 1):
        raise NotImplementedError(f"needs 2, 4 or 8 ranks, such as --ranks 2, got {ranks}")
    gathers = gathered_bytes > 0
    if not (gathers or _compat.reduces_in_groups()):
        raise NotImplementedError("this MindSpore cannot reduce in groups here: ranks gather all")
    (batch,) = oracle.batches(1)
    with mock.patch.object(cell, "GATHERED_BYTES", gathered_bytes):
        found, step = train([batch], ["adasum"], common={"device_number": 1})
    if step.adasum.gathers != gathers:
        raise AssertionError(f"gathered is {step.adasum.gathers}, not {gathers}")
    start, parts = oracle.first_weights(), zip(*(np.array_split(one, ranks) for one in batch))
    steps = [oracle.Backward(start, (x, y)).gradients for x, y in parts]
    combined = {name: oracle.adasum([one[name] for one in steps]) for name in start}
    return furthest(found, oracle.trained([batch], lambda backward: combined))


def dim_reduce() -> float:
    """Train by P-BFGS; return the share of the weights' change outside the snapshots' span."""
    data, generator = oracle.batches(STEPS), np.random.default_rng(2)
    start, snapshots = oracle.first_weights(), []
    with tempfile.TemporaryDirectory(prefix="selftest-") as folder:
        for number in range(4):
            moved = {
                name: np.asarray(value + generator.normal(0, 0.1, value.shape), np.float32)
                for name, value in start.items()
            }
            snapshots.append(_flat(moved))
            listed = [{"name": name, "data": Tensor(value)} for name, value in moved.items()]
            ms.save_checkpoint(listed, str(Path(folder) / f"snapshot-{number}.ckpt"))
        # alpha above 0 would also step along the gradient outside the span.
        section = {"n_components": _COMPONENTS, "weight_load_dir": folder, "alpha": 0.0}
        found, _ = train(data, ["dim_reduce"], dim_reduce=section)
    before, after = (oracle.Backward(one, data[-1]).loss for one in (start, found))
    if not after < before:
        raise AssertionError(f"the loss of a trained batch rises from {before:g} to {after:g}")
    return oracle.outside_span(_flat(found) - _flat(start), np.stack(snapshots), _COMPONENTS)


def _flat(weights: Weights) -> Array:
    return np.concatenate([weights[name].ravel() for name in oracle.first_weights()])


CHECKS: Mapping[str, Callable[[], float]] = {
    "plain step": by_rule,
    "compiled_step": partial(by_rule, "compiled_step"),
    "cheaper_operators": cheaper,
    "gradients.clip_norm": partial(
        by_rule, rule=oracle.clipped(_CLIP), gradients={"clip_norm": _CLIP}
    ),
    "grad_accumulation": accumulation,
    "grad_freeze": freezing,
    "less_bn": fewer_norms,
    "gradient_centralization": partial(by_rule, "gradient_centralization", rule=oracle.centralized),
    "CommonHeadLastFN": head,
    "overflow detection": overflow_detection,
    "dynamic loss scale": dynamic_scale,
    "loss_scale_group": grouped_scale,
    "thor": thor,
    "progressive_resizing": small_images,
    "seq_length_warmup": short_sequences,
    "short_schedule": short_schedule,
    "label_smoothing": smoothed_labels,
    "adasum": adasum,
    "adasum in halves": partial(adasum, 0),
    "dim_reduce": dim_reduce,
}
