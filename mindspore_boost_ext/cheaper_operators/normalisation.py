"""BatchNorm of rows of features, whose kernel is made for images."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.cheaper_operators.cell import CheaperCell


class CheaperBatchNorm(CheaperCell, nn.BatchNorm1d):
    """A BatchNorm1d that sees the samples of a feature side by side while it trains.

    Statistics over a batch of one signal, [1, C, N], are those over N samples, [N, C].
    """

    counted_as = "batch_norm"

    def __init__(self, plain: nn.BatchNorm1d) -> None:
        super().__init__(plain)
        for name, one in _compat.own_parameters(plain).items():  # code may read them of the layer
            setattr(self, name, one)

    def construct(self, x: Tensor) -> Tensor:
        """Return the normalised features, of the shape of ``x``."""
        if x.ndim != 2 or not self.training or self.is_plain(x):
            return self.plain(x)
        signal = ops.expand_dims(ops.transpose(x, (1, 0)), 0)
        return ops.transpose(ops.squeeze(self.plain(signal), 0), (1, 0))
