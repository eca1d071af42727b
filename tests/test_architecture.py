"""The house: imports run one way, private names live in one file, nothing is left lying."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "mindspore_boost_ext"
# Each floor may import from the floors below it, and from its own where that is not a circle.
FLOORS = [
    {
        "_rules",
        "_version",
        "report",
        "history",
        "launcher",
        "threads",
        "watch",
    },
    {
        "config",
        "pca",
        "sections",
    },
    {
        "_compat",
    },
    {
        "learning_rate",
        "gradient_centralization",
        "optimizer_settings",
        "packing",
        "exchange",
        "adasum_rule",
        "snapshots",
        "projection",
        "bundled",
        "checkpoint",
        "cells",
    },
    {
        "overflow",
        "base",
        "optimizer_view",
        "gradients",
        "environment",
        "freeze_schedule",
        "resting",
        "tracing",
        "normalised_head",
        "residual_blocks",
    },
    {
        "freeze_optimizer",
        "less_batch_normalization",
        "grad_freeze",
        "grad_accumulation",
        "adasum",
        "dim_reduce",
        "subspace",
        "group_loss_scale_manager",
        "thor",
        "thor_factors",
        "thor_inverse",
        "thor_layers",
        "thor_step",
        "thor_switch",
    },
    {
        "boost_cell_wrapper",
        "train_step",
        "boost",
    },
    {
        "integration",
        "thor_model",
    },
    {
        "_display",
        "callbacks",
        "trajectory",
    },
    {
        "recipes",
        "comparison",
        "trial",
        "compare",
    },
    {
        "__main__",
        "__init__",
    },
]
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def floor_of(module):
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def imports(module):
    """Return the modules of this package that ``module`` imports at load time."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "mindspore_boost_ext"
        ):
            inner = node.module.partition(".")[2]
            found.update([inner] if inner else [alias.name for alias in node.names])
    return found & set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    for other in imports(module):
        assert floor_of(other) <= floor_of(module), f"{module} imports {other} from above"


def test_no_module_imports_itself_in_a_circle():
    done = set()

    def visit(module, path):
        assert module not in path, f"a circle of imports: {[*path, module]}"
        if module not in done:
            for other in imports(module):
                visit(other, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


@pytest.mark.parametrize(
    "module", ["_rules", "config", "sections", "report", "pca", "history", "_version"]
)
def test_lowest_floors_import_no_mindspore(module):
    path = PACKAGE / f"{module}.py"
    if not path.exists():
        pytest.skip("not written yet")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) mindspore\b", text, re.MULTILINE)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"_compat"}))
def test_private_mindspore_modules_are_imported_in_one_file(module):
    """``mindspore._x`` and ``from mindspore... import _x`` stand in _compat only."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "mindspore":
                assert not any(part.startswith("_") for part in name.split(".")[1:]), name


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring_and_reads_in_one_sitting(module):
    text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 500


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__main__"}))
def test_library_code_prints_nothing(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


def test_top_level_holds_what_it_may_hold():
    allowed = {"mindspore_boost_ext", "tests", "examples", "pyproject.toml", "README.md", "LICENSE"}
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    found = {name.split("/")[0] for name in listing.stdout.splitlines()}
    assert {name for name in found if not name.startswith(".")} == allowed
