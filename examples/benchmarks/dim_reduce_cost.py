"""What training in a subspace costs: its basis, its step, and steps that go nowhere.

    python examples/benchmarks/dim_reduce_cost.py --parts basis step stall

*basis*: 40 snapshots of 1.2 million weights, k = 32, over scikit-learn's randomised SVD. Demanded:
0.4 of its time, 1.5 times the snapshots' memory. *step*: the step's time over a model of it:
(2 + trials) forward passes and 4kn multiply-adds. *stall*: zero steps on a quadratic of curvature
50, made by the built-in package and by this one.
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from typing import Any

import mindspore as ms
import numpy as np
from dim_reduce import digits, perceptron
from harness import paired, print_table
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from networks import Called, waiting, with_loss

import mindspore_boost_ext
from mindspore_boost_ext.dim_reduce.basis import orthonormality_error, principal_basis
from mindspore_boost_ext.dim_reduce.p_bfgs import DimReduce


def basis_cost(count: int = 40, size: int = 1_200_000, k: int = 32, pairs: int = 3) -> None:
    """Print time and memory of the basis over a randomised SVD."""
    try:
        from sklearn.utils.extmath import randomized_svd
    except ImportError:
        sys.exit("basis is compared with scikit-learn's randomised SVD: pip install scikit-learn")
    generator = np.random.default_rng(0)
    walk = generator.normal(size=(count, size)).astype(np.float32).cumsum(axis=0)

    def other() -> Any:
        return randomized_svd(walk - walk.mean(axis=0), k, random_state=0)

    ratio = paired(lambda: principal_basis(walk, k), other, pairs, steps=1, warm_up=1)
    error = orthonormality_error(principal_basis(walk, k).components)
    tracemalloc.start()
    basis = principal_basis(walk.copy(), k, overwrite=True)  # the copy stands for the files' matrix
    peak = tracemalloc.get_traced_memory()[1] / walk.nbytes
    tracemalloc.stop()
    explained = np.cumsum(basis.explained)
    times = f"{ratio.reference_ms / 1e3:.2f} | {ratio.shown}"
    shares = ", ".join(f"{explained[i - 1]:.4f}" for i in sorted({min(5, k), min(10, k), k}))
    print_table(
        f"Basis of {count} x {size} float32, k = {k}",
        "randomised SVD, s | time ratio | quartiles | memory over snapshots | |PP'-I| | "
        "explained by 5, 10, k",
        [f"{times} | {peak:.2f} | {error:.1e} | {shares}"],
    )


def step_cost(trials: int = 2, k: int = 32, hidden: int = 4096, batch: int = 1024) -> None:
    """Print the step of P-BFGS over its model; its searches are made to run all trials."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net = perceptron(hidden, 0)
    network = with_loss(net).set_train()
    weight = ParameterTuple(net.trainable_params())
    size = sum(one.size for one in weight)
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(size, k)))[0].T.astype(np.float32)
    data = digits(0.0, 0)
    inputs = Tensor(data.images[:batch]), Tensor(data.labels[:batch])
    whole, products = _Step(network, weight, basis, trials), Called(_products)
    factors = Tensor(basis), Tensor(basis[:1].T.copy())

    def modelled() -> None:
        for _ in range(2 + trials):
            network(*inputs).asnumpy()
        products(*factors).asnumpy()

    plain = waiting(nn.TrainOneStepCell(network, nn.SGD(list(weight), 1e-9)), inputs)
    rows = []
    for name, reference in (("(2 + trials) forward + 4kn", modelled), ("plain step", plain)):
        ratio = paired(lambda: whole(*inputs).asnumpy(), reference, pairs=15, steps=2)
        rows.append(f"{name} | {ratio.reference_ms:.2f} | {ratio.shown}")
    title = f"Step of P-BFGS: n = {size}, k = {k}, batch {len(inputs[0])}, {trials} trials, GRAPH"
    print_table(title, "over | that takes, ms | ratio | quartiles", rows)


class _Step(nn.Cell):
    """Forward and backward pass and the step in the subspace, with every trial run."""

    def __init__(self, network: nn.Cell, weight: Any, basis: np.ndarray, trials: int) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.weight = network, weight
        optimizer = nn.SGD(list(weight), 1.0)
        # No loss falls by 99.99 % of what the slope promises: each search runs all its trials.
        constants = (0.55, 0.9, 0.0, 0.9999, 0, 1)
        self.reduce = DimReduce(
            network, optimizer, weight, basis, len(basis), *constants, trials=trials
        )
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, *inputs: Tensor) -> Tensor:
        loss = self.network(*inputs)
        gradients = self.grad(self.network, self.weight)(*inputs)
        return self.reduce(loss, gradients, 1.0, self.weight, self.weight, *inputs)


def _products(basis: Tensor, column: Tensor) -> Tensor:
    """Return matrix products of 4kn multiply-adds."""
    down = ops.matmul(basis, column)
    pair = ops.concat((down, 2 * down, 3 * down), 1)
    return ops.matmul(ops.transpose(basis, (1, 0)), pair).sum()


def stall(steps: int = 12, curvature: float = 50.0) -> None:
    """Print how many steps are zero where two trials cannot succeed, here and upstream."""
    rows = []
    for name in ("mindspore.boost", "mindspore_boost_ext"):
        zero, loss = _stalled(name, steps, curvature)
        rows.append(f"{name} | {zero} of {steps} | {loss:.4g}")
    title = f"A quadratic of curvatures up to {curvature:g}, default settings, from loss 1"
    print_table(title, "package | zero steps | loss at the end", rows)


def _stalled(package: str, steps: int, curvature: float) -> tuple[int, float]:
    """Return the number of zero steps and the last loss, from the loss 1."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    curvatures = np.linspace(1.0, curvature, 8).astype(np.float32)

    class Quadratic(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            start = np.full(8, np.sqrt(2.0 / curvatures.sum()), np.float32)
            self.w = Parameter(Tensor(start), name="w")
            self.curvatures = Tensor(curvatures)

        def construct(self, x: Tensor) -> Tensor:
            return 0.5 * (self.curvatures * self.w * self.w).sum() + 0.0 * x.sum()

    net, x = Quadratic(), Tensor(np.zeros(1, np.float32))
    weight = ParameterTuple(net.trainable_params())
    clone = weight.clone(prefix="clone", init="same")
    constants = (np.eye(8, dtype=np.float32), 8, 0.55, 0.9, 0.001, 0.4, 0, 1)
    if package == "mindspore.boost":
        mindspore_boost_ext.uninstall()
    try:
        from mindspore.boost.dim_reduce import DimReduce as Reduce

        reduce = Reduce(net, nn.SGD(list(weight), 1.0), weight, *constants)
    finally:
        mindspore_boost_ext.install()
    zero = 0
    for _ in range(steps):
        before = net.w.asnumpy().copy()
        reduce(net(x), (Tensor(curvatures * before),), Tensor(1.0), weight, clone, x)
        zero += np.array_equal(net.w.asnumpy(), before)
    return zero, float(net(x).asnumpy())


PARTS = {"stall": stall, "basis": basis_cost, "step": step_cost}


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description="Measure what training in a subspace costs.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    for part in parser.parse_args().parts:
        PARTS[part]()


if __name__ == "__main__":
    main()
