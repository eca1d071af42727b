"""One rank of a run in which a rank is killed in the middle of training; a script like any."""

from __future__ import annotations

import os
import signal
import sys

import distributed_worker
import mindspore as ms
import mindspore.boost
import nets
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank, init


def main(mode, folder, victim):
    print("rank", os.environ["RANK_ID"], sys.argv[1:], mindspore.boost.AutoBoost.__module__)
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    rank = get_rank()
    with open(f"{folder}/rank{rank}.pid", "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    _, step = distributed_worker.case("adasum")
    for index, (x, y) in enumerate(nets.batches(500)):
        if rank == int(victim) and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = (distributed_worker.share(one, rank, get_group_size()) for one in (x, y))
        step(Tensor(x), Tensor(y))


if __name__ == "__main__":
    main(*sys.argv[1:])
