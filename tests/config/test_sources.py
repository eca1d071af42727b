"""What may stand in place of a dict, a string or a file: it works, or one error names it."""

from __future__ import annotations

import collections
import enum
import errno
import itertools
import json
import os
import pathlib
import socket
import unicodedata
import warnings
from collections.abc import Mapping

import numpy as np
import pytest

from mindspore_boost_ext import BoostConfig, BoostConfigError, BoostWarning, GradientFreeze
from mindspore_boost_ext.config import files
from mindspore_boost_ext.config.rules import one_of, plain, printable
from mindspore_boost_ext.dim_reduce.sampler import TrajectorySampler
from mindspore_boost_ext.grad_freeze.freezing import prefix_schedule


def refused(source, level="O1"):
    """Return the one problem of a source, and what caused the error."""
    with pytest.raises(BoostConfigError) as caught:
        BoostConfig.parse(level, source)
    (problem,) = caught.value.problems
    return problem, caught.value.__cause__


# --- files ---------------------------------------------------------------------------------------


def make(path, name):
    """Make something at a path that is no file of settings."""

    def bind():
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))

    makers = {
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "socket": bind,
        "circle": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere\n.json"),
        "empty": path.touch,
        "blank": lambda: path.write_text(" \n"),
        "large": lambda: path.write_bytes(b"{}" + b" " * (1 << 20)),
        "UTF-16": lambda: path.write_bytes("{}".encode("utf-16")),
        "no JSON": lambda: path.write_text("level: O1"),
        "list": lambda: path.write_text('["\\u001b"]'),
        "twice": lambda: path.write_text('{"a\\n\\u001b": 1, "a\\n\\u001b": 2}'),
    }
    makers[name]()
    return str(path)


