"""The cards of the algorithms, as ``--explain NAME`` prints them."""

from __future__ import annotations

from pathlib import Path

import mindspore_boost_ext

# Where the card of an algorithm stands, beside its code.
CARDS = {
    "less_bn": "less_batch_normalization/README.md",
    "normalised_head": "less_batch_normalization/head.md",
    "gradient_centralization": "gradient_centralization/README.md",
    "grad_freeze": "grad_freeze/README.md",
    "adasum": "adasum/README.md",
    "grad_accumulation": "grad_accumulation/README.md",
    "dim_reduce": "dim_reduce/README.md",
    "loss_scale": "boost_cell_wrapper/README.md",
    "loss_scale_group": "group_loss_scale_manager/README.md",
    "thor": "thor/README.md",
    "progressive_resizing": "progressive_resizing/README.md",
    "seq_length_warmup": "seq_length_warmup/README.md",
    "short_schedule": "short_schedule/README.md",
    "label_smoothing": "label_smoothing/README.md",
    "compiled_step": "compiled_step/README.md",
    "cheaper_operators": "cheaper_operators/README.md",
}
# Other names of the same: a setting, a class, a run of compare.
OTHER_NAMES = {
    "fn_flag": "normalised_head",
    "CommonHeadLastFN": "normalised_head",
    "gc_flag": "gradient_centralization",
    "OptimizerProcess": "gradient_centralization",
    "LessBN": "less_bn",
    "GradientFreeze": "grad_freeze",
    "FreezeOpt": "grad_freeze",
    "GradientAccumulation": "grad_accumulation",
    "FlushAccumulation": "grad_accumulation",
    "AdaSum": "adasum",
    "DimReduce": "dim_reduce",
    "THOR": "thor",
    "ResizedImages": "progressive_resizing",
    "ShortSequences": "seq_length_warmup",
    "FasterSchedule": "short_schedule",
    "SmoothedLoss": "label_smoothing",
    "GroupLossScaleManager": "loss_scale_group",
    "DynamicLossScaleManager": "loss_scale",
    "FixedLossScaleManager": "loss_scale",
    "dynamic_loss_scale": "loss_scale",
}


def card(name: str) -> str:
    """Return what a method does, its rule, its price, what was measured, and when not to use it."""
    folder = Path(mindspore_boost_ext.__file__).parent
    return (folder / CARDS[name]).read_text(encoding="utf-8").strip()
