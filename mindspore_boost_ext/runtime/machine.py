"""Tunes MindSpore for the CPU it runs on: deficits of its wheels, each with a measured cure."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

import mindspore as ms

from mindspore_boost_ext import _compat
from mindspore_boost_ext.config.rules import switched_off
from mindspore_boost_ext.report import APPLIED, INACTIVE, SKIPPED, NoEffectWarning, Row, warn
from mindspore_boost_ext.runtime import convolutions, division, functions_at_once
from mindspore_boost_ext.runtime.cure import Cure
from mindspore_boost_ext.runtime.replaced import FUNCTIONS
from mindspore_boost_ext.runtime.worker_threads import Placement

SWITCH_VARIABLE = "MINDSPORE_BOOST_EXT_TUNE"
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads both names
ISA = "AVX2"
_ONEDNN_AVX2, _ONEDNN_SUCCESS = 0x7, 0  # dnnl_cpu_isa_avx2, dnnl_success
# Flags that a processor must have before oneDNN uses its AVX-512 kernels.
AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))
# Blocking launch was measured on one and on two cores (examples/benchmarks/machine.py).
MOST_CORES = 2
# Threads on cores of their own were measured on two; they are slower where processes share cores.
PLACED_CORES = 2
_NONE_MADE = "no convolution was made yet, and without them AVX-512 is faster"
_OTHERS = "other processes keep the cores busy"
_OF_RANKS = ("MS_ROLE", "RANK_ID", "OMPI_COMM_WORLD_SIZE")  # msrun, rank tables, mpirun


class InstructionSet(Cure):
    """With AVX-512, oneDNN in the 2.9 and 2.10 wheels convolves by its slow reference kernel.

    All else is faster with it: a script that mentions no convolution keeps it until it makes one.
    """

    def __init__(self) -> None:
        # In this process oneDNN keeps the first setting that it gets.
        super().__init__("oneDNN instruction set", lambda: True, _limit_in_new_processes)
        self.made = self.in_graph = False  # whether there is a convolution; only in a graph

    def unneeded(self) -> str:
        """Return why convolutions are fast without the cure."""
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
        if self.reason != _NONE_MADE:  # convolutions were not watched until now
            self.made = convolutions.are_made()
        return "" if self.made else _NONE_MADE

    def update(self, off: str) -> None:
        """Apply, undo, or wait for the first convolution."""
        super().update(off)
        convolutions.unwatch()
        if self.reason == _NONE_MADE:
            convolutions.watch(self._convolve)

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
    """Keep oneDNN from AVX-512 in processes that this one starts, or no longer do so."""
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
    """A cure for threads that spin while they wait, and so keep others from the few cores."""

    def unneeded(self) -> str:
        """Return why the threads stay as they are."""
        cores = usable_cores()
        many = f"{cores} cores: measured on at most {MOST_CORES} only" if cores > MOST_CORES else ""
        return super().unneeded() or many

    def apply(self) -> tuple[str, str]:
        """Put the cure in place; the reason has the number of cores."""
        status, why = super().apply()
        return status, f"{usable_cores()} cores: {why}"


class BlockingLaunch(FewCoresCure):
    """On few cores, PYNATIVE_MODE's threads, which pass operators on, spin and slow each other.

    GRAPH_MODE does not read the setting, so a script may choose its mode later.
    """

    taken_back = "the script has reset it"

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
            self.set_back = "was switched on already"  # the user's, even if it changes later
        return self.set_back or super().unneeded()


class CompiledFunctions(FewCoresCure):
    """On few cores, the thread that calls a function of ``ms.jit`` spins while others run it.

    It passes the function on through a queue, in GRAPH_MODE, too, as it passes on each operator in
    PYNATIVE_MODE. Blocking launch does not change that.
    """

    def __init__(self) -> None:
        super().__init__(
            "ms.jit without a queue",
            functions_at_once.is_in_place,
            functions_at_once.put_in_place,
            "a waiting thread keeps others from computing",
        )

    def unneeded(self) -> str:
        """Return why functions stay in the queue."""
        if not functions_at_once.is_possible():
            return "this MindSpore has no way around the queue"
        return super().unneeded()


class OwnCores(FewCoresCure):
    """With three threads on two cores, one that spins while it waits keeps another from computing.

    Python's thread waits while MindSpore's two workers share an operator, in GRAPH_MODE, too. If
    both workers happen to be on one core, the other core only waits. Where other processes use a
    core, all three share one: each would wait for the worker that waits for the other process.
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
        """Apply or undo the cure; a forked process applies it anew, to its own threads only."""
        if self.status == APPLIED and self._placement.is_of_parent():
            self.status, self.reason = INACTIVE, "not tried"
        super().update(off)
        if self.status == APPLIED:
            shared = f"; now all share one: {_OTHERS}" if self._placement.is_shared() else ""
            self.reason = f"{len(self._placement.cores)} cores: {self.why}{shared}"

    def _place(self, apart: bool) -> None:
        """Place the threads when MindSpore has started them, or let them run on all cores."""
        if apart:
            self._placement = Placement()
        else:
            self._placement.undo()


_CURES: tuple[Cure, ...] = (
    *(InstructionSet(), BlockingLaunch(), CompiledFunctions(), OwnCores()),
    *FUNCTIONS,
    Cure(
        "division by one number in graphs",
        division.is_in_place,
        division.put_in_place,
        "by an operator that keeps no buffers",
    ),
)
_off = ""


def tune_machine(enabled: bool = True) -> tuple[Row, ...]:
    """Tune MindSpore for this machine's processor, or undo that; called by the import.

    On CPU only, it sets what is measured to be faster there, and nothing that the user has set: the
    instruction set of oneDNN, blocking launch, functions of ``ms.jit`` in the thread that calls
    them, a core for each thread that computes (one for all beside busy processes), and other
    operators in some functions of ``mindspore.ops`` and in ``/``. ``runtime/README.md`` has the
    conditions of each, and which results change: by rounding, or where MindSpore's are wrong.

    ``MINDSPORE_BOOST_EXT_TUNE=0`` in the environment overrules the import and every call. What the
    user sets after the import stays. A blocking launch switched off before the import looks like
    the default and is switched on.

    Args:
        enabled (bool): False undoes, until a call with True: blocking launch, ``ms.jit`` in the
            calling thread, the cores, the functions (not in compiled graphs), the environment
            variable. The instruction set stays in this process. Default: True.

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
    """Return the processor's flags as Linux names them; an empty set on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            found = next((line for line in file if re.match(r"flags\s*:", line)), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())
