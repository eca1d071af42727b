"""Settings for all tests: both modes, no state left behind."""

from __future__ import annotations

import compileall
import contextlib
import faulthandler
import gc
import os
import pathlib
import py_compile
import subprocess
import tempfile
from typing import Any

# MindSpore's threads spin while they wait: where the processes of the tests have no more cores than
# there are processes, each stays on one, or they take turns in keeping each other from working.
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.environ["TEST_CORES"] = ",".join(map(str, _cores))  # for ranks, which are processes too
    if len(_cores) <= int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        os.sched_setaffinity(0, {_cores[int(_worker[2:]) % len(_cores)]})

# Bytecode stands where Python looks for it: a folder for the tests alone would be empty, and each
# process would compile MindSpore again. The package's is made once, and valid by its source's
# content: mutants.py may change a file twice within a second.
PACKAGE = pathlib.Path(__file__).parents[1] / "mindspore_boost_ext"
if not _worker:
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(PACKAGE, quiet=2, invalidation_mode=checked)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # for workers: what pytest makes of the tests

import compiling
import failures
import mindspore as ms
import pytest
import slow_cases

import mindspore_boost_ext
from mindspore_boost_ext.cheaper_operators.known import KNOWN

compiling.spare()
LONGEST_TEST = 900  # seconds; several times what the longest takes here


def pytest_configure(config):
    config.real_stderr = os.dup(2)  # nothing is captured yet


def pytest_collection_finish(session):
    """Spare what has been loaded from garbage collection, which MindSpore runs at every compile."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Spare what a file leaves behind in modules and caches, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """End a process whose test hangs: all stacks are printed, and pytest-xdist names the test."""
    faulthandler.dump_traceback_later(LONGEST_TEST, exit=True, file=item.config.real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Say of a failing test in which mode, network and settings it failed."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and call.excinfo is not None:
        frames = [entry.frame.f_locals for entry in call.excinfo.traceback]
        lines = failures.surroundings(item, frames)
        report.sections.append(("where it failed", "\n".join(lines)))


# Their first test takes too long for the loop of writing: real processes, whole trainings.
NOT_QUICK = {"test_distributed", "test_dim_reduce_ranks", "test_thor_distributed", "test_faults"}
NOT_QUICK |= {"test_examples", "test_example_resnet", "test_docs", "test_upstream"}
NOT_QUICK |= {"test_combinations", "test_config_generated"}
NOT_QUICK |= {"test_random_combinations", "test_resume_matrix"}
NOT_QUICK |= {"test_two_models", "test_article", "test_mindcv", "test_agreement"}


def pytest_collection_modifyitems(items):
    """Let ``-m quick`` take the first test of each file, with its first and last parameters."""
    first = {}
    for item in items:
        function = first.setdefault(item.path, (item.originalname, []))
        if item.originalname == function[0] and item.path.stem not in NOT_QUICK:
            function[1].append(item)
    for _, found in first.values():
        for item in {*found[:1], *found[-1:]}:
            item.add_marker("quick")
    slow_cases.mark(items)


# They read what the same real processes found, which are started once for all of them.
OF_RANKS = ("test_distributed", "test_dim_reduce_ranks", "test_overflow", "test_thor_distributed")
OF_RANKS += ("test_agreement",)
LONGEST_FIRST = ("ranks", *(f"tests/test_{one}.py" for one in ("examples", "contract")))
LONGEST_FIRST += ("tests/grad_freeze/test_freezing.py", "tests/test_combinations.py")
LONGEST_FIRST += ("tests/cheaper_operators/test_cheaper_operators.py", "tests/cli/test_main.py")
LONGEST_FIRST += ("tests/thor/test_thor_step.py", "tests/thor/test_thor.py")
# Few tests, which would come last: pytest-xdist begins with the files of most tests.
LONGEST_FIRST += ("tests/test_faults.py", "tests/test_wheel.py", "tests/thor/test_article.py")
LONGEST_FIRST += ("tests/cheaper_operators/test_recurrent.py", "tests/runtime/test_watch.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep a file in one process, and those in one that read what the same ranks found."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "ranks" if os.path.basename(file)[: -len(".py")] in OF_RANKS else file

        def _assign_work_unit(self, node):
            """Begin with what takes longest, so that nobody waits for it alone at the end."""
            for scope in [one for one in reversed(LONGEST_FIRST) if one in self.workqueue]:
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@contextlib.contextmanager
def _in(mode):
    before = ms.get_context("mode")
    ms.set_context(mode=mode)
    yield
    ms.set_context(mode=before)


@pytest.fixture(params=["graph", "pynative"])
def mode(request):
    """Run the test in GRAPH_MODE and in PYNATIVE_MODE."""
    with _in(ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE):
        yield request.param


@pytest.fixture
def pynative_mode():
    """Run the test in PYNATIVE_MODE only."""
    with _in(ms.PYNATIVE_MODE):
        yield


@pytest.fixture
def graph_mode():
    """Run the test in GRAPH_MODE only."""
    with _in(ms.GRAPH_MODE):
        yield


@pytest.fixture
def untuned():
    """Tune again after a test that has switched the tuning off."""
    yield
    mindspore_boost_ext.tune_machine()


@pytest.fixture
def every_size(monkeypatch):
    """Let cheaper operators take small inputs, too: large ones would take the tests' time."""
    for known in KNOWN.values():
        monkeypatch.setattr(known.replacement, "least", 0)


@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    """Return a function that gives the folder and what each of some real processes found.

    Processes are started once for each number of them, whichever test comes first.
    """
    import launch

    done: dict[int, Any] = {}

    def run(ranks: int, mode: str) -> Any:
        if ranks not in done:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            try:
                done[ranks] = folder, launch.results(ranks, folder)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                done[ranks] = folder, error  # not to be waited for by every test again
        folder, found = done[ranks]
        if isinstance(found, Exception):
            raise found
        return folder, [result[mode] for result in found]

    return run


@pytest.fixture(autouse=True)
def _clean_surroundings(tmp_path, monkeypatch):
    """Let files be written elsewhere; keep the mode, and fail what stays uninstalled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = ms.get_context("mode")
    yield
    ms.set_context(mode=before)
    assert mindspore_boost_ext.is_installed()
