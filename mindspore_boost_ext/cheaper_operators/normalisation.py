"""BatchNorm of rows of features, whose kernel is made for images."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell


class CheaperBatchNorm(CheaperCell):
    """The operator of a BatchNorm1d that trains, which sees the samples of a feature side by side.

    Statistics over a batch of one signal, [1, C, N], are those over N samples, [N, C].
    """

    counted_as = "batch_norm"

    def add_flags(self, **flags: object) -> nn.Cell:
        """Note the dtype that mixed precision sets, and cast nothing to it.

        A Cell of 16 bits casts its inputs: moving statistics would be copies that nobody reads.
        """
        for name in ("fp16", "bf16", "fp32"):
            if name in flags:
                setattr(self, name, flags.pop(name))
        return super().add_flags(**flags)

    def construct(
        self, x: Tensor, gamma: Tensor, beta: Tensor, mean: Parameter, variance: Parameter
    ) -> tuple[Tensor, ...]:
        """Return the normalised features, of the shape of ``x``, and the other results."""
        if x.ndim != 2 or self.is_plain(x):
            return self.plain(x, gamma, beta, mean, variance)
        signal = ops.expand_dims(ops.transpose(x, (1, 0)), 0)
        outputs = self.plain(signal, gamma, beta, mean, variance)
        return (ops.transpose(ops.squeeze(outputs[0], 0), (1, 0)), *outputs[1:])
