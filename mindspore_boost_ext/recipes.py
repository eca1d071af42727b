"""Combinations of settings that were tuned together, as plain dicts that anyone can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mindspore_boost_ext.config.rules import check_all, integer, launched_processes, one_of

_ALL_OFF: Mapping[str, Any] = {"mode": "manual", "less_bn": False, "grad_freeze": False}
# Gives back some of the accuracy that fewer updates cost.
_LABELS: Mapping[str, Any] = {"smoothing": 0.1, "if_unfit": "skip", "when": "shorter"}

_PARTS = 2  # updates per batch, so that fewer batches suffice
_WINDOW = 2  # batches per update; four cost accuracy


def _in_fewer_batches(total_steps: int, devices: int, **shares: float) -> dict[str, Any]:
    schedule = {**shares, "parts": _PARTS, "total_steps": total_steps, "if_unfit": "skip"}
    return {
        "boost": {**_ALL_OFF},
        "short_schedule": schedule,
        "label_smoothing": {**_LABELS},
        "seq_length_warmup": _short_sequences(total_steps),
        "cheaper_operators": {},
    }


def _short_sequences(updates: int) -> dict[str, Any]:
    phases = [[0.2, 0.125], [0.3, 0.25]]
    return {"phases": phases, "method": "reshape", "total_steps": updates, "if_unfit": "skip"}


def _large_batch(total_steps: int, devices: int) -> dict[str, Any]:
    settings = {
        "boost": {**_ALL_OFF, "grad_accumulation": True, "adasum": devices > 1},
        "grad_accumulation": {"grad_accumulation_step": _WINDOW, "weighting": "samples"},
    }
    updates = max(total_steps // _WINDOW, 1)  # whole windows; the schedule ends with them
    if updates < total_steps:
        schedule = {"share": updates / total_steps, "total_steps": total_steps}
        settings["short_schedule"] = {**schedule, "if_unfit": "skip_rate"}
        settings["label_smoothing"] = {**_LABELS}
        settings["seq_length_warmup"] = _short_sequences(updates)
    server = 1 if devices % 2 else devices // 2  # two servers, if the number of devices is even
    return {**settings, "common": {"device_number": server}} if devices > 1 else settings


_RECIPES: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "fast": partial(_in_fewer_batches, share=0.5, whole_share=0.6),
    "fastest": partial(_in_fewer_batches, share=0.4, whole_share=0.5),
    "large-batch": _large_batch,
    "fp16": lambda total_steps, devices: {
        "boost": {**_ALL_OFF},
        "loss_scale": {"init": 2.0**16, "factor": 2, "window": 1000},
    },
}
NAMES = tuple(_RECIPES)


def recipe(name: str, total_steps: int, *, devices: int | None = None) -> dict[str, Any]:
    """Return tuned settings as a new dict, for ``boost_config_dict`` at level O1.

    Change it as you like, or write it to a file: it is plain JSON. ``docs/RECIPES.md`` says what a
    recipe gains and costs, and on which networks. Source: Li, Yumer, Ramanan, Budgeted
    Training, ICLR 2020 (fewer batches); Masters, Luschi, Revisiting Small Batch Training for Deep
    Neural Networks, 2018 (in parts); Szegedy et al., Rethinking the Inception Architecture, CVPR
    2016 (labels); Li, Zhang, He, The Stability-Efficiency Dilemma, 2022 (sequences).

    Args:
        name (str): ``"fast"`` is meant to reach plain training's result sooner. It uses half of
            the batches and makes two updates from each. Batches of fewer than 64 samples stay
            whole, and 60 % of them are used. A language model has short sequences at first instead.
            ``"fastest"`` is meant to come close to plain training's result with 40 % of its batches
            (50 % if they stay whole). It trains a language model as ``"fast"`` does. Both need
            falling learning rates; a constant learning rate keeps all its updates.
            ``"large-batch"`` makes one update from two batches, and combines several devices by
            AdaSum. The learning-rate schedule takes half of the updates, with smoothed labels; a
            language model has short sequences at first instead. It was tuned on one device.
            ``"fp16"`` scales the loss of a script whose network computes in float16 and that has no
            loss-scale manager. It is the same for every ``total_steps``.
        total_steps (int): updates of the whole training without a recipe, one for each batch; from
            1 to 2**30.
        devices (int, optional): processes that train together, at least 1. Default: None, as many
            as ``msrun`` has started, or 1 without it.

    Raises:
        ValueError: if an argument breaks its rule.

    Examples:
        >>> from mindspore_boost_ext import recipe
        >>> recipe("fast", 4000)["short_schedule"]["share"]
        0.5
    """
    devices = launched_processes() if devices is None else devices
    check_all(
        "recipe",
        name=(name, one_of(NAMES)),
        total_steps=(total_steps, integer(1, 2**30)),
        devices=(devices, integer(1)),
    )
    return _RECIPES[name](int(total_steps), int(devices))
