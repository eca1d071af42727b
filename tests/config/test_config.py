"""Levels, modes, values and messages of the configuration. No MindSpore needed."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

from mindspore_boost_ext import (
    AutoBoost,
    BoostConfig,
    BoostConfigError,
    BoostWarning,
    NoEffectWarning,
)
from mindspore_boost_ext.config.parse import (
    ALGORITHMS,
    SECTIONS,
    STRICT_VARIABLE,
    warn_of_idle_settings,
)
from mindspore_boost_ext.config.sections import LessBNConfig

# The table of the API text, which upstream's documentation gives as the recommended format.
RECOMMENDED = {
    "boost": {"mode": "auto", **dict.fromkeys(ALGORITHMS, False)},
    "common": {"gradient_split_groups": [50, 100], "device_number": 8},
    "less_bn": {"fn_flag": True, "gc_flag": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
    "grad_accumulation": {"grad_accumulation_step": 1},
    "dim_reduce": {
        "rho": 0.55,
        "gamma": 0.9,
        "alpha": 0.001,
        "sigma": 0.4,
        "n_components": 32,
        "pca_mat_path": None,
        "weight_load_dir": None,
        "timeout": 1800,
    },
}


def wanted(level, source=None, missing=None):
    plan = BoostConfig.parse(level, source).plan(missing)
    return {one.algorithm for one in plan if one.wanted}


def problems(source, level="O1"):
    with pytest.raises(BoostConfigError) as caught:
        BoostConfig.parse(level, source)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


def test_a_class_is_no_function_of_the_step():
    (found,) = problems({"grad_freeze": {"schedule": object}})
    assert found.startswith("grad_freeze.schedule must be None, 'linear', ")
    BoostConfig.parse("O1", {"grad_freeze": {"schedule": lambda step: 0, "total_steps": 7}})


def test_recommended_format_is_the_default():
    given, empty = BoostConfig.parse("O1", RECOMMENDED), BoostConfig.parse("O1")
    for section in ("common", "less_bn", "grad_freeze", "grad_accumulation", "dim_reduce"):
        assert getattr(given, section) == getattr(empty, section)


@pytest.mark.parametrize("source", [None, "", {}, {"boost": None}, {"grad_freeze": None}])
def test_nothing_given_means_defaults(source):
    assert BoostConfig.parse("O1", source) == BoostConfig.parse("O1", {})


@pytest.mark.parametrize(
    ("level", "source", "expected"),
    [
        ("O0", None, set()),
        ("O1", None, {"less_bn", "grad_freeze"}),
        ("O2", None, {"less_bn", "grad_freeze", "adasum"}),
        ("O1", {"boost": {"mode": "disable_all"}}, set()),
        ("O2", {"boost": {"mode": "manual"}}, {"less_bn", "grad_freeze", "adasum"}),
        ("O1", {"boost": {"mode": "manual", "grad_freeze": False}}, {"less_bn"}),
        (
            "O1",
            {"boost": {"mode": "manual", "loss_scale_group": True}},
            {"less_bn", "grad_freeze", "loss_scale_group"},
        ),
        ("O1", {"boost": {"less_bn": False}}, {"less_bn", "grad_freeze"}),
        ("O1", {"grad_freeze": {"total_steps": 7}}, {"less_bn", "grad_freeze"}),
        (
            "O1",
            {"boost": {"mode": "manual", "dim_reduce": True}, "dim_reduce": {"pca_mat_path": "p"}},
            {"dim_reduce"},
        ),
        (
            "O1",
            {"boost": {"mode": "enable_all"}},
            {"less_bn", "grad_freeze", "adasum", "loss_scale_group"},
        ),
        (
            "O1",
            {
                "boost": {"mode": "enable_all"},
                "grad_accumulation": {"grad_accumulation_step": 4},
            },
            {"less_bn", "grad_freeze", "adasum", "loss_scale_group", "grad_accumulation"},
        ),
        ("O0", {"boost": {"mode": "enable_all"}}, set()),
        ("O0", {"boost": {"mode": "manual", "less_bn": True}}, set()),
    ],
)
def test_what_levels_modes_and_switches_want(level, source, expected):
    assert wanted(level, source) == expected


def test_enable_all_leaves_out_what_lacks_a_prerequisite_and_says_why():
    config = BoostConfig.parse("O1", {"boost": {"mode": "enable_all"}})
    plan = {one.algorithm: one for one in config.plan({"adasum": "one process only"})}
    assert not plan["adasum"].wanted
    assert plan["adasum"].reason == "one process only"
    assert plan["adasum"].asked_by == "mode enable_all"
    assert "excludes most others" in plan["dim_reduce"].reason
    assert "grad_accumulation_step is 1" in plan["grad_accumulation"].reason


def test_dim_reduce_says_what_it_excludes():
    source = {
        "boost": {"mode": "manual", "dim_reduce": True, "less_bn": True},
        "dim_reduce": {"weight_load_dir": "somewhere"},
    }
    config = BoostConfig.parse("O1", source)
    plan = {one.algorithm: one for one in config.plan()}
    assert plan["less_bn"].asked_by == "boost.less_bn=True"
    assert plan["less_bn"].reason == "dim_reduce excludes this algorithm"
    assert config.notices() == (
        "boost.less_bn=True has no effect: dim_reduce excludes this algorithm",
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"boost": {"less_bn": "no"}}, "boost.less_bn must be True or False, got 'no' (str)"),
        ({"boost": {"less_bn": 1}}, "boost.less_bn must be True or False, got 1 (int)"),
        (
            {"boost": {"mode": "on"}},
            "boost.mode must be one of 'auto', 'manual', 'enable_all', 'disable_all', "
            "got 'on' (str)",
        ),
        (
            {"grad_freeze": {"freeze_p": -0.5}},
            "grad_freeze.freeze_p must be a number in [0, 1), got -0.5 (float)",
        ),
        (
            {"grad_freeze": {"freeze_p": 1}},
            "grad_freeze.freeze_p must be a number in [0, 1), got 1 (int)",
        ),
        (
            {"grad_freeze": {"freeze_p": float("nan")}},
            "grad_freeze.freeze_p must be a number in [0, 1), got nan (float)",
        ),
        (
            {"grad_freeze": {"total_steps": -5}},
            "grad_freeze.total_steps must be an int from 1 to 2147483647, got -5 (int)",
        ),
        (
            {"grad_freeze": {"freeze_type": True}},
            "grad_freeze.freeze_type must be one of 0, 1, got True (bool)",
        ),
        (
            {"grad_freeze": {"param_groups": 2.0}},
            "grad_freeze.param_groups must be an int from 1 to 2147483647, got 2.0 (float)",
        ),
        (
            {"dim_reduce": {"n_components": 0}},
            "dim_reduce.n_components must be an int from 1 to 2147483647, got 0 (int)",
        ),
        (
            {"dim_reduce": {"rho": 1.0}},
            "dim_reduce.rho must be a number in (0, 1), got 1.0 (float)",
        ),
        (
            {"dim_reduce": {"timeout": 0}},
            "dim_reduce.timeout must be a number in (0, 1e9], got 0 (int)",
        ),
        (
            {"dim_reduce": {"pca_mat_path": ""}},
            "dim_reduce.pca_mat_path must be None or a path (a non-empty str or os.PathLike), "
            "got '' (str)",
        ),
        (
            {"common": {"gradient_split_groups": [100, 50]}},
            "common.gradient_split_groups must be an int from 1 to 2147483647, or a list or tuple "
            "of such ints in rising order, got [100, 50] (list)",
        ),
        (
            {"grad_accumulation": {"grad_accumulation_step": None}},
            "grad_accumulation.grad_accumulation_step must be an int from 1 to 16777216, "
            "got None (NoneType)",
        ),
        # What float32 and int32 cannot hold: these made weights NaN, or stopped training.
        (
            {"gradients": {"clip_norm": 1e39}},
            "gradients.clip_norm must be None or a number in [1e-18, 1e18], got 1e+39 (float)",
        ),
        (
            {"gradients": {"clip_norm": 1e-50}},
            "gradients.clip_norm must be None or a number in [1e-18, 1e18], got 1e-50 (float)",
        ),
        (
            {"less_bn": {"multiplier": 1e39}},
            "less_bn.multiplier must be a number in (0, inf), got 1e+39 (float), "
            "which is inf in float32",
        ),
        (
            {"thor": {"moving_average": 1 - 1e-12}},
            "thor.moving_average must be a number in [0, 1), got 0.999999999999 (float), "
            "which is 1 in float32",
        ),
        (
            {"grad_accumulation": {"grad_accumulation_step": 2**31}},
            "grad_accumulation.grad_accumulation_step must be an int from 1 to 16777216, "
            "got 2147483648 (int)",
        ),
        (
            {"grad_freeze": {"param_groups": 2**63}},
            "grad_freeze.param_groups must be an int from 1 to 2147483647, "
            "got 9223372036854775808 (int)",
        ),
        ({"less_bn": 3}, "less_bn must be a dict of settings or None, got 3 (int)"),
        (
            {"grad_freze": {}},
            "grad_freze is not a known section: did you mean 'grad_freeze'?",
        ),
        (
            {"grad_freeze": {"freez_p": 0.5}},
            "grad_freeze.freez_p is not a known key: did you mean 'freeze_p'?",
        ),
        (
            {"boost": {"": True}},
            f"boost.'' (str) is not a known key: known are mode, {', '.join(ALGORITHMS)}",
        ),
        ({"boost": {"lessbn": True}}, "boost.lessbn is not a known key: did you mean 'less_bn'?"),
        ({"clip_norm": 5}, "clip_norm is not a known section: did you mean gradients.clip_norm?"),
        ({"mode": "manual"}, "mode is not a known section: did you mean boost.mode?"),
        (
            {"less_bn": {"mode": "manual"}},
            "less_bn.mode is not a known key: did you mean boost.mode?",
        ),
        (
            {"boost": {"gradients": {}}},
            "boost.gradients is not a known key: it is a section: give it beside boost",
        ),
        (
            {"boost": {"thor": {}}},
            "boost.thor must be True or False, got {} (dict): give settings in a section of that "
            "name beside boost",
        ),
        (
            {"thor": True},
            "thor must be a dict of settings or None, got True (bool): give a switch in section "
            "boost",
        ),
        (
            {"boost": {"mode": "manual", "dim_reduce": True}},
            "dim_reduce needs dim_reduce.weight_load_dir (a folder of checkpoints) or "
            "dim_reduce.pca_mat_path (a saved basis), got neither",
        ),
    ],
)
def test_each_wrong_value_has_its_message(source, message):
    assert problems(source) == (message,)


def test_all_problems_stand_in_one_error():
    source = {
        "boost": {"mode": 3, "adasum": "yes"},
        "common": {"device_number": 0},
        "dim_reduce": {"gamma": 2},
        "nonsense": 1,
    }
    found = problems(source, level="O7")
    assert len(found) == 6
    for name in ("level", "boost.mode", "boost.adasum", "device_number", "gamma", "nonsense"):
        assert sum(name in problem for problem in found) == 1
    with pytest.raises(ValueError, match="6 problems"):
        BoostConfig.parse("O7", source)


@pytest.mark.parametrize("source", [5, ["boost"], b"x", object()])
def test_a_source_of_the_wrong_type_is_a_type_error(source):
    with pytest.raises(TypeError, match="must be a dict, the path of a JSON file, None or ''"):
        BoostConfig.parse("O1", source)


def test_a_level_of_the_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match="level must be one of O0, O1, O2, got 1"):
        BoostConfig.parse(1)


def test_numpy_numbers_and_path_objects_are_accepted():
    config = BoostConfig.parse(
        "O1",
        {
            "boost": {"mode": "manual", "less_bn": np.bool_(False)},
            "grad_freeze": {"param_groups": np.int64(4), "freeze_p": np.float32(0.5)},
            "dim_reduce": {"pca_mat_path": pathlib.Path("basis.npz")},
            "common": {"gradient_split_groups": 30},
        },
    )
    assert config.switches["less_bn"] is False
    assert (config.grad_freeze.param_groups, config.grad_freeze.freeze_p) == (4, 0.5)
    assert config.dim_reduce.pca_mat_path == "basis.npz"
    assert config.common.gradient_split_groups == (30,)


def test_unknown_names_become_warnings_when_asked(monkeypatch):
    source = {"boost": {"mode": "manual", "lessbn": True}, "grad_freeze": {"freeze_p": 0.5}}
    with pytest.warns(BoostWarning, match="did you mean 'less_bn'"):
        config = BoostConfig.parse("O1", source, strict=False)
    assert config.grad_freeze.freeze_p == 0.5
    monkeypatch.setenv(STRICT_VARIABLE, "0")
    with pytest.warns(BoostWarning, match="ignored"):
        BoostConfig.parse("O1", source)
    with pytest.raises(BoostConfigError):
        BoostConfig.parse("O1", source, strict=True)


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ({"dim_reduce": {"n_component": 5}}, lambda config: config.dim_reduce.n_components == 5),
        ({"common": {"device_num": 4}}, lambda config: config.common.device_number == 4),
        ({"acc_level": "O2"}, lambda config: config.level == "O2"),
    ],
)
def test_names_of_other_texts_are_accepted_with_a_notice(source, read):
    with pytest.warns(BoostWarning, match=r"n_component|device_num|acc_level"):
        assert read(BoostConfig.parse("O1", source))


def test_an_alias_beside_its_name_is_an_error():
    assert "give one" in problems({"dim_reduce": {"n_component": 5, "n_components": 6}})[0]


@pytest.mark.parametrize(
    ("level", "source", "notice"),
    [
        (
            "O1",
            {"boost": {"less_bn": False}},
            "boost.less_bn=False has no effect: mode 'auto' decides; use mode 'manual' to set "
            "switches",
        ),
        (
            "O0",
            {"boost": {"grad_accumulation": True}},
            "boost.grad_accumulation=True has no effect: level O0 decides; use level O1 or O2 to "
            "set switches",
        ),
        (
            "O0",
            {"boost": {"mode": "enable_all"}},
            "boost.mode='enable_all' has no effect: level O0 switches nothing on",
        ),
        (
            "O1",
            {"grad_accumulation": {"grad_accumulation_step": 4}},
            "section 'grad_accumulation' has no effect: grad_accumulation is not switched on: "
            "set boost.mode to 'manual' and its switch to True",
        ),
        (
            "O1",
            {"boost": {"mode": "manual"}, "grad_accumulation": {"grad_accumulation_step": 4}},
            "section 'grad_accumulation' has no effect: grad_accumulation is not switched on: "
            "set its switch to True",
        ),
        (
            "O0",
            {"common": {"device_number": 2}},
            "section 'common' has no effect: level O0 switches nothing on; use level O1 or O2",
        ),
        (
            "O1",
            {"common": {"device_number": 2, "gradient_split_groups": [3]}},
            "common.device_number has no effect: adasum is not switched on",
        ),
        (
            "O2",
            {"boost": {"mode": "manual", "less_bn": False}, "common": {"gradient_split_groups": 3}},
            "common.gradient_split_groups has no effect: less_bn is not switched on",
        ),
        (
            "O1",
            {"short_schedule": {"total_steps": 1}},
            "section 'short_schedule' has no effect: short_schedule.share is rounded to all "
            "updates",
        ),
        (
            "O1",
            {"short_schedule": {"total_steps": 8, "whole_share": 0.99}},
            "section 'short_schedule' has no effect: short_schedule.whole_share is rounded to "
            "all updates",
        ),
    ],
)
def test_what_has_no_effect_is_told(level, source, notice):
    config = BoostConfig.parse(level, source)
    assert config.notices() == (notice,)
    with pytest.warns(NoEffectWarning) as caught:
        warn_of_idle_settings(config)
    assert len(caught) == 1


def test_a_section_of_what_is_switched_off_by_name_is_not_warned_of():
    """As in a script for mindspore.boost that gives all that its documentation lists."""
    off = dict.fromkeys(("less_bn", "adasum", "grad_accumulation", "dim_reduce"), False)
    settings = {
        "common": {"gradient_split_groups": [50, 100], "device_number": 8},
        "less_bn": {"fn_flag": True, "gc_flag": True},
        "grad_accumulation": {"grad_accumulation_step": 1},
        "dim_reduce": {"rho": 0.55, "pca_mat_path": None, "weight_load_dir": None},
    }
    source = {"boost": {"mode": "manual", **off, "grad_freeze": True}, **settings}
    assert BoostConfig.parse("O1", source).notices() == ()
    del source["boost"]["dim_reduce"]
    (notice,) = BoostConfig.parse("O1", source).notices()
    assert notice.startswith("section 'dim_reduce' has no effect: dim_reduce is not switched on")


def test_a_section_of_what_was_asked_for_and_left_out_gives_the_reason():
    switches = {"mode": "manual", "adasum": True, "dim_reduce": True, "less_bn": False}
    source = {"boost": switches, "dim_reduce": {"weight_load_dir": "folder"}}
    config = BoostConfig.parse("O1", source | {"common": {"device_number": 2}})
    reason = "section 'common' has no effect: dim_reduce excludes this algorithm"
    assert config.notices()[1:] == (reason,)


FREEZE, LESS_BN = "grad_freeze", "less_bn"


@pytest.mark.parametrize(
    ("section", "settings", "reason"),
    [
        (FREEZE, {"schedule": "cubic", "freeze_p": 0.5}, "freeze_p has no effect: grad_freeze.sch"),
        (FREEZE, {"schedule": [0, 1], "freeze_type": 0}, "freeze_type has no effect: grad_freeze"),
        (FREEZE, {"prefix_start": 0.1}, "prefix_start has no effect: grad_freeze.schedule is not"),
        (FREEZE, {"schedule": [0], "prefix_fraction": 0.1}, "prefix_fraction has no effect: grad"),
        (FREEZE, {"freeze_type": 0, "seed": 7}, "seed has no effect: grad_freeze.freeze_type 0"),
        (FREEZE, {"schedule": "cubic", "seed": 7}, "seed has no effect: grad_freeze.schedule"),
        (FREEZE, {"schedule": [0, 1], "total_steps": 9}, "total_steps has no effect: grad_freeze."),
        (
            "short_schedule",
            {"total_steps": 100, "whole_share": 0.5, "share": 0.6},
            "share has no effect: short_schedule.whole_share replaces it",
        ),
        (LESS_BN, {"fn_flag": False, "heads": ["x"]}, "heads has no effect: less_bn.fn_flag is Fa"),
        (LESS_BN, {"fn_flag": False, "multiplier": 2}, "multiplier has no effect: less_bn.fn_flag"),
    ],
)
def test_a_setting_that_another_one_makes_idle_is_told(section, settings, reason):
    (notice,) = BoostConfig.parse("O1", {section: settings}).notices()
    assert notice.startswith(f"{section}.{reason}")


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"method": "p-sgd", "trials": 9, "rho": 0.1}, {"trials", "rho"}),
        ({"method": "twa", "gamma": 0.1, "alpha": 0.5, "stall_limit": None}, None),
        ({"pca_mat_path": "b.npz", "memory_limit": 1}, {"weight_load_dir", "memory_limit"}),
        ({"rho": 0.1, "gamma": 0.1, "trials": 9, "memory_limit": 1}, set()),
    ],
)
def test_settings_that_a_method_of_dim_reduce_does_not_use_are_told(settings, idle):
    source = {
        "boost": {"mode": "manual", "dim_reduce": True, "less_bn": False, "grad_freeze": False},
        "dim_reduce": {"weight_load_dir": "snapshots", **settings},
    }
    told = {one.partition(" ")[0] for one in BoostConfig.parse("O1", source).notices()}
    idle = set(settings) - {"method"} if idle is None else idle
    assert told == {f"dim_reduce.{name}" for name in idle}


@pytest.mark.parametrize(
    ("boost", "section", "wanted"),
    [
        ({}, {}, True),
        ({}, {"damping": 0.1}, True),
        ({}, None, False),
        ({"mode": "enable_all"}, {}, True),
        ({"mode": "manual"}, {}, True),
        ({"thor": False}, {}, False),
        ({"thor": False, "mode": "manual"}, {"damping": 0.1}, False),
        ({"thor": False, "mode": "enable_all"}, {"damping": 0.1}, False),
        ({"mode": "manual", "thor": True}, None, True),
    ],
)
def test_a_section_asks_for_thor_and_the_switch_forbids_it(boost, section, wanted):
    config = BoostConfig.parse("O1", {"boost": boost, "thor": section})
    (row,) = [one for one in config.plan() if one.algorithm == "thor"]
    assert row.wanted is wanted
    if boost.get("thor") is False:
        assert row.reason == "boost.thor=False"
        assert not [one for one in config.notices() if one.startswith("boost.thor")]


def test_a_refresh_of_thor_may_not_be_later_than_its_counter_counts():
    with pytest.raises(BoostConfigError, match=r"frequency must be an int from 1 to 1073741824"):
        BoostConfig.parse("O1", {"thor": {"frequency": 3 * 10**9}})


def test_a_window_of_one_is_no_accumulation():
    source = {"boost": {"mode": "manual", "grad_accumulation": True}}
    config = BoostConfig.parse("O1", source)
    (row,) = [one for one in config.plan() if one.algorithm == "grad_accumulation"]
    assert not row.wanted
    assert row.reason == "grad_accumulation.grad_accumulation_step is 1"
    assert config.notices() == (f"boost.grad_accumulation=True has no effect: {row.reason}",)


def test_what_has_effect_is_not_told():
    source = {"boost": {"mode": "manual", "adasum": True}, "grad_freeze": {"freeze_p": 0.5}}
    assert BoostConfig.parse("O1", source).notices() == ()
    assert BoostConfig.parse("O0").notices() == ()


def test_a_configuration_is_a_value():
    config = BoostConfig.parse("O1", {"boost": {"mode": "manual", "adasum": True}})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert hash(twin) == hash(config)
    assert dataclasses.asdict(config)["given_switches"] == (("adasum", True),)


def test_warnings_point_at_the_users_line():
    with pytest.warns(NoEffectWarning) as caught:
        AutoBoost("O0", {"boost": {"less_bn": True}})
    with pytest.warns(BoostWarning) as aliased:
        AutoBoost("O1", {"dim_reduce": {"n_component": 3}, "less_bn": {"gc_flag": True}})
    assert {one.filename for one in (*caught, *aliased)} == {__file__}


def test_the_source_is_never_changed():
    source = {"boost": {"mode": "manual"}, "dim_reduce": {"n_component": 3}, "acc_level": "O1"}
    before = copy.deepcopy(source)
    with pytest.warns(BoostWarning):
        BoostConfig.parse("O1", source)
    assert source == before


def test_a_json_file_is_read(tmp_path):
    path = tmp_path / "boost.json"
    path.write_text(json.dumps(RECOMMENDED), encoding="utf-8")
    assert BoostConfig.parse("O1", str(path)) == BoostConfig.parse("O1", RECOMMENDED)
    assert BoostConfig.parse("O1", path) == BoostConfig.parse("O1", RECOMMENDED)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff\xfe", "codec can't decode"),
        (b'{"boost": {"mode": "auto", "mode": "manual"}}', "mode given twice"),
        (b"[" * 100_000, "recursion"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "larger than 1 MiB"),
        pytest.param(
            b'{"grad_freeze": {"total_steps": ' + b"9" * 5000 + b"}}",
            "integer string conversion",
            marks=pytest.mark.skipif(
                not hasattr(sys, "get_int_max_str_digits"), reason="this Python takes any number"
            ),
        ),
    ],
)
def test_a_damaged_json_file_is_one_clear_error(tmp_path, content, reason):
    path = tmp_path / "boost.json"
    path.write_bytes(content)
    (problem,) = problems(str(path))
    assert "boost.json" in problem
    assert reason in problem


@pytest.mark.parametrize("path", ["missing.json", "/", "\0"])
def test_a_file_that_is_not_there_is_one_clear_error(path):
    (problem,) = problems(path)
    assert "cannot use the file" in problem


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_checks_itself(name):
    section = SECTIONS[name]
    assert section() == section()
    for one in dataclasses.fields(section):
        with pytest.raises(ValueError, match=rf"^{name}\.{one.name} must be "):
            section(**{one.name: object()})


def test_configuration_needs_no_mindspore():
    """The rules, the report and the configuration load where MindSpore is not installed."""
    folder = pathlib.Path(__file__).parents[2] / "mindspore_boost_ext"
    program = f"""
import importlib.util, sys, types
sys.modules["mindspore"] = None
package = types.ModuleType("mindspore_boost_ext")
package.__path__ = [{str(folder)!r}]
sys.modules["mindspore_boost_ext"] = package
from mindspore_boost_ext.config import parse as config
assert config.BoostConfig.parse("O1").plan()[0].wanted
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_is_missing_is_named_beside_what_is_wrong():
    source = {"grad_freeze": {"freeze_p": 2}, "short_schedule": {}, "thor": 3}
    with pytest.raises(BoostConfigError) as error:
        BoostConfig.parse("O1", source)
    assert [one.split()[0] for one in error.value.problems] == [
        "grad_freeze.freeze_p",
        "thor",
        "short_schedule",
    ]


def test_a_section_in_a_class_of_a_script_keeps_its_name():
    class Experiment:
        baseline = LessBNConfig()

    assert type(Experiment.baseline).path == "less_bn"
