"""Many tensors in one buffer of equal blocks, so that one collective carries all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.base.mapping import Tensors, each

_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 1024
_PADDING_SHARE = 16  # about one sixteenth of the buffer may be padding


class Packing(nn.Cell):
    """The places of tensors in a buffer ``[blocks, width]`` of float32.

    Of ``tensors`` only shapes and dtypes are read. ``blocks`` is a multiple of ``multiple``.
    ``owners``, int32 [blocks], has the number of the tensor to which each block belongs, and
    ``count``, the number of tensors, for the padding at the end.
    """

    def __init__(self, tensors: Sequence[Any], multiple: int = 1) -> None:
        super().__init__(auto_prefix=False)
        self.shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.dtypes = tuple(tensor.dtype for tensor in tensors)
        self.count = len(tensors)
        self.sizes = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.width = block_width(self.sizes)
        blocks = [-(-size // self.width) for size in self.sizes]
        self.starts = tuple(int(n) * self.width for n in np.cumsum([0, *blocks])[:-1])
        self.blocks = -(-sum(blocks) // multiple) * multiple
        self.places = tuple(range(self.count))
        # The parts of the buffer: the number of a tensor, or minus a number of zeros.
        pieces: list[int] = []
        for place, size in enumerate(self.sizes):
            gap = -size % self.width
            pieces += (place, -gap) if gap else (place,)
        tail = (self.blocks - sum(blocks)) * self.width
        self.pieces = (*pieces, -tail) if tail else tuple(pieces)
        # Made once: in PYNATIVE_MODE ``ops.zeros`` for every gap took most of the time of packing.
        self.zeros = {
            -piece: Tensor(np.zeros(-piece, np.float32)) for piece in self.pieces if piece < 0
        }
        owners = np.full(self.blocks, self.count, np.int32)
        owners[: sum(blocks)] = np.repeat(np.arange(self.count, dtype=np.int32), blocks)
        self.__dict__["owners"] = owners

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return float32 ``[blocks, width]`` with the values of the tensors."""
        # Even for one piece: without concat, PYNATIVE_MODE would return a view of the tensor.
        flat = ops.concat(each(ops.partial(self._piece, tensors), self.pieces))
        return ops.reshape(flat, (self.blocks, self.width))

    def _piece(self, tensors: Sequence[Tensor], piece: int) -> Tensor:
        if piece < 0:
            return self.zeros[-piece]
        tensor = tensors[piece]
        wide = tensor if tensor.dtype == ms.float32 else ops.cast(tensor, ms.float32)
        return ops.reshape(wide, (-1,))

    def unpack(self, buffer: Tensor) -> Tensors:
        """Return the tensors in their shapes and dtypes."""
        flat = ops.reshape(buffer, (-1,))
        return each(ops.partial(self._taken_out, flat), self.places)

    def _taken_out(self, flat: Tensor, place: int) -> Tensor:
        values = ops.slice(flat, (self.starts[place],), (self.sizes[place],))
        return ops.cast(ops.reshape(values, self.shapes[place]), self.dtypes[place])

    def write(self, buffer: Tensor, parameters: tuple[Parameter, ...]) -> Tensors:
        """Assign the values in the buffer to parameters, and return them."""
        return each(ops.assign, parameters, self.unpack(buffer))


def block_width(sizes: Sequence[int]) -> int:
    """Return the number of values in a block: a power of two that wastes at most about 1/16.

    On average, each tensor wastes half a block. ``sizes`` are the tensors' numbers of values.

    Examples:
        >>> block_width([400, 120, 48000, 120, 10080, 84, 840, 10])
        512
    """
    wanted = 2 * sum(sizes) // (_PADDING_SHARE * len(sizes))
    bounded = min(max(wanted, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    return 1 << (bounded.bit_length() - 1)
