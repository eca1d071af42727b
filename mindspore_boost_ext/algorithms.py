"""The algorithms, in the order in which they change network and optimizer.

This is the only list of them all. A new algorithm takes a folder and an entry here.
"""

from __future__ import annotations

from mindspore_boost_ext.adasum.algorithm import AdaSumAlgorithm
from mindspore_boost_ext.algorithm import Algorithm
from mindspore_boost_ext.cheaper_operators.algorithm import CheaperOperatorsAlgorithm
from mindspore_boost_ext.compiled_step.algorithm import CompiledStepAlgorithm
from mindspore_boost_ext.dim_reduce.algorithm import DimReduceAlgorithm
from mindspore_boost_ext.grad_accumulation.algorithm import AccumulationAlgorithm
from mindspore_boost_ext.grad_freeze.algorithm import FreezeAlgorithm
from mindspore_boost_ext.gradient_centralization.algorithm import GradientCentralizationAlgorithm
from mindspore_boost_ext.group_loss_scale_manager.algorithm import GroupedScaleAlgorithm
from mindspore_boost_ext.label_smoothing.algorithm import LabelSmoothingAlgorithm
from mindspore_boost_ext.less_batch_normalization.algorithm import LessBNAlgorithm
from mindspore_boost_ext.progressive_resizing.algorithm import ResizingAlgorithm
from mindspore_boost_ext.seq_length_warmup.algorithm import SeqLengthAlgorithm
from mindspore_boost_ext.short_schedule.algorithm import ShortScheduleAlgorithm
from mindspore_boost_ext.thor.algorithm import ThorAlgorithm

ALGORITHMS: tuple[type[Algorithm], ...] = (
    LessBNAlgorithm,
    GradientCentralizationAlgorithm,
    ThorAlgorithm,  # needs the layers of the rewritten network
    FreezeAlgorithm,  # wraps the optimizer, which THOR may replace
    DimReduceAlgorithm,
    AdaSumAlgorithm,
    AccumulationAlgorithm,
    GroupedScaleAlgorithm,
    ShortScheduleAlgorithm,
    ResizingAlgorithm,  # counts the updates that are made, whichever part makes them
    SeqLengthAlgorithm,
    LabelSmoothingAlgorithm,
    CheaperOperatorsAlgorithm,  # the others recognise MindSpore's own layers and losses
    CompiledStepAlgorithm,
)
