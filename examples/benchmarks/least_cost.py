"""What a method's step costs, and what it would cost at the very least: on LeNet, in GRAPH_MODE.

    taskset -c 0 python examples/benchmarks/least_cost.py

The least is a step written for this script, with the operators that the method cannot do without,
and nothing else: no ranks, no report, no settings, no schedule of the scale. Both are timed over
the plain step, by pairs, batch 32. Takes 5 minutes. On a wide network, with 2 million weights in
three layers, only this package's step is timed: it shows the cost of work on every gradient.

* dynamic scale: multiply the loss and each gradient, look for inf and nan, update in a branch;
* a scale for each of two groups: multiply the gradient between them, above them and of each
  weight, look for inf and nan in each group, set both scales, update in a branch;
* accumulation, a micro-batch that does not close its window: add to each sum, count, and a branch;
* THOR between two refreshes: a product with two matrices for each layer's gradient;
* normalised head: rows of features and weight of length one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import mindspore as ms
import numpy as np
from harness import paired, print_table
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from networks import LeNet5, grouped, marked, momentum, ours, plain_step, waiting, with_loss

_NEVER = 100_000  # micro-batches of a window, or steps to a refresh; no run here reaches it


class Least(nn.Cell):
    """The plain step; subclasses add their work between gradients and update."""

    def __init__(self, network: nn.Cell | None = None) -> None:
        super().__init__()
        network = LeNet5() if network is None else network
        self.network, self.optimizer = with_loss(network), momentum(network)
        self.weights = self.optimizer.parameters
        self.gradient = ops.GradOperation(get_by_list=True, sens_param=True)

    def start(self, loss: Tensor) -> Tensor:
        """Return what the backward pass begins with."""
        return ops.ones_like(loss)

    def finish(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        """Update, and return the loss."""
        return ops.depend(loss, self.optimizer(gradients))

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train one step."""
        loss = self.network(images, labels)
        sens = self.start(loss)
        return self.finish(loss, self.gradient(self.network, self.weights)(images, labels, sens))


