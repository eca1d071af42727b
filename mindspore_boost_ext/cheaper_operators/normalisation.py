"""BatchNorm1d and GroupNorm by the kernel of BatchNorm, which is made for images."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell, is_ranked

_NEGLIGIBLE = 1e-12  # an epsilon, beside a variance of 1


class CheaperBatchNorm(CheaperCell):
    """The operator of a BatchNorm1d in training, with the samples of a feature side by side.

    Statistics over a batch of one signal, [1, C, N], are those over N samples, [N, C].
    """

    counted_as = "batch_norm"

    def add_flags(self, **flags: object) -> nn.Cell:
        """Record the dtype that mixed precision sets, and cast nothing to it.

        A Cell of 16 bits casts its inputs. It would move copies of the statistics, not these.
        """
        for name in ("fp16", "bf16", "fp32"):
            if name in flags:
                setattr(self, name, flags.pop(name))
        return super().add_flags(**flags)

    def construct(
        self, x: Tensor, gamma: Tensor, beta: Tensor, mean: Parameter, variance: Parameter
    ) -> tuple[Tensor, ...]:
        """Return the normalised features, of the shape of ``x``, and the other results."""
        if not is_ranked(x.shape) or x.ndim != 2 or self.is_plain(x):
            return self.plain(x, gamma, beta, mean, variance)
        signal = ops.expand_dims(ops.transpose(x, (1, 0)), 0)
        outputs = self.plain(signal, gamma, beta, mean, variance)
        return (ops.transpose(ops.squeeze(outputs[0], 0), (1, 0)), *outputs[1:])


class CheaperGroupNorm(CheaperCell, nn.GroupNorm):
    """A GroupNorm by two operators of BatchNorm: one normalises, the other scales and shifts.

    For the first one, the groups of all samples are the channels of one image.
    """

    counted_as, least = "group_norm", 16384

    def __init__(self, plain: nn.GroupNorm) -> None:
        super().__init__(plain)
        self.gamma, self.beta = plain.gamma, plain.beta  # other code may read them
        self.normalise = ops.BatchNorm(is_training=True, epsilon=plain.eps)
        self.scale = ops.BatchNorm(is_training=False, epsilon=_NEGLIGIBLE)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a new ``gamma`` or ``beta`` is set in the plain layer, too."""
        super().__setattr__(name, value)
        if name in ("gamma", "beta"):
            setattr(self.plain, name, value)

    def construct(self, x: Tensor) -> Tensor:
        """Return the normalised values, of the shape of ``x``."""
        if self.is_plain(x) or self.is_small(x) or x.ndim < 2 or 0 in x.shape:
            return self.plain(x)
        if x.shape[1] != self.num_channels:
            return self.plain(x)
        rows = x.reshape((1, x.shape[0] * self.num_groups, -1, 1))
        # The operator's mean is rounded, which matters if it is large. So the group's first value
        # is subtracted before.
        first = ops.stop_gradient(rows[:, :, :1])
        rows = rows - first
        # The operator moves statistics in place. Nobody reads them, but they must not be constants.
        moved = first.reshape((-1,)) * 0
        ones = ops.ones_like(moved)
        normal = self.normalise(rows, ones, ops.zeros_like(moved), moved, moved)[0]
        images = normal.reshape((x.shape[0], self.num_channels, -1, 1))
        zeros, units = ops.zeros_like(self.beta), ops.ones_like(self.gamma)
        return self.scale(images, self.gamma, self.beta, zeros, units)[0].reshape(x.shape)
