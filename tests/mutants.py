"""How much the tests see: small faults are put into the package, one at a time, and looked for.

    python tests/mutants.py [--count 200] [--seed 0] [--jobs 2] [--only thor] [--json FILE]
    python tests/mutants.py --again FILE [--slow]    # what survived, once more

A seeded sample over all places where a comparison, a sum or product, a constant, a condition, the
order of two arguments, or a statement can be wrong. For each a copy of the project gets the fault,
and the default run's tests of its room (then, where it trains, the contract suite and the
combinations) run until one fails, which is named: where one test finds everything, it is that test
that is broken. Before the first fault its tests have to pass without it. mutmut keeps all variants
of a function in one file, which MindSpore's parser does not read; cosmic-ray runs the same tests
for every fault.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import pytest
import scripts

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mindspore_boost_ext"
LONGEST = 3600  # seconds for the tests of one fault; longer counts as found
SHARED = ("tests/test_contract.py", "tests/test_combinations.py", "tests/test_refused.py")
EXAMPLES = "tests/test_docs.py::test_docstring_examples_run"
# Rooms that do not train: what all algorithms share runs through them, and sees nothing of them.
BESIDE_TRAINING = ("cli", "callbacks", "selftest", "report", "recipes", "bundled", "docs", "data")
# Rooms without tests of their name, and those that other tests see, too.
SEEN_BY = {
    "__init__": ("tests/test_collector.py",),
    "__main__": ("tests/cli",),
    "_collector": ("tests/test_collector.py",),
    "_compat": ("tests/base", "tests/runtime", "tests/thor", "tests/callbacks"),
    "adasum": ("tests/test_distributed.py",),
    "algorithms": ("tests/test_boost.py", "tests/config"),
    "base": ("tests/callbacks", "tests/grad_freeze", "tests/stages", "tests/test_two_models.py"),
    "boost_cell_wrapper": (
        *("tests/stages", "tests/grad_accumulation", "tests/grad_freeze", "tests/compiled_step"),
        *("tests/group_loss_scale_manager", "tests/thor", "tests/test_algorithm.py"),
    ),
    "config": (
        "tests/test_docs.py::test_the_page_of_settings_is_that_of_the_sections",
        *("tests/integration", "tests/progressive_resizing", "tests/grad_freeze"),
    ),
    "grad_freeze": ("tests/compiled_step",),
    "integration": ("tests/test_two_models.py", "tests/test_algorithm.py"),
    "runtime": ("tests/test_distributed.py", "tests/boost_cell_wrapper/test_agreement.py"),
    "stages": (
        *("tests/boost_cell_wrapper", "tests/progressive_resizing", "tests/seq_length_warmup"),
        *("tests/grad_freeze", "tests/thor", "tests/group_loss_scale_manager"),
    ),
}
COMPARED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
CALCULATED = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
}
COMMUTES = {"logical_or", "logical_and", "logical_xor", "maximum", "minimum", "max", "min"}
COMMUTES |= {"mul", "add", "equal", "not_equal", "_MUL", "isclose", "gcd", "lcm"}


@dataclass(frozen=True)
class Mutant:
    """A fault: what stands where in a file, and what is put there."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the faults that can be put into a file."""
    text = path.read_text("utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    left_out = _left_out(tree := ast.parse(text))
    for node in ast.walk(tree):
        if id(node) in left_out or not hasattr(node, "end_col_offset"):
            continue
        after = _changed(node)
        if after is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[start:end].decode()
            where = str(path.relative_to(ROOT))
            yield Mutant(where, node.lineno, start, end, before, after)


def _left_out(tree: ast.AST) -> set[int]:
    """Return the nodes without effect: annotations, texts, what only type checkers see."""
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            arguments = node.args
            parts += [one.annotation for one in [*arguments.args, *arguments.kwonlyargs]]
            parts += [one.annotation for one in (arguments.vararg, arguments.kwarg) if one]
            parts += [getattr(node, "returns", None)]
        if isinstance(node, ast.AnnAssign):
            parts += [node.annotation]
        if isinstance(node, (ast.JoinedStr, ast.Raise)):  # wording of messages
            parts += [node]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts += [node]
        for part in parts:
            found |= {id(one) for one in ast.walk(part)} if part is not None else set()
    return found


def _changed(node: ast.AST) -> str | None:
    """Return the source of the fault that is put in the place of a node, if there is one."""
    one = copy.deepcopy(node)
    if isinstance(one, ast.Compare):
        one.ops[0] = COMPARED[type(one.ops[0])]()
    elif isinstance(one, ast.BinOp) and type(one.op) in CALCULATED:
        one.op = CALCULATED[type(one.op)]()
    elif isinstance(one, ast.BoolOp):
        one.op = ast.Or() if isinstance(one.op, ast.And) else ast.And()
    elif isinstance(one, ast.UnaryOp) and isinstance(one.op, (ast.Not, ast.USub)):
        one = one.operand
    elif isinstance(one, ast.Constant) and isinstance(one.value, bool):
        one.value = not one.value
    elif isinstance(one, ast.Constant) and isinstance(one.value, (int, float)):
        one.value = one.value + 1 if isinstance(one.value, int) else one.value * 2 or 1.0
    elif isinstance(one, ast.Call) and _order_matters(one):
        one.args[0], one.args[1] = one.args[1], one.args[0]
    elif isinstance(one, ast.AugAssign) or (
        isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
    ):
        return "pass"
    else:
        return None
    after = ast.unparse(one)
    return (
        f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else after
    )


def _order_matters(call: ast.Call) -> bool:
    """Return whether a call says something else with its first two arguments exchanged."""
    function, arguments = call.func, call.args[:2]
    if len(arguments) < 2 or isinstance(arguments[1], ast.Starred):
        return False
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name not in COMMUTES and ast.dump(arguments[0]) != ast.dump(arguments[1])


def file_of(test: str) -> str:
    """Return the file or folder of a test."""
    return test.partition("::")[0]


def tests_of(path: str, whole: bool) -> list[str]:
    """Return the tests of a room, and those that every room is in; or all."""
    if whole:
        return ["tests"]
    room = Path(path).parts[1].removesuffix(".py")
    own = [f"tests/{room}", f"tests/test_{room}.py", *SEEN_BY.get(room, ())]
    shared = () if room in BESIDE_TRAINING else SHARED
    return [*(one for one in own if (ROOT / file_of(one)).exists()), EXAMPLES, *shared]


def sample_of(options: argparse.Namespace) -> list[Mutant]:
    """Return the faults to try: drawn, or those that survived before."""
    if options.again:
        rows = json.loads(options.again.read_text("utf-8"))
        fields = Mutant.__dataclass_fields__
        survivors = [row for row in rows if row["result"] == "survived"]
        return [Mutant(**{name: row[name] for name in fields}) for row in survivors]
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    every = [one for file in files if options.only in str(file) for one in mutants_of(file)]
    print(f"of {len(every)} faults, seed {options.seed}:", flush=True)
    return random.Random(options.seed).sample(every, min(options.count, len(every)))


def judged(mutant: Mutant, folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Put a fault into a copy of the project; return what became of it, and which test found it."""
    file = folder / mutant.path
    whole = file.read_bytes()
    if whole[mutant.start : mutant.end] != mutant.before.encode():
        return "gone", "the code has changed"
    file.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    try:
        return tested(mutant, folder, options)
    finally:
        file.write_bytes(whole)


def tested(mutant: Mutant, folder: Path, options: argparse.Namespace) -> tuple[str, str]:
    """Run the tests that should find a fault in a copy of the project, as it stands."""
    words = ["-m", "pytest", "-x", "-n", "0", "--dist", "no", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    words += ["-m", ""] if options.slow else []
    tests = tests_of(mutant.path, options.whole)
    try:
        done = scripts.run(*words, *tests, cwd=folder, env=environment, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return "killed", "too long"
    if done.returncode == 0:
        return "survived", ""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return "not run", f"no tests in {' '.join(tests)}"
    # Without a test's name: the fault ended the process, or conftest.py could not be imported.
    return "killed", found[-1] if found else f"the process, which ended with {done.returncode}"


def main() -> int:
    """Sample, judge, and print what became of each; return 1 if less than 90 % were found."""
    parser = argparse.ArgumentParser(description="Put faults into the package; count those found.")
    parser.add_argument("--count", type=int, default=200, help="of faults (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--only", default="", help="rooms whose path holds this text (all)")
    parser.add_argument("--whole", action="store_true", help="run all tests for each fault")
    parser.add_argument("--slow", action="store_true", help="with the tests of -m slow, too")
    parser.add_argument("--again", type=Path, help="try the survivors in such a file once more")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    sample = sample_of(options)
    print(f"{len(sample)} faults", flush=True)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.jobs) as pool:
        folders: Queue[Path] = Queue()
        for number in range(options.jobs):
            folder = Path(place, str(number))
            left_out = shutil.ignore_patterns(".git", ".venvs", ".*_cache", "__pycache__")
            shutil.copytree(ROOT, folder, ignore=left_out)
            folders.put(folder)
        if sample and (without := tested(sample[0], Path(place, "0"), options))[0] != "survived":
            raise SystemExit(f"without a fault {without[1]} fails")

        def run(mutant: Mutant) -> tuple[str, str]:
            folder = folders.get()
            try:
                result, by = judged(mutant, folder, options)
            finally:
                folders.put(folder)
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{result:9} {mutant.path}:{mutant.line} {change[:100]} | {by}", flush=True)
            return result, by

        results = list(pool.map(run, sample))
    found = sum(result == "killed" for result, _ in results)
    print(f"{found} of {len(results)} found: {found / max(len(results), 1):.1%}")
    if options.json:
        rows = [
            {**asdict(one), "result": result, "by": by}
            for one, (result, by) in zip(sample, results)
        ]
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    return int(found < 0.9 * len(results))


if __name__ == "__main__":
    sys.exit(main())
