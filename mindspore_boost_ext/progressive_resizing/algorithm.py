"""The switch ``progressive_resizing``: images start small and grow with the training."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindspore_boost_ext.config.rules import shown
from mindspore_boost_ext.stages.growing_inputs import GrowingInputs, scaled

_MOST_CHANNELS = 4  # so short an axis beside a longer one may be the channels, as of (N, H, W, C)


class ResizedImages(nn.Cell):
    r"""Makes the images of a batch smaller, bilinearly.

    The value at :math:`i` is interpolated at :math:`(i + 1/2) H / h - 1/2` of the given image. At
    scale 1/2 it is the mean of four pixels.

    Args:
        scale (float): factor on height and width, in (0, 1).
        multiple (int): both are rounded to a multiple of this, at least 1. Default: 1.

    Inputs:
        - **images** (Tensor) - float, shape :math:`(N, C, H, W)`.
        - **\*rest** (tuple(Tensor)) - the other inputs. Those that are float, of four axes, and of
          this height and width are made smaller, too.

    Outputs:
        tuple of all inputs, dtypes as given, images in shape :math:`(N, C, h, w)`.

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.progressive_resizing import ResizedImages
        >>> images = Tensor(np.arange(16).reshape(1, 1, 4, 4), dtype=ms.float32)
        >>> ResizedImages(0.5)(images)[0].asnumpy().tolist()
        [[[[2.5, 4.5], [10.5, 12.5]]]]
    """

    def __init__(self, scale: float, multiple: int = 1) -> None:
        super().__init__(auto_prefix=False)
        self.scale, self.multiple = scale, multiple

    def construct(self, images: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Resize the first input, and others of its size."""
        height, width = images.shape[2:]
        result: tuple[Tensor, ...] = (self._small(images),)
        for one in rest:
            is_image = isinstance(one, Tensor) and one.ndim == 4 and one.is_floating_point()
            if is_image and one.shape[2:] == (height, width):
                one = self._small(one)
            result += (one,)
        return result

    def _small(self, images: Tensor) -> Tensor:
        height = scaled(images.shape[2], self.scale, self.multiple)
        width = scaled(images.shape[3], self.scale, self.multiple)
        # In float32: float16 has no kernel on CPU.
        small = ops.interpolate(
            ops.cast(images, ms.float32), size=(height, width), mode="bilinear", align_corners=False
        )
        return ops.cast(small, images.dtype)


class ResizingAlgorithm(GrowingInputs):
    """Progressive resizing."""

    switch = "progressive_resizing"

    def smaller(self, scale: float) -> nn.Cell:
        """Return the Cell that resizes images."""
        return ResizedImages(scale, self.settings.multiple)

    def check_inputs(self, *inputs: object) -> None:
        """Refuse a first input that is no batch of images."""
        images = inputs[0] if inputs else None
        found = shown(images)
        if isinstance(images, Tensor):
            is_batch, sizes = images.ndim == 4 and images.is_floating_point(), images.shape[2:]
            if is_batch and (min(sizes) > _MOST_CHANNELS or max(sizes) <= _MOST_CHANNELS):
                return
            found = f"{images.dtype} of shape {images.shape}"
        raise ValueError(
            "progressive_resizing resizes the first input, which must be images: a float Tensor "
            f"of shape (N, C, H, W), H and W above {_MOST_CHANNELS}, got {found}: give it such "
            "images (channels before height), or leave progressive_resizing out"
        )
