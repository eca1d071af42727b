"""The expected results: a network of three layers, its training and its rules in float64.

Written from the formulas, with NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
Batch = tuple[Array, Array]

FEATURES, HIDDEN, OUTPUTS, BATCH = 5, 4, 3, 8
LAYERS = ("first", "middle", "last")
RATE, MOMENTUM = 0.1, 0.9


def wide(values: Array) -> Array:
    """Return values in float64."""
    return np.asarray(values, np.float64)


def first_weights() -> Weights:
    """Return the weights at the start, float32: name -> array."""
    generator = np.random.default_rng(0)
    sizes = ((HIDDEN, FEATURES), (HIDDEN, HIDDEN), (OUTPUTS, HIDDEN))
    weights: Weights = {}
    for layer, size in zip(LAYERS, sizes):
        weights[f"{layer}.weight"] = generator.normal(0, 0.5, size).astype(np.float32)
        weights[f"{layer}.bias"] = generator.normal(0, 0.5, size[:1]).astype(np.float32)
    return weights


def batches(count: int) -> list[Batch]:
    """Return ``count`` batches: float32 ``[BATCH, FEATURES]`` and ``[BATCH, OUTPUTS]``."""
    generator = np.random.default_rng(1)

    def values(size: int) -> Array:
        return np.asarray(generator.normal(size=(BATCH, size)), np.float32)

    return [(values(FEATURES), values(OUTPUTS)) for _ in range(count)]


class Backward:
    """One forward and backward pass of the mean squared error."""

    def __init__(self, weights: Weights, batch: Batch) -> None:
        x, target = wide(batch[0]), wide(batch[1])
        self.inputs: dict[str, Array] = {}  # layer -> [n, in]
        self.deltas: dict[str, Array] = {}  # layer -> gradients by its outputs [n, out]
        self.gradients: Weights = {}  # all gradients are those of the mean
        for layer in LAYERS:
            self.inputs[layer] = x
            x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            x = x if layer == LAYERS[-1] else np.tanh(x)
        self.loss = float(((x - target) ** 2).mean())
        delta = 2 * (x - target) / target.size
        for layer in reversed(LAYERS):
            self.deltas[layer] = delta
            self.gradients[f"{layer}.weight"] = delta.T @ self.inputs[layer]
            self.gradients[f"{layer}.bias"] = delta.sum(axis=0)
            # The inputs of all but the first layer are tanh of something.
            delta = (delta @ weights[f"{layer}.weight"]) * (1 - self.inputs[layer] ** 2)


def trained(
    data: Sequence[Batch], rule: Callable[[Backward], Weights] = lambda backward: backward.gradients
) -> Weights:
    """Return the weights after an update for each batch, with the gradients that ``rule`` makes."""
    weights = {name: wide(value) for name, value in first_weights().items()}
    moments = {name: np.zeros_like(value) for name, value in weights.items()}
    for batch in data:
        for name, gradient in rule(Backward(weights, batch)).items():
            moments[name] = MOMENTUM * moments[name] + gradient
            weights[name] = weights[name] - RATE * moments[name]
    return weights


# ---- Rules ----


def clipped(bound: float) -> Callable[[Backward], Weights]:
    """Return the rule of clipping by the global norm."""

    def rule(backward: Backward) -> Weights:
        norm = np.sqrt(sum((gradient**2).sum() for gradient in backward.gradients.values()))
        factor = min(1.0, bound / norm)
        return {name: factor * one for name, one in backward.gradients.items()}

    return rule


def centralized(backward: Backward) -> Weights:
    """Return gradients of weights minus their mean over the inputs of each output."""
    return {
        name: one - one.mean(axis=1, keepdims=True) if one.ndim > 1 else one
        for name, one in backward.gradients.items()
    }


def preconditioned(damping: float) -> Callable[[Backward], Weights]:
    """Return THOR's rule with a refresh in every step: weights by two Kronecker factors."""

    def rule(backward: Backward) -> Weights:
        found = dict(backward.gradients)
        for layer in LAYERS:
            a, delta = backward.inputs[layer], len(backward.inputs[layer]) * backward.deltas[layer]
            factors = [rows.T @ rows / len(rows) for rows in (delta, a)]
            left, right = (factor + np.sqrt(damping) * np.eye(len(factor)) for factor in factors)
            half = np.linalg.solve(left, found[f"{layer}.weight"])
            found[f"{layer}.weight"] = np.linalg.solve(right, half.T).T
        return found

    return rule


def only_last(steps: Sequence[bool]) -> Callable[[Backward], Weights]:
    """Return the rule that trains only the last layer in the steps that are True."""
    turns: Iterator[bool] = iter(steps)

    def rule(backward: Backward) -> Weights:
        names = [LAYERS[-1]] if next(turns) else LAYERS
        return {
            name: one for name, one in backward.gradients.items() if name.split(".")[0] in names
        }

    return rule


def cosine_outputs(features: Array, weight: Array, multiplier: float) -> Array:
    """Return the outputs of the head: cosines of rows, times ``multiplier``."""

    def unit(rows: Array) -> Array:
        rows = wide(rows)
        lengths = np.sqrt(np.maximum((rows**2).sum(axis=1, keepdims=True), 1e-4))
        return np.asarray(rows / lengths)

    return np.asarray(multiplier * unit(features) @ unit(weight).T)


def step_on_smoothed_labels(
    weights: Weights, features: Array, labels: Array, smoothing: float
) -> Weights:
    """Return the gradients of a Dense layer's mean cross-entropy with smoothed labels."""
    logits = wide(features) @ wide(weights["weight"]).T + wide(weights["bias"])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    classes = logits.shape[1]
    wanted = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    delta = (shares - wanted) / len(labels)
    return {"weight": delta.T @ wide(features), "bias": delta.sum(axis=0)}


def adasum(steps: Sequence[Array]) -> Array:
    """Return the AdaSum of one tensor's steps on 2**k ranks, combined by pairs of neighbours."""
    level = [wide(step) for step in steps]
    while len(level) > 1:
        level = [_pair(*level[place : place + 2]) for place in range(0, len(level), 2)]
    return level[0]


def _pair(a: Array, b: Array) -> Array:
    product = (a * b).sum()
    squares = [(one * one).sum() for one in (a, b)]
    shares = [product / (2 * square) if square else 0.0 for square in squares]
    return np.asarray((1 - shares[0]) * a + (1 - shares[1]) * b)


def outside_span(movement: Array, snapshots: Array, components: int) -> float:
    """Return which share of a movement is outside the first principal directions of snapshots.

    The movement is ``[size]``, the snapshots are ``[count, size]``.
    """
    centered = wide(snapshots) - wide(snapshots).mean(axis=0)
    directions = np.linalg.svd(centered, full_matrices=False)[2][:components]
    inside = directions.T @ (directions @ wide(movement))
    return float(np.linalg.norm(movement - inside) / np.linalg.norm(movement))
