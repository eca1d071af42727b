"""One rank of a run in which rank 1 leaves, stops, or has no more data; a script like any."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import mindspore as ms
import nets
from mindspore import Tensor
from mindspore.communication import get_rank, init

from mindspore_boost_ext import BoostModel

STEPS, LEAVES_AT = 8, 4


def main(how, mode, folder):
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    init()
    rank = get_rank()
    (pathlib.Path(folder) / f"rank{rank}.pid").write_text(str(os.getpid()))
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    config = {"boost": {"mode": "disable_all"}}
    model = BoostModel(net, nets.loss_fn(), optimizer, boost_level="O1", boost_config_dict=config)
    for number, (x, y) in enumerate(nets.batches(STEPS)):
        if rank == 1 and number == LEAVES_AT:
            if how == "exit":
                os._exit(0)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            break  # the data has ended, and with it the script
        model.train_network(Tensor(x), Tensor(y)).asnumpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
