"""What holds for every test: both modes, no state left behind, what a failing one reports.

Not in ``conftest.py``, since the process that hands the tests out needs no MindSpore.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import subprocess
import tempfile
from typing import Any

import compiling
import failures
import mindspore as ms
import pytest
import slow_cases

import mindspore_boost_ext
from mindspore_boost_ext.cheaper_operators.known import KNOWN

compiling.spare()
LONGEST_TEST = 900  # seconds; several times what the longest takes here


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
