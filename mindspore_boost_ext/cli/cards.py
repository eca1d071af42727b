"""The cards of the algorithms and the page of the recipes, as ``--explain NAME`` prints them."""

from __future__ import annotations

from pathlib import Path

import mindspore_boost_ext
from mindspore_boost_ext import recipes

# Other names of a method: a setting, a class, a run of compare.
_OTHERS: dict[str, tuple[str, ...]] = {
    "less_bn": ("LessBN",),
    "normalised_head": ("fn_flag", "CommonHeadLastFN"),
    "gradient_centralization": ("gc_flag", "OptimizerProcess"),
    "grad_freeze": ("GradientFreeze", "FreezeOpt"),
    "adasum": ("AdaSum",),
    "grad_accumulation": ("GradientAccumulation", "FlushAccumulation"),
    "dim_reduce": ("DimReduce",),
    "loss_scale": ("DynamicLossScaleManager", "FixedLossScaleManager", "dynamic_loss_scale"),
    "loss_scale_group": ("GroupLossScaleManager",),
    "thor": ("THOR",),
    "progressive_resizing": ("ResizedImages",),
    "seq_length_warmup": ("ShortSequences",),
    "short_schedule": ("FasterSchedule",),
    "label_smoothing": ("SmoothedLoss",),
    "compiled_step": (),
    "cheaper_operators": (),
    "recipes": ("recipe", *recipes.NAMES),
}
# Cards that are not the README.md in the folder with the method's name.
_ELSEWHERE = {
    "less_bn": "less_batch_normalization/README.md",
    "normalised_head": "less_batch_normalization/head.md",
    "loss_scale": "boost_cell_wrapper/README.md",
    "loss_scale_group": "group_loss_scale_manager/README.md",
    "recipes": "docs/RECIPES.md",
}
CARDS = {name: _ELSEWHERE.get(name, f"{name}/README.md") for name in _OTHERS}
OTHER_NAMES = {other: name for name, others in _OTHERS.items() for other in others}


def card(name: str) -> str:
    """Return what a method does, its rule, its price, what was measured, and when not to use it."""
    folder = Path(mindspore_boost_ext.__file__).parent
    return (folder / CARDS[name]).read_text(encoding="utf-8").strip()
