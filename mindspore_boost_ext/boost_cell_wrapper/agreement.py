"""Checks that the steps of all ranks agree, if they reduce over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from mindspore_boost_ext import _compat
from mindspore_boost_ext.algorithm import StepCell
from mindspore_boost_ext.base.learning_rate import host_array
from mindspore_boost_ext.base.order import is_of_libraries
from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.boost_cell_wrapper.broadcast import BroadcastsWeights, broadcasts_weights
from mindspore_boost_ext.report import INACTIVE, Row, warn
from mindspore_boost_ext.runtime.ranks import (
    check_equal_on_ranks,
    differences_between_ranks,
    launched_count,
    rank_count,
)
from mindspore_boost_ext.runtime.watch import watch_ranks

# Names of the settings of optimizers; and of MindSpore's own, as in others these may mean anything.
_SETTINGS = ("learning_rate", "weight_decay", "momentum", "beta1", "beta2", "eps")
_OWN_SETTINGS = (
    *("epsilon", "dampening", "nesterov", "use_nesterov", "use_amsgrad", "use_lazy", "decay"),
    *("decay_rate", "clip_threshold", "scale_parameter", "centered", "rho", "lambd", "alpha"),
    *("t0", "etaminus", "etaplus", "l1", "l2", "lr_power"),
)
_SCALE_SETTINGS = (  # of MindSpore's Cells, and of ours
    *("scale_factor", "scale_window", "minimum_loss_scale"),
    *("growth_factor", "shrink_factor", "minimum", "maximum"),
)
_GROUP_SETTINGS = ("lr", "weight_decay", "momentum", "betas")
_SAME_STEP = "Give every rank the same network, optimizer and settings."
_TOGETHER = "ms.set_auto_parallel_context(parallel_mode='data_parallel')"
_BEFORE = "before the Model, or the step, is built"
_COMPARED: WeakSet[nn.Cell] = WeakSet()
_BEGUN: WeakSet[nn.Cell] = WeakSet()
_COUNTED = (ms.int32, ms.int64)  # dtypes of counters
_UPDATES = ("global_step", "state_step", "step_t")  # names in MindSpore's optimizers
_SHOWN = 100  # characters of a setting; the rest of a long one is a checksum


def watch_or_report(step: StepCell) -> None:
    """Watch the other ranks if a step trains with them; if the ranks train apart, report that."""
    if step.reducer_flag:
        watch_ranks()
    elif rank_count() > 1 and ms.get_auto_parallel_context("parallel_mode") == "stand_alone":
        reason = (
            f"{rank_count()} ranks train independently: to train one network together, call "
            f"{_TOGETHER} {_BEFORE}"
        )
        step.report().put(Row("ranks", "-", INACTIVE, reason))


def check_same_step_on_ranks(step: nn.TrainOneStepCell) -> None:
    """Compare settings, optimizer and weights' shapes with those of the other ranks, once.

    Every rank that trains must call this. If something differs, each raises a ``ValueError`` with
    names, values and ranks. Call it when a training begins, not when a step is built: a rank may
    build a Model only to evaluate. A step of MindSpore's own counts as level O0. If the step does
    not reduce over the ranks, nothing is compared; it may warn that ranks train apart.
    """
    if step not in _COMPARED and not step.reducer_flag:
        _COMPARED.add(step)
        _warn_of_training_apart()
    if step not in _COMPARED:
        boost = getattr(step, "auto_boost", None) or AutoBoost()
        levels = {"boost_level": boost.config.level, "boost.mode": boost.config.mode}
        facts = {**levels, **boost.settings_in_force(), **_kinds(step), **_shapes(step)}
        values = {} if _sends_values(step) else _values(step)
        check_equal_on_ranks({**facts, **values}, "the training step", _SAME_STEP)
        _COMPARED.add(step)
        if (watch := watch_ranks()) is not None:
            watch.meet()


def check_same_training_on_ranks(step: StepCell, epochs: int, batches: str) -> None:
    """Raise a ``ValueError`` on every rank if the training's length or start differs."""
    if not step.reducer_flag:
        return
    if not _sends_values(step):
        # Again: an earlier training may have changed a learning rate on one rank.
        check_equal_on_ranks(_values(step), "the training step", _SAME_STEP)
    check_equal_on_ranks(
        {"number of epochs": str(epochs), "number of batches in an epoch": batches},
        "the training",
        "Give every rank the same number of batches, for example by num_shards and shard_id of "
        "the dataset; to resume, load checkpoints of the same epoch (BoostCheckpoint keeps the "
        "file before, with .before in its name).",
    )
    _BEGUN.discard(step)  # a file may have been loaded since
    check_same_start_on_ranks(step)


