"""``ops.masked_fill`` and ``ops.where`` by a choice between tensors of one shape.

Scripts call them with a mask of another shape, as for the scores of attention, or with a number. On
CPU, MindSpore's operators then find for each value of the result where it comes from, and in graphs
they keep what they have found for good.
"""

from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops import masked_fill as MASKED_FILL
from mindspore.ops import where as WHERE

from mindspore_boost_ext.runtime.compiling import is_compiling, is_known

_FEWEST = 2**17  # values of a result for which some operators more are the shorter way
_MOST_AXES = 8  # that ops.tile takes
_SHORTEST = 64  # values in a row, if an operand has only one of them: to repeat it takes long
_SELECT, _FILL = ops.Select(), ops.FillV2()

Shape = tuple[int, ...]


def masked_fill(input_x: Tensor, mask: Tensor, value: float | Tensor) -> Tensor:
    """Return what ``ops.masked_fill`` returns; for a large mask of another shape in less time."""
    # MindSpore refuses other values, and inputs that are no Tensor.
    is_number = _shape_of(value) == () and not isinstance(value, int)
    is_usual = is_number and isinstance(input_x, Tensor) and _is_of_bool(mask)
    if is_usual and _is_of_float32(input_x, value):
        shape = _common(is_compiling(), mask.shape, input_x.shape)
        if shape is not None:
            return _chosen(mask, value, input_x, shape)
    return MASKED_FILL(input_x, mask, value)


def where(condition: Tensor, input: float | Tensor, other: float | Tensor) -> Tensor:
    """Return what ``ops.where`` returns; for large operands of different shapes in less time."""
    if _is_of_float32(input, other) and _is_of_bool(condition):
        shape = _common(is_compiling(), condition.shape, _shape_of(input), _shape_of(other))
        if shape is not None:
            return _chosen(condition, input, other, shape)
    return WHERE(condition, input, other)


def _is_of_bool(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == mstype.bool_


def _is_of_float32(one: object, two: object) -> bool:
    """Return whether both are float32 tensors, or one of them is, and the other one a number."""
    if not isinstance(one, Tensor) and not isinstance(two, Tensor):
        return False
    return _fits(one) and _fits(two)


def _fits(operand: object) -> bool:
    if isinstance(operand, Tensor):
        return bool(operand.dtype == mstype.float32)
    return isinstance(operand, (int, float))


def _shape_of(operand: float | Tensor) -> Shape:
    return operand.shape if isinstance(operand, Tensor) else ()


@ops.constexpr(check=False)
def _common(compiled: bool, mask: Shape, *others: Shape) -> Shape | None:
    """Return the shape of the result; None if MindSpore's operator is to run."""
    shapes = (mask, *others)
    if not all(map(is_known, shapes)) or len(set(shapes)) == 1:
        return None
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        return None
    few = math.prod(shape) < _FEWEST or math.prod(mask) == 1
    short = any(math.prod(one) > 1 == one[-1] and shape[-1] < _SHORTEST for one in shapes)
    # Without a graph, ops.tile has no second gradient.
    has_none = not compiled and any(math.prod(one) > 1 and one != shape for one in others)
    return None if few or short or has_none or len(shape) > _MOST_AXES else shape


def _chosen(mask: Tensor, one: float | Tensor, other: float | Tensor, shape: Shape) -> Tensor:
    """Return a tensor of ``shape`` with ``one`` where the mask is True, and ``other`` elsewhere."""
    return _SELECT(_repeated(mask, shape), _repeated(one, shape), _repeated(other, shape))


def _repeated(operand: float | Tensor, shape: Shape) -> Tensor:
    if not isinstance(operand, Tensor):
        return _FILL(shape, ops.scalar_to_tensor(operand, mstype.float32))
    if operand.size == 1:
        return _FILL(shape, operand.reshape(()))
    return operand if operand.shape == shape else ops.tile(operand, _times(operand.shape, shape))


@ops.constexpr
def _times(own: Shape, shape: Shape) -> Shape:
    """Return how often a tensor is repeated along each axis of a shape."""
    sizes = (1,) * (len(shape) - len(own)) + own
    return tuple(size // one for one, size in zip(sizes, shape))