def unscaled(gradients: tuple[Tensor, ...], scale: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients over their scale, and whether all are finite."""
    inverse = 1.0 / scale  # a CPU multiplies twenty times as fast as it divides
    divided, flat = (), ()
    for one in gradients:
        divided += (one * inverse,)  # type: ignore[assignment]
        flat += (ops.reshape(one, (-1,)),)  # type: ignore[assignment]
    return divided, ops.isfinite(ops.concat(flat)).all()


class LeastScaled(Least):
    """A loss scale that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(1024.0, ms.float32), name="scale", requires_grad=False)

    def start(self, loss: Tensor) -> Tensor:
        """Multiply by the scale."""
        return ops.ones_like(loss) * self.scale

    def finish(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        """Divide, and update where all is finite."""
        divided, finite = unscaled(gradients, self.scale)
        if finite:
            loss = ops.depend(loss, self.optimizer(divided))
        return loss


class Boundary(nn.Cell):
    """Identity forwards; multiplies the gradient by the ratio of two scales."""

    def construct(self, x: Tensor, here: Tensor, above: Tensor) -> Tensor:
        """Return x."""
        return x

    def bprop(
        self, x: Tensor, here: Tensor, above: Tensor, out: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the gradients; nobody reads those of the scales."""
        return dout * (here / above), here, above


class Boundaries(nn.Cell):
    """In place of a manager: a boundary between convolutions and dense layers, one above all."""

    def __init__(self) -> None:
        super().__init__()
        scale = Tensor(1024.0, ms.float32)
        self.lower = Parameter(scale, name="lower", requires_grad=False)
        self.upper = Parameter(scale, name="upper", requires_grad=False)
        self.boundary, self.one = Boundary(), Tensor(1.0, ms.float32)

    def construct(self, x: Tensor, here: int, above: int) -> Tensor:
        """Return x."""
        if here == 1:
            return self.boundary(x, self.lower, self.upper)
        return self.boundary(x, self.upper, self.one)


class LeastGrouped(Least):
    """Two scales; each is halved when its group overflows, and grows otherwise."""

    def __init__(self) -> None:
        boundaries = Boundaries()
        super().__init__(marked("LeNet", boundaries))
        self.scales = (boundaries.lower, boundaries.upper)
        self.below = len(boundaries.loss_scale_groups[0])

    def finish(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        """Divide and test group by group, set the scales, update where all is finite."""
        divided, finite = (), ()
        for scale, group in zip(self.scales, (gradients[: self.below], gradients[self.below :])):
            part, good = unscaled(group, scale)
            divided += part
            finite += (good,)  # type: ignore[assignment]
            following = ops.clamp(ops.where(good, scale * 1.0001, scale * 0.5), 1.0, 65536.0)
            loss = ops.depend(loss, ops.assign(scale, ops.depend(following, divided)))
        if ops.logical_and(finite[0], finite[1]):
            loss = ops.depend(loss, self.optimizer(divided))
        return loss


class LeastAccumulated(Least):
    """Gradients that are summed up and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = ParameterTuple(self.weights).clone(prefix="sum", init="zeros")
        self.count = Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)

    def finish(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        """Add up, and count."""
        for total, one in zip(self.sums, gradients):
            loss = ops.depend(loss, ops.assign_add(total, one))
        loss = ops.depend(loss, ops.assign_add(self.count, 1))
        if self.count >= _NEVER:
            loss = ops.depend(loss, self.optimizer(self.sums))
        return loss


class LeastPreconditioned(Least):
    """Multiplies each matrix's gradient by one matrix over its rows and one over its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self._factors("left", [one.shape[0] for one in self.weights])
        self.right = self._factors("right", [one.size // one.shape[0] for one in self.weights])

    def _factors(self, name: str, sizes: list[int]) -> ParameterTuple:
        factors = [np.eye(size, dtype=np.float32) for size in sizes]
        return ParameterTuple([Parameter(one, name=f"{name}{i}") for i, one in enumerate(factors)])

    def finish(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
        """Multiply, and update."""
        changed = ()
        for left, one, right in zip(self.left, gradients, self.right):
            if one.ndim > 1:
                rows = ops.matmul(ops.matmul(left, one.reshape((one.shape[0], -1))), right)
                one = rows.reshape(one.shape)
            changed += (one,)  # type: ignore[assignment]
        return ops.depend(loss, self.optimizer(changed))


class UnitRows(nn.Dense):
    """A Dense of cosines."""

    def construct(self, x: Tensor) -> Tensor:
        """Return ten times the cosines."""
        return ops.matmul(_unit(x), _unit(self.weight).T) * 10.0


def _unit(rows: Tensor) -> Tensor:
    return rows / ops.sqrt(ops.square(rows).sum(axis=1, keepdims=True))


def least_head() -> nn.Cell:
    """Return the plain step of a LeNet-5 with a normalised classifier."""
    network = LeNet5()
    network.fc3 = UnitRows(84, 10, has_bias=False)
    return Least(network)


def wide() -> nn.Cell:
    """Return three dense layers, 2.1 million weights."""
    hidden = [nn.Dense(1024, 1024, activation="relu") for _ in range(2)]
    return nn.SequentialCell(nn.Flatten(), *hidden, nn.Dense(1024, 10))


def dynamic(network: nn.Cell) -> nn.Cell:
    """Return the step with a dynamic scale."""
    return ours(network, manager=ms.DynamicLossScaleManager())


CASES: dict[str, tuple[Callable[[], nn.Cell] | None, Callable[[], nn.Cell]]] = {
    "plain": (Least, lambda: ours(LeNet5())),
    "dynamic scale": (LeastScaled, lambda: dynamic(LeNet5())),
    "a scale for each of two groups": (LeastGrouped, lambda: grouped("LeNet")),
    "accumulation, micro-batch": (
        LeastAccumulated,
        lambda: ours(LeNet5(), grad_accumulation={"grad_accumulation_step": _NEVER}),
    ),
    "THOR, between refreshes": (
        LeastPreconditioned,
        lambda: ours(LeNet5(), thor={"frequency": _NEVER, "damping": 0.1}),
    ),
    "normalised head": (
        least_head,
        lambda: ours(LeNet5(), less_bn={"heads": ["fc3"], "gc_flag": False}),
    ),
    "wide, dynamic scale": (None, lambda: dynamic(wide())),
    "wide, clip_norm": (None, lambda: ours(wide(), gradients={"clip_norm": 1.0})),
}


def row(name: str, pairs: int) -> str:
    """Return a line of the table."""
    plain = plain_step(wide() if name.startswith("wide") else LeNet5())
    least, here = (make and paired(waiting(make()), plain, pairs) for make in CASES[name])
    shown = least.shown if least else "- | -"
    return f"{name} | {here.reference_ms:.1f} | {shown} | {here.shown}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What a step costs, and at the very least.")
    parser.add_argument("--pairs", type=int, default=40, help="of timings")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)} (all)")
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    print_table(
        "Steps over the plain one",
        "step | plain, ms | at least | quartiles | here | quartiles",
        (row(name, options.pairs) for name in options.cases or CASES),
    )


if __name__ == "__main__":
    main()
