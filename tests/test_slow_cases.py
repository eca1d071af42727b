"""What is left to ``-m slow`` is there: a name that no test has would leave nothing out."""

from __future__ import annotations

import pathlib
import re

import conftest
import slow_cases

TESTS = pathlib.Path(__file__).parent


def test_every_name_is_that_of_a_test_or_of_a_file():
    paths = list(TESTS.rglob("test_*.py"))
    functions = {
        name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    named = {*slow_cases.CASES, *slow_cases.COMPILED_ELSEWHERE, *slow_cases.OPTIMIZERS_ALIKE}
    assert named - functions == set()
    assert slow_cases.ALL_IN_GRAPH_MODE - {path.stem for path in paths} == set()


def test_what_is_begun_with_is_there():
    """The scheduler passes over a name that no file has."""
    files = [one for one in conftest.LONGEST_FIRST if one != "ranks"]
    files += [next(map(str, TESTS.rglob(f"{one}.py")), one) for one in conftest.OF_RANKS]
    assert [one for one in files if not (TESTS.parent / one).exists()] == []
