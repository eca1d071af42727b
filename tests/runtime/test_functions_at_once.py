"""Functions of ms.jit run in the thread that calls them: with the same results, and undone."""

from __future__ import annotations

import gc
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_boost_ext import _compat
from mindspore_boost_ext.runtime import functions_at_once, machine

pytestmark = pytest.mark.skipif(
    not functions_at_once.is_possible(), reason="this MindSpore has no way to"
)
MODES = [ms.GRAPH_MODE, ms.PYNATIVE_MODE]
EXECUTOR = _compat.executor_class()


@pytest.fixture(autouse=True)
def put_back():
    before = functions_at_once.is_in_place()
    yield
    functions_at_once.put_in_place(before)
    gc.collect()  # functions that are dropped here, which other tests would count


@pytest.fixture
def queues(monkeypatch):
    """Return how MindSpore's queues were switched; they are, for real."""
    switched = []

    def recorded(name):
        switch = getattr(EXECUTOR, name)
        return lambda self: (switched.append(name.partition("_")[0]), switch(self))[1]

    for name in ("disable_frontend_and_bprop_pipeline", "enable_frontend_and_bprop_pipeline"):
        monkeypatch.setattr(EXECUTOR, name, recorded(name))
    return switched


@ms.jit
def compiled(x):
    return x * x * x + x


@ms.jit
def of_another(x):
    return compiled(x) + 1


def trained():
    """Return losses and weights of a small training whose step is one function of ms.jit."""
    ms.set_seed(0)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3))
    loss, optimizer = nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 0.01)

    def forward(x, y):
        return loss(net(x), y)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x, y):
        value, found = gradients(x, y)
        optimizer(found)
        return value

    random, losses = np.random.default_rng(0), []
    for _ in range(5):
        x = Tensor(random.normal(size=(6, 4)).astype(np.float32))
        losses.append(step(x, Tensor(random.integers(0, 3, 6).astype(np.int32))).asnumpy())
    return [*losses, *(one.asnumpy() for one in net.get_parameters())]


def around(x):
    return (of_another(x * 3) * ops.sin(x)).sum()


def mixed():
    """Return a value and a gradient through operators, a compiled function, and operators again."""
    x = Tensor(np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4))
    value, gradient = ms.value_and_grad(around)(x)
    return [value.asnumpy(), gradient.asnumpy(), compiled(x + 1).asnumpy()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("computed", [trained, mixed])
def test_results_are_the_same_bit_for_bit(mode, computed, queues):
    ms.set_context(mode=mode)
    functions_at_once.put_in_place(False)
    expected = computed()
    assert not queues
    functions_at_once.put_in_place(True)
    found = computed()
    assert queues  # else this compared MindSpore with itself
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def test_the_gradient_through_operators_and_a_function_is_that_of_the_formula():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    functions_at_once.put_in_place(True)
    x = np.linspace(-2, 2, 12).reshape(3, 4)
    u = 3 * x
    expected = (u**3 + u + 1) * np.cos(x) + 3 * (3 * u**2 + 1) * np.sin(x)
    np.testing.assert_allclose(mixed()[1], expected, rtol=1e-5, atol=1e-4)  # terms of float32: 300


@pytest.mark.parametrize("mode", MODES)
def test_queues_are_back_after_a_function(mode, queues):
    ms.set_context(mode=mode)
    functions_at_once.put_in_place(True)
    compiled(Tensor(np.ones((2, 2), np.float32))).asnumpy()
    assert queues == ["disable", "enable"]


def test_queues_are_back_after_a_failure(monkeypatch, queues):
    def failing(self, *inputs):
        raise MemoryError

    monkeypatch.setattr(functions_at_once, "_HANDED_ON", failing)
    functions_at_once.put_in_place(True)
    with pytest.raises(MemoryError):
        compiled(Tensor(np.ones((2, 2), np.float32)))
    monkeypatch.undo()
    assert queues == ["disable", "enable"]


@ms.jit
def thrice(x):
    return x * 3 + 1


@pytest.mark.parametrize("mode", MODES)
def test_threads_with_a_function_each_take_turns(mode):
    ms.set_context(mode=mode)
    functions_at_once.put_in_place(True)
    rules = {compiled: lambda x: x * x * x + x, thrice: lambda x: 3 * x + 1}
    for function in rules:
        function(Tensor(np.ones((4, 4), np.float32))).asnumpy()  # compiled by one thread
    errors = []

    def work(function):
        try:
            for number in range(200):
                x = np.full((4, 4), number % 50, np.float32)  # exact in float32
                found = function(Tensor(x)).asnumpy()
                np.testing.assert_array_equal(found, rules[function](x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in rules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_thread_runs_its_own_function_where_another_has_named_one_since(monkeypatch, queues):
    seen = []
    monkeypatch.setattr(functions_at_once, "_NAMED", lambda self, phase: seen.append(phase))
    monkeypatch.setattr(functions_at_once, "_HANDED_ON", lambda self: seen.append("runs"))
    monkeypatch.setattr(functions_at_once, "_MINE", threading.local())
    functions_at_once.put_in_place(True)
    executor = _compat.executor_class()()
    executor.set_jit_compile_phase("of this thread")
    other = threading.Thread(target=executor.set_jit_compile_phase, args=("of another",))
    other.start()
    other.join()
    executor.grad_jit()
    assert seen == ["of this thread", "of another", "of this thread", "runs"]


def test_queues_that_are_off_stay_off(queues):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    functions_at_once.put_in_place(True)
    kept = []
    with ms.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        compiled(Tensor(np.ones((2, 2), np.float32))).asnumpy()
        assert queues == ["disable"] * 2
    assert queues == ["disable"] * 2 + ["enable"]


def updated(cure, off=""):
    cure.update(off)
    return cure.status


def test_the_cure_is_applied_undone_and_applied_again(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    functions_at_once.put_in_place(False)
    cure = machine.CompiledFunctions()
    for _ in range(2):
        assert updated(cure) == "applied"
        assert functions_at_once.is_in_place()
        assert updated(cure, "switched off") == "inactive"
        assert functions_at_once.is_in_place() is False


@pytest.mark.parametrize(
    ("cores", "can", "reason"),
    [
        (3, True, "3 cores: measured on at most 2 only"),
        (2, False, "this MindSpore has no way around the queue"),
    ],
)
def test_functions_are_handed_on_where_that_was_not_measured(monkeypatch, cores, can, reason):
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(functions_at_once, "is_possible", lambda: can)
    functions_at_once.put_in_place(False)
    cure = machine.CompiledFunctions()
    assert updated(cure) == "inactive"
    assert cure.reason == reason
    assert functions_at_once.is_in_place() is False


def test_another_launch_of_the_scripts_stays(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    functions_at_once.put_in_place(False)
    late, cure = machine.CompiledFunctions(), machine.CompiledFunctions()
    assert updated(cure) == "applied"
    monkeypatch.setattr(EXECUTOR, "grad_jit", theirs := lambda self, *inputs: None)
    reason = "the script has replaced it"
    assert [updated(cure), updated(late)] == ["inactive"] * 2
    assert [cure.reason, late.reason] == [reason] * 2
    assert updated(cure, "switched off") == "inactive"
    assert EXECUTOR.grad_jit is theirs
