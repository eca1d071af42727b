"""The tuning of the machine: only where it is needed, never over the user, and in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import scripts
from mindspore import nn, ops

from mindspore_boost_ext import AutoBoost, _compat, tune_machine
from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext.report import BoostWarning, NoEffectWarning
from mindspore_boost_ext.runtime import convolutions, machine
from mindspore_boost_ext.runtime import worker_threads as placement

ALL = machine.AVX512 | {"sse", "avx2"}


@pytest.fixture
def slow(monkeypatch):
    """Return the calls of a machine that needs both cures; nothing real is changed."""
    calls = []
    monkeypatch.setattr(convolutions, "are_expected", lambda: True)
    monkeypatch.setattr(machine, "processor_flags", lambda: ALL)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(_compat, "ONEDNN_LACKS_AVX512", True)
    monkeypatch.setattr(machine, "limit_onednn", lambda: calls.append("limit") or True)
    monkeypatch.setattr(_compat, "launches_blocking", lambda: calls[-1:] == [True])
    monkeypatch.setattr(_compat, "set_blocking_launch", calls.append)
    for name in machine.ISA_VARIABLES:
        monkeypatch.setenv(name, "")  # to be put back after the test
        monkeypatch.delenv(name)
    return calls


def updated(cure, off=""):
    cure.update(off)
    return cure.status


def test_both_cures_are_applied_where_they_are_needed(slow):
    instructions, launch = machine.InstructionSet(), machine.BlockingLaunch()
    assert updated(instructions) == updated(launch) == "applied"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert slow == ["limit", True]
    assert instructions.reason.startswith("AVX2: convolutions of this wheel are")
    assert updated(instructions) == updated(launch) == "applied"  # a second look changes nothing
    assert slow == ["limit", True]


@pytest.mark.parametrize("lacking", [*sorted(machine.AVX512), "the wheel"])
def test_oneDNN_is_left_alone_where_it_is_fast(slow, monkeypatch, lacking):
    monkeypatch.setattr(machine, "processor_flags", lambda: ALL - {lacking})
    monkeypatch.setattr(_compat, "ONEDNN_LACKS_AVX512", lacking != "the wheel")
    cure = machine.InstructionSet()
    assert updated(cure) == "inactive"
    assert ("of this MindSpore" if lacking == "the wheel" else "only with AVX-512") in cure.reason
    assert slow == []


@pytest.mark.parametrize("name", machine.ISA_VARIABLES)
def test_the_users_instruction_set_stays(slow, monkeypatch, name):
    monkeypatch.setenv(name, "AVX512_CORE")
    cure = machine.InstructionSet()
    assert updated(cure) == "inactive"
    assert cure.reason == f"{name}=AVX512_CORE was given"
    assert os.environ[name] == "AVX512_CORE"
    monkeypatch.setenv(name, "AVX2")  # as the import sets it, also for the processes it starts
    assert updated(machine.InstructionSet()) == "inactive"
    assert slow == []


def test_too_late_for_oneDNN_is_a_warning_with_the_remedy(slow, monkeypatch):
    monkeypatch.setattr(machine, "limit_onednn", lambda: False)
    cure = machine.InstructionSet()
    with pytest.warns(BoostWarning, match=r"set ONEDNN_MAX_CPU_ISA=AVX2, or import mind"):
        assert updated(cure) == "skipped"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"  # for the processes that this one starts
    assert updated(cure) == "skipped"  # without a second warning, which would be an error here
    assert updated(cure, "switched off") == "inactive"
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_too_late_with_a_convolution_made_before_is_a_warning(slow, monkeypatch):
    monkeypatch.setattr(convolutions, "are_made", lambda: True)
    monkeypatch.setattr(convolutions, "are_expected", lambda: False)
    monkeypatch.setattr(machine, "limit_onednn", lambda: False)
    with pytest.warns(BoostWarning, match="before the first convolution was made.*, or make one"):
        assert updated(machine.InstructionSet()) == "skipped"


@pytest.fixture
def waiting(slow, monkeypatch):
    """Return a cure in a process whose script speaks of no convolution."""
    monkeypatch.setattr(convolutions, "are_expected", lambda: False)
    monkeypatch.setattr(convolutions, "are_made", lambda: False)  # other tests have made some
    cure = machine.InstructionSet()
    monkeypatch.setattr(machine, "_CURES", (cure,))
    assert updated(cure) == "inactive"
    assert cure.reason.startswith("no convolution was made yet")
    yield cure
    convolutions.unwatch()


CONVOLUTIONS = {
    "nn.Conv1d": lambda: nn.Conv1d(2, 3, 3),
    "nn.Conv2d": lambda: nn.Conv2d(2, 3, 3, has_bias=True),
    "nn.Conv3d": lambda: nn.Conv3d(2, 3, 3),
    "nn.Conv1dTranspose": lambda: nn.Conv1dTranspose(2, 3, 3),
    "nn.Conv2dTranspose": lambda: nn.Conv2dTranspose(2, 3, 3),
    "nn.Conv3dTranspose": lambda: nn.Conv3dTranspose(2, 3, 3),
    "ops.Conv2D": lambda: ops.Conv2D(3, 2),
    "ops.conv2d": lambda: ops.conv2d(ops.ones((1, 2, 5, 5)), ops.ones((3, 2, 2, 2))),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_first_convolution_limits_oneDNN(waiting, slow, name):
    nn.Dense(2, 3)
    assert slow == []
    for _ in range(2):
        CONVOLUTIONS[name]()
    assert slow == ["limit"]
    assert waiting.status == "applied"
    assert waiting.reason.endswith("with AVX-512")  # no word of networks that have none
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize("in_time", [True, False])
def test_a_graph_from_a_file_may_hold_convolutions(waiting, slow, in_time, monkeypatch):
    monkeypatch.setattr(machine, "limit_onednn", lambda: slow.append("limit") or in_time)
    late = pytest.warns(NoEffectWarning, match="ran before a graph was loaded, which may hold")
    with pytest.raises((TypeError, AttributeError)), nullcontext() if in_time else late:
        nn.GraphCell(None)
    assert slow == ["limit"]


def test_two_that_watch_do_not_take_each_others_watch_away(waiting, slow):
    watch, calls = ops.Conv2D.__init__, []

    def other(self, *args, **kwargs):
        calls.append("other")
        watch(self, *args, **kwargs)

    ops.Conv2D.__init__ = other
    try:
        nn.Conv2d(2, 3, 3)
        assert ops.Conv2D.__init__ is other
        convolutions.watch(lambda: calls.append("again"))
        nn.Conv2d(2, 3, 3)
        assert calls == ["other", "other"]
        assert slow == ["limit"]
    finally:
        ops.Conv2D.__init__ = watch.__wrapped__


def test_a_first_convolution_that_comes_too_late_is_a_warning(waiting, monkeypatch):
    monkeypatch.setattr(machine, "limit_onednn", lambda: False)
    with pytest.warns(BoostWarning, match="before the first convolution was made.*, or make one"):
        nn.Conv2d(2, 3, 3)
    assert waiting.status == "skipped"
    nn.Conv2d(2, 3, 3)  # without a second warning, which would be an error here


def test_nobody_waits_for_convolutions_when_the_tuning_is_off(waiting, slow):
    assert updated(waiting, "switched off") == "inactive"
    nn.Conv2d(2, 3, 3)
    assert slow == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("net = nn.LSTM(3, 4)  # converted: converges", False),
        ("net = nn.Conv2d(3, 4, 3)", True),
        ("from mindcv import create_model", True),
        ("net = ResNet()", True),
        ("import mindspore.dataset.vision as vision", True),
        ("", True),
        (None, True),
    ],
)
@pytest.mark.parametrize("launched", [False, True])
def test_scripts_that_speak_of_convolutions(tmp_path, monkeypatch, text, expected, launched):
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    launcher = ["-m", "mindspore_boost_ext", "--level", "O1"] if launched else []
    command = ["python", "-u", *launcher, str(script), "--data", "images.npy"]
    monkeypatch.setattr(sys, "orig_argv", command, raising=False)
    monkeypatch.setattr(sys, "argv", ["-m"] if launched else command[2:])
    assert convolutions.are_expected.__wrapped__()  # a file of tests is one of many
    monkeypatch.delitem(sys.modules, "pytest")
    assert convolutions.are_expected.__wrapped__() is expected


@pytest.mark.parametrize("first", ["a" * 300 + ".py", "\0.py", "-m", "", pytest.__file__])
def test_what_is_no_script_of_the_user(monkeypatch, first):
    monkeypatch.delitem(sys.modules, "pytest")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train", "x.py"], raising=False)
    monkeypatch.setattr(sys, "argv", [first])
    assert convolutions.are_expected.__wrapped__()


def test_a_convolution_may_have_been_made_while_nobody_watched(slow, monkeypatch):
    monkeypatch.setattr(convolutions, "are_expected", lambda: False)
    layer = nn.Conv2d(2, 3, 3)
    cure = machine.InstructionSet()
    assert updated(cure, "the device may be another one") == "inactive"
    assert slow == []
    assert updated(cure) == "applied"
    assert layer is not None


@pytest.mark.parametrize("first", ["import layers", "import os"])
def test_networks_may_be_made_before_the_import(tmp_path, first):
    (tmp_path / "layers.py").write_text("from mindspore import nn\nnet = nn.Conv2d(1, 1, 1)\n")
    script = tmp_path / "train.py"
    script.write_text(
        f"{first}, mindspore_boost_ext.runtime.machine as m\n"
        "seen = getattr(m, 'con' + 'volutions')\n"  # the word would be one of those looked for
        "print(seen.are_expected(), seen.are_made())\n"
    )
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True).stdout
    assert printed == f"False {'layers' in first}\n"


def test_a_run_of_a_script_by_compare_is_tuned_as_the_script(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("net = nn.LSTM(3, 4)")
    command = ["python", "-m", "mindspore_boost_ext.cli.run", "trial.json", str(script), "-m"]
    monkeypatch.setattr(sys, "orig_argv", command, raising=False)
    assert convolutions._script() == str(script)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "-m"], raising=False)
    monkeypatch.setattr(sys, "argv", [str(script), "-m"])
    assert convolutions._script() == str(script)


def test_blocking_launch_is_not_used_on_more_cores_than_were_measured(slow, monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    cure = machine.BlockingLaunch()
    assert updated(cure) == "inactive"
    assert cure.reason == "3 cores: measured on at most 2 only"
    assert slow == []


def test_blocking_launch_of_the_user_stays_when_the_tuning_is_undone(slow):
    slow.append(True)  # the user was first
    cure = machine.BlockingLaunch()
    assert updated(cure) == updated(cure, "switched off") == "inactive"
    assert slow == [True]


def test_blocking_launch_of_the_user_may_be_switched_off_by_the_user_later(slow):
    slow.append(True)
    cure = machine.BlockingLaunch()
    assert updated(cure) == "inactive"
    slow.append(False)
    assert updated(cure) == "inactive"
    assert slow == [True, False]


def test_what_a_script_sets_back_is_not_set_again(slow):
    cure = machine.BlockingLaunch()
    assert updated(cure) == "applied"
    slow.append(False)  # the user's set_context(pynative_synchronize=False)
    assert updated(cure) == updated(cure) == "inactive"
    assert cure.reason == "the script has reset it"
    assert True not in slow[1:]


def test_what_a_script_has_set_back_is_set_again_when_it_asks(slow, monkeypatch):
    monkeypatch.setattr(machine, "_CURES", (machine.BlockingLaunch(),))
    assert [row.status for row in tune_machine()] == ["applied"]
    slow.append(False)
    assert [row.status for row in machine.tuning()] == ["inactive"]
    assert [row.status for row in tune_machine()] == ["applied"]


def test_an_instruction_set_that_a_script_gives_later_stays(slow, monkeypatch):
    cure = machine.InstructionSet()
    assert updated(cure) == "applied"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert updated(cure, "switched off") == "inactive"
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"


def test_it_is_undone_and_applied_again(slow):
    cures = machine.InstructionSet(), machine.BlockingLaunch()
    for _ in range(2):
        assert [updated(cure) for cure in cures] == ["applied"] * 2
        assert [updated(cure, "switched off") for cure in cures] == ["inactive"] * 2
        assert [cure.reason for cure in cures] == ["switched off"] * 2
        assert "ONEDNN_MAX_CPU_ISA" not in os.environ
        assert slow[-1] is False


@pytest.mark.parametrize(
    ("target", "other", "at_import", "reason"),
    [
        ("Ascend", "Ascend", True, "the device is Ascend"),
        ("GPU", "GPU", False, "the device is GPU"),
        ("CPU", "GPU", True, "GPU may be chosen before the first Model"),
        ("CPU", "GPU", False, ""),
        ("CPU", "", True, ""),
    ],
)
def test_only_training_on_cpu_is_tuned(monkeypatch, target, other, at_import, reason):
    class Context:
        @staticmethod
        def get_instance():
            return Context

        @staticmethod
        def is_pkg_support_device(name):
            return name in ("CPU", other)

    monkeypatch.setattr("mindspore._c_expression.MSContext", Context)
    monkeypatch.setattr("mindspore.get_context", {"device_target": target}.get)
    assert _compat.no_cpu_training(at_import) == reason


def test_nothing_is_changed_on_another_device(slow, monkeypatch):
    cures = machine.InstructionSet(), machine.BlockingLaunch()
    monkeypatch.setattr(machine, "_CURES", cures)
    monkeypatch.setattr(_compat, "no_cpu_training", lambda may_change: "the device is Ascend")
    assert {row.reason for row in machine.tuning()} == {"the device is Ascend"}
    assert slow == []
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("value", ["0", "false", "No", "OFF"])
def test_a_variable_switches_it_off(slow, monkeypatch, value):
    monkeypatch.setattr(machine, "_CURES", (machine.InstructionSet(), machine.BlockingLaunch()))
    monkeypatch.setenv(machine.SWITCH_VARIABLE, value)
    reason = f"switched off by MINDSPORE_BOOST_EXT_TUNE={value}"
    assert {row.reason for row in tune_machine()} == {reason}
    assert slow == []


def test_every_report_and_env_have_a_row_for_each_cure(capsys):
    report = AutoBoost().report()
    assert main(["--env"]) == 0
    printed = capsys.readouterr().out
    for name in (cure.name for cure in machine._CURES):
        row = report[f"machine: {name}"]
        assert f"machine | {name} | {row.status} | {row.reason}" in printed
    assert main(["--explain"]) == 0
    assert "oneDNN instruction set" in capsys.readouterr().out


def in_new_process(code, cores=None, **variables):
    """Run a script on one core of this machine, or on these; return what it prints as JSON."""
    environment = {name: os.environ[name] for name in os.environ if "DNN_MAX_CPU" not in name}
    cores = cores or str(min(os.sched_getaffinity(0)))
    place = f"import os\nos.sched_setaffinity(0, {{{cores}}})\n"
    ended = scripts.run("-c", place + code, env={**environment, **variables}, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chooses cores")

LAUNCHES = """
import json
import mindspore as ms
import mindspore_boost_ext as boost

