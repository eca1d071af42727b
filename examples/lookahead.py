"""An algorithm of your own: Lookahead, with one class for its rule and one for its settings.

    python examples/lookahead.py

After every ``k`` updates, the weights go back to the share ``alpha`` of their way since the last
return. Works with everything else: accumulation, freezing, loss scales, clipping, resume.

Reference: Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, NeurIPS 2019.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindspore_boost_ext import Algorithm, BoostModel, Update, UpdateAround
from mindspore_boost_ext.base.mapping import call


class LookaheadUpdate(UpdateAround):
    """Runs the update that was in this place, and goes back after every k-th one."""

    def __init__(self, inner: Update, weights: ParameterTuple, k: int, alpha: float) -> None:
        super().__init__(inner)
        self.weights, self.k, self.alpha = weights, k, alpha
        self.slow = weights.clone("boost.lookahead.slow", "same")  # state: it is in checkpoints
        name = "boost.lookahead.updates"
        self.updates = Parameter(Tensor(0, ms.int32), name=name, requires_grad=False)

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """Update, and go back after every k-th update."""
        first = self.updates == 0  # weights may have been loaded since this part was made
        for slow, weight in zip(self.slow, self.weights):
            loss = ops.depend(loss, ops.assign(slow, ops.where(first, weight, slow)))
        loss = call(self.inner, (loss, gradients, *inputs))
        back = ops.depend(ops.assign_add(self.updates, 1), loss) % self.k == 0
        for slow, weight in zip(self.slow, self.weights):
            now = ops.depend(weight, loss)
            value = ops.where(back, slow + self.alpha * (now - slow), now)
            done = ops.assign(slow, ops.where(back, value, slow)), ops.assign(weight, value)
            loss = ops.depend(loss, done)
        return loss


class Lookahead(Algorithm):
    """Lookahead with its settings: updates between two returns, and the share of the way."""

    switch = "lookahead"

    def __init__(self, k: int = 5, alpha: float = 0.5) -> None:
        if k < 1 or not 0 < alpha <= 1:
            raise ValueError(
                f"lookahead: k must be at least 1 and alpha in (0, 1], got {k}, {alpha}"
            )
        self.k, self.alpha = k, alpha

    def compared_settings(self) -> dict[str, object]:
        """Return the settings that ranks compare, and that a resumed training must have again."""
        return {"k": self.k, "alpha": self.alpha}

    def join(self, step: nn.Cell) -> None:
        """Put the rule around the part that updates the weights."""
        step.update_part = LookaheadUpdate(step.update_part, step.weights, self.k, self.alpha)


def main() -> None:
    """Train a small network with it, and print the report."""
    ms.set_seed(0)
    images = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    labels = (images.sum(axis=1) > 0).astype(np.int32)
    dataset = ms.dataset.NumpySlicesDataset((images, labels), shuffle=False).batch(16)
    net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 2))
    model = BoostModel(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9),
        metrics={"accuracy"},
        algorithms=[Lookahead(k=5, alpha=0.5)],
    )
    model.train(4, dataset)
    print(model.train_network.report())
    print(f"accuracy {model.eval(dataset)['accuracy']:.3f}")


if __name__ == "__main__":
    main()
