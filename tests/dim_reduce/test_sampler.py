"""Snapshots: what the sampler writes, and what the reader takes or refuses."""

from __future__ import annotations

import os

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import nn

from mindspore_boost_ext import BoostModel, TrajectorySampler, make_train_step
from mindspore_boost_ext._compat import CallbackParameters
from mindspore_boost_ext.dim_reduce.snapshots import layout_of, read_snapshots, snapshot_files


def train_sampled(sampler, epochs=3, batches=2):
    net = nets.MLP()
    model = BoostModel(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    model.train(epochs, nets.dataset(batches), callbacks=[sampler], dataset_sink_mode=False)
    return net


def flat(net):
    return np.concatenate([one.asnumpy().reshape(-1) for one in net.trainable_params()])


def read(folder, limit=100):
    return read_snapshots(snapshot_files(folder), layout_of(nets.MLP().trainable_params()), limit)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_the_first_and_the_last_weights_are_there(mode, format, tmp_path):
    net = train_sampled(TrajectorySampler(tmp_path / "run", format=format))
    matrix = read(tmp_path / "run")
    assert matrix.shape == (4, 17)
    assert np.array_equal(matrix[0], flat(nets.MLP()))
    assert np.array_equal(matrix[-1], flat(net))
    expected = [f"snapshot-{number:05d}.{format}" for number in range(4)]
    assert sorted(os.listdir(tmp_path / "run")) == expected  # and nothing half written


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"every": 2, "unit": "step"}, [0, 1, 2, 3]),  # 6 steps
        ({"every": 4, "unit": "step"}, [0, 1]),
        ({"every": 2}, [0, 1]),  # 3 epochs
        ({"initial": False}, [1, 2, 3]),
        ({"keep": 2}, [2, 3]),
    ],
)
def test_when_and_how_many(settings, numbers, tmp_path):
    train_sampled(TrajectorySampler(tmp_path, **settings))
    assert sorted(os.listdir(tmp_path)) == [f"snapshot-{number:05d}.ckpt" for number in numbers]


