"""``ops.max_pool2d`` by an operator whose gradient takes linear time on CPU."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops
from mindspore.ops import function
from mindspore.ops.function import nn_func

ORIGINAL = nn_func.max_pool2d
_NAMESPACES = (ops, function, nn_func)


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what ``ops.max_pool2d`` does; the gradient is the same bit for bit.

    NaN in a window makes the maximum NaN; in MindSpore's it does not.
    """
    if return_indices or x.ndim != 4:
        return ORIGINAL(x, kernel_size, stride, padding, dilation, return_indices, ceil_mode)
    strides = kernel_size if stride is None else stride
    kernel, strides, padding, dilation = _of_volumes(kernel_size, strides, padding, dilation)
    pool = ops.MaxPool3DWithArgmax(kernel, strides, padding, dilation, ceil_mode)
    return ops.squeeze(pool(ops.expand_dims(x, 2))[0], 2)


@ops.constexpr
def _of_volumes(*sizes: Any) -> tuple[tuple[int, ...], ...]:
    """Return sizes of a kernel, strides, padding and dilation for volumes of one image."""
    pairs = [size if isinstance(size, tuple) else (size, size) for size in sizes]
    return tuple((int(place != 2), *pair) for place, pair in enumerate(pairs))


def is_in_place() -> bool:
    """Return whether ``ops.max_pool2d`` is the one of this module."""
    return ops.max_pool2d is max_pool2d


def put_in_place(pool: Any) -> None:
    """Let ``ops.max_pool2d`` be this function, wherever it is MindSpore's or this module's."""
    for namespace in _NAMESPACES:
        if namespace.max_pool2d in (ORIGINAL, max_pool2d):
            namespace.max_pool2d = pool
