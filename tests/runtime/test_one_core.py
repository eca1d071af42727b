"""MindSpore's threads share one core while other processes use the others."""

import json
import os
import random
import sys
import types

import nets
import pytest
from mindspore import Tensor, nn

from mindspore_boost_ext.runtime import one_core, other_processes
from mindspore_boost_ext.runtime.worker_threads import core_for_all
from tests import scripts

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chooses cores")


@pytest.mark.parametrize(
    ("busy", "own", "now", "expected"),
    [
        ({0: 0.9, 1: 0.8}, 1.6, None, {None}),  # nobody else
        ({0: 1.0, 1: 1.0}, 1.5, None, {0, 1}),
        ({3: 1.0, 5: 1.0}, 1.5, None, {3, 5}),  # as taskset names them
        ({0: 0.9, 1: 0.5}, 0.9, 0, {0}),  # the other process is where it should be
        ({0: 0.9, 1: 0.3}, 0.9, 0, {0}),  # less than what begins it does not end it
        ({0: 0.9, 1: 0.1}, 0.9, 0, {None}),
        ({0: 1.0, 1: 0.0}, 0.5, 0, {0, 1}),  # another process is bound to the same core
        ({0: 1.0, 1: 1.0}, 0.5, 0, {0}),  # as much on each: nothing to be won
        ({}, 1.5, None, {None}),  # a system that does not say
    ],
)
def test_the_core_for_all(busy, own, now, expected):
    chosen = {core_for_all(busy, own, now, random.Random(seed)) for seed in range(20)}
    assert chosen == expected


def test_what_other_processes_use(monkeypatch, tmp_path):
    """Columns of proc(5): user, nice, system, idle, iowait, irq, softirq, steal, guest."""
    statistics = tmp_path / "stat"
    clock = types.SimpleNamespace(monotonic=lambda: 100.0, process_time=lambda: 7.0)
    monkeypatch.setattr(other_processes, "time", clock)
    monkeypatch.setattr(other_processes, "STATISTICS", statistics)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    statistics.write_text("cpu 9 9 9\ncpu1 100 0 0 50 0 0 0 0 0 0\ncpu2 10 0 0 90 0 0 0 0 0 0\n")
    usage = other_processes.Usage([1, 2])
    statistics.write_text(
        "cpu 9 9 9\ncpu1 150 20 10 50 0 10 10 0 40 0\ncpu2 30 0 0 190 60 0 0 20 0 0\nintr 5\n"
    )
    clock.monotonic, clock.process_time = lambda: 102.0, lambda: 7.8
    shares, own = usage.look()
    assert shares == pytest.approx({1: 0.5, 2: 0.1})
    assert own == pytest.approx(0.4)


