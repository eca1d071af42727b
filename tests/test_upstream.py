"""The built-in package, run in a process of its own where it is right, gives the same numbers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import nets
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindspore_boost_ext import AutoBoost, BoostTrainOneStepCell
from mindspore_boost_ext.integration.patch import INSTALL_VARIABLE

TESTS = pathlib.Path(__file__).parent


def upstream(program, tmp_path, mode):
    """Run ``program`` with the built-in package; return what it put into ``result``."""
    script = tmp_path / "upstream.py"
    output = tmp_path / "result.json"
    script.write_text(
        f"import os, sys, json\nsys.path.insert(0, {str(TESTS)!r})\n"
        "import mindspore as ms\nfrom mindspore import Tensor, nn, boost\nimport nets\n"
        f"ms.set_context(mode=ms.{mode.upper()}_MODE)\n{program}\n"
        "assert not any(name.startswith('mindspore_boost_ext') for name in sys.modules)\n"
        f"json.dump(result, open({str(output)!r}, 'w'))\n",
        encoding="utf-8",
    )
    subprocess.run(
        [sys.executable, str(script)],
        check=True,
        timeout=300,
        capture_output=True,
        env={**os.environ, INSTALL_VARIABLE: "0"},
    )
    return json.loads(output.read_text())


@pytest.mark.parametrize("sens", [1.0, 1024.0])
def test_fixed_scale_step_is_upstreams(mode, tmp_path, sens):
    """With a sens given upstream's step returns its loss; weights and losses agree bit for bit."""
    result = upstream(
        f"""
net = nets.MLP()
optimizer = nets.momentum(net.trainable_params(), loss_scale={sens})
cell = boost.BoostTrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), optimizer, {sens})
cell.set_train()
losses = [float(cell(Tensor(x), Tensor(y)).asnumpy()) for x, y in nets.batches(6)]
result = {{"losses": losses, "weights": [v.tolist() for v in nets.weights(net).values()]}}
""",
        tmp_path,
        mode,
    )
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params(), loss_scale=sens)
    cell = BoostTrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), optimizer, sens)
    cell.set_train()
    losses = [float(cell(Tensor(x), Tensor(y)).asnumpy()) for x, y in nets.batches(6)]
    assert losses == result["losses"]
    for ours, theirs in zip(nets.weights(net).values(), result["weights"]):
        np.testing.assert_array_equal(ours, np.array(theirs, np.float32))


def test_level_tables_and_defaults_are_upstreams(tmp_path):
    result = upstream(
        """
result = {}
for level in ("O0", "O1", "O2"):
    boost.AutoBoost._instance = None
    result[level] = dict(boost.AutoBoost(level, "").boost_config)
one = boost.AutoBoost._instance
result["defaults"] = {name: getattr(one, name) for name in (
    "_fn_flag", "_gc_flag", "_param_groups", "_freeze_type", "_freeze_p", "_total_steps",
    "device_number", "grad_accumulation_step", "rho", "gamma", "alpha", "sigma", "n_components",
    "pca_mat_path", "weight_load_dir", "timeout")}
result["names"] = list(boost.__all__)
""",
        tmp_path,
        "graph",
    )
    for level in ("O0", "O1", "O2"):
        own = AutoBoost(level).boost_config
        assert own.pop("thor") is False  # a switch that upstream does not have
        assert own == result[level]
    config = AutoBoost("O1").config
    sections = (
        config.less_bn,
        config.grad_freeze,
        config.common,
        config.grad_accumulation,
        config.dim_reduce,
    )
    for name, value in result["defaults"].items():
        holders = [section for section in sections if hasattr(section, name.lstrip("_"))]
        assert [getattr(holder, name.lstrip("_")) for holder in holders] == [value], name

    import mindspore_boost_ext

    assert set(result["names"]) <= set(mindspore_boost_ext.__all__)


def test_the_loss_of_upstreams_default_step_is_missing_and_ours_is_there(mode, tmp_path):
    """Why the project exists: row 1 of the list of defects, seen on the installed wheel."""
    result = upstream(
        """
net = nets.MLP()
cell = boost.BoostTrainOneStepCell(
    nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params()))
x, y = nets.batches(1)[0]
output = cell.set_train()(Tensor(x), Tensor(y))
result = {"is_tensor": isinstance(output, Tensor)}
""",
        tmp_path,
        mode,
    )
    assert result == {"is_tensor": False}
    net = nets.MLP()
    cell = BoostTrainOneStepCell(
        nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
    )
    x, y = nets.batches(1)[0]
    assert isinstance(cell.set_train()(Tensor(x), Tensor(y)), Tensor)
