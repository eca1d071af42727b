"""The bundled digits: their files, how they are divided and enlarged, and the pipelines."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from mindspore import nn

from mindspore_boost_ext import bundled


def test_digits_are_the_1797_images_in_ten_classes():
    images, labels = bundled.load_digits()
    assert (images.shape, images.dtype) == ((1797, 8, 8), np.uint8)
    assert (labels.shape, labels.dtype) == ((1797,), np.uint8)
    assert (images.min(), images.max()) == (0, 16)
    # Class counts as published with the collection (optdigits.names, test set).
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_equal_those_of_scikit_learn():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    expected = sklearn_datasets.load_digits()
    images, labels = bundled.load_digits()
    np.testing.assert_array_equal(images, expected.images)
    np.testing.assert_array_equal(labels, expected.target)


def test_readme_states_checksum_licence_and_source():
    readme = (bundled.DIGITS_FILE.parent / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256(bundled.DIGITS_FILE.read_bytes()).hexdigest()
    assert digest == bundled.DIGITS_SHA256
    for text in (
        digest,
        "CC BY 4.0",
        "10.24432/C50P49",
        f"{bundled.DIGITS_FILE.stat().st_size:,}",
    ):
        assert text in readme


def test_missing_digits_are_reported(tmp_path):
    with pytest.raises(bundled.DatasetError, match=r"gone\.npz cannot be read \(No such file"):
        bundled.load_digits(tmp_path / "gone.npz")


def test_damaged_digits_are_reported(tmp_path):
    content = bytearray(bundled.DIGITS_FILE.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "digits.npz").write_bytes(content)
    with pytest.raises(bundled.DatasetError, match=r"digits\.npz is damaged .* restore it"):
        bundled.load_digits(tmp_path / "digits.npz")


def test_split_is_disjoint_complete_and_stratified():
    labels = bundled.load_digits().labels
    train, test = bundled.stratified_split(labels, seed=3)
    assert (len(train), len(test)) == (1437, 360)
    assert sorted([*train, *test]) == list(range(1797))
    per_class = np.bincount(labels)
    assert np.all(np.abs(np.bincount(labels[test]) - per_class / 5) < 1)


def test_split_depends_on_the_seed_alone():
    labels = bundled.load_digits().labels
    first, again, other = (bundled.stratified_split(labels, seed)[1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)


def test_enlarge_interpolates_between_pixel_centres():
    image = np.array([[[0, 4], [8, 12]]], np.uint8)
    # Worked by hand: new centres lie at -1/4, 1/4, 3/4, 5/4 of the old grid, clipped to 0..1.
    expected = [[0, 1, 3, 4], [2, 3, 5, 6], [6, 7, 9, 10], [8, 9, 11, 12]]
    result = bundled.enlarge(image, 4)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, [expected])


@pytest.mark.parametrize("side", [8, 20, 32])
def test_enlarge_keeps_constants_and_range(side):
    images = bundled.load_digits().images[:20]
    result = bundled.enlarge(images, side)
    assert result.shape == (20, side, side)
    assert result.min() >= 0
    assert result.max() <= 16
    constant = bundled.enlarge(np.full((1, 8, 8), 5, np.uint8), side)
    # Weights of a row sum to 1 up to float32 rounding.
    np.testing.assert_allclose(constant, 5, rtol=1e-6)


def test_enlarge_to_the_same_side_changes_nothing():
    images = bundled.load_digits().images[:20]
    np.testing.assert_array_equal(bundled.enlarge(images, 8), images)


def test_digits_pipeline_shapes_types_and_range():
    train, test = bundled.digits_datasets(100, side=16, channels=3)
    assert train.get_dataset_size() == 14  # 1437 // 100, the rest waits for the next shuffle
    image, label = next(train.create_tuple_iterator(output_numpy=True, num_epochs=1))
    assert (image.shape, image.dtype) == ((100, 3, 16, 16), np.float32)
    assert (label.shape, label.dtype) == ((100,), np.int32)
    assert image.min() >= 0
    assert image.max() <= 1
    np.testing.assert_array_equal(image[:, 0], image[:, 2])
    sizes = [len(row[1]) for row in test.create_tuple_iterator(output_numpy=True, num_epochs=1)]
    assert sizes == [100, 100, 100, 60]


def test_batch_larger_than_the_training_set_is_refused():
    with pytest.raises(bundled.DatasetError, match=r"at most 1437, .* got 1438"):
        bundled.digits_datasets(1438)


def test_shards_divide_the_digits():
    shards = [bundled.Shard(rank, 4) for rank in range(4)]
    pairs = [bundled.digits_datasets(8, side=8, shard=shard) for shard in shards]
    assert {train.get_dataset_size() for train, _ in pairs} == {360 // 8}  # 1437 / 4, rounded up
    seen = [
        labels
        for _, test in pairs
        for _, labels in test.create_tuple_iterator(num_epochs=1, output_numpy=True)
    ]
    assert sum(map(len, seen)) == 360
    _, whole = bundled.digits_datasets(360, side=8)
    ((_, labels),) = whole.create_tuple_iterator(num_epochs=1, output_numpy=True)
    np.testing.assert_array_equal(np.bincount(np.concatenate(seen)), np.bincount(labels))


def test_orders_depend_on_seed_and_epoch():
    first, later = bundled.EpochOrder(20, 5), bundled.EpochOrder(20, 5, first_epoch=1)
    epochs = [list(first), list(first)]
    assert sorted(epochs[0]) == list(range(20))
    assert epochs[0] != epochs[1]
    assert list(later) == epochs[1]
    assert list(bundled.EpochOrder(20, 6)) != epochs[0]


def test_a_part_of_the_digits_has_all_classes():
    train, test = bundled.digits_datasets(30, side=8, channels=3, most=30)
    for part in (train, test):
        ((images, labels),) = part.create_tuple_iterator(output_numpy=True, num_epochs=1)
        assert images.shape == (30, 3, 8, 8)
        assert set(labels) == set(range(10))


# ---- Networks ----


def test_lenet_has_the_weights_of_the_article():
    """LeCun et al., 1998: 61,706 numbers for ten classes, but for the convolutions' 22 biases."""
    sizes = {one.name: one.size for one in bundled.LeNet5().trainable_params()}
    assert sizes == {
        **{"conv1.weight": 150, "conv2.weight": 2400},
        **{"fc1.weight": 48000, "fc1.bias": 120, "fc2.weight": 10080, "fc2.bias": 84},
        **{"fc3.weight": 840, "fc3.bias": 10},
    }


def test_the_small_resnet_has_seventeen_convolutions_of_8_to_32_channels():
    net = bundled.SmallResNet()
    cells = [cell for _, cell in net.cells_and_names()]
    widths = [one.out_channels for one in cells if isinstance(one, nn.Conv2d)]
    assert sorted(widths) == [8] * 7 + [16] * 5 + [32] * 5
    assert len(net.trainable_params()) == 53
