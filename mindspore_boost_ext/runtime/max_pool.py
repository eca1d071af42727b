"""``ops.max_pool2d`` by an operator whose gradient takes linear time on CPU."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.function.nn_func import max_pool2d as ORIGINAL

_FLOATS = (mstype.float16, mstype.float32, mstype.float64)  # the others have no gradient


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what ``ops.max_pool2d`` returns; the gradient is the same bit for bit.

    If a window holds NaN, its maximum is NaN; MindSpore's is not. If a window holds only -inf, its
    maximum is -inf; MindSpore's is the least number of the dtype.
    """
    strides = kernel_size if stride is None else stride
    if not isinstance(x, Tensor) or return_indices or x.ndim != 4 or x.dtype not in _FLOATS:
        return ORIGINAL(x, kernel_size, stride, padding, dilation, return_indices, ceil_mode)
    sizes = _of_volumes(ceil_mode, kernel_size, strides, dilation, padding)
    if sizes is None:  # MindSpore's raises
        return ORIGINAL(x, kernel_size, stride, padding, dilation, return_indices, ceil_mode)
    kernel, strides, dilation, padding = sizes
    pool = ops.MaxPool3DWithArgmax(kernel, strides, padding, dilation, ceil_mode)
    out = pool(ops.expand_dims(x, 2))[0]
    return out.reshape((*out.shape[:2], *out.shape[3:]))  # of open sizes, squeeze forgets the axes


@ops.constexpr
def _of_volumes(ceil_mode: object, *sizes: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return kernel, strides, dilation and padding for an image as a volume of depth 1.

    Return None where MindSpore's function does not accept them.
    """
    pairs = [size if isinstance(size, tuple) else (size, size) for size in sizes]
    numbers = [one for pair in pairs for one in pair]
    if {len(pair) for pair in pairs} != {2} or {type(number) for number in numbers} != {int}:
        return None
    fits = all(0 <= 2 * pad <= size for pad, size in zip(pairs[3], pairs[0]))
    if not isinstance(ceil_mode, bool) or not fits or min(numbers[:6]) <= 0:
        return None
    return tuple((int(place != 3), *pair) for place, pair in enumerate(pairs))
