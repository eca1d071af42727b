"""The sign ``/`` in graphs after the import: MindSpore's bits, by an operator without buffers."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import tune_machine, tuning
from mindspore_boost_ext.runtime import division

VALUES = np.array([0.0, -0.0, 1.5, -3e38, 1e-42, np.inf, -np.inf, np.nan, 7.0], np.float32)


class ByNumber(nn.Cell):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def construct(self, x):
        return x / self.number


class ByInput(nn.Cell):
    def construct(self, x, y):
        return x / y


class Slopes(nn.Cell):
    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.cell, self.gradient = cell, ops.GradOperation(get_all=True)

    def construct(self, *inputs):
        return self.gradient(self.cell)(*inputs)


@pytest.fixture
def left_to_mindspore(monkeypatch):
    """Record the shapes of divisors that are left to MindSpore's rules; () is a number."""
    seen = []
    by_number, by_tensor = (
        division.PLAIN[types] for types in (division.BY_NUMBER, division.BY_TENSOR)
    )

    def numbered(x, y):
        record(())
        return by_number(x, y)

    def shaped(x, y):
        record(y.shape)
        return by_tensor(x, y)

    @ops.constexpr(check=False)
    def record(shape):
        seen.append(shape)

    monkeypatch.setattr(division, "_PLAIN_BY_NUMBER", numbered)
    monkeypatch.setattr(division, "_PLAIN_BY_TENSOR", shaped)
    return seen


def by_mindspore(cell, *inputs):
    tune_machine(False)
    try:
        return cell(*inputs).asnumpy()
    finally:
        tune_machine()


@pytest.mark.parametrize("number", [3.0, 3, 1e-40, 1e300, 2**40, float("nan")])
def test_by_a_number(graph_mode, left_to_mindspore, number):
    """MindSpore's own bits; near 0 they are not NumPy's."""
    found = ByNumber(number)(Tensor(VALUES)).asnumpy()
    assert left_to_mindspore == []
    assert found.tobytes() == by_mindspore(ByNumber(number), Tensor(VALUES)).tobytes()


@pytest.mark.filterwarnings("ignore:divide by zero")  # of MindSpore, which computes 1 / 0
@pytest.mark.parametrize("number", [0.0, -0.0])
def test_zero_is_left_to_mindspore(graph_mode, left_to_mindspore, number):
    """A graph takes 0.0 and -0.0 for one constant."""
    (slope,) = Slopes(ByNumber(number))(Tensor(VALUES[2:4]))
    np.testing.assert_array_equal(slope.asnumpy(), np.full(2, np.copysign(np.inf, number)))
    assert set(left_to_mindspore) == {()}


def test_by_a_number_that_may_change(graph_mode, left_to_mindspore):
    found = ByInput()(Tensor(VALUES[2:4]), ms.mutable(4.0))
    np.testing.assert_array_equal(found.asnumpy(), VALUES[2:4] / np.float32(4))
    assert left_to_mindspore == []


def test_by_a_tensor_of_one_value(graph_mode, left_to_mindspore):
    x, y = Tensor(VALUES[:3]), Tensor(3.0, ms.float32)
    np.testing.assert_array_equal(ByInput()(x, y).asnumpy(), VALUES[:3] / np.float32(3.0))
    of_x, of_y = Slopes(ByInput())(x, y)
    np.testing.assert_array_equal(of_x.asnumpy(), np.full(3, np.float32(1) / np.float32(3)))
    # Rounding of float32: the sum of three values, divided twice.
    np.testing.assert_allclose(of_y.asnumpy(), -1.5 / 9, rtol=1e-6)
    assert left_to_mindspore == []


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
def test_other_divisors_are_left_to_mindspore(graph_mode, left_to_mindspore, shape):
    x, y = Tensor(np.float32([1, 2, 3])), np.full(shape, 2, np.float32)
    np.testing.assert_array_equal(ByInput()(x, Tensor(y)).asnumpy(), x.asnumpy() / y)
    assert set(left_to_mindspore) == {shape}


@pytest.mark.parametrize("dtype", [ms.float16, ms.float64, ms.int32])
def test_other_dtypes_are_left_to_mindspore(graph_mode, left_to_mindspore, dtype):
    found = ByNumber(2)(Tensor([1, 3], dtype))
    np.testing.assert_array_equal(found.asnumpy(), [0.5, 1.5])
    assert set(left_to_mindspore) == {()}


def test_mapped(graph_mode):
    class Mapped(nn.Cell):
        def construct(self, x, y):
            def divided(x, y):
                return x / y

            return ops.vmap(divided, (0, 0), 1)(x, y)

    x, y = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([2, 3])
    found = Mapped()(Tensor(x), Tensor(y)).asnumpy()
    np.testing.assert_array_equal(found, (x / y[:, None]).T)


def test_the_rules_are_found_if_types_print_differently(monkeypatch):
    """MindNLP 0.5 replaces the texts of MindSpore's types, before or after this import."""
    monkeypatch.setattr(type(ms.float32).__mro__[2], "__str__", lambda self: "torch.type")
    found = {types: division.rule_in_force(types) for types in division.OWN}
    assert found == dict(division.OWN)


def test_the_rules_go_and_come_back():
    def in_force():
        return {types: division.rule_in_force(types) for types in division.OWN}

    assert in_force() == dict(division.OWN)
    count = len(division.SIGN.entries)
    try:
        tune_machine(False)
        assert in_force() == dict(division.PLAIN)
    finally:
        tune_machine()
    assert in_force() == dict(division.OWN)
    assert len(division.SIGN.entries) == count


def of_the_script(x, y):
    return x


def test_a_rule_of_the_script_stays(monkeypatch):
    """And a row says so."""
    monkeypatch.setattr(division.SIGN, "entries", list(division.SIGN.entries))
    types = next(of for of, _ in division.SIGN.entries if tuple(map(str, of)) == division.BY_NUMBER)
    division.SIGN.entries.append((types, of_the_script))
    try:
        (row,) = [row for row in tuning() if "division" in row.algorithm]
        assert (row.status, row.reason) == ("inactive", "the script has replaced it")
        assert division.rule_in_force(division.BY_NUMBER) is of_the_script
        assert division.rule_in_force(division.BY_TENSOR) is division.PLAIN[division.BY_TENSOR]
    finally:
        monkeypatch.undo()
        tune_machine()
