"""Checkpoints that version 0.1.0 wrote: each a pair, saved after 7 steps and after the 12th.

``python tests/old_checkpoints.py`` writes them, with the code at hand: only for a new algorithm.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import contract
import mindspore as ms
import numpy as np

from mindspore_boost_ext.runtime.machine import processor_flags

FOLDER = Path(__file__).parent / "data" / "checkpoints"
ABOUT = FOLDER / "about.json"


def stem_of(algorithm):
    return algorithm.name.replace(", ", "-").replace(" ", "_")


def path_of(algorithm, steps):
    return str(FOLDER / f"{stem_of(algorithm)}.{steps}.ckpt")


def writers():
    """Return on what processor, and with what, the checkpoints of each algorithm were written."""
    return json.loads(ABOUT.read_text(encoding="utf-8"))


def processor():
    """Return what decides on the last bits: another processor or MindSpore rounds differently."""
    flags = hashlib.sha256(" ".join(sorted(processor_flags())).encode()).hexdigest()
    return {"flags": flags[:16], "mindspore": ms.__version__, "numpy": np.__version__}


def write():
    """Write the checkpoints of all algorithms that have none yet."""
    ms.set_context(mode=ms.GRAPH_MODE)
    about = writers()
    for algorithm in contract.ALGORITHMS:
        if Path(path_of(algorithm, contract.STEPS)).exists():
            continue
        _, model = contract.switched_on(algorithm)
        for begin, end in ((0, contract.RESUME_AT), (contract.RESUME_AT, contract.STEPS)):
            contract.run(model, algorithm.batches(contract.STEPS)[begin:end])
            ms.save_checkpoint(model.train_network, path_of(algorithm, end))
        about[stem_of(algorithm)] = processor()
    ABOUT.write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