found = []
look = lambda: found.append(boost._compat.launches_blocking())
look()
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_context(mode=ms.PYNATIVE_MODE)
look()
with boost.installed():
    look()
look()
boost.uninstall()
look()
boost.install()
look()
boost.tune_machine(False)
boost.AutoBoost()
look()
boost.install()
look()
print(json.dumps(found))
"""


@needs_linux
@pytest.mark.parametrize("install", ["0", "1"])
def test_the_import_switches_blocking_launch_on_and_uninstall_off(install):
    found, _ = in_new_process(LAUNCHES, MINDSPORE_BOOST_EXT_INSTALL=install)
    assert found == [True, True, True, True, False, True, False, False]


@needs_linux
def test_the_variable_keeps_the_import_from_it():
    found, _ = in_new_process(LAUNCHES, MINDSPORE_BOOST_EXT_TUNE="0")
    assert found == [False] * 8


# SSE4.1 instead of AVX2, so that it shows on every processor.
LIMITED = """
import ctypes, json, os, sys
from pathlib import Path
import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

convolve = lambda: ops.Conv2D(4, 3)(
    Tensor(np.ones((1, 4, 8, 8), np.float32)), Tensor(np.ones((4, 4, 3, 3), np.float32))
).asnumpy()
if os.environ["FIRST"] == "convolution":
    convolve()
