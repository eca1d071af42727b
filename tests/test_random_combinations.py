"""300 random combinations of settings against float64, through ``ms.Model``, in both modes.

``pytest -m slow -k case-017`` runs one of them; the first few run by default, in one mode each.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import numpy as np
import pytest
from random_combinations import case_of
from random_models import trained
from random_nets import first_values
from random_oracle import Expected, shares_off

from mindspore_boost_ext import NoEffectWarning

CASES, USUAL = 300, 6
# Of the way that a weight has gone. Of 300 cases the worst float32 is off by 6e-5; a step with half
# of its weight decay, or one more or one less in a schedule, is off by 1e-2 and more.
TOLERANCE = 3e-4

PARAMETERS = [
    pytest.param(
        mode,
        number,
        id=f"case-{number:03d}-{mode}",
        marks=() if number < USUAL and number % 2 == turn else pytest.mark.slow,
    )
    for number in range(CASES)
    for turn, mode in enumerate(("graph", "pynative"))
]

case_of = functools.cache(case_of)
LOOKED_AT = 100  # cases in which a setting has to show


@functools.cache
def expected_of(number):
    return Expected(case_of(number), drawn=[0, 1]).values


def differing(case, found, expected):
    """Return name -> how far it is off, as a share of its way, where that is too much."""
    shares = shares_off(case, found, expected)
    return {name: share for name, share in shares.items() if not share <= TOLERANCE}


@pytest.mark.parametrize(("mode", "number"), PARAMETERS, indirect=["mode"])
def test_a_random_combination_is_what_float64_says(mode, number):
    case = case_of(number)
    with warnings.catch_warnings():
        # Networks without a block for less_bn, schedules and windows longer than the training.
        warnings.simplefilter("ignore", NoEffectWarning)
        warnings.filterwarnings("ignore", message=".*is more than the .* steps of an epoch")
        warnings.filterwarnings("ignore", message=".*groups no update trains everything")
        net, model = trained(case)
    step = model.train_network
    expected = Expected(case, getattr(step.optimizer, "train_strategy", None))
    found = {one.name: one.asnumpy() for one in net.get_parameters()}
    assert found.keys() == expected.values.keys()
    off = differing(case, found, expected.values)
    assert not off, f"{mode}, off by {off}\n{case}"
    for name in case.net.frozen:
        np.testing.assert_array_equal(found[name], first_values(case.net)[name], err_msg=name)
    position = int(step.optimizer.global_step.asnumpy()[0])
    assert position == expected.optimizer.position, f"{mode}\n{case}"
    observed = step.observations()
    if case.skips_overflows:
        assert observed["skipped_steps"] == expected.skipped, f"{mode}\n{case}"
    if case.scale[0] == "dynamic":
        assert observed["loss_scale"] == expected.scale, f"{mode}\n{case}"
    if case.scale[0] == "grouped":
        scales = step.loss_scaling_manager.group_scales()
        # Each step's product is rounded in float32: 20 of them are off by 20 * 6e-8.
        np.testing.assert_allclose(scales, expected.scales, rtol=2e-6, err_msg=f"{mode}\n{case}")


# What is left out of a case, and in which cases that has to show in its end.
LEFT_OUT = {
    "weight_decay": (lambda case: not case.groups and case.weight_decay, {"weight_decay": 0.0}),
    "groups": (lambda case: len(case.groups) > 1, {"groups": ()}),
    "window": (lambda case: case.window > 1, {"window": 1}),
    "weighting": (
        lambda case: case.window > 1 and case.weighting == "samples" and case.samples % case.batch,
        {"weighting": "equal"},
    ),
    "flush": (lambda case: case.flush, {"flush": False}),
    "clip_norm": (lambda case: case.clip_norm, {"clip_norm": None}),
    "centralize": (lambda case: case.centralize, {"centralize": False}),
    "multiplier": (lambda case: case.multiplier, {"multiplier": 2.0}),
    "freeze": (lambda case: case.freeze, {"freeze": None}),
    "overflows": (lambda case: case.overflows, {"overflows": ()}),
    "shorter": (lambda case: case.shorter, {"shorter": None}),
    "epochs": (lambda case: case.epochs > 1, {"epochs": 1}),
}


@pytest.mark.parametrize("setting", LEFT_OUT)
def test_each_setting_shows_in_what_is_compared(setting):
    """So the comparison fails where a setting is not heeded: in half of the cases or more.

    The others are windows that never fill or are never left open, norms below the bound, schedules
    that freeze nothing in so few updates, and so on.
    """
    has_it, change = LEFT_OUT[setting]
    cases = [case for case in map(case_of, range(LOOKED_AT)) if has_it(case)]
    shown = 0
    for case in cases:
        without = Expected(dataclasses.replace(case, **change), drawn=[0, 1]).values
        shown += bool(differing(case, without, expected_of(case.number)))
    assert len(cases) >= 8
    assert shown >= len(cases) / 2, f"{shown} of {len(cases)}"
