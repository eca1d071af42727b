"""Overflow detection: did a gradient leave the range of its dtype? One protocol, four detectors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import functional

from mindspore_boost_ext import _compat
from mindspore_boost_ext.base.mapping import each, entry, size
from mindspore_boost_ext.base.sums import filled, finite_sums

CHECK_MODE_VARIABLE = "MS_ASCEND_CHECK_OVERFLOW_MODE"
_SATURATION_ONLY = frozenset({"ascend910", "ascend310", "ascend310p", "ascend310b"})
_BOTH_MODES = frozenset({"ascend910b", "ascend910_93"})
# Starting a kernel costs as much as reading this many values: smaller tensors are joined first.
_SMALL = 1 << 16
_WIDTH = 1024  # of the matrix that joins them


def _widened(value: Tensor) -> Tensor:
    return ops.cast(value, ms.float32) if value.dtype == ms.bfloat16 else value


def _finite_flag(value: Tensor) -> Tensor:
    """Return bool[1]: whether a tensor is finite. Kernels are fast only on a single axis."""
    return ops.all(ops.isfinite(ops.reshape(_widened(value), (-1,))), keep_dims=True)


def _finite_flags(values: tuple[Tensor, ...]) -> Tensor:
    """Return bool[n]: whether each of n tensors is finite."""
    return ops.concat(each(_finite_flag, values))


def _all_finite(values: tuple[Tensor, ...]) -> Tensor:
    """Return bool, shape (): whether all are finite; joins small ones of a dtype. For CPU."""
    singles, wide, half = _shared_out(each(size, values), each(_kind, values))
    flags: tuple[Tensor, ...] = each(_summed_flag, each(ops.partial(entry, values), singles))
    if len(wide) > 0:
        flags += (_summed_flag(_rows(each(ops.partial(_column, values), wide))),)
    if len(half) > 0:
        flags += (_finite_flag(ops.concat(each(ops.partial(_column, values), half))),)
    if len(flags) == 1:
        return ops.reshape(flags[0], ())
    return ops.concat(flags).all()


def _summed_flag(value: Tensor) -> Tensor:
    """Return bool[1]: whether a tensor is finite, tested by sums where that is faster."""
    value = _widened(value)
    return _finite_flag(finite_sums(value) if value.dtype == ms.float32 else value)


def _kind(value: Tensor) -> Any:
    return value.dtype


def _column(values: tuple[Tensor, ...], place: int) -> Tensor:
    return ops.reshape(_widened(values[place]), (-1,))


def _rows(columns: tuple[Tensor, ...]) -> Tensor:
    """Return 1-D tensors joined in one matrix, filled up with zeros."""
    joined = ops.concat(columns)
    missing = -joined.size % _WIDTH
    if missing > 0:
        joined = ops.concat((joined, filled(ms.float32, (missing,), 0.0)))
    return ops.reshape(joined, (-1, _WIDTH))


@ops.constexpr
def _shared_out(sizes: tuple[int, ...], kinds: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the places of tensors to be tested alone, joined as float32, joined as float16."""
    found: dict[Any, list[int]] = {None: [], ms.float32: [], ms.float16: []}
    for place, (count, kind) in enumerate(zip(sizes, kinds)):
        tested_as = ms.float32 if kind == ms.bfloat16 else kind
        found[tested_as if count <= _SMALL and tested_as in found else None].append(place)
    return tuple(tuple(places) for places in found.values())


# On CPU a dozen small operators one by one cost ten times a compiled graph of them.
@ms.jit
def _compiled_any_non_finite(*values: Tensor) -> Tensor:
    return ops.logical_not(_all_finite(values))


def _values(gradient: Tensor) -> Tensor:
    """Return the stored values: a dense gradient itself, or those of a row-sparse or COO one."""
    return gradient if isinstance(gradient, Tensor) else gradient.values


# In GRAPH_MODE, if a network has a sparse lookup, the compiler learns the types of all gradients
# late. Until then no operator accepts them; a MultitypeFuncGraph does.
_late_non_finite = ops.MultitypeFuncGraph("boost_late_non_finite")


@_late_non_finite.register("Tensor", "Tensor")
@_late_non_finite.register("Tensor", "RowTensor")
def _late_flag(so_far: Tensor, gradient: Tensor) -> Tensor:
    return ops.logical_or(so_far, ops.logical_not(_finite_flags((_values(gradient),))))


def _late_any_non_finite(gradients: tuple[Any, ...]) -> Tensor:
    so_far = Tensor([False])
    for gradient in gradients:
        so_far = _late_non_finite(so_far, gradient)
    if so_far:  # what a branch returns has a type at once
        return Tensor(True)
    return Tensor(False)


@ops.constexpr
def _is_late(kind: object) -> bool:
    """Return whether a type is one that the compiler does not know yet."""
    return "Undetermined" in str(kind)


