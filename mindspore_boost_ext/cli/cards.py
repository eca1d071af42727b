"""The cards of the algorithms, as ``--explain NAME`` prints them."""

from __future__ import annotations

from pathlib import Path

import mindspore_boost_ext

# Where the card of an algorithm stands, beside its code; then what else that is called: by a
# setting, a class, a run of compare.
_CARDS: dict[str, tuple[str, ...]] = {
    "less_bn": ("less_batch_normalization/README.md", "LessBN"),
    "normalised_head": ("less_batch_normalization/head.md", "fn_flag", "CommonHeadLastFN"),
    "gradient_centralization": (
        "gradient_centralization/README.md",
        "gc_flag",
        "OptimizerProcess",
    ),
    "grad_freeze": ("grad_freeze/README.md", "GradientFreeze", "FreezeOpt"),
    "adasum": ("adasum/README.md", "AdaSum"),
    "grad_accumulation": (
        "grad_accumulation/README.md",
        "GradientAccumulation",
        "FlushAccumulation",
    ),
    "dim_reduce": ("dim_reduce/README.md", "DimReduce"),
    "loss_scale": (
        "boost_cell_wrapper/README.md",
        "DynamicLossScaleManager",
        "FixedLossScaleManager",
        "dynamic_loss_scale",
    ),
    "loss_scale_group": ("group_loss_scale_manager/README.md", "GroupLossScaleManager"),
    "thor": ("thor/README.md", "THOR"),
    "progressive_resizing": ("progressive_resizing/README.md", "ResizedImages"),
    "seq_length_warmup": ("seq_length_warmup/README.md", "ShortSequences"),
    "short_schedule": ("short_schedule/README.md", "FasterSchedule"),
    "label_smoothing": ("label_smoothing/README.md", "SmoothedLoss"),
    "compiled_step": ("compiled_step/README.md",),
    "cheaper_operators": ("cheaper_operators/README.md",),
}
CARDS = {name: path for name, (path, *_) in _CARDS.items()}
OTHER_NAMES = {other: name for name, (_, *others) in _CARDS.items() for other in others}


def card(name: str) -> str:
    """Return what a method does, its rule, its price, what was measured, and when not to use it."""
    folder = Path(mindspore_boost_ext.__file__).parent
    return (folder / CARDS[name]).read_text(encoding="utf-8").strip()
