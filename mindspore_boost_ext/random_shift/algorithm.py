"""The switch ``random_shift``: every image of a batch is moved by a few pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.report import APPLIED, SKIPPED, Row
from mindspore_boost_ext.runtime.cells import layers_of
from mindspore_boost_ext.runtime.ranks import rank_and_count
from mindspore_boost_ext.stages.batch import behind
from mindspore_boost_ext.stages.labels import no_class_a_sample

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell

SKIP = "skip"
_DRAWS = 8191  # a prime, so that batches of every size come to all of them
_GRID = 2**16  # draws are multiples of its inverse: times any size they are exact in float32


class ShiftedImages(nn.Cell):
    r"""Moves each image of a batch by chance; what comes in at a border repeats the border.

    Along an axis of size :math:`s` an image moves by :math:`\lfloor u (2 p + 1) \rfloor - p`
    pixels, :math:`p` the rounded product of share and :math:`s`, and :math:`u` the next of 8,191
    draws from [0, 1) that are gone through again and again.

    Args:
        share (float): of height and width, in [0, 0.25]; 0 leaves images as they are.
        seed (int): of the draws, from 0 to 2**32 - 1; every rank draws its own. Default: 0.
        only_images (bool): whether anything but a batch of images is an error. Default: ``True``.

    Inputs:
        - **images** (Tensor) - any dtype, shape :math:`(N, C, H, W)`.
        - **\*rest** (tuple(Tensor)) - the other inputs.

    Outputs:
        tuple, the moved images, dtype and shape as given, and the rest as it was.

    Supported Platforms:
        Run: ``CPU``. Written, not run: ``Ascend``, ``GPU``.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.random_shift import ShiftedImages
        >>> images = Tensor(np.arange(16).reshape(1, 1, 4, 4))
        >>> ShiftedImages(0.25)(images)[0].asnumpy().tolist()
        [[[[4, 4, 5, 6], [8, 8, 9, 10], [12, 12, 13, 14], [12, 12, 13, 14]]]]
    """

    def __init__(self, share: float, seed: int = 0, only_images: bool = True) -> None:
        super().__init__(auto_prefix=False)
        self.share, self.only_images = share, only_images
        draws = np.random.default_rng((seed, rank_and_count()[0])).integers(0, _GRID, (2, _DRAWS))
        self.draws = Tensor((draws / _GRID).astype(np.float32))
        name = "boost.random_shift.position"  # among the draws
        self.position = Parameter(Tensor(0, ms.int32), name=name, requires_grad=False)

    def construct(self, images: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Move the first input."""
        if self.share == 0 or (images.ndim != 4 and not self.only_images):
            return (images, *rest)
        count, channels, height, width = images.shape
        chosen = (self.position + ops.arange(count)) % _DRAWS
        rows, columns = self._places(0, chosen, height), self._places(1, chosen, width)
        places = rows.expand_dims(2) * width + columns.expand_dims(1)
        planes = ops.arange(count * channels).reshape((count, channels, 1)) * (height * width)
        # One gather of whole numbers: exact in every dtype, on every device.
        found = ops.gather(images.reshape(-1), planes + places.reshape((count, 1, -1)), 0)
        moved = found.reshape(images.shape)
        following = (ops.depend(self.position, chosen) + count) % _DRAWS
        return (ops.depend(moved, ops.assign(self.position, following)), *rest)

    def _places(self, axis: int, chosen: Tensor, size: int) -> Tensor:
        """Return from where each place of an axis is taken, int32, shape (N, size)."""
        most = pixels(self.share, size)
        draws = ops.gather(self.draws[axis], chosen, 0)
        shifts = ops.cast(ops.floor(draws * (2 * most + 1)), ms.int32) - most
        places = shifts.expand_dims(1) + ops.arange(size)
        return ops.cast(ops.clamp(places, 0, size - 1), ms.int32)


def pixels(share: float, size: int) -> int:
    """Return by how many pixels an image moves at most; also in a graph."""
    return int(share * size + 0.5)


class RandomShiftAlgorithm(Algorithm):
    """Randomly shifted images."""

    switch = "random_shift"

    def join(self, step: BoostTrainOneStepCell) -> None:
        """Let the images move before the network sees them."""
        if not self.is_on(step):
            return
        if not step.runs_our_construct():
            raise ValueError(
                f"{type(step).__name__} has a construct of its own, in which images would not "
                "move: leave random_shift away"
            )
        settings: Any = step.auto_boost.config.random_shift
        shifted = ShiftedImages(settings.share, settings.seed, settings.if_unfit != SKIP)
        step.batch_part = behind(step.batch_part, shifted)
        self._put_row(step, APPLIED, f"by up to {settings.share:.3g} of height and width")

    def check_state(self, step: BoostTrainOneStepCell, *inputs: object) -> None:
        """Refuse a first batch that is not of images with one class each."""
        if not (self.is_on(step) and inputs):
            return
        settings: Any = step.auto_boost.config.random_shift
        reason = _no_images(settings.share, inputs[0]) or no_class_a_sample(*inputs)
        if not reason:
            return
        if settings.if_unfit != SKIP:
            raise ValueError(f"random_shift {reason}: leave random_shift away")
        for each in layers_of(step, (ShiftedImages,)):
            each.share = 0.0
        self._put_row(step, SKIPPED, reason)

    def _put_row(self, step: BoostTrainOneStepCell, status: str, reason: str) -> None:
        report = step.report()
        report.put(Row(self.switch, report[self.switch].asked_by, status, reason))


def _no_images(share: float, images: object) -> str:
    """Return why an input cannot be moved; empty if it can."""
    needs = "moves the first input, which must be images: a Tensor of shape (N, C, H, W), got "
    if not isinstance(images, Tensor):
        return needs + shown(images)
    if images.ndim != 4:
        return f"{needs}shape {images.shape}"
    if not any(pixels(share, size) for size in images.shape[2:]):
        return f"moves images of {images.shape[2:]} by no pixel at random_shift.share={share:g}"
    return ""


__all__ = ["RandomShiftAlgorithm", "ShiftedImages"]
