"""What is set on a step after it was made, by a subclass or a script."""

from __future__ import annotations

import inspect

from mindspore import nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import StepCell
from mindspore_boost_ext.base.order import is_of_libraries
from mindspore_boost_ext.report import NoEffectWarning, warn
from mindspore_boost_ext.stages.update import HidesSens, Update, parts_within

_ARGUMENTS = ("network", "grad", "grad_no_sens", "optimizer")
_PLACES = ("batch_part", "captures_part", "window_part", "update_part", "clip_norm")


def remember_parts(step: StepCell) -> None:
    """Remember, for :func:`follow_parts`, what a step is made with."""
    step.__dict__["_made_with"] = {name: getattr(step, name) for name in (*_ARGUMENTS, *_PLACES)}


def follow_parts(step: StepCell) -> None:
    """Before the first step, use another optimizer; warn of what would be left out."""
    made_with = step.__dict__.pop("_made_with", {})  # else what was replaced would be kept
    later = [name for name, one in made_with.items() if not _is_same(getattr(step, name), one)]
    if "optimizer" in later and _use_optimizer(step):
        later.remove("optimizer")
    if step.choice_part is None:  # the step itself runs, and looks at these
        later = [name for name in later if name == "optimizer"]
    if later:
        place = set(later) <= {*_PLACES}
        remedy = "set it in join of an Algorithm" if place else "give it to the constructor"
        warn(
            f"{', '.join(later)} of the training step was set after the step was made, and has no "
            f"effect on the parts that were made before: {remedy}",
            NoEffectWarning,
        )
    _warn_of_own_methods(step)


def _is_same(now: object, before: object) -> bool:
    return now is before or (isinstance(now, (int, float)) and now == before)


def _use_optimizer(step: StepCell) -> bool:
    """Let the parts of a step use the optimizer that it has now; return whether they do."""
    parts = parts_within(step.update_part)
    ours = {type(one) for one in parts if is_of_libraries(type(one).__module__)}
    # Others of this package's parts use the state of the optimizer that they were made with.
    if step.choice_part is not None or not ours <= {Update, HidesSens}:
        return False
    for part in (*parts, *filter(None, [step.window_part])):
        _compat.set_child(part, "optimizer", step.optimizer)
    step.compiles_end = False  # it may be a Cell that does not compile
    return True


def _warn_of_own_methods(step: StepCell) -> None:
    """Warn of methods that were set on the object: nothing looks at what they call."""
    special = step.choice_part is not None or step.window_part is not None
    special = special or step.clip_norm is not None or type(step.update_part) is not Update
    held = [name for name, one in vars(step).items() if inspect.isroutine(one)]
    found = [name for name in held if hasattr(nn.Cell, name) or hasattr(type(step), name)]
    if found and special:
        warn(
            f"{', '.join(found)} was set on the training step itself, so that it is not known "
            "whether it leaves out what is switched on: define it in a class that derives from "
            f"{type(step).__name__}"
        )
