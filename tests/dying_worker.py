"""One rank of a run in which a rank is killed in the middle of training; a script like any.

Each rank saves a checkpoint of its own after every step. Started again with no victim, the ranks go
on from the last step that all of them have saved, train anew without interruption, and write down
what differs.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time

import distributed_worker
import fault_worker
import mindspore as ms
import mindspore.boost
import nets
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank, init

from mindspore_boost_ext import _compat, save_checkpoint

MSRUN_RESTS = _compat.VERSION >= (2, 8)  # between two looks at the ranks
STEPS = 8
DIES_AT = random.Random(20).randint(2, STEPS - 2)


def checkpoint(folder, rank, steps):
    return folder / f"rank{rank}_after{steps}.ckpt"


def await_a_look_of(launcher):
    """Wait until msrun has just looked whether all ranks live, which it does every second.

    A rank that dies as it looks leaves the others no time to say so: they are killed at once. The
    msrun of MindSpore 2.7 looks all the time, so that there is nothing to wait for.
    """
    if not MSRUN_RESTS:
        return

    def waits():
        text = pathlib.Path(f"/proc/{launcher}/status").read_text()
        return next(line for line in text.splitlines() if line.startswith("voluntary"))

    before = waits()
    while waits() == before:
        time.sleep(0.01)


def train_from(step, folder, first, victim=None):
    """Make the steps from ``first`` on, save after each if there is a victim, which dies."""
    rank = get_rank()
    for index, (x, y) in list(enumerate(nets.batches(STEPS)))[first:]:
        if rank == victim and index == DIES_AT:
            await_a_look_of(os.getppid())
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = (distributed_worker.share(one, rank, get_group_size()) for one in (x, y))
        step(Tensor(x), Tensor(y))
        if victim is not None:
            save_checkpoint(step, checkpoint(folder, rank, index + 1))


def resumed(folder):
    """Finish the killed run; return where it went on, and what differs from a whole run."""
    everyone = range(get_group_size())
    saved = [n for n in range(STEPS) if all(checkpoint(folder, r, n).exists() for r in everyone)]
    _, second = distributed_worker.case("adasum")
    values = ms.load_checkpoint(str(checkpoint(folder, get_rank(), saved[-1])))
    missing, _ = ms.load_param_into_net(second, values)
    train_from(second, folder, saved[-1])
    _, whole = distributed_worker.case("adasum")
    train_from(whole, folder, 0)
    different = fault_worker.different(nets.weights(second), nets.weights(whole))
    return {"resumed_at": saved[-1], "missing": missing, "different": different}


def main(mode, folder, victim=None):
    # Flushed: a rank that is killed does not end as Python does.
    words = sys.argv[1:], mindspore.boost.AutoBoost.__module__
    print("rank", os.environ["RANK_ID"], *words, flush=True)
    folder = pathlib.Path(folder)
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    (folder / f"rank{get_rank()}.pid").write_text(str(os.getpid()))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    if victim is None:
        (folder / f"rank{get_rank()}.json").write_text(json.dumps(resumed(folder)))
    else:
        train_from(distributed_worker.case("adasum")[1], folder, 0, int(victim))


if __name__ == "__main__":
    main(*sys.argv[1:])