def check_first_run_on_ranks(step: nn.TrainOneStepCell) -> None:
    """Raise a ``ValueError`` on every rank if a step or its start differs; check once."""
    check_same_step_on_ranks(step)
    check_same_start_on_ranks(step)


def check_same_start_on_ranks(step: nn.TrainOneStepCell) -> None:
    """Compare the start of a training with the other ranks, once: counters, weights and moments.

    If weights or moments differ, it warns: each rank then trains another network. If counters
    differ, every rank raises a ``ValueError``: ranks would not reduce at the same time.
    """
    if not step.reducer_flag or step in _BEGUN:
        return
    is_ours = isinstance(step, BroadcastsWeights)
    hands_out = step.begin_together() if is_ours else broadcasts_weights()
    if _sends_values(step):
        check_equal_on_ranks(_values(step), "the training step", _SAME_STEP)
    if is_ours or not hands_out:
        check_equal_on_ranks(
            _counters(step),
            "the start of the training",
            "To resume, load checkpoints of the same step into the training step on every rank "
            "(BoostCheckpoint keeps the file before, with .before in its name).",
        )
    if not hands_out:
        _warn_of_unequal_values(step)
    _BEGUN.add(step)


def _warn_of_training_apart() -> None:
    """Warn if several ranks, each with a step without reducer, seem to be meant to train together.

    Semi-automatic parallelism needs no reducer.
    """
    parallel, count = ms.get_auto_parallel_context("parallel_mode"), launched_count()
    words = f"the {count} processes train independently, each on all that it reads: call "
    if rank_count() == 1 < count:
        warn(f"{words}init() and {_TOGETHER} {_BEFORE}")
    elif count > 1 and parallel in ("data_parallel", "hybrid_parallel"):
        warn(f"{words}init() and ms.set_auto_parallel_context {_BEFORE}, not after it")


def _warn_of_unequal_values(step: nn.TrainOneStepCell) -> None:
    weights = [weight for weight in step.weights if not weight.layerwise_parallel]
    if unequal := differences_between_ranks(_checksums(weights), "the weights"):
        warn(
            "the weights are not the same on all ranks, so each rank trains a different network: "
            f"{'; '.join(unequal)}. Call mindspore.set_seed with the same number on every rank, "
            "or load the same checkpoint, or, in GRAPH_MODE only, call "
            "set_auto_parallel_context(parameter_broadcast=True)"
        )
    elif unequal := differences_between_ranks(_checksums(_moments(step)), "the moments"):
        warn(
            "the state of the optimizer is not the same on all ranks, so their weights may drift "
            f"apart: {'; '.join(unequal)}. Load the same checkpoint into the step on every rank"
        )


def _sends_values(step: nn.TrainOneStepCell) -> bool:
    """Return whether rank 0 may send its values before the first step: they are compared then."""
    return isinstance(step, BroadcastsWeights) and broadcasts_weights()


def _kinds(step: nn.TrainOneStepCell) -> dict[str, str]:
    mode = "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"
    manager = getattr(step, "loss_scaling_manager", None)
    return {
        "mode": mode,
        "step cell": type(step).__name__,
        "optimizer": type(step.optimizer).__name__,
        "kind of loss scale": "fixed" if manager is None else type(manager).__name__,
        "gradients_mean": str(step.mean),
    }


def _values(step: nn.TrainOneStepCell) -> dict[str, str]:
    """Return the numbers of loss scale and optimizer, of which some are Parameters."""
    manager = getattr(step, "loss_scaling_manager", None)
    return {
        "loss scale": _described(getattr(step, "scale_sense", step.sens)),
        **_in_text(
            {name: getattr(manager, name, None) for name in _known(manager, _SCALE_SETTINGS)}
        ),
        **_settings(step.optimizer),
    }


