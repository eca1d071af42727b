"""Thousands of configurations that nobody wrote: a plan, or one clear error, and nothing else.

Half are made by hypothesis from known and unknown names, fitting and unfitting values; half are a
valid file with one bit flipped or its end cut off. Allowed is a plan, or a ValueError or TypeError
that says something. Nothing outside the call may change.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import random
import warnings

import numpy as np
import pytest

from mindspore_boost_ext.config import parse as config
from mindspore_boost_ext.config.parse import ALGORITHMS, LEVELS, MODES, SECTIONS, BoostConfig
from mindspore_boost_ext.report import BoostWarning


def surroundings():
    """Return what a call could change outside itself."""
    tables = {
        name: dict(value) if hasattr(value, "keys") else value
        for name, value in vars(config).items()
        if name.isupper() or name in ("_ALIASES", "_READERS", "_FOR_EVERY_STEP")
    }
    return copy.deepcopy(
        (tables, dict(os.environ), random.getstate(), np.random.get_state()[1].tobytes())
    )


def plan_or_clear_error(level, source, strict=None):
    """Return the configuration, or None after a clear error; anything else fails the test."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            parsed = BoostConfig.parse(level, source, strict=strict)
            plan, notices = parsed.plan(), parsed.notices()
        except (ValueError, TypeError) as error:
            raised = error
        else:
            raised = None
    if raised is not None:
        assert 0 < len(str(raised)) < 10_000
        # Ours, not one that Python raised somewhere inside.
        assert isinstance(raised, config.BoostConfigError) or "must be" in str(raised)
        return None
    assert all(issubclass(one.category, BoostWarning) for one in told)
    assert [one.algorithm for one in plan] == list(ALGORITHMS)
    assert all(isinstance(one.wanted, bool) for one in plan)
    assert all(isinstance(one, str) for one in notices)
    hash(parsed)
    return parsed


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

NUMBERS = [0, 1, -1, 2, 3, 0.5, 0.0, -0.0, 1.0, 1e308, -1e308, 5e-324, 10**30, 10**400, 65536]
NUMBERS += [math.nan, math.inf, -math.inf, np.float32(0.5), np.int64(3), np.bool_(True)]
ODD = [None, True, False, "", "auto", "O1", "\0", "\ud800", b"x", [], [1], [2, 1], (1, 2), {}]
ODD += [{"a": 1}, object(), lambda step: 0, len, float, 1j, range(3), {1}, "linear", "samples"]
SCALARS = [*NUMBERS, *ODD]
FIELDS = {
    (name, one.name): one.default
    for name, section in SECTIONS.items()
    for one in dataclasses.fields(section)
}
SWITCHES = [("boost", name) for name in ALGORITHMS]
STRAYS = [("boost", ""), ("dim_reduce", "n_component"), ("common", "device_num"), ("boost", 0)]
STRAYS += [("lessbn", "fn_flag"), (None, None), ((), "mode"), ("boost", "mode")]
WHOLE = [*SECTIONS, "boost", "acc_level", 7]


def entry(draw, free):
    """Return a setting as ((section, key), value), or a whole section as ((section,), value)."""
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(SWITCHES), draw.random() < 0.5
    if kind < 0.4:
        return ("boost", "mode"), draw.choice(MODES)
    if kind < 0.75:
        return draw.choice(list(FIELDS.items()))
    value = draw.choice([*SCALARS, *free, [draw.choice(SCALARS), draw.choice(free)]])
    if kind < 0.95:
        return draw.choice([*FIELDS, *SWITCHES, *STRAYS]), value
    return (draw.choice(WHOLE),), value


def document(seed, *free):
    """Return the configuration of a seed; ``free`` are values that hypothesis has made up."""
    draw, source = random.Random(seed), {}
    if draw.random() < 0.02:
        return draw.choice([*SCALARS, *free])
    for _ in range(draw.randrange(9)):
        (section, *key), value = entry(draw, free)
        if not key:
            source[section] = value
        elif isinstance(source.setdefault(section, {}), dict):
            source[section] = {**source[section], key[0]: value}
    return source


PAIRS = st.builds(
    # Two of each seed: hypothesis repeats small ones.
    lambda seed, *free: (document(seed, *free), document(~seed, *free, repr(seed))),
    st.integers(0, 2**62),
    st.floats(),
    st.text(max_size=5),
)
LEVEL = st.sampled_from([*LEVELS, *LEVELS, *LEVELS, "O3", 1, None])


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_generated_configurations(count):
    before, outcomes, seen = surroundings(), [], set()

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(LEVEL, PAIRS, st.booleans())
    def check(level, pair, strict):
        for source in pair:
            given = repr(source)
            seen.add((level, given, strict))
            outcomes.append(plan_or_clear_error(level, source, strict) is not None)
            assert repr(source) == given

    state = random.getstate()
    check()
    random.setstate(state)  # hypothesis itself seeds it
    assert surroundings() == before
    assert len(seen) >= count
    # Both ends are reached often, else this says little.
    assert 0.05 < sum(outcomes) / len(outcomes) < 0.95


VALID = {
    "boost": {"mode": "manual", "less_bn": False, "grad_accumulation": True},
    "common": {"gradient_split_groups": [50, 100], "device_number": 8},
    "grad_freeze": {"param_groups": 10, "freeze_p": 0.7, "schedule": "cubic", "seed": 0},
    "grad_accumulation": {"grad_accumulation_step": 4, "weighting": "samples"},
    "dim_reduce": {"rho": 0.55, "pca_mat_path": None, "weight_load_dir": "folder"},
    "gradients": {"clip_norm": 1.5},
}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_and_every_cut_of_a_valid_file(tmp_path, every):
    text = json.dumps(VALID).encode()
    before, path, outcomes = surroundings(), tmp_path / "boost.json", []
    flipped = [
        text[:place] + bytes([text[place] ^ (1 << bit)]) + text[place + 1 :]
        for place in range(len(text))
        for bit in range(8)
    ]
    cut = [text[:length] for length in range(len(text))]
    for content in [*flipped, *cut][::every]:
        path.write_bytes(content)
        outcomes.append(plan_or_clear_error("O1", str(path)) is not None)
    assert surroundings() == before
    assert plan_or_clear_error("O1", VALID) is not None
    assert 0 < sum(outcomes) < len(outcomes)
