"""What surrounds the runs of a step: what comes before the first, what MindSpore keeps of them."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import StepCell
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import APPLIED, Row, warn
from mindspore_boost_ext.stages.update import Update, parts_within, warn_of_idle_optimizer

Held = tuple[object, Sequence[object]]  # a value, and its entries

FIRST_RUN: list[Callable[[Any], None]] = []  # called with a step that runs for the first time


@contextlib.contextmanager
def timing_the_first(step: nn.Cell) -> Iterator[None]:
    """Report how long the first run of a variant took, compilation included."""
    start = time.perf_counter()
    yield
    if step._variant:
        step._first_runs.append(f"{step._variant}: {time.perf_counter() - start:.1f} s")
        step._variant = ""
        step.report().put(Row("first steps", "-", APPLIED, "; ".join(step._first_runs)))


@contextlib.contextmanager
def explaining_failures() -> Iterator[None]:
    """Say what to do where MindSpore's own error names no setting."""
    try:
        yield
    except ValueError as error:
        if "shape of sense must not be dynamic" not in str(error):
            raise
        raise ValueError(
            "gradients.clip_norm, grad_accumulation and loss scales need the shape of the loss, "
            "but the network returns one for each sample, and set_inputs leaves their number "
            "open: give the loss reduction 'mean' or 'sum', or give set_inputs that number"
        ) from error


@contextlib.contextmanager
def refusing_what_is_forgotten(step: nn.Cell) -> Iterator[None]:
    """Refuse a network that MindSpore would train wrongly after this step.

    If a step in PYNATIVE_MODE is the first to differentiate a function of ``ms.jit``, MindSpore
    leaves gradients that this step does not ask for out of all later steps.
    """
    if not (step._asks_for_less and step.runs_eagerly()):
        yield
        return
    before = _compat.differentiated_functions()
    yield
    now = _compat.differentiated_functions()
    new = {function for key, function in now.items() if key not in before}
    found = sorted(function for function in new if not function.startswith(_of_optimizer(step)))
    if found:
        raise ValueError(
            f"the first step that runs the ms.jit functions of the network ({', '.join(found)}) "
            "on inputs of this shape freezes weights, or refreshes no factors of THOR. In "
            "PYNATIVE_MODE MindSpore would leave the missing gradients out of all later steps, "
            "too: remove ms.jit, or train in GRAPH_MODE, or begin with a step that freezes "
            "nothing (group 0 of grad_freeze)"
        )


def _of_optimizer(step: nn.Cell) -> tuple[str, ...]:
    """Return the modules, with a dot behind each, that an optimizer shares with no layer.

    A step that failed leaves MindSpore recording, as if it differentiated the optimizer, too.
    """
    modules = _modules(step.optimizer) - _modules(step.network)
    return tuple(f"{module}." for module in modules)


def _modules(cell: nn.Cell) -> set[str]:
    """Return the modules of the classes of a Cell, and of all Cells in it."""
    kinds = [kind for _, one in cell.cells_and_names() for kind in type(one).__mro__]
    return {kind.__module__ for kind in kinds}


def warn_of_mode(step: nn.Cell) -> None:
    """Warn of what does not go with the way in which a step runs."""
    if not step.runs_eagerly():
        _warn_of_kept_graphs(step.auto_boost)
    elif not step.compiles_end:
        warn_of_idle_optimizer(step.optimizer)


def _warn_of_kept_graphs(boost: AutoBoost) -> None:
    """Warn if MindSpore may load the graph of a run with other settings from its cache.

    MindSpore finds a graph by the text of the script, which settings from outside do not change.
    """
    if boost.level != "O0" and _compat.keeps_graphs():
        warn(
            "MindSpore's compile cache is on (MS_COMPILER_CACHE_ENABLE, or enable_compile_cache): "
            "it reuses the graph of an earlier run of the same script, even if the settings of "
            "mindspore_boost_ext were different. After a change of settings delete the cache, or "
            "switch it off"
        )


def in_graph_mode() -> bool:
    """Return whether a Cell is compiled as a whole."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)


def follow_mode(step: nn.Cell) -> None:
    """Make a step compile by ``construct``, whatever has run in the other mode, or by ms.jit.

    In GRAPH_MODE any step may compile, for a batch of another shape.
    """
    mode = ms.get_context("mode")
    if step._ran_in != mode:  # Cells may have been replaced since
        step.__dict__["_cells_within"] = [cell for _, cell in step.cells_and_names()]
    if step._ran_in != mode or mode == ms.GRAPH_MODE:
        step._ran_in = mode
        _compat.parse_by_construct(step._cells_within)


def prepare_parts(step: StepCell, *inputs: object) -> None:
    """Let the update part look at a batch, once; its copies in variants get what it has set."""
    if not step._is_whole:
        step.update_part.follow_script()
        return
    copied = step._own_updates and step.choice_part is not None
    parts = parts_within(step.update_part) if copied else []
    before = [_held_by(part) for part in parts]
    step.update_part.before_step(*inputs)
    changed = [_names_of_changed(part, old) for part, old in zip(parts, before)]
    for variant in _variants(step) if any(changed) else ():
        _hand_on(changed, step, variant)


def _held_by(part: Update) -> dict[str, Held]:
    """Return what a part itself holds, by name."""
    own = _compat.own_attributes(part), _compat.own_parameters(part), _compat.children(part)
    return {name: (one, _entries(one)) for held in own for name, one in held.items()}


def _entries(value: object) -> Sequence[object]:
    """Return what can be replaced within a value: the script may change it in place."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return (*value, *value.values())
    return tuple(value) if isinstance(value, list) else ()


def _names_of_changed(part: Update, before: dict[str, Held]) -> list[str]:
    """Return the names under which a part holds something else than before."""
    now = _held_by(part)
    return [name for name in now if name not in before or not _is_same(now[name], before[name])]


def _is_same(now: Held, old: Held) -> bool:
    """Return whether a value is the same object, with the same entries."""
    if now[0] is not old[0]:
        return False
    if isinstance(now[1], bytes):
        return now[1] == old[1]
    return len(now[1]) == len(old[1]) and all(map(operator.is_, now[1], old[1]))


def _hand_on(changed: list[list[str]], step: StepCell, variant: StepCell) -> None:
    """Let the parts of a variant have what :meth:`Update.restricted` gives them of a change."""
    places = {id(weight): place for place, weight in enumerate(step.weights)}
    positions = tuple(places[id(weight)] for weight in variant.weights)
    renewed = parts_within(step.update_part.restricted(variant.optimizer, positions))
    for names, new, part in zip(changed, renewed, parts_within(variant.update_part)):
        for name in names if type(new) is type(part) and new is not part else ():
            setattr(part, name, getattr(new, name))


def _variants(step: StepCell) -> Iterator[StepCell]:
    """Yield the variants of a step, and theirs."""
    for variant in step.choice_part.variants if step.choice_part is not None else ():
        yield variant
        yield from _variants(variant)
