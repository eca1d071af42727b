"""The table of BatchNorms left here and there: its counting, its lines, and one real network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))

import less_bn_networks as benchmark  # noqa: E402

DUMP = """
  %3(equiv_15_CNode_1180) = PrimFunc_BatchNorm(%1, %para4_bn1.gamma, %para5_bn1.beta) {scope: x}
      # Fullname with scope: (Default/network/bn1-BatchNorm2d/BatchNorm-op0)
  %9(CNode_7) = PrimFunc_BatchNormGrad(%8, %1, %para4_bn1.gamma)
  %5(CNode_8) = PrimFunc_BatchNorm(%4, %para8_layer1.0.down_sample.1.gamma, %para9_x.beta)
  %6(CNode_9) = PrimFunc_Conv2D(%5, %para1_conv1.weight)
"""


def test_the_batch_norms_of_a_dump_are_named_without_their_gradients():
    assert benchmark.names_in_dump(DUMP) == ["bn1", "layer1.0.down_sample.1"]


def test_networks_that_do_not_compile_are_in_no_sum():
    lines = [("a", 9, "8", 4), ("b", 5, "5", 5), ("c", 5, "4", 5), ("d", 5, "does not compile", 1)]
    assert benchmark.sums(lines) == (
        "Of 3 networks that the pass compiles, this package leaves fewer in 1, as many in 1, "
        "more in 1."
    )


def test_a_line_counts_what_is_left_on_both_sides():
    ours = {
        "all": ["stem", "a.bn1", "a.bn2", "b.bn1", "b.bn2"],
        "left": {"stem": "outside", "a.bn2": benchmark.LAST, "b.bn1": "gate", "b.bn2": "gate"},
    }
    theirs = {"left": ["stem", "a.bn1", "a.bn2", "b.bn1"]}
    line = ("net", 5, "4", 4, "1: gate", "2 of 3: gate")
    assert benchmark.row("net", theirs, ours) == line
    failed = benchmark.row("net", {"failure": "no kernel"}, ours)
    assert failed == ("net", 5, "does not compile", 4, "", "2 of 3: gate")
    assert benchmark.row("net", theirs, {"failure": "no such network"})[-1] == "no such network"


def test_every_network_of_the_default_table_is_one_of_mindcv():
    import mindcv

    assert set(benchmark.NETWORKS) <= set(mindcv.list_models())


@pytest.mark.slow
def test_a_network_of_mindcv_on_both_sides():
    """The pass removes 16 of MobileNetV2's 52, so it is the pass that is counted; we remove 20."""
    name = "mobilenet_v2_035_96"
    theirs = benchmark.in_own_process(name, "there", 300)
    ours = benchmark.in_own_process(name, "here", 300)
    assert (len(ours["all"]), len(theirs["left"]), len(ours["left"])) == (52, 36, 32)
    assert set(theirs["left"]) <= set(ours["all"])
    assert "failure" in benchmark.in_own_process("no_such_network", "here", 300)
