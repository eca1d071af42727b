"""The basis: exact directions, and files that are read safely or refused in words."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from mindspore_boost_ext.dim_reduce import basis as pca
from mindspore_boost_ext.dim_reduce.basis import Basis, load_basis, principal_basis, save_basis

LAYOUT = (("first.weight", (2, 3)), ("first.bias", (2,)), ("last.weight", (1, 2)))
N, K = 10, 3


def walk(count=6, size=N, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size)).cumsum(axis=0).astype(np.float32)


def some_basis(seed=0):
    return principal_basis(walk(seed=seed), K, layout=LAYOUT)


def oracle(snapshots, k):
    """Directions and variances from the SVD of the centred snapshots, in float64."""
    centred = np.float64(snapshots) - np.float64(snapshots).mean(axis=0)
    _, values, rows = np.linalg.svd(centred, full_matrices=False)
    return rows[:k], (values**2 / (values**2).sum())[:k]


@pytest.mark.parametrize("shape", [(6, 10), (12, 8), (5, 20000), (2, 3)])
def test_the_directions_are_those_of_the_svd(shape):
    snapshots = walk(*shape)
    k = min(3, shape[0] - 1)
    basis = principal_basis(snapshots, k)
    rows, explained = oracle(snapshots, k)
    overlap = np.abs((basis.components * rows).sum(axis=1))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-6)  # float32 components
    np.testing.assert_allclose(basis.explained, explained, rtol=1e-10)
    assert basis.components.dtype == np.float32
    assert pca.orthonormality_error(basis.components) < 1e-6  # the demand


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_snapshots_does_not_matter(seed):
    """A state that was saved belongs to directions with their signs."""
    order = np.random.default_rng(seed).permutation(6)
    found = principal_basis(walk()[order], K).components
    np.testing.assert_allclose(found, principal_basis(walk(), K).components, atol=1e-6)


def test_variances_over_many_decades_stay_orthonormal():
    scales = 10.0 ** (3 - np.arange(7))
    snapshots = np.random.default_rng(0).normal(size=(30, 7)) * scales  # variances 1e6 to 1e-6
    basis = principal_basis(snapshots, 7)
    assert pca.orthonormality_error(basis.components) < 1e-6


def test_several_blocks_give_what_one_gives(monkeypatch):
    whole = principal_basis(walk(), K)
    monkeypatch.setattr(pca, "_COLUMNS", 3)
    parts = principal_basis(walk(), K)
    np.testing.assert_allclose(parts.components, whole.components, atol=1e-6)
    np.testing.assert_allclose(parts.mean, walk().mean(axis=0), atol=1e-6)


def test_the_mean_of_many_snapshots_keeps_its_digits():
    snapshots = np.full((1000, 2), 0.1, np.float32)
    np.testing.assert_array_equal(pca.snapshot_mean(snapshots), snapshots[0])


def test_a_memory_map_is_not_changed_and_overwriting_uses_the_snapshots(tmp_path):
    plain, snapshots = principal_basis(walk(), K), walk()
    mapped = np.memmap(tmp_path / "walk", np.float32, "w+", shape=snapshots.shape)
    mapped[:] = snapshots
    assert np.array_equal(principal_basis(mapped, K).components, plain.components)
    assert np.array_equal(mapped, snapshots)
    inside = principal_basis(snapshots, K, overwrite=True)
    assert np.shares_memory(inside.components, snapshots)
    assert np.array_equal(inside.components, plain.components)


def test_rows_are_shared_out_over_any_number_of_ranks():
    for k in range(1, 9):
        for size in range(1, 7):
            parts = [pca.rows_of_rank(k, rank, size) for rank in range(size)]
            assert [row for part in parts for row in range(part.start, part.stop)] == list(range(k))
            assert max(part.stop - part.start for part in parts) == -(-k // size)


@pytest.mark.parametrize(
    ("snapshots", "k", "message"),
    [
        (walk(4), 4, "n_components is 4, but 4 snapshots of 10 weights give at most 3 directions"),
        (walk(4), 0, "n_components must be an int from 1 to 2147483647, got 0"),
        (np.repeat(walk(2), 3, axis=0), 2, "vary in 1 directions only"),
        (np.ones((4, N), np.float32), 1, "vary in 0 directions only"),
        (np.ones((4, N), np.int32), 1, "must be a float array"),
        (walk() * np.float32("nan"), 2, "inf or nan"),
        (np.where(np.arange(N) == 1, np.float32("inf"), walk()), 2, "inf or nan"),
    ],
)
def test_snapshots_that_give_no_basis(snapshots, k, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        principal_basis(snapshots, k)


def test_a_basis_comes_back_from_its_file(tmp_path):
    basis = some_basis()
    save_basis(tmp_path / "basis.npz", basis)
    found = load_basis(tmp_path / "basis.npz", 2, LAYOUT)
    assert np.array_equal(found.components, basis.components[:2])
    assert np.array_equal(found.explained, basis.explained[:2])
    assert np.array_equal(found.mean, basis.mean)
    assert found.layout == LAYOUT
    assert os.listdir(tmp_path) == ["basis.npz"]  # nothing half written is left


def test_columns_follow_the_network_whatever_the_order_in_the_file(tmp_path):
    basis = some_basis()
    save_basis(tmp_path / "basis.npz", basis)
    found = load_basis(tmp_path / "basis.npz", K, LAYOUT[::-1])
    order = np.concatenate(np.split(np.arange(N), [6, 8])[::-1])
    assert np.array_equal(found.components, basis.components[:, order])
    assert np.array_equal(found.mean, basis.mean[order])
    assert found.layout == LAYOUT[::-1]


def test_rows_beyond_those_wanted_may_be_longer(tmp_path):
    components = some_basis().components * np.float32([[1], [1], [2]])
    written(tmp_path / "basis.npz", components)
    assert np.array_equal(load_basis(tmp_path / "basis.npz", 2).components, components[:2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4"])
def test_upstreams_form_is_read(tmp_path, dtype):
    components = some_basis().components.astype(dtype)
    np.save(tmp_path / "basis.npy", np.asfortranarray(components))
    found = load_basis(tmp_path / "basis.npy", K, LAYOUT)
    assert np.array_equal(found.components, some_basis().components)
    assert found.components.dtype == np.float32
    assert found.mean is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "basis.npz"
    save_basis(path, some_basis())
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        save_basis(path, some_basis(1))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["basis.npz"]


@pytest.mark.parametrize("name", ["basis.txt", "basis"])
def test_other_endings_are_not_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"saved as \.npz or \.npy"):
        save_basis(tmp_path / name, some_basis())


def written(path, components, **more):
    with open(path, "wb") as file:
        np.savez(file, components=components, **more)


def one_value(value):
    components = some_basis().components.copy()
    components[0, 0] = value
    return components


class Trap:
    """Unpickling this would write a file."""

    def __reduce__(self):
        return (open, ("trap-was-sprung", "w"))


FLAWS = {
    "it has 9 columns, but the network has 10": lambda path: written(
        path, np.eye(3, 9, dtype="f4")
    ),
    r"float matrix, got int64 \[3, 10\]": lambda path: written(path, np.eye(3, 10, dtype=int)),
    r"float matrix, got float32 \[10\]": lambda path: written(path, np.ones(10, np.float32)),
    "it has 2 rows, but n_components is 3": lambda path: written(path, np.eye(2, 10)),
    "it holds inf or nan": lambda path: written(path, one_value(np.nan)),
    "not orthonormal": lambda path: written(path, 1.01 * some_basis().components),
    "holds no array 'components'": lambda path: np.savez(path, other=np.eye(3)),
    "pickled objects": lambda path: written(path, np.array([Trap()], object)),
    "its members are compressed": lambda path: np.savez_compressed(path, components=np.eye(3, 10)),
    "its mean has shape": lambda path: written(path, np.eye(3, 10), mean=np.ones(9)),
    "its layout is damaged": lambda path: written(
        path, np.eye(3, 10), layout=np.frombuffer(b"[1]", np.uint8)
    ),
    "parameter 'first.bias' is": lambda path: save_basis(
        path, Basis(some_basis().components, np.empty(0), None, (LAYOUT[0], ("first.bias", (4,))))
    ),
    "it has no parameter 'first.weight'": lambda path: save_basis(
        path, Basis(some_basis().components, np.empty(0), None, (("other", (10,)),))
    ),
    "there is no such file": lambda path: None,
    "not a zip file": lambda path: path.write_bytes(b"neither\n"),
    "it is a symbolic link": lambda path: (
        save_basis(str(path) + ".npz", some_basis()),
        path.symlink_to(str(path) + ".npz"),
    ),
    "it is not a regular file": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("message", FLAWS)
def test_files_that_are_refused(tmp_path, message):
    path = tmp_path / "basis.npz"
    FLAWS[message](path)
    with pytest.raises(ValueError, match=message) as caught:
        load_basis(path, K, LAYOUT)
    assert str(caught.value).startswith(f"cannot use the basis {path}: ")
    assert not os.path.exists("trap-was-sprung")


def npy(content, shape=None):
    """A .npy file whose header may promise another shape than its content has."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape or content.shape}
    )
    return file.getvalue() + content.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(some_basis().components)[:-4], "its length does not fit its header"),
        (npy(some_basis().components, (10**9, 10**9)), "its length does not fit its header"),
        (pickle.dumps(np.eye(3)), "magic string"),
        (b"", "EOF"),
    ],
)
def test_damaged_matrices_are_refused(tmp_path, content, message):
    (tmp_path / "basis.npy").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_basis(tmp_path / "basis.npy", K)


