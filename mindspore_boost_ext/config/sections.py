"""The sections of a configuration: one frozen dataclass each, every field with its rule.

``parse.py`` reads them. A new setting takes one entry here. If ``mindspore.boost`` has a setting,
its name and default are the same here. Imports no MindSpore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mindspore_boost_ext.config.rules import (
    boolean,
    either,
    freeze_schedule,
    increasing_integers,
    integer,
    name_patterns,
    one_of,
    optional,
    optional_path,
    real,
    reals,
)
from mindspore_boost_ext.config.section import Section, setting


@dataclass(frozen=True)
class CommonConfig(Section):
    """Section ``common``: settings shared by several algorithms."""

    readers = MappingProxyType({"gradient_split_groups": "less_bn", "device_number": "adasum"})

    gradient_split_groups: tuple[int, ...] = setting(
        (50, 100),
        increasing_integers(),
        "positions in the list of parameters where `less_bn` starts a new all-reduce",
    )
    device_number: int = setting(
        8,
        integer(1),
        "devices per server: `adasum` averages gradients inside, combines updates across",
    )


@dataclass(frozen=True)
class LessBNConfig(Section):
    """Section ``less_bn``: fewer BatchNorms, with or without the normalised head."""

    fn_flag: bool = setting(True, boolean(), "normalise the classifier, too")
    gc_flag: bool = setting(True, boolean(), "centralize the gradients of weights")
    keep_shortcut: bool = setting(False, boolean(), "keep the BatchNorms on shortcuts")
    include: Any = setting(
        None,
        optional(name_patterns()),
        "patterns of the BatchNorms that may be removed, such as `layer1.*`; null: all",
    )
    exclude: Any = setting((), name_patterns(), "patterns of BatchNorms to keep")
    multiplier: float = setting(
        1.0, real("(0, inf)"), "initial multiplier of the normalised classifier"
    )
    heads: Any = setting(
        None,
        optional(name_patterns()),
        "patterns of the Dense layers to normalise instead of the classifier",
    )

    def idle_settings(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Without the normalised head, its settings have no effect."""
        if not self.fn_flag:
            yield ("multiplier", "heads"), "less_bn.fn_flag is False"


