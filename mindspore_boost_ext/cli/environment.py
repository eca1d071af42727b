"""What this machine offers: versions, devices, and whether convolutions run at full speed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import timeit
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime.machine import tuning

_SHOWN_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "MINDSPORE_BOOST_EXT_INSTALL",
    "MINDSPORE_BOOST_EXT_STRICT",
    "MINDSPORE_BOOST_EXT_TUNE",
    "RANK_ID",
    "MS_ASCEND_CHECK_OVERFLOW_MODE",
)
# At full speed a convolution is 1-4 times as slow as a matrix product of equal work here. The
# reference kernel that oneDNN falls back to in some wheels is 20-50 times slower than that.
_SLOW_RATIO = 12.0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _seconds(run: Callable[[], Tensor]) -> float:
    """Return the fastest of three runs after one to warm up."""
    return min(timeit.repeat(lambda: run().asnumpy(), number=1, repeat=4)[1:])


def convolution_seconds() -> tuple[float, float]:
    """Return the time of a 3x3 convolution and of a matrix product of equal work, in seconds."""
    image = Tensor(np.ones((8, 64, 28, 28), np.float32))
    kernel = Tensor(np.ones((64, 64, 3, 3), np.float32))
    rows = Tensor(np.ones((8 * 28 * 28, 64 * 9), np.float32))
    columns = Tensor(np.ones((64 * 9, 64), np.float32))
    convolution = ops.Conv2D(64, 3, pad_mode="same")
    return _seconds(lambda: convolution(image, kernel)), _seconds(lambda: ops.matmul(rows, columns))


def step_seconds() -> dict[bool, float]:
    """Return the seconds of a small PYNATIVE_MODE step, with (True) and without blocking launch."""
    net = nn.SequentialCell([nn.Dense(16, 16, activation="relu") for _ in range(8)])
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), learning_rate=0.0)
    )
    data = Tensor(np.ones((4, 16), np.float32))
    before, times = _compat.launches_blocking(), {}
    try:
        for blocking in (True, False):
            _compat.set_blocking_launch(blocking)
            times[blocking] = _seconds(lambda: step(data, data))
    finally:
        _compat.set_blocking_launch(before)
    return times


def describe() -> str:
    """Return the answer to ``--env``: a few lines of text."""
    packages = ("mindspore_boost_ext", "mindspore", "numpy", "rich", "matplotlib")
    lines = [f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"]
    lines += [f"{package} {_version(package)}" for package in packages]
    lines.append(f"device target {ms.get_context('device_target')}")
    lines += [f"{name}={os.environ[name]}" for name in _SHOWN_VARIABLES if name in os.environ]
    lines += [" | ".join((*row.algorithm.split(": "), row.status, row.reason)) for row in tuning()]
    convolution, product = convolution_seconds()
    ratio = convolution / product
    lines.append(
        f"a 3x3 convolution takes {convolution * 1e3:.1f} ms, {ratio:.1f} times a matrix product "
        f"of equal work: {'SLOW' if ratio > _SLOW_RATIO else 'full speed'}"
    )
    if ratio > _SLOW_RATIO:
        lines.append("to cure it, set ONEDNN_MAX_CPU_ISA=AVX2 before MindSpore starts")
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        times = step_seconds()
        lines.append(
            f"a small step of PYNATIVE_MODE takes {times[True] * 1e3:.1f} ms with blocking "
            f"launch, {times[False] * 1e3:.1f} ms without"
        )
        if times[True] < 0.8 * times[False] and not _compat.launches_blocking():
            lines.append("call ms.runtime.launch_blocking() at the start of the script")
    return "\n".join(lines)
