"""The update of ``nn.AdamWeightDecay`` by the kernel of Adam, which is vectorised."""

from __future__ import annotations

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from mindspore_boost_ext.cheaper_operators.cell import CheaperCell


class CheaperAdamWeightDecay(CheaperCell):
    """The operator of AdamWeightDecay: weights decay first, and Adam takes its step from there."""

    counted_as = "adam_weight_decay"

    def __init__(self, plain: ops.Primitive) -> None:
        super().__init__(plain)
        self.adam = ops.Adam()
        # The betas' powers, by which Adam corrects the moments of its first steps: of 0 by nothing.
        self.power = Tensor(0.0, mstype.float32)

    # No branch: MindSpore compiles none here, where a map over the weights calls it.
    def construct(
        self,
        weight: Parameter,
        first: Parameter,
        second: Parameter,
        rate: Tensor,
        beta1: Tensor,
        beta2: Tensor,
        epsilon: Tensor,
        decay: Tensor | float,
        gradient: Tensor,
    ) -> tuple[Tensor, ...]:
        """Update a weight and its moments in place, as the operator does."""
        shrunk = ops.assign(weight, weight * (1 - rate * decay))
        return self.adam(
            ops.depend(weight, shrunk), first, second, self.power, self.power,
            rate, beta1, beta2, epsilon, gradient,
        )  # fmt: skip
