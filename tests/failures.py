"""What a failing test adds to its report: in which mode, network and settings it failed."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn


def surroundings(item, frames):
    """Return lines that say in what a test failed; ``frames`` are the local names of its calls."""
    mode = "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"
    lines = [f"mode: {mode}"]
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    lines += [f"parameter {name}: {_short(value)}" for name, value in parameters.items()]
    values = {name: value for names in frames for name, value in names.items()}
    for name, value in values.items():
        if isinstance(value, ms.Model):
            value = getattr(value, "train_network", None)  # none yet where building it failed
        if isinstance(value, nn.Cell):
            lines.append(f"network {name}: {type(value).__name__}{_applied(value)}")
        elif isinstance(value, dict) and "boost" in value:
            lines.append(f"settings {name}: {_short(value)}")
    return lines


def _applied(cell):
    """Return which algorithms a step has on."""
    # Another Cell (an optimizer may have the first), or one that was being built.
    if not (hasattr(cell, "auto_boost") and hasattr(cell, "report")):
        return ""
    rows = [one.algorithm for one in cell.report().rows if one.status == "applied"]
    return f" with {', '.join(one for one in rows if not one.startswith('machine: '))}"


def _short(value):
    text = repr(getattr(value, "name", value))
    return text if len(text) <= 500 else f"{text[:500]}..."