os.environ["MINDSPORE_BOOST_EXT_TUNE"] = "0"
import mindspore_boost_ext as boost
from mindspore_boost_ext.runtime import convolutions, machine

del os.environ["MINDSPORE_BOOST_EXT_TUNE"]
machine.processor_flags = lambda: machine.AVX512
boost._compat.ONEDNN_LACKS_AVX512 = True
machine._ONEDNN_AVX2 = 0x1
status = boost.tune_machine()[0].status
convolve()
(library,) = (Path(ms.__file__).parent / "lib").glob("libdnnl.so*")
limit = ctypes.CDLL(str(library)).dnnl_get_effective_cpu_isa()
print(json.dumps([status, limit == 0x1]))
"""


@needs_linux
@pytest.mark.parametrize(
    ("first", "expected", "warned"),
    [("import", ["applied", True], False), ("convolution", ["skipped", False], True)],
)
def test_oneDNN_takes_the_limit_until_its_first_operator(first, expected, warned):
    found, printed = in_new_process(LIMITED, FIRST=first)
    assert found == expected
    assert ("an operator of oneDNN ran before the import" in printed) is warned


TRAINED = """
import hashlib, json, os, warnings
import mindspore as ms
import numpy as np
from mindspore import nn

if os.environ["TUNED"] == "by hand":
    ms.runtime.launch_blocking()