class OverflowDetector(nn.Cell):
    """What the four detectors have in common. A Cell without parameters; use it inside construct.

    Args:
        why (str): one sentence for the report: why this detector.
        distributed (bool): whether the ranks must agree. Default: ``False``.

    Inputs:
        - **status** (Tensor) - first output of :meth:`start`.
        - **gradients** (tuple[Tensor, RowTensor, COOTensor]) - float16, bfloat16 or float32.

    Outputs:
        Tensor of bool, shape :math:`()`: True when there was an overflow, on any rank.

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import Tensor
        >>> from mindspore_boost_ext.stages.overflow import choose_detector
        >>> detector = choose_detector()
        >>> status, sens = detector.start(Tensor(1024.0), Tensor(0.5))
        >>> print(detector(status, (Tensor([1.0, float("inf")]), Tensor([0.0]))))
        True
    """

    name = ""

    def __init__(self, why: str = "", distributed: bool = False) -> None:
        super().__init__(auto_prefix=False)
        self.why = why
        self.distributed = distributed
        self.no_status = Tensor([0] * 8, ms.int32)
        if distributed:
            self.all_reduce = ops.AllReduce()

    def start(self, sens: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Begin to watch after the loss, ``after``; return the status (int32[8]) and ``sens``.

        The backward pass must start from the ``sens`` that is returned.
        """
        return self.no_status, sens

    def agree(self, flags: Tensor) -> Tensor:
        """Return bool flags that are True on all ranks where they are True on any of them."""
        if self.distributed:
            return ops.greater(self.all_reduce(ops.cast(flags, ms.float32)), 0)
        return flags


class RegisterDetector(OverflowDetector):
    """The float-status register of Ascend in saturation mode. It cannot tell gradients apart.

    The register is sticky and has no order of its own, so ``depend`` orders reading and clearing.
    The clear is tied to ``sens``: tied to the network's inputs, it would run the forward pass
    twice. Written, its graph checked; not run.
    """

    name = "ascend_register"

    def __init__(self, why: str = "", distributed: bool = False) -> None:
        super().__init__(why, distributed)
        self.get, self.clear = _compat.float_status_register()

    def start(self, sens: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Clear the register after the loss and before the backward pass that ``sens`` starts."""
        cleared = self.clear(ops.depend(self.no_status, after))
        return ops.depend(self.no_status, cleared), ops.depend(sens, cleared)

    def construct(self, status: Tensor, gradients: tuple[Any, ...]) -> Tensor:
        """Read the register after all gradients; compare on all ranks; leave it clear."""
        flags = self.get(ops.depend(status, gradients))
        if self.distributed:
            flags = self.all_reduce(flags)
        overflow = ops.not_equal(flags, 0).any()
        # An all-reduce can set the register, too: clear it once more before the next step.
        cleared = self.clear(ops.depend(status, overflow))
        return ops.depend(overflow, cleared)


class FiniteDetector(OverflowDetector):
    """A detector that looks at the gradients, and so can answer for some of them.

    A subclass says how values are tested, by :meth:`any_value_non_finite`.
    """

    def any_value_non_finite(self, values: tuple[Tensor, ...]) -> Tensor:
        """Return bool, shape (): True when any of n > 0 tensors holds inf or nan."""
        raise NotImplementedError

    def any_non_finite(self, gradients: tuple[Any, ...]) -> Tensor:
        """Return bool, shape (): True when any gradient is not finite. This rank only."""
        if len(gradients) == 0:
            return Tensor(False)
        if _is_late(functional.typeof(gradients)):
            return _late_any_non_finite(gradients)
        return self.any_value_non_finite(each(_values, gradients))

    def construct(self, status: Tensor, gradients: tuple[Any, ...]) -> Tensor:
        """Return whether any gradient is not finite, on any rank."""
        return self.agree(self.any_non_finite(gradients))


class InfNanDetector(FiniteDetector):
    """Ascend in inf/nan mode: AllFinite as one kernel for all gradients, else IsFinite.

    Written, its graph checked; not run.
    """

    name = "ascend_infnan"

    def __init__(self, why: str = "", distributed: bool = False, one_kernel: bool = True) -> None:
        super().__init__(why, distributed)
        self.one_kernel = one_kernel
        if one_kernel:
            self.operator = _compat.all_finite_operator()

    def any_value_non_finite(self, values: tuple[Tensor, ...]) -> Tensor:
        """Return whether any tensor holds inf or nan, shape ()."""
        if self.one_kernel:
            return ops.reshape(self.operator(values), ())
        return ops.logical_not(_finite_flags(values)).any()


class FloatStatusDetector(FiniteDetector):
    """GPU, FloatStatus: float32[1] for each tensor, 1.0 where it holds inf or nan.

    Written, its graph checked; not run.
    """

    name = "gpu_float_status"

    def __init__(self, why: str = "", distributed: bool = False) -> None:
        super().__init__(why, distributed)
        self.operator = ops.FloatStatus()

    def any_value_non_finite(self, values: tuple[Tensor, ...]) -> Tensor:
        """Return whether any tensor holds inf or nan, shape ()."""
        return ops.greater(ops.concat(each(self._status, values)), 0).any()

    def _status(self, value: Tensor) -> Tensor:
        return self.operator(_widened(value))


class CPUFiniteDetector(FiniteDetector):
    """CPU: IsFinite, compiled into one graph in both modes."""

    name = "cpu_finite"

    def any_value_non_finite(self, values: tuple[Tensor, ...]) -> Tensor:
        """Return whether any tensor holds inf or nan, shape ()."""
        return _compiled_any_non_finite(*values)


@dataclass(frozen=True)
class DeviceFacts:
    """All that the choice of a detector depends on; what is unset is empty."""

    target: str  # "CPU", "GPU" or "Ascend"
    soc: str = ""  # MindSpore's name of the Ascend chip, such as "ascend910b" or "ascend910_93"
    check_mode: str = ""  # value of MS_ASCEND_CHECK_OVERFLOW_MODE
    jit_level: str = ""  # level of the global jit configuration
    rank_table: bool = False  # whether RANK_TABLE_FILE is set
    all_finite_package: bool = True  # whether the one with AllFinite fits the installed CANN
    runtime_conf: str = ""  # value of MS_DEV_RUNTIME_CONF

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> DeviceFacts:
        """Ask MindSpore and the environment."""
        target = str(ms.get_context("device_target"))
        on_ascend = target == "Ascend"
        return cls(
            target=target,
            soc=_compat.ascend_soc() if on_ascend else "",
            check_mode=environment.get(CHECK_MODE_VARIABLE, ""),
            jit_level=str(ms.get_context("jit_level") or ""),
            rank_table="RANK_TABLE_FILE" in environment,
            all_finite_package=on_ascend and _compat.has_all_finite_package(),
            runtime_conf=environment.get("MS_DEV_RUNTIME_CONF", ""),
        )

    def saturates(self) -> tuple[bool, str]:
        """Return whether this Ascend saturates on overflow, and why."""
        if self.soc in _SATURATION_ONLY:
            return True, f"{self.soc} has the saturation mode only"
        asked = self.check_mode == "SATURATION_MODE"
        if self.soc in _BOTH_MODES:
            if asked:
                return True, f"{CHECK_MODE_VARIABLE}=SATURATION_MODE on {self.soc}"
            return False, f"inf/nan mode is the default of {self.soc}"
        passed_over = f"; {CHECK_MODE_VARIABLE} has no effect there" if asked else ""
        return False, f"{self.soc or 'this Ascend'} has the inf/nan mode only{passed_over}"

    def all_finite_usable(self) -> tuple[bool, str]:
        """Return whether AllFinite can be used on this Ascend, and why."""
        switch = self.runtime_conf.lower()
        if not self.all_finite_package:
            return False, "IsFinite: the package with AllFinite is missing or of another version"
        if self.rank_table:
            return False, "IsFinite: AllFinite does not work with RANK_TABLE_FILE"
        if "all_finite:true" in switch or "all_finite:false" in switch:
            usable = "all_finite:true" in switch
            return usable, f"{'AllFinite' if usable else 'IsFinite'}: set by MS_DEV_RUNTIME_CONF"
        if self.jit_level not in ("", "O0", "O1"):
            return False, f"IsFinite: AllFinite does not work with jit level {self.jit_level}"
        return True, "AllFinite: one kernel for all gradients"


def choose_detector(
    distributed: bool = False, facts: DeviceFacts | None = None
) -> OverflowDetector:
    """Return the detector for a device, by default the present one; only this function decides.

    It raises a ``ValueError`` if the target is not CPU, GPU or Ascend.

    Examples:
        >>> from mindspore_boost_ext.stages.overflow import DeviceFacts, choose_detector
        >>> detector = choose_detector(facts=DeviceFacts("Ascend", soc="ascend910"))
        >>> print(detector.name, "-", detector.why)
        ascend_register - ascend910 has the saturation mode only
    """
    facts = facts or DeviceFacts.read()
    if facts.target == "CPU":
        return CPUFiniteDetector("CPU keeps inf and nan: IsFinite on every gradient", distributed)
    if facts.target == "GPU":
        return FloatStatusDetector("GPU keeps inf and nan: FloatStatus", distributed)
    if facts.target != "Ascend":
        raise ValueError(f"device target must be CPU, GPU or Ascend, got {facts.target!r}")
    saturates, why = facts.saturates()
    if saturates:
        return RegisterDetector(why, distributed)
    one_kernel, kernel = facts.all_finite_usable()
    return InfNanDetector(f"{why}; {kernel}", distributed, one_kernel)
