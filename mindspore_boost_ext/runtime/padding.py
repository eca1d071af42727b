"""``ops.pad`` with constants by joining, which has the right gradient in every step of a graph.

The gradient of a padding above 0 is one below 0. MindSpore's operator for that changes its own
arguments each time it runs: as a gradient in graphs of known shapes, and alone in both modes. From
the second step on it cuts at other places, and for some sizes it never ends.
"""

from __future__ import annotations

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.function.nn_func import pad as ORIGINAL

from mindspore_boost_ext.runtime.compiling import is_compiling

_FLOATS = (mstype.float16, mstype.float32, mstype.float64)
_MOST_AXES = 8  # that ops.slice takes


def pad(
    input_x: Tensor,
    padding: tuple[int, ...] | list[int] | Tensor,
    mode: str = "constant",
    value: float | Tensor | None = None,
) -> Tensor:
    """Return what ``ops.pad`` returns. It cuts by ``ops.slice``, and in graphs it pads by joining.

    Where Python runs it, MindSpore pads: its gradient and its second gradient are right there. The
    second gradient of joining is not.
    """
    if mode != "constant" or not isinstance(input_x, Tensor):
        return ORIGINAL(input_x, padding, mode, value)
    plan = _plan(input_x.shape, padding)
    if plan is None:
        return ORIGINAL(input_x, padding, mode, value)
    start, size, borders = plan
    padded = input_x if size == input_x.shape else ops.slice(input_x, start, size)
    if not is_compiling() or not _fits(value, input_x.dtype):
        return ORIGINAL(padded, [max(width, 0) for width in padding], mode, value)
    for axis, before, after in borders:
        padded = _joined(padded, axis, before, after, value)
    return padded


def _fits(value: object, dtype: mstype.Type) -> bool:
    """Return whether the border's value is known, and the dtype can have a gradient."""
    if dtype not in _FLOATS:
        return False
    if isinstance(value, Tensor):
        return bool(value.size == 1 and value.dtype == dtype)
    return value is None or isinstance(value, (int, float))


@ops.constexpr(check=False)  # what a graph does not know is None here, or has None or -1 within
def _plan(
    shape: tuple[int, ...] | None, padding: object
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int, int], ...]] | None:
    """Return begin and size of the part that is kept, and the widths to add at the ends of axes.

    Return None where MindSpore's function raises an error, or supports what this one does not.
    """
    numbers = list(padding) if isinstance(padding, (tuple, list)) else []
    if not shape or not numbers:
        return None
    if {type(one) for one in (*shape, *numbers)} != {int}:
        return None
    axes = range(len(shape) - 1, -1, -1)
    pairs = list(zip(axes, numbers[::2], numbers[1::2]))
    start, size = [0] * len(shape), list(shape)
    for axis, first, last in pairs:
        start[axis] = max(-first, 0)
        size[axis] += min(first, 0) + min(last, 0)
    if 2 * len(pairs) < len(numbers) or min((*shape, *size)) < 1 or len(shape) > _MOST_AXES:
        return None
    borders = tuple((axis, max(first, 0), max(last, 0)) for axis, first, last in pairs)
    return tuple(start), tuple(size), borders


def _joined(x: Tensor, axis: int, before: int, after: int, value: float | Tensor | None) -> Tensor:
    """Return ``x`` with ``before`` and ``after`` places of a value at the ends of an axis."""
    parts = [x]
    if before > 0:
        parts = [_border(x, axis, before, value), *parts]
    if after > 0:
        parts = [*parts, _border(x, axis, after, value)]
    return ops.cat(parts, axis) if len(parts) > 1 else x


def _border(x: Tensor, axis: int, width: int, value: float | Tensor | None) -> Tensor:
    if not isinstance(value, Tensor):  # in a graph, ops.full takes an int as a number of 32 bits
        value = ops.scalar_to_tensor(0 if value is None else value, x.dtype)
    shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
    return ops.broadcast_to(ops.stop_gradient(value).reshape((1,) * x.ndim), shape)