else:
    import mindspore_boost_ext

ms.set_seed(0)
net = nn.SequentialCell(
    nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dense(64, 3)
)
loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
images = np.random.default_rng(0).normal(size=(32, 1, 8, 8)).astype(np.float32)
data = ms.dataset.NumpySlicesDataset((images, np.arange(32, dtype=np.int32) % 3), shuffle=False)
model = ms.Model(net, loss, nn.Adam(net.trainable_params(), 0.01))
model.train(2, data.batch(4))
weights = b"".join(one.asnumpy().tobytes() for one in net.get_parameters())
print(json.dumps(hashlib.sha256(weights).hexdigest()))
"""


@needs_linux
def test_weights_are_those_of_a_run_with_the_same_set_by_hand():
    # On a processor without AVX-512 the variable changes nothing; see README.
    by_hand, _ = in_new_process(TRAINED, TUNED="by hand", ONEDNN_MAX_CPU_ISA="AVX2")
    assert in_new_process(TRAINED, TUNED="by import")[0] == by_hand


PLACED = """
import json, os, time
import mindspore as ms
import numpy as np
import mindspore_boost_ext as boost
from mindspore_boost_ext.runtime import worker_threads as placement
from mindspore_boost_ext.runtime.worker_threads import worker_threads

placement._LOOK_EVERY = 600  # the machine that runs the tests is busy
CORES = sorted(os.sched_getaffinity(0))

