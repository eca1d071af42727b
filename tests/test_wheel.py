"""What ``pip install`` brings, from a wheel and from an sdist, outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("mindspore_boost_ext", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta as b; b.build_{}('{}')"
CARDS = """
from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext.cli.cards import CARDS
assert not [name for name in CARDS if main(["--explain", name])]
try:
    main(["selftest", "--help"])
except SystemExit as end:
    assert not end.code
import mindspore_boost_ext
print(mindspore_boost_ext.__file__)
assert main(["compare", "plain", "--epochs", "1"]) == 0
"""
SCRIPT = """
import mindspore as ms
from mindspore import nn
from mindspore_boost_ext.bundled import SmallResNet, digits_datasets
train, _ = digits_datasets(32, most=64)
net = SmallResNet(2)
loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
model = ms.Model(net, loss, nn.SGD(net.trainable_params(), 0.1))
model.train(1, train, dataset_sink_mode=False)
"""
TYPED = """
import mindspore_boost_ext as boost

config: boost.BoostConfig = boost.BoostConfig.parse("O1", boost.recipe("fast", 100))
wanted: list[str] = [one.algorithm for one in config.plan() if one.wanted]
names: list[object] = [{names}]
"""


def shell(*command, folder, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is built, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("source")
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FILES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=without)
        else:
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """The folder into which the wheel of the sdist is installed."""
    folder = tmp_path_factory.mktemp("installed")
    shell(sys.executable, "-c", BUILD.format("sdist", folder), folder=source)
    (archive,) = folder.glob("*.tar.gz")
    # In a process of its own: versions of Python differ in their filters, and in what they warn of.
    shell(sys.executable, "-m", "tarfile", "-e", archive, folder, folder=source)
    (unpacked,) = [one for one in folder.iterdir() if one.is_dir()]
    shell(sys.executable, "-c", BUILD.format("wheel", folder), folder=unpacked)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site-packages"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(target)
    return target


def data_files(folder):
    every = (folder / "mindspore_boost_ext").rglob("*")
    return {
        str(one.relative_to(folder))
        for one in every
        if one.is_file() and one.suffix != ".pyc" and "egg-info" not in str(one)
    }


def test_the_wheel_of_the_sdist_holds_every_file_of_the_package(source, installed):
    assert data_files(installed) == data_files(source)


def test_metadata_are_complete(installed):
    (path,) = installed.glob("*.dist-info/METADATA")
    metadata = path.read_text(encoding="utf-8")
    for line in (
        "Name: mindspore_boost_ext",
        "Version: 0.2.0",
        "Author: The authors of mindspore_boost_ext",
        "License-Expression: Apache-2.0",
        "Requires-Python: <3.13,>=3.9",
        "Requires-Dist: mindspore>=2.7",
        "Provides-Extra: progress",
        "Description-Content-Type: text/markdown",
    ):
        assert line in metadata.replace("mindspore-boost-ext", "mindspore_boost_ext")
    assert "# mindspore_boost_ext" in metadata


def test_cards_launcher_and_comparison_run_from_the_wheel(installed, tmp_path):
    path = str(installed)
    done = shell(sys.executable, "-c", CARDS, folder=tmp_path, PYTHONPATH=path)
    assert f"\n{path}" in done.stdout
    assert "| plain |" in done.stdout
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = ("-m", "mindspore_boost_ext", "--recipe", "fast", "--total-steps", "2", "train.py")
    done = shell(sys.executable, *words, folder=tmp_path, PYTHONPATH=path)
    assert "progressive_resizing" in done.stderr


def test_a_users_script_is_checked_strictly_against_the_public_names(installed, tmp_path):
    pytest.importorskip("mypy")
    import mindspore_boost_ext

    names = ", ".join(f"boost.{name}" for name in mindspore_boost_ext.__all__)
    (tmp_path / "script.py").write_text(TYPED.format(names=names), encoding="utf-8")
    words = ("-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir=/dev/null")
    shell(sys.executable, *words, "script.py", folder=tmp_path, MYPYPATH=str(installed))
