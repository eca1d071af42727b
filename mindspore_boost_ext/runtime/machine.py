"""Tunes MindSpore for the CPU it runs on: deficits of its wheels, each with a measured cure."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import mindspore as ms
from mindspore import ops
from mindspore.ops import composite, function, functional
from mindspore.ops.function import clip_func, nn_func

from mindspore_boost_ext import _compat
from mindspore_boost_ext.config.rules import switched_off
from mindspore_boost_ext.report import APPLIED, INACTIVE, SKIPPED, NoEffectWarning, Row, warn
from mindspore_boost_ext.runtime import (
    clipping,
    convolutions,
    cross_entropy,
    functions_at_once,
    max_pool,
    padding,
)
from mindspore_boost_ext.runtime.worker_threads import Placement

SWITCH_VARIABLE = "MINDSPORE_BOOST_EXT_TUNE"
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads both names
ISA = "AVX2"
_ONEDNN_AVX2, _ONEDNN_SUCCESS = 0x7, 0  # dnnl_cpu_isa_avx2, dnnl_success
# What oneDNN asks of a processor before it takes its AVX-512 kernels.
AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))
# Blocking launch was measured on one and on two cores (examples/benchmarks/machine.py).
MOST_CORES = 2
# So were threads on cores of their own, which lose where processes share these.
PLACED_CORES = 2
_NONE_MADE = "no convolution was made yet, and without them AVX-512 is faster"
# Where scripts find the functions of mindspore.ops.
_NAMESPACES: tuple[Any, ...] = (ops, function, functional, composite, nn_func, clip_func)
_OF_RANKS = ("MS_ROLE", "RANK_ID", "OMPI_COMM_WORLD_SIZE")  # msrun, rank tables, mpirun


class Cure:
    """One deficit of MindSpore on some machines, and what mends it: a setting, or a function.

    ``is_in_place`` returns whether that is there, or None where somebody else's is;
    ``put_in_place`` puts it there, or puts back what was, as far as that can be done.
    """

    # The reason when it is no longer there.
    taken_back: ClassVar[str] = "the script has reset it"

    def __init__(
        self,
        name: str,
        is_in_place: Callable[[], bool | None],
        put_in_place: Callable[[bool], None],
        why: str = "",
    ) -> None:
        self.name, self.why = name, why  # as they stand in reports
        self.is_in_place, self.put_in_place = is_in_place, put_in_place
        # SKIPPED where it is needed, but no longer possible.
        self.status, self.reason = INACTIVE, "not tried"
        self.set_back = ""

    def unneeded(self) -> str:
        """Return why this machine does without; empty if it needs the cure."""
        return self.taken_back if self.is_in_place() is None else ""

    def apply(self) -> tuple[str, str]:
        """Put the cure in place; return the status and the reason."""
        self.put_in_place(True)
        return APPLIED, self.why

    def update(self, off: str) -> None:
        """Apply or undo, as is wanted now; ``off`` is why nothing may be changed, or empty."""
        if self.status == APPLIED and not self.is_in_place():
            self.set_back = self.taken_back
        reason = off or self.set_back
        if self.status == INACTIVE:
            reason = reason or self.unneeded()
            self.status, self.reason = (INACTIVE, reason) if reason else self.apply()
        elif reason:
            self.put_in_place(False)
            self.status, self.reason = INACTIVE, reason


class InstructionSet(Cure):
    """With AVX-512, oneDNN of the 2.9 and 2.10 wheels convolves by its reference kernel.

    All else is faster with it: a script that seems to make no convolution keeps it until it does.
    """

    def __init__(self) -> None:
        # In this process oneDNN keeps what it was given once.
        super().__init__("oneDNN instruction set", lambda: True, _limit_in_new_processes)
        self.made = False  # a convolution

    def unneeded(self) -> str:
        """Return why convolutions are fast without."""
        if not _compat.ONEDNN_LACKS_AVX512:
            return "convolutions of this MindSpore are not known to be slow"
        if not processor_flags() >= AVX512:
            return "convolutions are slow only with AVX-512, which this processor lacks"
        given = [name for name in ISA_VARIABLES if name in os.environ]
        if given and os.environ[given[0]] == ISA:
            return f"{given[0]}={ISA} was given, or set by the process that started this one"
        if given:
            return f"{given[0]}={os.environ[given[0]]} was given"
        if self.made or convolutions.are_expected():
            return ""
        if self.reason != _NONE_MADE:  # nobody has watched until now
            self.made = convolutions.are_made()
        return "" if self.made else _NONE_MADE

    def update(self, off: str) -> None:
        """Apply, undo, or wait for the first convolution."""
        super().update(off)
        if self.reason == _NONE_MADE:
            convolutions.watch(self._convolve)
        else:
            convolutions.unwatch()

    def _convolve(self, in_graph: bool) -> None:
        self.made, self.in_graph = True, in_graph
        tuning()

    def apply(self) -> tuple[str, str]:
        """Limit oneDNN, in this process and in those that it starts."""
        if limit_onednn():
            self.put_in_place(True)
            slow = "convolutions of this wheel are tens of times slower with AVX-512"
            others = f"a network without them is faster with {ISA_VARIABLES[0]}=AVX512_CORE"
            return APPLIED, f"{ISA}: {slow}" if self.made else f"{ISA}: {slow}; {others}"
        event, first = "the import", "import mindspore_boost_ext"
        if self.made:
            event, first = "the first convolution was made", "make one"
        if self.made and self.in_graph:
            event, first = "a graph was loaded, which may hold some", "load one"
        late = (
            f"an operator of oneDNN ran before {event}, so convolutions stay tens of times "
            f"slower: set {ISA_VARIABLES[0]}={ISA}, or {first} first"
        )
        warn(late, NoEffectWarning)
        self.put_in_place(True)
        return SKIPPED, late


def _limit_in_new_processes(limited: bool) -> None:
    """Let processes that this one starts keep oneDNN from AVX-512, or no longer."""
    if limited:
        os.environ[ISA_VARIABLES[0]] = ISA
    elif os.environ.get(ISA_VARIABLES[0]) == ISA:
        del os.environ[ISA_VARIABLES[0]]


@functools.cache  # oneDNN takes the setting once
def limit_onednn() -> bool:
    """Keep oneDNN from AVX-512; return whether that was in time, before its first operator."""
    libraries = sorted((Path(ms.__file__).parent / "lib").glob("libdnnl.so*"))
    try:
        library = ctypes.CDLL(str(libraries[0]), mode=os.RTLD_NOLOAD)
    except (IndexError, OSError):
        return True  # not loaded yet: it will read the environment
    return bool(library.dnnl_set_max_cpu_isa(_ONEDNN_AVX2) == _ONEDNN_SUCCESS)


class FewCoresCure(Cure):
    """A cure of threads that wait and spin, and so keep others from their few cores."""

    def unneeded(self) -> str:
        """Return why the threads stay as they are."""
        cores = usable_cores()
        many = f"{cores} cores: measured on at most {MOST_CORES} only" if cores > MOST_CORES else ""
        return super().unneeded() or many

    def apply(self) -> tuple[str, str]:
        """Put the cure in place; the reason has the cores."""
        status, why = super().apply()
        return status, f"{usable_cores()} cores: {why}"


class BlockingLaunch(FewCoresCure):
    """On few cores, the threads by which PYNATIVE_MODE hands operators on spin in each other's way.

    GRAPH_MODE does not read the setting, so a script may choose its mode later.
    """

    def __init__(self) -> None:
        super().__init__(
            "blocking launch in PYNATIVE_MODE",
            _compat.launches_blocking,
            _compat.set_blocking_launch,
            "MindSpore's threads block each other",
        )

    def unneeded(self) -> str:
        """Return why operators are not launched one after the other."""
        if self.is_in_place():
            self.set_back = "was switched on already"  # the user's, also if it changes later
        return self.set_back or super().unneeded()


class CompiledFunctions(FewCoresCure):
    """On few cores, the thread that calls a function of ``ms.jit`` spins while others run it.

    It hands the function on through a queue, as it does each operator of PYNATIVE_MODE; blocking
    launch does not reach it. In GRAPH_MODE, too.
    """

    taken_back = "the script has replaced it"

    def __init__(self) -> None:
        super().__init__(
            "ms.jit without a queue",
            functions_at_once.is_in_place,
            functions_at_once.put_in_place,
            "a waiting thread keeps others from computing",
        )

    def unneeded(self) -> str:
        """Return why functions are handed on."""
        if not functions_at_once.is_possible():
            return "this MindSpore has no way around the queue"
        return super().unneeded()


class OwnCores(FewCoresCure):
    """With three threads on two cores, one that waits, and spins, keeps one from computing.

    Python's thread waits while MindSpore's two workers share out an operator; where those happen
    to be on one core, the other core only waits. In GRAPH_MODE, too.
    """

    taken_back = "the script has placed them itself"
    _placement: Placement  # when it has been applied

    def __init__(self) -> None:
        super().__init__(
            "a core for each worker thread",
            lambda: self._placement.in_force(),
            self._place,
            "a waiting thread keeps others from computing",
        )

    def unneeded(self) -> str:
        """Return why threads stay where the system puts them."""
        if not hasattr(os, "sched_setaffinity"):
            return "this system does not let a process place its threads"
        if any(name in os.environ for name in _OF_RANKS):
            return "ranks share the cores"
        one = usable_cores() == PLACED_CORES
        return "" if one else f"{usable_cores()} cores: measured on {PLACED_CORES} only"

    def update(self, off: str) -> None:
        """Apply or undo; in a forked process anew, for its own threads alone."""
        if self.status == APPLIED and self._placement.is_of_parent():
            self.status, self.reason = INACTIVE, "not tried"
        super().update(off)

    def _place(self, apart: bool) -> None:
        """Place the threads when MindSpore has started them, or let them run on all cores."""
        if apart:
            self._placement = Placement()
        else:
            self._placement.undo()


class FunctionCure(Cure):
    """A function of ``mindspore.ops`` that our own of the same name takes the place of."""

    taken_back = "the script has replaced it"

    def __init__(self, name: str, own: Callable[..., object], why: str) -> None:
        super().__init__(name, self._is_ours, self._put, why)
        self.own, self._name = _compat.not_rewritten(own), own.__name__
        self._plain: Callable[..., object] = getattr(ops, self._name)

    def _is_ours(self) -> bool | None:
        """Return whether a script finds our own under the name; None if it is another's."""
        found = getattr(ops, self._name)
        return found is self.own if found in (self._plain, self.own) else None

    def _put(self, ours: bool) -> None:
        """Let the name be our own's, or MindSpore's, wherever it is not another's."""
        for namespace in _NAMESPACES:
            if getattr(namespace, self._name, None) in (self._plain, self.own):
                setattr(namespace, self._name, self.own if ours else self._plain)


