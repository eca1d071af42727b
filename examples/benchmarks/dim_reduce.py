"""The accuracy that training in a subspace reaches.

    python examples/benchmarks/dim_reduce.py --seeds 3 --plot dim_reduce.png

A perceptron on the bundled digits, with right labels and with 30 % of them drawn at random. SGD
trains with snapshots (stage 1); then the same start is trained in the subspace (stage 2): P-SGD,
P-BFGS (also four times longer), TWA, and P-BFGS in a random subspace of the same size. The length
of stage 2 is the same for both kinds of labels. This length and the batch were chosen on seed 0;
the runs begin at seed 1. Demanded: P-BFGS within 0.01 of SGD with right labels, and at least 0.05
above SGD's final accuracy with noise. ``dim_reduce_cost.py`` measures what it costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from harness import drawn, print_table
from mindspore import Tensor, nn
from mindspore.train import Callback, LambdaCallback
from networks import cross_entropy

from mindspore_boost_ext import BoostModel, TrajectorySampler
from mindspore_boost_ext.bundled import load_digits, stratified_split
from mindspore_boost_ext.cli.compare import count
from mindspore_boost_ext.cli.trial_settings import only
from mindspore_boost_ext.dim_reduce.basis import Basis, save_basis

LABELS = {"clean": 0.0, "30 % noise": 0.3}
FIRST_SEED = 1  # length and batch of the second stage were chosen on seed 0


class Plan(NamedTuple):
    """Lengths of the runs: epochs of both stages, snapshots, directions, hidden neurons."""

    first: int = 80
    second: int = 16
    snapshots: int = 40
    directions: int = 30
    hidden: int = 128
    batch: int = 128
    large_batch: int = 1024


class Run(NamedTuple):
    """What one training gave: test accuracy after each epoch, seconds, observations, report."""

    accuracy: tuple[float, ...]
    seconds: float
    counts: dict[str, Any]
    reason: str


class Data(NamedTuple):
    """Images float32 [m, 64] and labels int32 [m], for training and for testing."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits(noise: float, seed: int) -> Data:
    """Return the digits with the share ``noise`` of the training labels drawn anew."""
    digits = load_digits()
    images = (digits.images.reshape(-1, 64) / 8.0 - 1.0).astype(np.float32)
    train, test = stratified_split(digits.labels)
    labels = digits.labels.astype(np.int32)
    generator = np.random.default_rng(seed)
    drawn = generator.random(len(labels)) < noise
    noisy = np.where(drawn, generator.integers(0, 10, len(labels)), labels).astype(np.int32)
    return Data(images[train], noisy[train], images[test], labels[test])


def perceptron(hidden: int, seed: int) -> nn.Cell:
    """Return a network of one hidden layer; equal seeds give equal weights."""
    ms.set_seed(seed)
    net = nn.SequentialCell(nn.Dense(64, hidden), nn.ReLU(), nn.Dense(hidden, 10))
    generator = np.random.default_rng(seed)
    for one in net.trainable_params():
        scale = np.sqrt(2.0 / one.shape[-1]) if one.ndim > 1 else 0.0
        one.set_data(Tensor((scale * generator.normal(size=one.shape)).astype(np.float32)))
    return net


def accuracy(net: nn.Cell, data: Data) -> float:
    """Return that on the test images, counted with NumPy, which touches nothing in MindSpore."""
    values = [one.asnumpy() for one in net.trainable_params()]
    hidden = np.maximum(data.test_images @ values[0].T + values[1], 0.0)
    answers = (hidden @ values[2].T + values[3]).argmax(axis=1)
    return float((answers == data.test_labels).mean())


def train(
    plan: Plan,
    data: Data,
    seed: int,
    epochs: int,
    batch: int,
    config: dict[str, Any] | None = None,
    *callbacks: Callback,
) -> Run:
    """Train one perceptron from the weights of ``seed``; return how it went."""
    net = perceptron(plan.hidden, seed)
    dataset = ms.dataset.NumpySlicesDataset((data.images, data.labels), shuffle=True)
    dataset = dataset.batch(batch, drop_remainder=True)
    steps = epochs * dataset.get_dataset_size()
    falling = [0.1 * (1 - step / steps) for step in range(steps)]
    model = BoostModel(
        net,
        cross_entropy(),
        nn.SGD(net.trainable_params(), falling, momentum=0.9),
        boost_level="O1" if config else "O0",
        boost_config_dict=config,
    )
    began, ended = [], []
    clock = LambdaCallback(
        on_train_epoch_begin=lambda _: began.append(time.perf_counter()),
        on_train_epoch_end=lambda _: ended.append((time.perf_counter(), accuracy(net, data))),
    )
    model.train(epochs, dataset, callbacks=[clock, *callbacks], dataset_sink_mode=False)
    times, accuracies = zip(*ended)
    step = model.train_network
    counts = step.observations() if config else {}
    reason = step.report()["dim_reduce"].reason if config else ""
    return Run(accuracies, sum(times) - sum(began), counts, reason)