def places():
    return [sorted(os.sched_getaffinity(one)) for one in worker_threads()]

def soon(expected):
    end = time.monotonic() + 20
    while places() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return places() == expected

def row():
    return boost.AutoBoost().report()["machine: a core for each worker thread"]

found = {"began": row().status}
ms.set_context(mode=getattr(ms, os.environ["MODE"]))
ms.nn.Dense(3, 2)(ms.Tensor(np.ones((2, 3), np.float32))).asnumpy()
found["placed"] = soon([[one] for one in CORES])
found["main"] = sorted(os.sched_getaffinity(0)) == CORES
boost.tune_machine(False)
found["undone"] = places() == [CORES] * 2
boost.tune_machine()
found["placed again"] = soon([[one] for one in CORES])
for thread in worker_threads():
    os.sched_setaffinity(thread, CORES[:1])
found["the script's own"] = [row().status, row().reason, places() == [CORES[:1]] * 2]
print(json.dumps(found))
"""


def two_cores():
    """Return two cores of this machine, in the words of taskset; skip where there is only one."""
    usable = os.environ.get("TEST_CORES") or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cores = usable.split(",")[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    return ",".join(cores)


@needs_linux
@pytest.mark.parametrize("mode", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_worker_threads_get_cores_of_their_own_and_python_keeps_all(mode):
    found, _ = in_new_process(PLACED, two_cores(), MODE=mode)
    assert found == {
        "began": "applied",
        "placed": True,
        "main": True,
        "undone": True,
        "placed again": True,
        "the script's own": ["inactive", "the script has placed them itself", True],
    }


FORKED = (
    PLACED.partition("found =")[0]
    + """