REASONS = {
    "folder": "it is a directory: give the file in it",
    "fifo": "it is a FIFO: write the settings into a file",
    "socket": "it is a socket: write the settings into a file",
    "circle": "its symbolic links form a loop: give the file itself",
    "dangling": r"it is a link to 'nowhere\n.json' (str), which does not exist: repair the link",
    "empty": "it is empty: write {} for the defaults",
    "blank": "it is empty: write {} for the defaults",
    "large": "it is larger than 1 MiB: pass long lists in a dict",
    "UTF-16": "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte: "
    "save it as UTF-8",
    "no JSON": "it is not valid JSON: Expecting value: line 1 column 1 (char 0)",
    "list": r"it must hold a JSON object, got ['\x1b'] (list)",
    "twice": r"a\n\x1b given twice: keep one",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_path_that_is_no_file_of_settings_is_called_what_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    problem, cause = refused(make(pathlib.Path("given"), name))
    assert problem == f"cannot use the file 'given' (str): {REASONS[name]}"
    assert isinstance(cause, (OSError, ValueError))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing.json", "there is no such file: check the path"),
        *(
            (one, f"there is no such file; if it is a recipe, give recipe('{one}', total_steps)")
            for one in ("fast", "large-batch")
        ),
        ("file/x", "there is no such file, because a folder of its path is a file: check the path"),
        ("x" * 5000, "the path is too long: shorten it"),
        (' {"thor": {}}', "it is JSON text, not a path: give a dict, or write it into a file"),
        ("{out}/boost.json", "there is no such file: check the path"),
        (
            '{"x": "' + "x" * 5000 + '"}',
            "it is JSON text, not a path: give a dict, or write it into a file",
        ),
        ("a\0b", "no file can have this name: check the path"),
        ("\ud800", "no file can have this name: check the path"),
        ("/dev/zero", "it is a device: write the settings into a file"),
        ("/dev/null", "it is a device: write the settings into a file"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_clear_error(path, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("{}")
    problem, _ = refused(path)
    assert problem.startswith("cannot use the file '")
    assert problem.endswith(f": {reason}")


def test_a_file_that_this_user_may_not_read_is_named(tmp_path):
    path = tmp_path / "given.json"
    path.write_text("{}")
    path.chmod(0)
    as_root = os.geteuid() == 0
    try:
        if as_root:
            os.seteuid(65534)
        problem, cause = refused(str(path))
    finally:
        if as_root:
            os.seteuid(0)
    assert "given.json' (str): no permission to read it: give this user the permission" in problem
    assert cause.errno == errno.EACCES


def test_a_fifo_that_takes_the_place_of_a_file_does_not_keep_the_reader_waiting(
    tmp_path, monkeypatch
):
    """Between the look at the path and its opening."""
    regular, fifo = tmp_path / "regular", tmp_path / "fifo"
    regular.write_text("{}")
    os.mkfifo(fifo)
    found = os.stat(regular)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "stat", lambda path: found)
        problem, _ = refused(str(fifo))
    assert "it is a FIFO" in problem


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "boost.json"
    path.write_text(json.dumps({"boost": {"mode": "manual"}}), encoding="utf-8-sig")
    assert BoostConfig.parse("O1", path).mode == "manual"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert BoostConfig.parse("O1", link).mode == "manual"


def test_many_names_given_twice_are_found_at_once(tmp_path):
    """Looking each of 80,000 names up among all of them would take minutes."""
    path = tmp_path / "boost.json"
    path.write_text("{" + ", ".join(f'"{k % 40_000}": 1' for k in range(80_000)) + "}")
    problem, _ = refused(str(path))
    assert problem.endswith("given twice: keep one")
    assert len(problem) < 500


class Path(os.PathLike):
    def __init__(self, answer):
        self.answer = answer

    def __fspath__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_path_of_ones_own_class_works_or_is_named(tmp_path):
    path = tmp_path / "boost.json"
    path.write_text('{"boost": {"mode": "manual"}}')
    for given in (Path(str(path)), Path(os.fsencode(path)), np.str_(path)):
        assert BoostConfig.parse("O1", given).mode == "manual"
    problem, cause = refused(Path(RuntimeError("no path")))
    assert "(Path): RuntimeError: no path: give a str" in problem
    assert isinstance(cause, RuntimeError)
    problem, cause = refused({"dim_reduce": {"pca_mat_path": Path(RuntimeError("no path"))}})
    assert problem.startswith("dim_reduce.pca_mat_path must be None or a path")
    assert problem.endswith("(Path), which raises RuntimeError: no path")
    assert isinstance(cause, RuntimeError)


# --- strings -------------------------------------------------------------------------------------


class Text(str):
    """Cannot be compared, and is found in no dict."""

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __hash__(self):
        return id(self)

    def __str__(self):
        return "something else"


class Word(str, enum.Enum):
    """Names other than the values, so that the hashes differ."""

    LEVEL = "O2"
    SECTION = "boost"
    KEY = "mode"
    MODE = "manual"
    FREEZE = "grad_freeze"
    SCHEDULE = "schedule"
    KIND = "cubic"
    SAMPLES = "samples"
    PATTERN = "layer1.*"
    FILE = "basis.npz"
    FORMAT = "safetensors"


def as_word(text):
    return Word(text)


@pytest.mark.parametrize("kind", [str, np.str_, Text, as_word], ids=lambda one: one.__name__)
def test_strings_of_every_class_work_as_names_and_values(kind):
    source = {
        kind("boost"): {kind("mode"): kind("manual")},
        kind("grad_freeze"): {kind("schedule"): kind("cubic")},
        "grad_accumulation": {"weighting": kind("samples")},
        "less_bn": {"include": [kind("layer1.*")]},
        "dim_reduce": {"pca_mat_path": kind("basis.npz")},
    }
    config = BoostConfig.parse(kind("O2"), source)
    values = [
        config.level,
        config.mode,
        config.grad_freeze.schedule,
        config.grad_accumulation.weighting,
        *config.less_bn.include,
        config.dim_reduce.pca_mat_path,
    ]
    assert values == ["O2", "manual", "cubic", "samples", "layer1.*", "basis.npz"]
    assert {type(one) for one in values} == {str}
    with pytest.warns(BoostWarning, match="acc_level is the old name"):
        assert BoostConfig.parse("O1", {"acc_level": kind("O2")}).level == "O2"
    assert prefix_schedule(3, 8, kind("cubic")) == prefix_schedule(3, 8, "cubic")
    GradientFreeze(3, 1, 0.5, 8, schedule=kind("cubic"))
    assert TrajectorySampler("folder", format=kind("safetensors")).format == "safetensors"


@pytest.mark.parametrize("kind", [np.int64, enum.IntEnum("Number", {"ONE": 1}), np.uint8])
def test_integers_of_every_class_work_among_a_few(kind):
    config = BoostConfig.parse("O1", {"grad_freeze": {"freeze_type": kind(1)}})
    assert type(config.grad_freeze.freeze_type) is int
    assert not one_of((0, 1)).accepts(True)


class Plain(enum.Enum):
    MODE = "manual"


@pytest.mark.parametrize(
    ("value", "shown"), [(b"manual", "b'manual' (bytes)"), (Plain.MODE, "(Plain)")]
)
def test_what_is_no_string_is_named_with_its_type(value, shown):
    assert shown in refused({"boost": {"mode": value}})[0]
    with pytest.raises(TypeError, match=r"level must be one of O0, O1, O2, got .*\((bytes|Plain)"):
        BoostConfig.parse(value)
    assert f"{shown} is not a known section" in refused({value: {}})[0]
    problem, _ = refused({"boost": {value: 1}})
    assert problem.startswith("boost.")
    assert f"{shown} is not a known key" in problem


def test_a_name_given_twice_in_two_classes_is_an_error():
    source = {"boost": {"mode": "manual"}, Text("boost"): {"mode": "auto"}}
    assert "has 'boost' (str) twice" in refused(source)[0]


# --- what a terminal would obey ------------------------------------------------------------------

UNSEEN = "\n\r\t\0\x07\x1b\x7f\x85\x9b\xad\u061c\u200b\u200d\u200e\u2028\u2029\u202e\u2066\ufeff"
UNSEEN += "\ud800\ue000\U000e0041"


class Shown:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def unseen_in(text):
    """Return what stands in a text but the line breaks between problems, and cannot be seen."""
    kinds = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return {one for one in text.replace("\n  ", "") if unicodedata.category(one) in kinds}


@pytest.mark.parametrize("one", UNSEEN, ids=lambda one: f"U+{ord(one):04X}")
def test_characters_that_cannot_be_seen_are_escaped_in_every_message(one, tmp_path):
    name = f"a{one}b"
    cases = [
        {name: 1},
        {one: 1},
        {"boost": {name: 1}},
        {"boost": {"mode": name}},
        {"boost": {"mode": Shown(name)}},
        {"boost": Shown(name)},
        {Shown(name): 1},
        {"acc_level": name},
        {"less_bn": {"include": [name, 1]}},
        {"boost": {"mode": type(name.replace("\0", "\1").replace("\ud800", ""), (), {})()}},
        name,
        str(tmp_path / name),
        Broken({}, RuntimeError(name)),
    ]
    for source in cases:
        with pytest.raises(BoostConfigError) as caught:  # acc_level warns as well
            warned(lambda source=source: BoostConfig.parse("O1", source))
        assert not unseen_in(str(caught.value)), source
    with pytest.raises(TypeError) as wrong:
        BoostConfig.parse("O1", Shown(name))
    assert not unseen_in(str(wrong.value))
    with pytest.raises(BoostConfigError) as level:
        BoostConfig.parse(name)
    assert not unseen_in(str(level.value))
    for source in ({"boost": {name: 1}}, {Shown(name): 1}):
        (message,) = warned(lambda source=source: BoostConfig.parse("O1", source, strict=False))
        assert not unseen_in(message)


def warned(call):
    """Return the messages of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


def test_what_can_be_seen_stays_as_it_is():
    for text in ("größe", "学习率", "a b", "\\n", "é", "🙂"):
        assert printable(text) == text
    assert refused({"größe": 1})[0].startswith("größe is not a known section")


# --- mappings ------------------------------------------------------------------------------------


class Broken(Mapping):
    """A Mapping whose method of a name raises, or answers wrongly."""

    def __init__(self, content, error, method="__iter__"):
        self.content, self.error, self.method = content, error, method

    def _do(self, method, call):
        if self.method != method:
            return call()
        if isinstance(self.error, Exception):
            raise self.error
        return self.error

    def __iter__(self):
        return self._do("__iter__", lambda: iter(self.content))

    def __getitem__(self, name):
        return self._do("__getitem__", lambda: self.content[name])

    def __len__(self):
        return self._do("__len__", lambda: len(self.content))

    def keys(self):
        return self._do("keys", lambda: self.content.keys())

    def items(self):
        return self._do("items", lambda: self.content.items())

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None


ERRORS = [RuntimeError("bo\nom"), KeyError("k"), RecursionError(), OSError(5, "x"), TypeError("t")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("method", ["__iter__", "__getitem__"])
def test_a_mapping_that_raises_gives_our_error_with_the_cause(method, error):
    kind = type(error).__name__
    problem, cause = refused(Broken({"boost": {}}, error, method))
    assert problem.startswith(f"boost_config_dict cannot be read: {kind}: ")
    assert problem.endswith(": give a dict")
    assert cause is error
    for name in ("boost", "grad_freeze"):
        problem, cause = refused({name: Broken({"mode": "auto", "seed": 1}, error, method)})
        assert problem.startswith(f"section {name} cannot be read: {kind}: ")
        assert cause is error


@pytest.mark.parametrize("answer", [*ERRORS, -1, 10**18])
@pytest.mark.parametrize("method", ["keys", "items", "__len__"])
def test_a_mapping_is_read_by_its_names_alone(method, answer):
    boost = Broken({"mode": "manual"}, answer, method)
    assert BoostConfig.parse("O1", Broken({"boost": boost}, answer, method)).mode == "manual"


def test_other_mappings_are_read_as_a_dict():
    content = {"boost": {"mode": "manual"}}
    for kind in (collections.OrderedDict, collections.ChainMap, collections.UserDict):
        assert BoostConfig.parse("O1", kind(content)).mode == "manual"
    lazy = collections.defaultdict(lambda: 1 / 0, content)
    assert BoostConfig.parse("O1", lazy).mode == "manual"
    assert lazy == content


def test_a_dict_of_ones_own_that_raises_gives_our_error():
    class Own(dict):
        def __iter__(self):
            raise RuntimeError("boom")

    problem, cause = refused(Own(boost={}))
    assert problem == "boost_config_dict cannot be read: RuntimeError: boom: give a dict"
    assert isinstance(cause, RuntimeError)


def test_a_mapping_without_an_end_is_left():
    class Endless(Broken):
        def __iter__(self):
            return map(str, itertools.count())

        def __getitem__(self, name):
            return None

    problem, _ = refused(Endless({}, None, ""))
    assert problem == "boost_config_dict has more than 1000 names: leave unknown ones out"
    problem, _ = refused({"thor": dict.fromkeys(map(str, range(10**5)))})
    assert problem == "section thor has more than 1000 names: leave unknown ones out"


def test_a_mapping_that_holds_itself_is_told_by_its_unknown_name():
    round_and_round = {}
    round_and_round["boost"] = round_and_round
    assert refused(round_and_round)[0].startswith("boost.boost is not a known key")
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert "got a value that cannot be shown (dict)" in refused({"boost": {"mode": deep}})[0]
    while deep:  # taken apart here: the interpreter would do it by recursion
        deep = deep["a"]


class Key:
    """A name that cannot be compared, and has the hash of a section."""

    def __hash__(self):
        return hash("boost")

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("name", [3, None, True, 1.5, (), ("a",), frozenset(), b"boost", Key()])
def test_a_name_that_is_no_string_is_named_with_its_type(name):
    kind = type(name).__name__
    for source in ({name: 1}, {"boost": {name: 1}}, {"thor": {name: 1}}):
        problem, _ = refused(source)
        assert f"({kind}) is not a known " in problem
        messages = warned(lambda source=source: BoostConfig.parse("O1", source, strict=False))
        assert any(f"({kind}) is not a known " in one for one in messages)


# --- values --------------------------------------------------------------------------------------


def raising(base, *methods):
    """Return a class whose named methods raise."""

    def method(self, *arguments):
        raise RuntimeError("boom")

    return type("Raising", (base,), dict.fromkeys(methods, method))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("common.gradient_split_groups", raising(list, "__iter__")([1, 2])),
        ("less_bn.include", raising(list, "__iter__")(["a"])),
        ("grad_freeze.schedule", raising(tuple, "__iter__")([1])),
        ("thor.damping", raising(list, "__iter__")([1.0])),
        ("thor.trace_rule", raising(list, "__len__")([1.0, 0.5])),
        ("grad_freeze.freeze_p", raising(float, "__float__")(0.5)),
        ("grad_freeze.total_steps", raising(int, "__int__")(5)),
    ],
)
def test_a_value_that_raises_is_named(path, value):
    section, name = path.split(".")
    problem, cause = refused({section: {name: value}})
    assert problem.startswith(f"{path} must be ")
    assert problem.endswith("(Raising), which raises RuntimeError: boom")
    assert isinstance(cause, RuntimeError)


def test_a_constructor_names_a_value_that_raises_as_well():
    steps = raising(int, "__int__")(5)
    with pytest.raises(
        ValueError, match=r"grad_freeze\.total_steps must be .* which raises"
    ) as one:
        GradientFreeze(3, 1, 0.5, steps)
    assert isinstance(one.value.__cause__, RuntimeError)


def test_plain_leaves_all_else_alone():
    for value in (None, True, 1.5, b"x", [1]):
        assert plain(value) is value
