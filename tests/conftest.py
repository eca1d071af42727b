"""The processes of the tests: their cores, their bytecode, and who runs what first."""

from __future__ import annotations

import compileall
import os
import pathlib
import py_compile

import pytest

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


def pytest_configure(config):
    config.real_stderr = os.dup(2)  # nothing is captured yet
    hands_out = getattr(config.option, "numprocesses", None) and not _worker
    if not hands_out:  # it would import MindSpore, while those that run the tests wait for it
        config.pluginmanager.import_plugin("every_test")


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
