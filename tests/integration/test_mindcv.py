"""A script that goes MindCV's way to a trainer is boosted from the command line, unmodified."""

from __future__ import annotations

import pathlib
import re
import textwrap

import pytest
import scripts

SCRIPT = """
    import sys

    import mindspore as ms
    import numpy as np
    from mindcv.loss import create_loss
    from mindcv.models import create_model
    from mindcv.optim import create_optimizer
    from mindcv.utils import create_trainer, set_seed

    mode, kind, scale, drop, amp_level = sys.argv[1:]
    ms.set_context(mode=int(mode))
    set_seed(1)
    network = create_model("resnet18", num_classes=4)
    loss = create_loss("CE")
    drop = drop == "True"
    own_scale = 1.0 if drop or kind == "auto" else float(scale)
    optimizer = create_optimizer(network.trainable_params(), "momentum", 0.01, loss_scale=own_scale)
    trainer = create_trainer(
        network, loss, optimizer, {"accuracy"}, amp_level, "", kind, float(scale), drop)
    random = np.random.default_rng(0)
    values = random.normal(size=(12, 3, 32, 32)).astype(np.float32)
    labels = (np.arange(12) % 4).astype(np.int32)
    data = ms.dataset.NumpySlicesDataset((values, labels), shuffle=False).batch(4)
    trainer.train(2, data, ms.LossMonitor(), dataset_sink_mode=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["0", "1"], ids=["graph", "pynative"])
@pytest.mark.parametrize(
    ("kind", "scale", "drop", "amp_level"),
    [("fixed", 64.0, False, "O0"), ("dynamic", 1024.0, True, "O0"), ("auto", 1.0, True, "O2")],
)
def test_a_script_of_mindcvs_kind_is_boosted(tmp_path, mode, kind, scale, drop, amp_level):
    pytest.importorskip("mindcv")
    script = pathlib.Path(tmp_path) / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    command = ["-m", "mindspore_boost_ext", "--level", "O1", str(script)]
    words = [mode, kind, str(scale), str(drop), amp_level]
    result = scripts.run(*command, *words, cwd=tmp_path, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    losses = [float(one) for one in re.findall(r"loss is (\S+)", result.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert re.search(r"ResNet: boost level O1[\s\S]*less_bn +level O1 +applied", result.stderr)
