"""examples/resnet.py: its networks, CIFAR-10's files, options, checkpoint and resume."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

import datasets  # noqa: E402
import resnet  # noqa: E402
import resnets  # noqa: E402

CONFIGS = EXAMPLES / "configs"
BOOSTED = ["--config", str(CONFIGS / "grad_freeze.json")]
QUICK = ["--max-images", "32", "--batch-size", "16", "--epochs", "2", "--side", "8"]


@pytest.fixture
def tiny(monkeypatch):
    """Networks of the same form with few blocks and channels; MindSpore's settings as before."""
    monkeypatch.setattr(resnets, "STAGE_WIDTHS", (4, 4, 8, 8))
    for name, block, small in (
        ("resnet18", resnets.BasicBlock, True),
        ("resnet50", resnets.Bottleneck, False),
    ):
        make = functools.partial(resnets.ResNet, block, (1, 1, 1, 1), 10, small)
        monkeypatch.setitem(resnets.NETWORKS, name, make)
    mode = ms.get_context("mode")
    yield
    ms.set_context(mode=mode)


def run(arguments, capsys):
    """Run the example in this process; return its last line."""
    assert resnet.main([*QUICK, *arguments]) == 0
    return capsys.readouterr().out.strip().splitlines()[-1]


def error(arguments, capsys):
    """Return the one line that a refused request prints."""
    assert resnet.main([*QUICK, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("resnet.py: error: ")
    return line


# ---- Networks ----


@pytest.mark.parametrize(
    ("name", "norms", "weights", "features"),
    # Weights: as published for ImageNet (11,689,512 and 25,557,032) with a Dense of 10 classes in
    # place of 1000, and for ResNet-18 a stem of 3x3 in place of 7x7.
    [
        ("resnet18", 20, 11_689_512 - 513_000 + 5_130 - 3 * 64 * (49 - 9), 512),
        ("resnet50", 53, 25_557_032 - 2_049_000 + 20_490, 2048),
    ],
)
def test_networks_are_the_published_ones(name, norms, weights, features):
    net = resnets.NETWORKS[name]()
    kinds = [type(cell) for _, cell in net.cells_and_names()]
    assert kinds.count(nn.BatchNorm2d) == norms
    assert sum(one.size for one in net.trainable_params()) == weights
    assert net.fc.in_channels == features


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_networks_take_images_of_any_size(name, tiny):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    net = resnets.NETWORKS[name]().set_train(False)
    for side in (8, 33):
        assert net(ms.ops.ones((2, 3, side, side), ms.float32)).shape == (2, 10)


# ---- CIFAR-10 ----


def write_cifar10(folder, names=("data_batch_2.bin", "test_batch.bin")):
    """Files of the format: a label byte, then 3072 bytes of red, green and blue, 10,000 times.

    MindSpore's loader takes whole files only, so they are sparse: all but a few images are zeros.
    """
    for seed, name in enumerate(names):
        records = np.random.default_rng(seed).integers(0, 256, (6, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        with (folder / name).open("wb") as file:
            file.write(records.tobytes())
            file.truncate(30_730_000)
    return folder


def test_cifar10_pixels_arrive_exactly(tmp_path):
    folder = write_cifar10(tmp_path)

    def order(count):
        assert count == 6
        return datasets.EpochOrder(count, seed=3)

    train, test = datasets.cifar10_datasets(folder, 4, order, most=6)
    assert train.get_dataset_size() == 1  # 6 // 4
    records = np.fromfile(folder / "test_batch.bin", np.uint8)[: 6 * 3073].reshape(6, 3073)
    seen = 0
    for images, labels in test.create_tuple_iterator(output_numpy=True, num_epochs=1):
        expected = records[seen : seen + len(labels)]
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        np.testing.assert_array_equal(labels, expected[:, 0])
        # One rounding of 1/255 and one of the product.
        pixels = expected[:, 1:].reshape(-1, 3, 32, 32) / 255
        np.testing.assert_allclose(images, pixels, rtol=3e-7, atol=0)
        seen += len(labels)
    assert seen == 6
    shuffled = np.random.default_rng([3, 0]).permutation(6)[:4]
    labels = next(train.create_tuple_iterator(output_numpy=True, num_epochs=1))[1]
    records = np.fromfile(folder / "data_batch_2.bin", np.uint8)[: 6 * 3073].reshape(6, 3073)
    np.testing.assert_array_equal(labels, records[shuffled, 0])


def test_cifar10_trains_from_the_command_line(tiny, tmp_path, capsys):
    folder = str(write_cifar10(tmp_path))
    assert "test accuracy" in run(["--data-dir", folder], capsys)


def damage(folder, fault):
    path = folder / "data_batch_2.bin"
    if fault == "no train":
        path.unlink()
    elif fault == "no test":
        (folder / "test_batch.bin").unlink()
    elif fault == "short":
        path.write_bytes(b"0" * 3073)
    elif fault == "label":
        with path.open("r+b") as file:
            file.write(b"\x0a")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("no train", "data_batch_1.bin is missing: unpack cifar-10-binary.tar.gz"),
        ("no test", "test_batch.bin is missing: unpack cifar-10-binary.tar.gz"),
        ("short", "data_batch_2.bin holds 3073 bytes, 10000 images have 30730000: download"),
        ("label", "data_batch_2.bin holds the label 10, CIFAR-10 has 0 to 9: download"),
    ],
)
def test_damaged_cifar10_gives_one_line(fault, expected, tmp_path, capsys):
    damage(write_cifar10(tmp_path), fault)
    assert expected in error(["--data-dir", str(tmp_path)], capsys)


def test_missing_folder_gives_one_line(tmp_path, capsys):
    line = error(["--data-dir", str(tmp_path / "nowhere")], capsys)
    assert "nowhere is not a folder: --data-dir takes the folder that holds test_batch.bin" in line


# ---- Options ----


def test_orders_depend_on_seed_and_epoch():
    first, later = datasets.EpochOrder(20, 5), datasets.EpochOrder(20, 5, first_epoch=1)
    epochs = [list(first), list(first)]
    assert sorted(epochs[0]) == list(range(20))
    assert epochs[0] != epochs[1]
    assert list(later) == epochs[1]
    assert list(datasets.EpochOrder(20, 6)) != epochs[0]


def test_a_part_of_the_digits_has_all_classes():
    train, test = datasets.digits_datasets(30, side=8, channels=3, most=30)
    for part in (train, test):
        ((images, labels),) = part.create_tuple_iterator(output_numpy=True, num_epochs=1)
        assert images.shape == (30, 3, 8, 8)
        assert set(labels) == set(range(10))


OPTIONS = {
    "fixed scale, amp O2": ["--loss-scale", "fixed", "--amp-level", "O2"],
    "dynamic scale, amp O3": [*BOOSTED, "--loss-scale", "dynamic", "--amp-level", "O3"],
    "amp O1, ResNet-50": ["--amp-level", "O1", "--network", "resnet50"],
    "pynative": ["--mode", "pynative", *BOOSTED, "--loss-scale", "dynamic"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_train(name, tiny, capsys):
    line = run(OPTIONS[name], capsys)
    assert re.fullmatch(r"test accuracy \d\.\d{4} after 2 epochs in \d+\.\d s", line)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--loss-scale", "dynamic"], "--loss-scale dynamic needs a boost level"),
        (["--checkpoint", "run.bin"], "must end in .ckpt, got 'run.bin'"),
        (["--network", "resnet34"], "argument --network: invalid choice: 'resnet34'"),
        (["--plot", "loss.png"], "--plot draws the history, so it needs --history FILE"),
    ],
)
def test_wrong_arguments_are_explained(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        resnet.main(arguments)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


# ---- Checkpoint and resume ----

RESUMED = {
    "plain": ["--loss-scale", "fixed"],
    "boosted": [*BOOSTED, "--loss-scale", "dynamic"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_without_the_break(name, tiny, tmp_path, capsys, monkeypatch):
    through, broken = tmp_path / "through.ckpt", tmp_path / "broken.ckpt"
    options = [*RESUMED[name], "--epochs", "3"]
    run([*options, "--checkpoint", str(through)], capsys)

    class Break(Exception):
        pass

    def stop_in_third_epoch(self, run_context):
        if run_context.original_args().cur_epoch_num == 3:
            raise Break

    with monkeypatch.context() as patch:
        patch.setattr(resnet.BoostCheckpoint, "on_train_step_end", stop_in_third_epoch)
        with pytest.raises(Break):
            resnet.main([*QUICK, *options, "--checkpoint", str(broken)])
    run([*options, "--resume", str(broken), "--checkpoint", str(broken)], capsys)
    one, two = (ms.load_checkpoint(str(path)) for path in (through, broken))
    assert one.keys() == two.keys()
    assert int(two["epoch"].asnumpy()) == 3
    assert one.pop("boost.settings", "") == two.pop("boost.settings", "")
    for key, value in one.items():
        np.testing.assert_array_equal(value.asnumpy(), two[key].asnumpy(), err_msg=key)


def test_unfit_checkpoints_give_one_line(tiny, tmp_path, capsys):
    path, other = tmp_path / "run.ckpt", tmp_path / "other.ckpt"
    run(["--checkpoint", str(path)], capsys)
    assert "has trained 2 epochs already: --epochs must" in error(["--resume", str(path)], capsys)
    more = ["--epochs", "3", "--resume"]
    line = error([*more, str(path), "--network", "resnet50"], capsys)
    assert "does not fit this training: " in line
    ms.save_checkpoint(nn.Dense(1, 1), str(other))
    assert "does not say how many epochs are done" in error([*more, str(other)], capsys)
    missing = error([*more, str(tmp_path / "none.ckpt")], capsys)
    assert "cannot be read as a checkpoint" in missing


# ---- As a user runs it ----


def test_the_real_network_with_history_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    history, picture = tmp_path / "history.jsonl", tmp_path / "history.png"
    arguments = ["--max-images", "32", "--epochs", "1", "--history", str(history)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "resnet.py"), *arguments, "--plot", str(picture)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout.splitlines()[-1]
    assert "accuracy" in history.read_text(encoding="utf-8")
    assert picture.stat().st_size > 0
