"""The faults of mutants.py are faults: Python that says something else."""

from __future__ import annotations

import ast
import random

import mutants
import pytest


@pytest.fixture(scope="module")
def every():
    files = sorted((mutants.ROOT / mutants.PACKAGE).rglob("*.py"))[::3]
    return [one for file in files for one in mutants.mutants_of(file)]


def test_they_are_python_and_differ(every):
    for one in random.Random(0).sample(every, 30):
        whole = (mutants.ROOT / one.path).read_bytes()
        changed = whole[: one.start] + one.after.encode() + whole[one.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(whole)), one


def test_they_are_of_all_kinds(every):
    pairs = {(one.before, one.after) for one in every}
    assert {("1", "2"), ("True", "False")} <= pairs
    assert any(one.after == "pass" for one in every)
    assert any(one.before.startswith("not ") and not one.after.startswith("not") for one in every)


def test_every_room_has_tests_of_its_own():
    others = [one for tests in mutants.SEEN_BY.values() for one in tests]
    assert all((mutants.ROOT / mutants.file_of(one)).exists() for one in others)
    shared = {*mutants.SHARED, mutants.EXAMPLES}
    for path in (mutants.ROOT / mutants.PACKAGE).rglob("*.py"):
        if path.name not in ("__init__.py", "_version.py"):
            tests = mutants.tests_of(str(path.relative_to(mutants.ROOT)), whole=False)
            assert not set(tests) <= shared, f"{path} has no tests of its own"