@dataclass(frozen=True)
class GradFreezeConfig(Section):
    """Section ``grad_freeze``: steps that train only the later layers.

    ``schedule`` replaces ``freeze_type`` and ``freeze_p``. ``"linear"``, ``"cubic"`` and ``"step"``
    freeze a growing prefix for good; ``"adaptive"`` decides when by the change of the weights.
    """

    param_groups: int = setting(10, integer(1), "number of parts of the network")
    freeze_type: int = setting(
        1, one_of((0, 1)), "0: groups in order; 1: everything alternates with a drawn group"
    )
    freeze_p: float = setting(0.7, real("[0, 1)"), "share of the updates that train everything")
    total_steps: int = setting(65536, integer(1), "number of updates of the schedule")
    seed: int = setting(0, integer(0, 2**32 - 1), "seed for drawing the groups of `freeze_type` 1")
    schedule: Any = setting(
        None,
        freeze_schedule(),
        "how the frozen first part grows, or the group of each update; null: by `freeze_type`",
    )
    prefix_fraction: float = setting(
        1.0, real("[0, 1]"), "largest share of the parts that is frozen at the end"
    )
    prefix_start: float = setting(
        0.5, real("[0, 1]"), "share of the updates before freezing begins"
    )
    eval_frozen: bool = setting(
        False, boolean(), "frozen BatchNorm and dropout layers work as in evaluation"
    )
    adaptive_window: int = setting(50, integer(1), "updates between two comparisons of the weights")
    adaptive_tolerance: float = setting(
        0.3, real("(0, 1)"), "a part has stopped if its change is at most this share of its largest"
    )

    def idle_settings(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """``schedule`` and ``freeze_type`` read different settings."""
        if not isinstance(self.schedule, str):
            reason = "grad_freeze.schedule is not 'linear', 'cubic' or 'step'"
            yield ("prefix_start",), reason
            yield ("prefix_fraction",), f"{reason}, nor 'adaptive'"
        if self.schedule == "adaptive":
            yield ("prefix_start", "total_steps"), "grad_freeze.schedule is 'adaptive'"
        else:
            reason = "grad_freeze.schedule is not 'adaptive'"
            yield ("adaptive_window", "adaptive_tolerance"), reason
        if isinstance(self.schedule, tuple) and len(self.schedule) != self.total_steps:
            yield ("total_steps",), "grad_freeze.schedule has the group of each update"
        if self.schedule is not None:
            yield ("freeze_p", "freeze_type"), "grad_freeze.schedule replaces it"
            yield ("seed",), "grad_freeze.schedule draws no groups"
        elif self.freeze_type == 0:
            yield ("seed",), "grad_freeze.freeze_type 0 draws no groups"


@dataclass(frozen=True)
class GradAccumulationConfig(Section):
    """Section ``grad_accumulation``: micro-batches in a window, their weights, and overflow."""

    # Counted in float32.
    grad_accumulation_step: int = setting(1, integer(1, 2**24), "micro-batches per update")
    weighting: str = setting(
        "equal",
        one_of(("equal", "samples", "labels")),
        "weight of a micro-batch: equal, or by its samples or labels",
    )
    on_overflow: str = setting(
        "drop_micro_batch",
        one_of(("drop_micro_batch", "drop_window")),
        "what is left out if one micro-batch overflows",
    )

    def nothing_to_do(self) -> str:
        """A window of one micro-batch is a plain step."""
        one = self.grad_accumulation_step == 1
        return "grad_accumulation.grad_accumulation_step is 1" if one else ""


@dataclass(frozen=True)
class DimReduceConfig(Section):
    """Section ``dim_reduce``: training in the directions of an earlier training."""

    left_out_of_all = "it excludes most others: switch it on in mode manual"
    goes_with = frozenset({"grad_accumulation", "compiled_step", "cheaper_operators"})
    of_one_host = frozenset({"pca_mat_path", "weight_load_dir", "timeout", "memory_limit"})

    rho: float = setting(0.55, real("(0, 1)"), "factor from one tried step length to the next")
    gamma: float = setting(
        0.9, real("[0, 1)"), "decay of the residual, the sum of the gradients outside the subspace"
    )
    alpha: float = setting(0.001, real("[0, inf)"), "factor of the residual in an update")
    sigma: float = setting(
        0.4, real("(0, 1)"), "share of the expected decrease that an update must reach"
    )
    n_components: int = setting(32, integer(1), "number of directions of the subspace")
    pca_mat_path: str | None = setting(None, optional_path(), "file of a saved basis")
    weight_load_dir: str | None = setting(
        None, optional_path(), "folder of snapshots from which the basis is made"
    )
    # At most what Python can wait for.
    timeout: float = setting(1800, real("(0, 1e9]"), "seconds to wait for the basis of other ranks")
    method: str = setting(
        "p-bfgs",
        one_of(("p-bfgs", "p-sgd", "twa")),
        "quasi-Newton updates; the optimizer's, projected; these, from the snapshots' mean on",
    )
    trials: int = setting(2, integer(1), "number of step lengths to try")
    first_update_scaling: bool = setting(
        False, boolean(), "fit the first step length to the curvature"
    )
    stall_limit: int | None = setting(
        3, optional(integer(1)), "failed searches in a row before steps are shortened; null: never"
    )
    memory_limit: float = setting(
        4096, real("(0, inf)"), "MiB of snapshots in memory; if more, all go to a scratch file"
    )

    def idle_settings(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Only P-BFGS searches and has a residual. A saved basis replaces the snapshots."""
        if self.method != "p-bfgs":
            search = ("rho", "sigma", "trials", "first_update_scaling", "stall_limit")
            yield (*search, "gamma", "alpha"), f"dim_reduce.method is {self.method!r}"
        if self.pca_mat_path:
            yield ("weight_load_dir", "memory_limit"), "dim_reduce.pca_mat_path is given"

    def missing(self) -> str:
        """A basis comes from snapshots or from a file."""
        if self.pca_mat_path or self.weight_load_dir:
            return ""
        return (
            "dim_reduce needs dim_reduce.weight_load_dir (a folder of checkpoints) or "
            "dim_reduce.pca_mat_path (a saved basis), got neither"
        )


@dataclass(frozen=True)
class ThorConfig(Section):
    """Section ``thor``: THOR replaces the user's optimizer; the section switches it on.

    Learning rate, weight decay and parameters come from the optimizer. If ``momentum`` is None, it
    also comes from there; it is 0.9 if the optimizer has none. The other settings are the arguments
    of ``THOR``.
    """

    left_out_of_all = "it replaces the optimizer: give a section 'thor' to use it"
    given_means_on = True

    damping: Any = setting(
        0.03,
        either(real("[0, inf)"), reals("[0, inf)")),
        "damping of the factors; a list: one value per update, the last one stays",
    )
    momentum: float | None = setting(
        None, optional(real("[0, inf)")), "null: that of the optimizer, or 0.9"
    )
    batch_size: int = setting(32, integer(1), "batch size in the rule of LayerNorm")
    use_nesterov: bool = setting(False, boolean(), "Nesterov's momentum")
    split_indices: tuple[int, ...] | None = setting(
        None,
        optional(increasing_integers(0)),
        "numbers of the layers that end a group; ranks average group by group",
    )
    enable_clip_grad: bool = setting(
        False, boolean(), "bound the norm of each update by 1, before momentum"
    )
    # At most as in THOR, whose counter is an int32.
    frequency: int = setting(100, integer(1, 2**30), "updates between two refreshes of the factors")
    block_size: int | None = setting(
        None,
        optional(integer(1)),
        "size of the blocks into which larger factors are cut; null: whole factors",
    )
    trace_rule: tuple[float, ...] | None = setting(
        None,
        optional(reals("[0, inf)", 2)),
        "bounds on the change of a factor's trace, as in the article; null: no rule",
    )
    pi_damping: bool = setting(
        False, boolean(), "divide the damping between a layer's factors by their traces"
    )
    kl_clip: float | None = setting(
        None,
        optional(real("[1e-18, 1e18]")),
        "bound on the squared rate times the product of update and gradient",
    )
    moving_average: float = setting(0.0, real("[0, 1)"), "share of the old factors in a refresh")


@dataclass(frozen=True)
class LabelSmoothingConfig(Section):
    """Section ``label_smoothing``: the gradient of smoothed labels; the section switches it on."""

    left_out_of_all = "it trains on other labels: give a section 'label_smoothing' to use it"
    given_means_on = True

    smoothing: float = setting(0.1, real("(0, 1)"), "share of each label spread over all classes")
    if_unfit: str = setting(
        "refuse",
        one_of(("refuse", "skip")),
        "if the loss is unknown, or labels are not one class per sample: an error, or plain labels",
    )
    when: str = setting(
        "always", one_of(("always", "shorter")), "shorter: only if `short_schedule` saves updates"
    )


@dataclass(frozen=True)
class GradientCentralizationConfig(Section):
    """Section ``gradient_centralization``: centralized gradients; the section switches it on."""

    left_out_of_all = "less_bn.gc_flag does it: give a section 'gradient_centralization' to use it"
    given_means_on = True


@dataclass(frozen=True)
class CompiledStepConfig(Section):
    """Section ``compiled_step``: a graph per step in PYNATIVE_MODE; the section switches it on."""

    left_out_of_all = "the network has to compile: give a section 'compiled_step' to use it"
    given_means_on = True


@dataclass(frozen=True)
class CheaperOperatorsConfig(Section):
    """Section ``cheaper_operators``: faster operators on CPU; the section switches them on."""

    left_out_of_all = "it rounds differently: give a section 'cheaper_operators' to use it"
    given_means_on = True


@dataclass(frozen=True)
class GradientsConfig(Section):
    """Section ``gradients``: clipping at levels O1 and O2, whatever is switched on."""

    for_every_step = True

    # Outside this range float32 cannot hold norm / bound, or the square of a gradient at the bound.
    clip_norm: float | None = setting(
        None,
        optional(real("[1e-18, 1e18]")),
        "largest global norm of gradients; above 1.8e19 (times a fixed scale) they all become 0",
    )


@dataclass(frozen=True)
class LossScaleConfig(Section):
    """Section ``loss_scale``: gives a dynamic loss scale to a script that has no manager."""

    for_every_step = True

    # A step multiplies by the inverse, which is no normal float32 number for scales above 2 ** 126.
    init: float = setting(2.0**16, real("[1, 8e37]"), "initial loss scale")
    factor: int = setting(2, integer(2), "factor by which it grows, or shrinks at an overflow")
    window: int = setting(1000, integer(1), "steps without overflow before it grows")
