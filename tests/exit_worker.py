"""Ranks that are asked to end their training, one after the other."""

from __future__ import annotations

import json
import os
from unittest import mock

import mindspore as ms
import models
import nets
from mindspore.train.callback import Callback, OnRequestExit

from mindspore_boost_ext import BoostModel

ASKED_AT = (2, 4)  # the step at whose end each of two ranks is asked
BATCHES = 8
SWITCHES = {"mode": "manual", "less_bn": False, "grad_freeze": False}
CONFIGS = {
    "nothing": {"boost": SWITCHES},
    "accumulation": {
        "boost": {**SWITCHES, "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": 4},
    },
    "freezing": {
        "boost": {**SWITCHES, "grad_freeze": True},
        "grad_freeze": {"total_steps": 2 * BATCHES},
    },
    "loss scale": {"boost": SWITCHES},
}


class AskAtStep(Callback):
    """Writes at the end of a step what MindSpore reads as the request to end; counts steps."""

    def __init__(self, path, asked_at):
        super().__init__()
        self.path, self.asked_at, self.steps = path, asked_at, 0

    def on_train_step_end(self, run_context):
        self.steps += 1
        if self.steps == self.asked_at:
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump({"GracefulExit": 1}, file)


def steps_made(rank, folder, mode, name):
    """Return after how many steps this rank has ended, and whether there is a checkpoint."""
    net = nets.Deep()
    manager = {}
    if name == "loss scale":
        manager["loss_scale_manager"] = ms.DynamicLossScaleManager(64.0)
    model = models.model_of(net, CONFIGS[name], kind=BoostModel, **manager)
    place = f"{folder}/exit {mode} {name}"
    request = f"{place} {rank}.json"
    ask = AskAtStep(request, ASKED_AT[rank])
    leave = OnRequestExit(save_mindir=False, directory=place, config_file=request)
    model.train(1, nets.dataset(BATCHES), callbacks=[ask, leave], dataset_sink_mode=False)
    return ask.steps, os.path.exists(f"{place}/rank_{rank}/Net_train.ckpt")


def results(rank, folder, mode):
    """Return what this rank finds; in GRAPH_MODE, where compiling takes long, of two cases."""
    names = CONFIGS if mode == "pynative" else ("accumulation", "loss scale")
    with mock.patch.dict(os.environ, MS_ENABLE_GRACEFUL_EXIT="1"):
        return {name: steps_made(rank, folder, mode, name) for name in names}
