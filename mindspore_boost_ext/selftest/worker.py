"""One process of the selftest: does the checks, and writes each result as soon as it has it.

``python -m mindspore_boost_ext.selftest.worker ORDER.json``: the file says what to do. Lines of
JSON go to ``results_RANK.jsonl`` beside it: they show the check that ended the process, and those
not begun. What the process finds about its device goes to ``surroundings_RANK.json``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.communication import init

from mindspore_boost_ext.cli.run import MODES
from mindspore_boost_ext.report import APPLIED
from mindspore_boost_ext.runtime.machine import tuning
from mindspore_boost_ext.runtime.ranks import rank_and_count
from mindspore_boost_ext.selftest.checks import CHECKS
from mindspore_boost_ext.stages.overflow import DeviceFacts, choose_detector

_SETTINGS = ("MS_", "ASCEND_", "HCCL_", "CUDA_", "NCCL_", "RANK_", "DNNL_", "ONEDNN_")
PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible here"
# Largest error of a weight, as a share of its change. On CPU, float32 sums of at most 40 products
# and inverses of condition at most 10 are off by some 1e-6. Kernels of accelerators may multiply in
# shorter dtypes by default. One step too many or too few is off by 0.1 or more.
_ON_CPU, _ON_ACCELERATORS = 1e-4, 2e-2


def work(order: Path) -> None:
    """Do what an order says: ``device``, ``ranks``, ``modes`` and ``checks``."""
    wanted = json.loads(order.read_text(encoding="utf-8"))
    missing = _use(wanted["device"], wanted["ranks"])
    tolerance = _ON_CPU if wanted["device"] == "CPU" else _ON_ACCELERATORS
    rank, _ = rank_and_count()
    here = json.dumps(surroundings())
    (order.parent / f"surroundings_{rank}.json").write_text(here, encoding="utf-8")
    absent = {"status": NOT_POSSIBLE, "reason": missing, "seconds": 0.0}
    # Buffered by line, so that each line is in the file at once.
    with open(order.parent / f"results_{rank}.jsonl", "w", 1, encoding="utf-8") as file:
        for mode in wanted["modes"]:
            ms.set_context(mode=MODES[mode])
            for name in wanted["checks"]:
                begun = {"check": name, "mode": mode}
                file.write(json.dumps(begun) + "\n")
                line = {**begun, **absent} if missing else result(name, mode, tolerance)
                file.write(json.dumps(line) + "\n")


def _use(device: str, ranks: int) -> str:
    """Set up device and ranks; return why there is no such device, or ""."""
    try:
        ms.set_context(device_target=device)
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    if ranks > 1:
        init()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return ""


def surroundings() -> dict[str, Any]:
    """Return what this process finds about the device, and what is set for it."""
    detector = choose_detector()
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SETTINGS)}
    return {
        "facts": asdict(DeviceFacts.read()),
        "overflow detection": f"{detector.name}: {detector.why}",
        "environment": settings,
        "machine": [f"{row.algorithm}: {row.reason}" for row in tuning() if row.status == APPLIED],
    }


def result(name: str, mode: str, tolerance: float) -> dict[str, Any]:
    """Do a check in the mode that is set; return its line."""
    start = time.perf_counter()
    line: dict[str, Any] = {"check": name, "mode": mode}
    try:
        off = CHECKS[name]()
    except NotImplementedError as reason:  # a limit of the check or of the device
        line |= {"status": NOT_POSSIBLE, "reason": str(reason)}
    except Exception as error:  # any error of a device belongs in the table
        line |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    else:
        good = off <= tolerance
        line |= {"status": PASSED if good else FAILED, "off": off if math.isfinite(off) else None}
        line["reason"] = (
            "" if good else f"weights differ by {off:.2g} of their change; {tolerance:g} is allowed"
        )
    return line | {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    work(Path(sys.argv[1]))