SHARED = """
import json, os, threading, time
import mindspore as ms
import numpy as np
from mindspore import nn, ops
import mindspore_boost_ext as boost
from mindspore_boost_ext.runtime import functions_at_once, one_core, other_processes
from mindspore_boost_ext.runtime import worker_threads as placement

CORES = sorted(os.sched_getaffinity(0))
others, seen = [0.0], []
placement._LOOK_EVERY = 0.02
other_processes.Usage.look = lambda self: (dict.fromkeys(CORES, 0.5 + others[0] / 2), 1.0)
ms.set_context(mode=getattr(ms, os.environ["MODE"]))


def here():
    return sorted(os.sched_getaffinity(0))

def places():
    return [sorted(os.sched_getaffinity(one)) for one in placement.worker_threads()]

def soon(there):
    end = time.monotonic() + 20
    while not there() and time.monotonic() < end:
        time.sleep(0.01)
    return there()

def row():
    return boost.AutoBoost().report()["machine: a core for each worker thread"].reason

def patched():
    return any("__call__" in vars(kind) for kind in (nn.TrainOneStepCell, nn.WithEvalCell))

def child(asked):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if asked() else 1)
    return os.waitpid(pid, 0)[1] == 0

def child_thread(core):
    # as a step starts one, which inherits its core
    ready, ids = threading.Event(), []
    def wait():
        ids.append(threading.get_native_id())
        ready.set()
        time.sleep(100)
    with one_core.beside_workers():
        threading.Thread(target=wait, daemon=True).start()
        ready.wait()
    assert os.sched_getaffinity(ids[0]) == {core}
    return ids[0]

@ms.jit
def doubled(x):
    return x * 2

net = nn.Dense(3, 2)
step = nn.TrainOneStepCell(
    nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1)
)
evaluation = nn.WithEvalCell(net, nn.MSELoss())
run = nn.Cell.__call__
nn.Cell.__call__ = lambda self, *inputs: (seen.append(here()), run(self, *inputs))[1]
batch = ms.Tensor(np.ones((4, 3), np.float32)), ms.Tensor(np.ones((4, 2), np.float32))
handed_on = functions_at_once._HANDED_ON
functions_at_once._HANDED_ON = lambda *given: (seen.append(here()), handed_on(*given))[1]

def trained():
    # where a step, an evaluation and a compiled function run
    seen.clear()
    step(*batch).asnumpy()
    trainings = len(seen)
    evaluation(*batch)
    assert len(seen) > trainings > 0
    doubled(batch[0]).asnumpy()
    return seen[0] if len(seen) > 1 and seen.count(seen[0]) == len(seen) else seen

found = {"alone": [trained(), soon(lambda: places() == [[one] for one in CORES]), trained()]}
others[0] = 1.0
together = lambda: places() in ([[one]] * 2 for one in CORES)
found["together"] = soon(together)
core = places()[0]
started = child_thread(core[0])
found["steps"] = [trained() == core, here() == CORES, "share one" in row()]
with one_core.beside_workers(), one_core.beside_workers():
    found["child of a step"] = child(lambda: here() == CORES)
found["child"] = child(lambda: not patched() and here() == CORES)
os.sched_setaffinity(0, [one for one in CORES if [one] != core])
found["bound by the script"] = trained() == here() != core
os.sched_setaffinity(0, CORES)
def look(self):
    failures.append(1)
    raise OSError("too many open files")

failures, looks = [], other_processes.Usage.look
other_processes.Usage.look = look
found["after an error"] = soon(lambda: len(failures) > 2)
other_processes.Usage.look = looks
others[0] = 0.0
found["apart again"] = soon(lambda: places() == [[one] for one in CORES])
found["a thread that a step has started"] = sorted(os.sched_getaffinity(started)) == CORES
found["steps apart"] = [trained() == CORES, patched(), row()]
others[0] = 1.0
found["together again"] = soon(together)
boost.tune_machine(False)
found["undone"] = [trained() == CORES, places() == [CORES] * 2]
print(json.dumps(found))
"""


@needs_linux
@pytest.mark.parametrize("mode", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_steps_run_beside_the_workers_while_these_share_a_core(tmp_path, mode):
    usable = os.environ.get("TEST_CORES") or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cores = [int(one) for one in usable.split(",")[:2]]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    script = tmp_path / "shared.py"
    script.write_text(f"import os\nos.sched_setaffinity(0, {set(cores)})\n{SHARED}")
    ended = scripts.run(script, env={**os.environ, "MODE": mode}, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {
        "alone": [cores, True, cores],
        "together": True,
        "steps": [True, True, True],
        "child of a step": True,
        "child": True,
        "after an error": True,
        "bound by the script": True,
        "apart again": True,
        "a thread that a step has started": True,
        "steps apart": [True, False, "2 cores: a waiting thread keeps others from computing"],
        "together again": True,
        "undone": [True, True],
    }


def test_a_step_that_fails_gives_the_cores_back(monkeypatch):
    moves = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *move: moves.append(move), raising=False)
    monkeypatch.setattr(one_core.shared, "core", 1)
    with pytest.raises(KeyError), one_core.beside_workers():
        raise KeyError
    assert moves == [(0, (1,)), (0, {0, 1})]


class Counting(nn.Cell):
    def __call__(self, *inputs):
        self.calls += 1
        return super().__call__(*inputs)


class CountingStep(nn.TrainOneStepCell, Counting):
    calls = 0


@needs_linux
def test_a_call_that_comes_later_in_the_order_of_classes_runs(pynative_mode):
    net = nets.MLP()
    step = CountingStep(nn.WithLossCell(net, nets.loss_fn()), nn.SGD(net.trainable_params(), 0.1))
    one_core.share(min(os.sched_getaffinity(0)))
    try:
        step(*map(Tensor, nets.batches(1)[0]))
    finally:
        one_core.share(None)
    assert step.calls == 1
