"""The examples, as a user runs them: in a process of their own, with fewer epochs or images."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import scripts

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.json"))


def environment():
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(folder, name, *words):
    """Run an example in a folder; return what it printed, and the accuracy in its last line."""
    done = scripts.run(EXAMPLES / name, *words, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout, accuracy(done.stdout)


def accuracy(printed):
    return float(re.fullmatch(r"test accuracy (\d\.\d{4})", printed.splitlines()[-1])[1])


def test_the_example_configurations_switch_on_what_they_are_named_after():
    from mindspore_boost_ext import BoostConfig

    for path in CONFIGS:
        wanted = [one.algorithm for one in BoostConfig.parse("O1", path).plan() if one.wanted]
        names = {"accumulation": ["grad_accumulation"], "nothing_enabled": []}
        assert wanted == names.get(path.stem, [path.stem]), path


# Guessing one of ten classes gives 0.1.
@pytest.mark.parametrize(
    ("mode", "words", "least"),
    [
        (
            "graph",
            ["--epochs", 3, "--config", EXAMPLES / "configs/thor.json", "--learning-rate", 0.01],
            0.9,
        ),
        ("graph", ["--epochs", 2, "--config", EXAMPLES / "configs/accumulation.json"], 0.2),
        ("pynative", ["--epochs", 2, "--level", "O0"], 0.5),
    ],
)
def test_lenet_learns(mode, words, least, tmp_path):
    printed, found = run(tmp_path, "lenet.py", "--mode", mode, *words)
    assert found > least
    assert "algorithm" in printed  # the report


def mnist(folder, count=40):
    """Write tiny files of MNIST's format: big-endian headers, then pixels or labels."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), np.uint8)
    labels = bytes(one % 10 for one in range(count))
    for part in ("train", "t10k"):
        images = struct.pack(">4i", 2051, *pixels.shape) + pixels.tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)
    return pixels


def test_mnists_pixels_arrive_exactly(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lenet

    pixels, found = mnist(tmp_path), []
    for images, labels in lenet.mnist(str(tmp_path), "test").create_tuple_iterator(
        output_numpy=True, num_epochs=1
    ):
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        found.append(images)
    expected = np.zeros((40, 1, 32, 32))
    expected[:, 0, 2:30, 2:30] = pixels / 255
    # In float32: one rounding of 1/255, one of the product.
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=3e-7, atol=0)


def cifar10(folder):
    """Write sparse files of the format: a label byte, then 3072 bytes of red, green and blue."""
    records = np.random.default_rng(1).integers(0, 256, (6, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    for name in ("data_batch_1.bin", "test_batch.bin"):
        with (folder / name).open("wb") as file:
            file.write(records.tobytes())
            file.truncate(30_730_000)  # MindSpore's loader takes whole files only
    return records


def test_cifar10s_pixels_arrive_exactly(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import resnet

    records = cifar10(tmp_path)
    data = resnet.cifar10(str(tmp_path), "test")
    images, labels = next(data.create_tuple_iterator(output_numpy=True, num_epochs=1))
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(labels[:6], records[:, 0])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32) / 255
    np.testing.assert_allclose(images[:6], pixels, rtol=3e-7, atol=0)  # as for MNIST


@pytest.mark.parametrize(
    ("name", "norms", "weights"),
    # Weights: as published for ImageNet (11,689,512 and 25,557,032) with a Dense of 10 classes in
    # place of 1000, and for ResNet-18 a stem of 3x3 in place of 7x7.
    [
        ("resnet18", 20, 11_689_512 - 513_000 + 5_130 - 3 * 64 * (49 - 9)),
        ("resnet50", 53, 25_557_032 - 2_049_000 + 20_490),
    ],
)
def test_the_resnets_are_the_published_ones(name, norms, weights, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import resnets

    net = resnets.NETWORKS[name]()
    kinds = [type(cell) for _, cell in net.cells_and_names()]
    assert kinds.count(ms.nn.BatchNorm2d) == norms
    assert sum(one.size for one in net.trainable_params()) == weights


def test_resnet_trains_by_a_recipe(tmp_path):
    printed, _ = run(tmp_path, "resnet.py", "--max-images", 64, "--epochs", 2)
    row = next(line for line in printed.splitlines() if line.startswith("short_schedule"))
    assert "applied" in row


@pytest.mark.parametrize("words", [[], ["--groups"]])
def test_float16_learns(words, tmp_path):
    assert run(tmp_path, "fp16.py", "--epochs", 3, *words)[1] > 0.8


def test_a_network_of_mindcv_trains(tmp_path):
    pytest.importorskip("mindcv")
    printed, _ = run(tmp_path, "mindcv_model.py", "--epochs", 1, "--max-images", 64)
    assert re.search(r"^less_bn .* applied", printed, re.MULTILINE)


def test_a_killed_run_ends_as_one_without_the_break(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    words = ("--epochs", 3)
    expected = run(whole, "resume.py", *words)[1]
    killed = scripts.Script(EXAMPLES / "resume.py", *words, cwd=broken, env=environment())
    deadline = time.monotonic() + 200
    while epochs(broken) < 1 and killed.process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.process.kill()
    assert killed.communicate().returncode == -signal.SIGKILL
    printed, found = run(broken, "resume.py", *words)
    assert re.fullmatch("goes on after epoch [12]", printed.splitlines()[0])
    assert found == expected
    one, two = (ms.load_checkpoint(str(folder / "run.ckpt")) for folder in (whole, broken))
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert type(value) is type(two[key])
        if isinstance(value, ms.Parameter):
            np.testing.assert_array_equal(value.asnumpy(), two[key].asnumpy(), err_msg=key)


def epochs(folder):
    """Return how many epochs a run has finished, by its history."""
    history = folder / "run.jsonl"
    if not (folder / "run.ckpt").exists() or not history.exists():
        return 0
    lines = history.read_text(encoding="utf-8").split("\n")[:-1]
    return sum(json.loads(line)["event"] == "epoch" for line in lines)


def test_the_loop_of_ones_own_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import loop

    mode = ms.get_context("mode")
    try:
        for words, least in (([], 0.8), (["--resume"], 0.9)):
            monkeypatch.setattr(sys, "argv", ["loop.py", *words])
            loop.main()
            printed = capsys.readouterr()
            assert float(re.search(r"test accuracy (0\.\d+)", printed.out)[1]) > least
    finally:
        ms.set_context(mode=mode)
    assert "epoch 6/6" in printed.err
    assert "epoch 3/6" not in printed.err
