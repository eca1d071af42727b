"""The benchmark of gradient centralization runs, and compares what it says it compares."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import centralization  # noqa: E402
from mindspore import nn  # noqa: E402


class Small(nn.Cell):
    """A convolution and a Dense in place of a ResNet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Dense(2, 10)

    def construct(self, images):
        return self.head(self.conv(images).mean((2, 3)))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(centralization.NETWORKS, "small ResNet", (Small, 1))
    before = ms.get_context("mode")
    yield
    ms.set_context(mode=before)


def test_only_one_of_the_two_is_centralized(small, monkeypatch):
    made = []
    monkeypatch.setattr(
        centralization.nn, "TrainOneStepCell", lambda net, optimizer: made.append(optimizer) or net
    )
    for centralized in (True, False):
        centralization.make_step("small ResNet", centralized, batch_size=2)
    assert made[0].grad_centralization_flags == (True, True, False)
    assert not hasattr(made[1], "grad_centralization_flags")
    assert made[0].get_weight_decay() == made[1].get_weight_decay()


def test_it_prints_a_table(small, capsys):
    arguments = ["--networks", "small ResNet", "--modes", "GRAPH", "--pairs", "2", "--steps", "1"]
    centralization.main([*arguments, "--batch-size", "2"])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("| small ResNet | GRAPH | ")
    assert last.count("|") == 6