def _settings(optimizer: nn.Cell) -> dict[str, str]:
    """Return the settings of an optimizer, and those that its wrappers add, as text."""
    found: dict[str, object] = {}
    *wrappers, optimizer = _compat.with_wrapped(optimizer)
    for wrapper in wrappers:
        found |= getattr(wrapper, "common_to_ranks", dict)()
    names = (*_SETTINGS, *_known(optimizer, _OWN_SETTINGS))
    found |= {name: getattr(optimizer, name, None) for name in names}
    found["loss_scale of the optimizer"] = getattr(optimizer, "loss_scale", None)
    groups = getattr(optimizer, "param_groups", ())  # of mindspore.experimental.optim
    for number, group in enumerate(one for one in groups if isinstance(one, dict)):
        found |= {f"{name} of group {number}": group.get(name) for name in _GROUP_SETTINGS}
    return _in_text(found)


def _known(cell: object, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of settings if the class is MindSpore's or ours, which say what they mean."""
    return names if is_of_libraries(type(cell).__module__) else ()


def _in_text(settings: Mapping[str, object]) -> dict[str, str]:
    words = {name.replace("_", " "): _described(one) for name, one in settings.items()}
    return {name: text for name, text in words.items() if text}


def _described(value: object) -> str:
    """Return numbers, lists and schedules as text that shows differences; else an empty text."""
    return _cut(_in_words(value))


def _cut(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... (checksum {zlib.crc32(text.encode()):08x})"


def _in_words(value: object) -> str:
    if isinstance(value, (list, tuple, nn.CellList)):
        return ", ".join(_in_words(one) for one in value)
    if isinstance(value, nn.Cell):  # a schedule is known by the numbers in it
        inside = {**_compat.own_attributes(value), **_compat.own_parameters(value)}
        kept = {**inside, **_compat.children(value)}
        # In a class of the user's own, an int may be the number of the rank.
        whole = (int,) if is_of_libraries(type(value).__module__) else ()
        kinds = (nn.Cell, float, Tensor, *whole)
        found = sorted(name for name, one in kept.items() if isinstance(one, kinds))
        words = ", ".join(f"{name} {_in_words(kept[name])}" for name in found)
        return f"{type(value).__name__}({words})"
    if isinstance(value, (int, float, Tensor)):
        return ", ".join(str(one) for one in host_array(value).ravel())
    return ""  # in the user's own optimizer, such a name may mean anything


def _shapes(step: nn.TrainOneStepCell) -> dict[str, str]:
    weights = [weight for weight in step.weights if not weight.layerwise_parallel]
    shapes = {f"weight {weight.name}": f"{weight.dtype} {weight.shape}" for weight in weights}
    # Gradients are reduced in this order. In another order, those of different weights would mix.
    return {**shapes, "order of the weights": _cut(", ".join(weight.name for weight in weights))}


def _checksums(parameters: Sequence[Parameter]) -> dict[str, str]:
    sums = ((parameter.name, zlib.crc32(parameter.asnumpy().tobytes())) for parameter in parameters)
    return {f"checksum of {name}": f"{value:08x}" for name, value in sums}


def _counters(step: nn.TrainOneStepCell) -> dict[str, str]:
    """Return the position of a training, which decides the next updates and reductions."""
    window = getattr(step, "window_part", None)
    held = {} if window is None else {"micro-batches in the window": str(window.micro_steps())}
    apart = set() if window is None else {id(one) for one in window.state()}
    counters = (parameter for parameter in step.get_parameters() if parameter.dtype in _COUNTED)
    # Others may differ by rank, such as a seed in the user's own optimizer.
    known = (one for one in counters if one.name.startswith("boost.") or one.name in _UPDATES)
    return {**held, **{one.name: _described(one) for one in known if id(one) not in apart}}


def _moments(step: nn.TrainOneStepCell) -> list[Parameter]:
    """Return the optimizer's state; nothing under AdaSum, where each server has its own."""
    if getattr(step, "enable_adasum", False):
        return []
    weights = {id(weight) for weight in step.weights}
    held = (one for one in step.optimizer.get_parameters() if id(one) not in weights)
    return [one for one in held if one.dtype not in _COUNTED and not one.layerwise_parallel]