def headed(text):
    """A .npy file with any header."""
    header = text.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 72


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 6",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1" + "0" * 400 + ",), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 6), }",
        "{[]: 1, 'descr': '<f4', 'fortran_order': False, 'shape': (3, 6), }",
        "-" * 9000 + "1",
    ],
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_whatever_a_header_says_the_error_names_the_file(tmp_path, header, suffix):
    path = tmp_path / f"basis.{suffix}"
    path.write_bytes(headed(header))
    if suffix == "npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("components.npy", headed(header))
    with pytest.raises(ValueError, match="cannot use the basis"):
        load_basis(path, K, LAYOUT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("explained", np.array(["a", "b", "c"])),
        ("explained", np.array(1.0)),
        ("mean", np.array(["a"] * N)),
        ("layout", np.array('[["w", [1e999]]]')),
        ("layout", np.array('[["w", [6]], ["w", [6]]]')),
        ("layout", np.array("{")),
    ],
)
def test_parts_of_another_kind_are_refused(tmp_path, name, value):
    path = tmp_path / "basis.npz"
    np.savez(path, components=some_basis().components, **{name: value})
    with pytest.raises(ValueError, match="cannot use the basis"):
        load_basis(path, K, LAYOUT)


def test_a_truncated_archive_is_refused(tmp_path):
    path = tmp_path / "basis.npz"
    save_basis(path, some_basis())
    content = path.read_bytes()
    for length in (len(content) // 2, len(content) - 10):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="cannot use the basis"):
            load_basis(path, K, LAYOUT)


def test_a_member_that_lies_about_its_size_is_refused(tmp_path):
    path = tmp_path / "basis.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("components.npy", npy(some_basis().components, (4, 10)))
    with pytest.raises(ValueError, match="its length does not fit its header"):
        load_basis(path, K, LAYOUT)


def test_a_basis_may_be_read_by_whom_a_file_of_numpys_may(tmp_path):
    """Ranks may run under other accounts."""
    np.save(tmp_path / "plain.npy", np.zeros(2))
    save_basis(tmp_path / "basis.npz", some_basis())
    modes = {one.stat().st_mode for one in tmp_path.iterdir()}
    assert len(modes) == 1
