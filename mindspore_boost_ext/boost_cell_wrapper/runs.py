"""What surrounds the runs of a step: what comes before the first, what MindSpore keeps of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import StepCell
from mindspore_boost_ext.base.entries import entries_at
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import APPLIED, Row, warn
from mindspore_boost_ext.stages.update import parts_within, warn_of_idle_optimizer

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
    before = [_compat.own_attributes(part) for part in parts]
    step.update_part.before_step(*inputs)
    for place, (part, old) in enumerate(zip(parts, before)):
        now = _compat.own_attributes(part)
        changed = {name: now[name] for name in now if now[name] is not old.get(name)}
        for variant in _variants(step) if changed else ():
            copies = parts_within(variant.update_part)[place : place + 1]
            for copy in copies:
                copy.__dict__.update(_for_weights(changed, step.weights, variant.weights))


def _for_weights(
    attributes: dict[str, Any], every: Sequence[Parameter], some: Sequence[Parameter]
) -> dict[str, Any]:
    """Return attributes, of which lists with an entry for each weight lose those of the others."""
    kept = {id(weight) for weight in some}
    positions = [place for place, weight in enumerate(every) if id(weight) in kept]
    return {
        name: entries_at(value, positions)
        if isinstance(value, (tuple, list)) and len(value) == len(every)
        else value
        for name, value in attributes.items()
    }


def _variants(step: StepCell) -> Iterator[StepCell]:
    """Yield the variants of a step, and theirs."""
    for variant in step.choice_part.variants if step.choice_part is not None else ():
        yield variant
        yield from _variants(variant)
