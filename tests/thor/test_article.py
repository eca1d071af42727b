"""The THOR article's scripts train unmodified; MindSpore's own THOR never trains unnoticed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mindspore as ms
import nets
import pytest
import scripts
from mindspore import Tensor, nn

import mindspore_boost_ext
from mindspore_boost_ext import THOR, ConvertModelUtils, FreezeOpt, install, uninstall

SCRIPT = Path(__file__).parent.parent / "thor_article.py"


def run(*words):
    """Run Python in a process of its own; return what it did."""
    return scripts.run(
        *words,
        # Not sys.path, to which MindSpore adds folders of its own that hide Python's modules.
        env={**os.environ, "PYTHONPATH": str(Path(mindspore_boost_ext.__file__).parent.parent)},
    )


def assert_trained(result):
    """Demand for both scripts of the article a falling loss, and a refresh in every third step."""
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == 2
    for line in lines:
        found = json.loads(line.removeprefix("found "))
        assert found["losses"][-1] < 0.5 * found["losses"][0]
        assert found["refreshes"] == 8  # 24 steps


def test_unmodified_under_the_launcher():
    assert_trained(run("-m", "mindspore_boost_ext", str(SCRIPT), "graph"))


def test_with_a_mere_import_on_top(tmp_path):
    source = SCRIPT.read_text(encoding="utf-8")
    future = "from __future__ import annotations\n"
    script = tmp_path / "article.py"
    script.write_text(source.replace(future, future + "import mindspore_boost_ext\n", 1), "utf-8")
    assert_trained(run(str(script), "pynative"))


def test_the_names_around_thor_are_ours_while_plugged_in():
    modules = [ms, ms.train, ms.train.train_thor, ms.train.train_thor.convert_utils]
    assert nn.thor is nn.optim.thor is nn.optim.THOR is THOR
    assert sys.modules["mindspore.nn.optim.thor"].thor is THOR
    assert all(module.ConvertModelUtils is ConvertModelUtils for module in modules)
    uninstall()
    try:
        assert not hasattr(nn.optim, "THOR")
        assert nn.thor is nn.optim.thor is sys.modules["mindspore.nn.optim.thor"].thor
        assert nn.thor.__module__ == "mindspore.nn.optim.thor"
        for module in modules:
            assert module.ConvertModelUtils.__module__.startswith("mindspore.train.")
    finally:
        install()


@pytest.fixture
def early():
    """What a script holds that has imported MindSpore's own names before this package."""
    uninstall()
    try:
        return nn.thor, ms.train.ConvertModelUtils
    finally:
        install()


def test_a_conversion_imported_before_this_package_converts(early, graph_mode):
    net, (_, conversion) = nets.MLP(), early
    opt = nn.thor(net, 0.05, Tensor([0.1]), 0.9, frequency=5)
    model = conversion().convert_to_thor_model(
        model=ms.Model(net, nets.loss_fn(), opt),
        network=net,
        loss_fn=nets.loss_fn(),
        optimizer=opt,
        frequency=2,
    )
    model.train(1, nets.dataset(4))
    assert opt.observations()["thor.refreshes"] == 2


@pytest.mark.parametrize("ours", [True, False], ids=["our conversion", "the built-in's name"])
@pytest.mark.parametrize("given", ["optimizer", "wrapped", "step"])
def test_a_built_in_optimizer_is_refused_with_the_remedy(early, given, ours):
    net, (thor, built_in) = nets.MLP(), early
    opt = thor(net, Tensor([0.05]), Tensor([0.1]), 0.9)
    arguments = {"network": net, "loss_fn": nets.loss_fn(), "optimizer": opt}
    if given == "wrapped":
        arguments["optimizer"] = FreezeOpt(opt)
    elif given == "step":
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), opt)
        arguments = {"network": step}
    conversion = ConvertModelUtils if ours else built_in
    with pytest.raises(
        ValueError, match=r"got MindSpore's own Thor\w+, .*'import mindspore_boost_ext' ab"
    ):
        conversion().convert_to_thor_model(ms.Model(net), **arguments)
