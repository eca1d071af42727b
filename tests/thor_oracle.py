"""THOR's rule in NumPy float64 with plain loops, from the formulas, independent of the code."""

from __future__ import annotations

import numpy as np


def kronecker_solve(weight_gradient, a, g, damping):
    """Return the solution of (A + dI) x (G + dI) vec(U) = vec(dW) by one big linear system."""
    outputs, inputs = weight_gradient.shape
    a = np.float64(a) + damping * np.eye(inputs)
    g = np.float64(g) + damping * np.eye(outputs)
    # Row-major vec: vec(G U A) = (G kron A) vec(U) for symmetric A.
    flat = np.linalg.solve(np.kron(g, a), np.float64(weight_gradient).ravel())
    return flat.reshape(outputs, inputs)


def second_moment(rows):
    """Return E[r rT] over the rows."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in np.float64(rows):
        total += np.outer(row, row)
    return total / len(rows)


def patches(image, kernel, stride, dilation, pads):
    """Return the patches of [N, C, H, W] as rows [N, OH, OW, C * kh * kw]."""
    top, bottom, left, right = pads
    image = np.pad(np.float64(image), ((0, 0), (0, 0), (top, bottom), (left, right)))
    count, channels, height, width = image.shape
    high = (height - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    wide = (width - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    rows = np.zeros((count, high, wide, channels, *kernel))
    for i in range(high):
        for j in range(wide):
            for u in range(kernel[0]):
                for v in range(kernel[1]):
                    y, x = i * stride[0] + u * dilation[0], j * stride[1] + v * dilation[1]
                    rows[:, i, j, :, u, v] = image[:, :, y, x]
    return rows.reshape(count, high, wide, -1)


def dense_direction(x, delta, gradient, damping):
    """Return u for a Dense layer: inputs [N, in], gradients of the mean loss [N, out]."""
    a, g = second_moment(x), second_moment(len(x) * np.float64(delta))
    return kronecker_solve(gradient, a, g, np.sqrt(damping))


def conv_direction(rows, delta, gradient, damping):
    """Return u for a convolution: patches [N, OH, OW, n], delta [N, OH, OW, out]."""
    count, high, wide, size = rows.shape
    positions = high * wide
    a = second_moment(rows.reshape(-1, size))
    g = second_moment(count * np.float64(delta).reshape(-1, delta.shape[-1]))
    return kronecker_solve(gradient, a, g, np.sqrt(damping / positions)) / positions


def embedding_direction(ids, delta, gradient, damping):
    """Return u for an embedding table [vocabulary, size]: A is diagonal."""
    vocabulary = gradient.shape[0]
    a = np.bincount(ids.ravel(), minlength=vocabulary) / ids.size
    rows = len(ids) * np.float64(delta).reshape(-1, delta.shape[-1])
    return kronecker_solve(
        np.float64(gradient).T, np.diag(a), second_moment(rows), np.sqrt(damping)
    ).T


def layer_norm_direction(gradient, samples, damping):
    """Return u for a parameter of LayerNorm."""
    gradient = np.float64(gradient)
    return gradient / (gradient**2 / samples + np.sqrt(damping))
