"""Lists every message that the package can print, to be read by a person.

    python tests/list_messages.py            # or with a part of a path, such as "grad_freeze"

A message is what an error, a warning, a row of the report, a rule, a log record or the command line
says. What is filled in when it is printed stands in braces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "mindspore_boost_ext"
SAYS = {"warn", "Row", "Rule", "error", "info", "warning", "print", "write", "line", "add"}
SAYS |= {"add_argument", "ArgumentParser", "put", "update", "NoEffectWarning", "BoostWarning"}
LEAST = 12  # characters; shorter strings are names


def text_of(node: ast.AST) -> str:
    """Return what a string of the source says, with braces for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (text_of(one) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def says(node: ast.AST) -> bool:
    """Return whether a call or a statement hands strings on to a reader."""
    if isinstance(node, (ast.Raise, ast.Return, ast.Assign, ast.Yield)):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return name in SAYS or name.endswith("Error")


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message of a module, docstrings left out."""
    seen = set()
    for node in ast.walk(tree):
        if not says(node):
            continue
        inside = [one for one in ast.walk(node) if isinstance(one, (ast.Constant, ast.JoinedStr))]
        pieces = {id(one) for joined in inside for one in getattr(joined, "values", ())}
        for one in inside:
            text = " ".join(text_of(one).split())
            place = (one.lineno, one.col_offset)
            if id(one) in pieces or place in seen or len(text) < LEAST or " " not in text:
                continue
            seen.add(place)
            yield one.lineno, text


def main() -> None:
    """Print them, file by file."""
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for path in sorted(PACKAGE.rglob("*.py")):
        if part in str(path):
            found = sorted(set(messages(ast.parse(path.read_text(encoding="utf-8")))))
            print("".join(f"{path.relative_to(PACKAGE)}:{line}: {text}\n" for line, text in found))


if __name__ == "__main__":
    main()
