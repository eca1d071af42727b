"""``ops.clip_by_global_norm`` by sums along rows and one factor: a CPU divides slowly."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.function.clip_func import clip_by_global_norm as ORIGINAL

from mindspore_boost_ext.base.mapping import each
from mindspore_boost_ext.base.sums import factor_to_norm, sum_of_squares
from mindspore_boost_ext.runtime.compiling import is_compiling, is_eager, is_known


def clip_by_global_norm(
    x: Sequence[Tensor], clip_norm: float = 1.0, use_norm: None = None
) -> Sequence[Tensor]:
    """Return what ``ops.clip_by_global_norm`` returns, up to rounding.

    Gradients below the norm stay as they are, and a gradient of shape () keeps its shape.
    """
    if not (_is_norm(clip_norm, use_norm) and isinstance(x, (tuple, list)) and _are_dense(x)):
        return ORIGINAL(x, clip_norm, use_norm)
    factor = factor_to_norm(each(sum_of_squares, x), clip_norm)
    clipped: Sequence[Tensor] = each(ops.partial(ops.mul, factor), x)
    # MindSpore's function returns a list for a list in GRAPH_MODE, outside a graph.
    makes_list = isinstance(x, list) and not is_compiling() and not is_eager()
    return list(clipped) if makes_list else clipped


def _are_dense(gradients: Sequence[Tensor]) -> bool:
    """Return whether all are float32 Tensors of known shapes."""
    dense = True
    for gradient in gradients:
        dense = dense and isinstance(gradient, Tensor) and gradient.dtype == mstype.float32
        dense = dense and is_known(gradient.shape)
    return dense


@ops.constexpr(check=False)
def _is_norm(clip_norm: object, use_norm: object) -> bool:
    """Return whether MindSpore's function takes the two settings."""
    return isinstance(clip_norm, (int, float)) and clip_norm > 0 and use_norm is None
