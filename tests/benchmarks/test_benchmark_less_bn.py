"""The arithmetic of the LessBN benchmark, and one tiny run of each of its parts."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import less_bn as benchmark  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402
from networks import BasicBlock, SmallResNet, batch  # noqa: E402

from mindspore_boost_ext.base.centralization import installed_axes  # noqa: E402


def test_normalised_elements_are_those_of_one_image():
    ms.set_context(mode=ms.PYNATIVE_MODE)  # hooks run there
    # Two BatchNorms of 4 channels on 6 x 6 in the branch, one on the shortcut.
    block = BasicBlock(2, 4)
    images = Tensor(np.zeros((3, 2, 6, 6), np.float32))
    assert benchmark.normalised(block, images) == (3, 3 * 4 * 6 * 6)
    benchmark.less_bn(block)
    assert benchmark.normalised(block, images) == (1, 4 * 6 * 6)


@pytest.mark.parametrize("name", ["plain", "less_bn, head"])
def test_a_training_cell_of_each_method_trains(graph_mode, name):
    network = SmallResNet(2)
    step = benchmark.training_cell(network, benchmark.METHODS[name])
    assert np.isfinite(step(*batch(4)).asnumpy())
    assert isinstance(network.head, nn.Dense) == (name == "plain")


def test_the_last_line_differs_from_the_one_before_by_centralization():
    third, last = list(benchmark.METHODS)[2:]
    weights = {}
    for name in (third, last):
        cell = benchmark.training_cell(SmallResNet(2), benchmark.METHODS[name])
        weights[name] = len(installed_axes(cell.optimizer))
    assert weights == {third: 0, last: 17}  # 17 convolutions; the head is left out