found, child = {"before": row().status}, os.fork()
if child == 0:  # MindSpore has no threads yet
    status = row().status
    ms.nn.Dense(3, 2)(ms.Tensor(np.ones((2, 3), np.float32))).asnumpy()
    os._exit(0 if (status, soon([[one] for one in CORES])) == ("applied", True) else 1)
found["child placed"] = os.waitpid(child, 0)[1] == 0
ms.nn.Dense(3, 2)(ms.Tensor(np.ones((2, 3), np.float32))).asnumpy()
found["placed"], child = soon([[one] for one in CORES]), os.fork()
if child == 0:
    boost.tune_machine(False)
    os._exit(0)
os.waitpid(child, 0)
found["still placed"] = places() == [[one] for one in CORES]
print(json.dumps(found))
"""
)


@needs_linux
def test_a_forked_process_has_threads_of_its_own():
    """It does not move those of its parent."""
    found, _ = in_new_process(FORKED, two_cores())
    done = {"child placed": True, "placed": True, "still placed": True}
    assert found == {"before": "applied", **done}


BOUND_BEFORE = """
import json, os, time
import mindspore as ms
import numpy as np
from pathlib import Path

ms.nn.Dense(3, 2)(ms.Tensor(np.ones((2, 3), np.float32))).asnumpy()
core = {min(os.sched_getaffinity(0))}
workers, end = [], time.monotonic() + 20
while len(workers) < 2 and time.monotonic() < end:  # a thread names itself after it has started
    names = {one.name: (one / "comm").read_text() for one in Path("/proc/self/task").iterdir()}
    found = [one for one in names if names[one].startswith(("ActorThread", "KernelThread"))]
    workers = [int(one) for one in found]
for one in workers:
    os.sched_setaffinity(one, core)
import mindspore_boost_ext as boost

name, end = "machine: a core for each worker thread", time.monotonic() + 20
while (row := boost.AutoBoost().report()[name]).status == "applied" and time.monotonic() < end:
    time.sleep(0.01)
stay = all(os.sched_getaffinity(one) == core for one in workers)
print(json.dumps([len(workers), stay, row.status]))
"""


@needs_linux
def test_worker_threads_that_are_bound_already_stay():
    assert in_new_process(BOUND_BEFORE, two_cores())[0] == [2, True, "inactive"]


@needs_linux
def test_more_worker_threads_than_cores_stay_where_they_are(monkeypatch):
    """As where a script has asked MindSpore for more of them."""
    cores, moved = os.sched_getaffinity(0), []
    monkeypatch.setattr(placement, "worker_threads", lambda: list(range(1, len(cores) + 2)))
    monkeypatch.setattr(placement, "_cores_of", lambda thread: set(cores))
    monkeypatch.setattr(placement, "_move", lambda *move: moved.append(move))
    placed = placement.Placement()
    assert placed._place()
    placed.undo()
    assert moved == []


@pytest.mark.parametrize(
    ("cores", "variable", "reason"),
    [
        (1, None, "1 cores: measured on 2 only"),
        (3, None, "3 cores: measured on 2 only"),
        (2, "MS_ROLE", "ranks share the cores"),
        (2, "RANK_ID", "ranks share the cores"),
        (2, "OMPI_COMM_WORLD_SIZE", "ranks share the cores"),
    ],
)
def test_worker_threads_stay_where_cores_of_their_own_were_not_measured_to_win(
    monkeypatch, cores, variable, reason
):
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    if variable:
        monkeypatch.setenv(variable, "1")
    cure = machine.OwnCores()
    assert updated(cure) == "inactive"
    assert cure.reason == reason


DEVICE_TO_COME = """
import json
import mindspore._c_expression as expression

expression.MSContext.is_pkg_support_device = lambda self, name: name != "GPU"
import mindspore_boost_ext as boost
print(json.dumps(boost._compat.launches_blocking()))
"""


@needs_linux
def test_where_another_device_may_come_the_import_changes_nothing():
    found, _ = in_new_process(DEVICE_TO_COME)
    assert found is False


def test_the_import_says_nothing_that_mindspores_does_not_say():
    """MindSpore writes a line to stderr for each of its modules that it gives up."""
    code = "import os, mindspore\nfor one in (1, 2): os.write(one, b'ours:')\n"
    command = [sys.executable, "-c", f"{code}import mindspore_boost_ext"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("ours:")
    assert ended.stderr.endswith("ours:")