_FUNCTIONS = (
    FunctionCure(
        "gradient of ops.max_pool2d",
        max_pool.max_pool2d,
        "uses an operator whose gradient takes linear time, not quadratic",
    ),
    FunctionCure(
        "ops.cross_entropy",
        cross_entropy.cross_entropy,
        "in PYNATIVE_MODE its gradient is one operator, and unused label smoothing is skipped",
    ),
    FunctionCure(
        "ops.pad",
        padding.pad,
        "MindSpore's gradient is wrong in graphs from the second step on: joined there",
    ),
    FunctionCure(
        "ops.clip_by_global_norm",
        clipping.clip_by_global_norm,
        "one factor from sums along rows, where MindSpore's divides number by number",
    ),
)
_CURES: tuple[Cure, ...] = (
    *(InstructionSet(), BlockingLaunch(), CompiledFunctions(), OwnCores()),
    *_FUNCTIONS,
)
_off = ""


def tune_machine(enabled: bool = True) -> tuple[Row, ...]:
    """Tune MindSpore for this machine's processor, or undo that; called by the import.

    Sets what is measured to be faster on such a machine, on CPU only, and never what the user has
    set: the instruction set of oneDNN before its first operator, in a script that does not speak of
    convolutions before the first one is made; blocking launch, which acts in
    PYNATIVE_MODE; functions of ``ms.jit`` that run in the thread that calls them; a core of its own
    for each thread that computes; ``ops.max_pool2d`` by an operator whose gradient takes linear
    time; ``ops.cross_entropy`` in PYNATIVE_MODE by a gradient of one operator; ``ops.pad`` with
    constants, of which MindSpore's gradient is wrong in graphs; and ``ops.clip_by_global_norm`` by
    one factor.
    ``MINDSPORE_BOOST_EXT_TUNE=0`` in the environment overrules the import and every call.
    What the user sets later stays. A blocking launch switched off before the import looks like the
    default and is switched on; a second ``set_context`` after the import is not.

    Results change by rounding where the instruction set does (relative 1e-6 for a convolution), in
    ``ops.clip_by_global_norm`` (1e-6) and in ``ops.cross_entropy`` (1e-5), and not by the others,
    but for what MindSpore's ``ops.pad`` has wrong, and for windows of ``ops.max_pool2d`` with NaN
    or of -inf alone.

    Args:
        enabled (bool): False undoes what can be undone, and keeps it so until called with True:
            blocking launch, functions of ``ms.jit``, the threads' cores, the functions (but
            for what is compiled), and the variable of the environment. The instruction set stays in
            this process.
            Default: True.

    Returns:
        tuple[Row], a row for each cure, as in every report.

    Supported Platforms:
        Run: ``CPU``. On ``Ascend`` and ``GPU`` nothing is changed.

    Examples:
        >>> from mindspore_boost_ext import tune_machine
        >>> {row.status for row in tune_machine(False)}
        {'inactive'}
        >>> rows = tune_machine()
    """
    global _off
    if enabled:
        for cure in _CURES:
            cure.set_back = ""  # the latest word counts
    _off = "" if enabled else "switched off by tune_machine(False) or uninstall()"
    return tuning()


def is_replacement(thing: object) -> bool:
    """Return whether something stands for a function of MindSpore's."""
    return any(thing is one.own for one in _FUNCTIONS)


def is_tuned() -> bool:
    """Return whether nobody has switched the tuning off by :func:`tune_machine`."""
    return not _off


def tuning(at_import: bool = False) -> tuple[Row, ...]:
    """Bring the tuning up to date with the device in force; return a row for each cure.

    At import the script may still choose another device.
    """
    reason = _off
    if switched_off(SWITCH_VARIABLE):
        reason = f"switched off by {SWITCH_VARIABLE}={os.environ[SWITCH_VARIABLE]}"
    reason = reason or _compat.no_cpu_training(at_import)
    for cure in _CURES:
        cure.update(reason)
    return tuple(
        Row(f"machine: {cure.name}", "import", cure.status, cure.reason) for cure in _CURES
    )


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_flags() -> frozenset[str]:
    """Return what the processor can do, in Linux's words; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            found = next((line for line in file if re.match(r"flags\s*:", line)), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())