@pytest.mark.parametrize(
    ("settings", "numbers"), [({"every": 2}, 4), ({"every": 5, "unit": "step"}, 3)]
)
def test_epochs_and_steps_are_counted_over_several_calls(settings, numbers, tmp_path):
    """6 epochs of 2 steps."""
    net, sampler = nets.MLP(), TrajectorySampler(tmp_path, **settings)
    model = BoostModel(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    for _ in range(6):
        model.train(1, nets.dataset(2), callbacks=[sampler], dataset_sink_mode=False)
    assert len(sampler.snapshots()) == numbers


def test_steps_are_counted_where_the_host_sees_every_other_one(tmp_path):
    """As in sink mode: of the multiples of 3, it sees 6 and 12 at once, 3 and 9 a step later."""
    sampler = TrajectorySampler(tmp_path, every=3, unit="step", initial=False)
    told, found = CallbackParameters(network=nets.MLP()), []
    sampler.on_train_begin(ms.train.RunContext(told))
    for told.cur_step_num in range(2, 14, 2):
        before = len(sampler.snapshots())
        sampler.on_train_step_end(ms.train.RunContext(told))
        found += [told.cur_step_num] * (len(sampler.snapshots()) - before)
    assert found == [4, 6, 10, 12]


def test_the_epochs_of_a_run_that_goes_on_have_their_own_numbers(tmp_path):
    net, sampler = nets.MLP(), TrajectorySampler(tmp_path, every=2, initial=False)
    model = BoostModel(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    model.train(4, nets.dataset(2), [sampler], dataset_sink_mode=False, initial_epoch=1)
    assert len(sampler.snapshots()) == 2  # after epochs 2 and 4


def test_a_call_that_says_where_it_begins_is_counted_by_that(tmp_path):
    net, sampler = nets.MLP(), TrajectorySampler(tmp_path, every=2, initial=False)
    model = BoostModel(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    for epochs, first in ((1, 0), (2, 0), (6, 3)):  # 1; 2 and 3; 4, 5 and 6
        model.train(
            epochs, nets.dataset(2), [sampler], dataset_sink_mode=False, initial_epoch=first
        )
    assert len(sampler.snapshots()) == 3  # after 2, 4 and 6


def test_another_network_is_another_run(tmp_path):
    sampler = TrajectorySampler(tmp_path)
    train_sampled(sampler, epochs=1)
    with pytest.raises(ValueError, match="it holds 2 snapshots of another run"):
        train_sampled(sampler, epochs=1)


def test_a_loop_of_ones_own_has_snapshots_too(tmp_path):
    net, sampler = nets.MLP(), TrajectorySampler(tmp_path)
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()), level="O0")
    for batch in step.over(nets.dataset(2), 3, sampler):
        step(*batch)
    assert len(sampler.snapshots()) == 4


def test_a_second_run_is_refused_or_goes_on(tmp_path):
    train_sampled(TrajectorySampler(tmp_path), epochs=1)
    with pytest.raises(ValueError, match="it holds 2 snapshots of another run"):
        train_sampled(TrajectorySampler(tmp_path), epochs=1)
    train_sampled(TrajectorySampler(tmp_path, resume=True), epochs=1)
    assert len(os.listdir(tmp_path)) == 3


def test_numbers_of_six_digits_come_after_those_of_five(tmp_path):
    for number in (99_999, 100_000):
        (tmp_path / f"snapshot-{number}.ckpt").touch()
    train_sampled(TrajectorySampler(tmp_path, resume=True, keep=2), epochs=1)
    assert sorted(os.listdir(tmp_path)) == ["snapshot-100000.ckpt", "snapshot-100001.ckpt"]


def test_what_is_not_trained_is_in_no_snapshot(tmp_path):
    net = nn.SequentialCell(nn.Dense(nets.FEATURES, 4), nn.BatchNorm1d(4))
    model = BoostModel(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    sampler = TrajectorySampler(tmp_path)
    model.train(1, nets.dataset(1), [sampler], dataset_sink_mode=False)
    held = {*ms.load_checkpoint(sampler.snapshots()[-1])}
    assert held == {one.name for one in net.trainable_params()}


def test_weights_of_the_loss_are_in_a_snapshot(tmp_path):
    """dim_reduce trains them, too, and would find them missing."""

    class Centred(nn.LossBase):
        def __init__(self):
            super().__init__()
            self.centre = ms.Parameter(ms.Tensor([0.0] * nets.CLASSES), name="centre")

        def construct(self, outputs, labels):
            return ((outputs - self.centre) ** 2).mean() + 0.0 * labels.sum()

    net, loss = nets.MLP(), Centred()
    model = BoostModel(net, loss, nets.momentum([*net.trainable_params(), loss.centre]))
    sampler = TrajectorySampler(tmp_path)
    model.train(1, nets.dataset(1), [sampler], dataset_sink_mode=False)
    assert "centre" in ms.load_checkpoint(sampler.snapshots()[-1])


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(ms, "save_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        train_sampled(TrajectorySampler(tmp_path), epochs=1)
    assert os.listdir(tmp_path) == []


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK_ID", "1")
    train_sampled(TrajectorySampler(tmp_path / "run"), epochs=1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name, reason in (("file", "File exists|Not a directory"), ("link", "symbolic link")):
        with pytest.raises(ValueError, match=f"TrajectorySampler cannot use .*: .*({reason})"):
            train_sampled(TrajectorySampler(tmp_path / name), epochs=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, r"TrajectorySampler\.every must be an int from 1 to 2147483647, got 0"),
        ({"unit": "batch"}, r"TrajectorySampler\.unit must be one of 'epoch', 'step'"),
        ({"keep": 0}, r"TrajectorySampler\.keep must be"),
        ({"format": "npz"}, r"TrajectorySampler\.format must be one of 'ckpt', 'safetensors'"),
        ({"prefix": "../x"}, "a prefix of letters, digits and underscores"),
        ({"folder": None}, "needs a folder"),
        ({"folder": 3}, r"TrajectorySampler\.folder must be None or a path"),
    ],
)
def test_settings_that_break_their_rule(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        TrajectorySampler(**{"folder": tmp_path, **settings})


def save(path, content=None, **changes):
    """Save an MLP, with some parameters changed (None leaves one out), in another order."""
    values = {one.name: one.asnumpy() for one in nets.MLP().trainable_params()}
    values.update(changes)
    entries = [
        {"name": name, "data": ms.Tensor(value)}
        for name, value in reversed(values.items())
        if value is not None
    ]
    ms.save_checkpoint(entries, str(path), format=str(path).rpartition(".")[2])


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_columns_follow_the_network_and_other_entries_are_passed_over(tmp_path, ending):
    save(tmp_path / f"a.{ending}", moments=np.ones(3, np.float32))
    (tmp_path / "notes.txt").write_text("not a snapshot")
    (tmp_path / ".hidden.ckpt").write_text("not one either")
    assert np.array_equal(read(tmp_path), [flat(nets.MLP())])


def test_beyond_the_memory_limit_the_matrix_lies_in_a_file(tmp_path):
    save(tmp_path / "a.ckpt")
    mapped = read(tmp_path, limit=1e-9)
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, read(tmp_path))


def test_half_precision_is_widened(tmp_path):
    halves = {one.name: one.asnumpy().astype(np.float16) for one in nets.MLP().trainable_params()}
    save(tmp_path / "a.ckpt", **halves)
    np.testing.assert_allclose(read(tmp_path)[0], flat(nets.MLP()), rtol=1e-3)  # float16


FLAWS = {
    "parameter 'first.bias' is [3] there, but [2] here": {"first.bias": np.ones(3, np.float32)},
    "it has no parameter 'first.bias' [2]": {"first.bias": None},
    "parameter 'first.bias' holds inf or nan": {"first.bias": np.full(2, np.nan, np.float32)},
}


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("flaw", FLAWS)
def test_snapshots_of_another_network_are_named(tmp_path, flaw, ending):
    save(tmp_path / f"a.{ending}", **FLAWS[flaw])
    with pytest.raises(ValueError, match=r"cannot use the snapshot .*a\.") as caught:
        read(tmp_path)
    assert flaw in str(caught.value)


# MindSpore leaves a safetensors file open that it cannot read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_snapshots_are_named(tmp_path, ending, damage):
    path = tmp_path / f"a.{ending}"
    save(path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "text": b"x" * 50, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"cannot use the snapshot .*a\."):
        read(tmp_path)


def test_links_and_folders_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    save(tmp_path / "a.ckpt")
    (tmp_path / "run" / "b.ckpt").symlink_to(tmp_path / "a.ckpt")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"snapshot .*b\.ckpt: it is a symbolic link"):
        snapshot_files(tmp_path / "run")
    with pytest.raises(ValueError, match="it is a symbolic link: give the folder itself"):
        snapshot_files(tmp_path / "link")
    with pytest.raises(ValueError, match="No such file or directory"):
        snapshot_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Not a directory"):
        snapshot_files(tmp_path / "a.ckpt")


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", forbidden)
    with pytest.raises(ValueError, match=r"cannot use the snapshots in .*: Permission denied"):
        snapshot_files(tmp_path)