def random_basis(path: str, plan: Plan, seed: int) -> None:
    """Write a basis of random directions, as large as the other one."""
    size = sum(one.size for one in perceptron(plan.hidden, seed).trainable_params())
    columns = np.random.default_rng(seed).normal(size=(size, plan.directions))
    components = np.ascontiguousarray(np.linalg.qr(columns)[0].T, np.float32)
    save_basis(path, Basis(components, np.empty(0)))


def races(plan: Plan, noise: float, seed: int, folder: Path) -> dict[str, Run]:
    """Return both stages of all methods for one seed."""
    data = digits(noise, seed)
    snapshots, random = str(folder / "snapshots"), str(folder / "random.npy")
    every = max(1, plan.first // plan.snapshots)
    sampler = TrajectorySampler(snapshots, every=every, keep=plan.snapshots + 1)
    runs = {"SGD": train(plan, data, seed, plan.first, plan.batch, None, sampler)}
    random_basis(random, plan, seed)
    taken, searches = {"weight_load_dir": snapshots}, {"alpha": 0.0, "trials": 8}
    second: dict[str, tuple[int, int, dict[str, Any]]] = {
        "P-SGD": (plan.batch, 1, {**taken, "method": "p-sgd"}),
        "P-BFGS": (plan.large_batch, 1, {**taken, **searches}),
        "P-BFGS, longer": (plan.large_batch, 4, {**taken, **searches}),
        "TWA": (plan.batch, 1, {**taken, "method": "twa"}),
        "random": (plan.large_batch, 1, {"pca_mat_path": random, **searches}),
    }
    for name, (batch, times, settings) in second.items():
        config = only("dim_reduce", dim_reduce={"n_components": plan.directions, **settings})
        runs[name] = train(plan, data, seed, times * plan.second, batch, config)
    return runs


def run_table(results: dict[str, list[dict[str, Run]]], plan: Plan) -> None:
    """Print final and best accuracy of every method, means over the seeds, and the demands."""
    rows = []
    for labels, seeds in results.items():
        for method in seeds[0]:
            runs = [one[method] for one in seeds]
            final = statistics.mean(run.accuracy[-1] for run in runs)
            best = statistics.mean(max(run.accuracy) for run in runs)
            seconds = statistics.mean(run.seconds for run in runs)
            if method == "SGD":
                first, stage = final, seconds
            whole = seconds if method in ("SGD", "random") else seconds + stage
            steps = ""
            if "dim_reduce.failed_searches" in runs[0].counts:
                accepted = sum(run.counts["dim_reduce.accepted_steps"] for run in runs)
                failed = sum(run.counts["dim_reduce.failed_searches"] for run in runs)
                steps = f"{accepted} / {failed}"
            rows.append(
                f"{labels} | {method} | {final:.4f} | {best:.4f} | {final - first:+.4f} | "
                f"{seconds:.1f} | {whole:.1f} | {steps}"
            )
    headings = "labels | method | final | best | final minus SGD | s | s with stage 1"
    title = (
        f"Digits, {plan.directions} directions of {plan.snapshots} snapshots, "
        f"seeds {FIRST_SEED} to {FIRST_SEED + len(next(iter(results.values()))) - 1}"
    )
    print_table(title, f"{headings} | steps / failed searches", rows)
    for labels, seeds in results.items():
        print(f"\n{labels}, seed {FIRST_SEED}: {seeds[0]['P-BFGS'].reason}")


def plot_runs(results: dict[str, list[dict[str, Run]]], path: Path) -> None:
    """Draw the accuracy over the passes through the data, a panel for each kind of labels."""
    with drawn(path, len(results), sharey=True) as axes:
        for axis, (labels, seeds) in zip(axes, results.items()):
            for method in seeds[0]:
                mean = np.mean([one[method].accuracy for one in seeds], axis=0)
                axis.plot(np.arange(1, len(mean) + 1), mean, label=method)
            axis.set(title=f"labels: {labels}", xlabel="epoch of the stage")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("test accuracy, mean over seeds")
        axes[0].legend()


def main() -> None:
    """Train, print the table, and draw it where that was asked for."""
    parser = argparse.ArgumentParser(description="Measure training in a subspace.")
    parser.add_argument("--seeds", type=count, default=3, help="runs of each training (default: 3)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the runs")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    plan, results = Plan(), {}
    for labels, noise in LABELS.items():
        results[labels] = []
        for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                results[labels].append(races(plan, noise, seed, Path(folder)))
            print(f"{labels}, seed {seed}: done", file=sys.stderr, flush=True)
    run_table(results, plan)
    if args.plot:
        plot_runs(results, args.plot)


if __name__ == "__main__":
    main()
