"""What a step that reduces over ranks must have in common with those of the other ranks."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Parameter, nn

from mindspore_boost_ext.boost import AutoBoost
from mindspore_boost_ext.report import warn
from mindspore_boost_ext.runtime.ranks import check_equal_on_ranks, differences_between_ranks
from mindspore_boost_ext.runtime.watch import watch_ranks

if TYPE_CHECKING:
    from mindspore_boost_ext.boost_cell_wrapper.train_step import BoostTrainOneStepCell


def check_same_step_on_ranks(step: nn.TrainOneStepCell, boost: AutoBoost) -> None:
    """Compare settings, optimizer and weights' shapes with those of the other ranks.

    Args:
        step (TrainOneStepCell): this package's step, or MindSpore's own.
        boost (AutoBoost): what it was built with.

    Raises:
        ValueError: on every rank, if they differ; with names, values and ranks.
    """
    if step.reducer_flag:
        check_equal_on_ranks(
            {**_levels(boost), **boost.settings_in_force(), **_parts(step), **_shapes(step)},
            "the training step",
            "Give every rank the same network, optimizer and settings.",
        )
        if (watch := watch_ranks()) is not None:
            watch.meet()


def check_same_training_on_ranks(step: BoostTrainOneStepCell, epochs: int, batches: str) -> None:
    """Compare the length of a training with that of the other ranks, and where weights begin.

    Args:
        step (BoostTrainOneStepCell): what is trained.
        epochs (int): how many.
        batches (str): in an epoch; ``"an unknown number"`` is equal to itself.

    Raises:
        ValueError: on every rank, if the length differs.
    """
    if not step.reducer_flag:
        return
    check_equal_on_ranks(
        {"number of epochs": str(epochs), "number of batches in an epoch": batches},
        "the training",
        "Give every rank as many batches, such as by num_shards and shard_id of the dataset.",
    )
    if ms.get_auto_parallel_context("parameter_broadcast"):
        return
    unequal = differences_between_ranks(_values(step), "the weights")
    if unequal:
        warn(
            "the weights are not the same on all ranks, so that each trains another network: "
            f"{'; '.join(unequal)}. Call mindspore.set_seed with the same number on every rank, "
            "or set_auto_parallel_context(parameter_broadcast=True), or load one checkpoint"
        )


def _levels(boost: AutoBoost) -> dict[str, str]:
    return {"boost_level": boost.config.level, "boost.mode": boost.config.mode}


def _parts(step: nn.TrainOneStepCell) -> dict[str, str]:
    mode = "GRAPH_MODE" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE_MODE"
    manager = getattr(step, "loss_scaling_manager", None)
    facts = {
        "mode": mode,
        "step cell": type(step).__name__,
        "optimizer": type(step.optimizer).__name__,
        "loss scale": f"{step.sens}" if manager is None else type(manager).__name__,
    }
    rate = getattr(step.optimizer, "learning_rate", None)
    if isinstance(rate, Parameter) and rate.size == 1:
        facts["learning rate"] = f"{float(rate.asnumpy()):g}"
    return facts


def _shapes(step: nn.TrainOneStepCell) -> dict[str, str]:
    weights = [one for one in step.weights if not one.layerwise_parallel]
    return {f"weight {one.name}": f"{one.dtype} {one.shape}" for one in weights}


def _values(step: nn.TrainOneStepCell) -> dict[str, str]:
    weights = [one for one in step.weights if not one.layerwise_parallel]
    sums = ((one.name, zlib.crc32(one.asnumpy().tobytes())) for one in weights)
    return {f"checksum of {name}": f"{value:08x}" for name, value in sums}


__all__ = ["check_same_step_on_ranks", "check_same_training_on_ranks"]
