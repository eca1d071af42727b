"""A failing test says in which mode, network and settings it failed."""

from __future__ import annotations

import os
import pathlib
import types

import contract
import failures
import nets
import scripts
from mindspore import nn

from mindspore_boost_ext import AutoBoost, BoostModel, BoostTrainOneStepCell


def test_mode_parameters_networks_and_settings_are_named(mode):
    algorithm = contract.ALGORITHMS[1]
    net, model = contract.switched_on(algorithm)
    frames = [{"net": net, "model": model, "config": algorithm.on, "other": {"a": 1}}]
    item = types.SimpleNamespace(callspec=types.SimpleNamespace(params={"algorithm": algorithm}))
    assert failures.surroundings(item, frames) == [
        f"mode: {mode.upper()}_MODE",
        "parameter algorithm: 'dynamic loss scale'",
        "network net: MLP",
        "network model: BoostTrainOneStepWithLossScaleCell with overflow detection",
        f"settings config: {algorithm.on!r}",
    ]


def test_what_was_being_built_when_the_test_failed_is_named_too():
    """The frames of a failed constructor hold a Model, or a step, that lacks most of itself."""
    model = object.__new__(BoostModel)
    step = BoostTrainOneStepCell.__new__(BoostTrainOneStepCell)
    nn.Cell.__init__(step)
    lines = failures.surroundings(types.SimpleNamespace(), [{"self": model, "step": step}])
    assert lines[1:] == ["network step: BoostTrainOneStepCell"]


def test_an_optimizer_that_has_seen_settings_is_named_too():
    net = nets.MLP()
    boost = AutoBoost("O1", contract.switched())
    _, optimizer = boost.network_auto_process_train(net, nets.momentum(net.get_parameters()))
    lines = failures.surroundings(types.SimpleNamespace(), [{"optimizer": optimizer}])
    assert lines[1:] == ["network optimizer: Momentum"]


FAILING = """
import nets


def test_it():
    net = nets.MLP()
    config = {"boost": {"mode": "manual"}}
    assert net is config
"""


def test_the_report_of_a_failing_test_shows_them(tmp_path):
    """Beside the tests, whose conftest then holds."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_it.py").write_text(FAILING, "utf-8")
    words = (
        "-n",
        "0",
        "--dist",
        "no",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    )
    paths = {"PYTHONPATH": str(pathlib.Path(failures.__file__).parent)}
    ended = scripts.run("-m", "pytest", *words, folder, cwd=tmp_path, env={**os.environ, **paths})
    assert ended.returncode == 1
    for line in ("mode: PYNATIVE_MODE", "network net: MLP", "settings config: {'boost': {'mode"):
        assert line in ended.stdout
