"""The rules of the algorithms in NumPy float64, from the formulas, independent of the code."""

from __future__ import annotations

import numpy as np


def dynamic_scale(start, factor, window, overflows, minimum=1.0):
    """Return the scale after each step: shrink on overflow, grow after ``window`` clean steps."""
    scale, clean, trace = float(start), 0, []
    for overflow in overflows:
        if overflow:
            scale, clean = max(scale / factor, minimum), 0
        else:
            clean += 1
            if clean == window:
                scale, clean = scale * factor, 0
        trace.append(scale)
    return trace


def group_scales(start, overflows, growth=2 ** (1 / 1000), shrink=2**-0.5, low=1.0, high=2.0**100):
    """Return all group scales after the steps whose overflows are given, one row a step."""
    scales = np.array(start, np.float64)
    for row in overflows:
        scales = np.clip(scales * np.where(row, shrink, growth), low, high)
    return scales


def clip_by_global_norm(gradients, bound):
    """Return the gradients, times bound / norm where the norm of all together exceeds the bound."""
    norm = np.sqrt(sum((np.float64(gradient) ** 2).sum() for gradient in gradients))
    return [np.float64(gradient) * min(1.0, bound / norm) for gradient in gradients]


def adasum_pair(first, second):
    """Return A(a, b) = (1 - d / 2 na) a + (1 - d / 2 nb) b of one tensor, in float64."""
    first, second = np.float64(first), np.float64(second)
    product, guard = (first * second).sum(), np.sqrt(np.finfo(np.float64).tiny)
    squares = [(one * one).sum() for one in (first, second)]
    factors = [1.0 if square < guard else 1.0 - product / (2 * square) for square in squares]
    return factors[0] * first + factors[1] * second


def adasum(values, devices=1):
    """Return the AdaSum of one tensor of each rank: mean in a server, fold, tree of neighbours."""
    servers = [
        np.mean(np.float64(values[start : start + devices]), axis=0)
        for start in range(0, len(values), devices)
    ]
    power = 2 ** int(np.log2(len(servers)))
    for extra in range(power, len(servers)):
        servers[extra - power] = adasum_pair(servers[extra - power], servers[extra])
    servers = servers[:power]
    while len(servers) > 1:
        servers = [adasum_pair(*servers[i : i + 2]) for i in range(0, len(servers), 2)]
    return servers[0]


def cosine_head(features, weight, bias, multiplier, epsilon=1e-4):
    """Return m * (x^ W^T + b) with rows divided by their lengths, at least sqrt(epsilon)."""

    def unit(rows):
        rows = np.float64(rows)
        return rows / np.sqrt(np.maximum((rows**2).sum(axis=1, keepdims=True), epsilon))

    return multiplier * (unit(features) @ unit(weight).T + np.float64(bias))


def interval_groups(groups, share, steps, seed):
    """Return freeze type 1 as version 0.1.0 drew it: all draws at once, then step by step."""
    length = int(steps * 1.01)
    weights = np.arange(groups - 1, 0, -1)
    draws = np.random.default_rng(seed).choice(
        np.arange(1, groups), size=length, p=weights / weights.sum()
    )
    sequence, frozen = [0], 0
    while len(sequence) < length:
        freezes = frozen / len(sequence) < 1 - share
        sequence.append(int(draws[frozen]) if freezes else 0)
        frozen += freezes
    return sequence
