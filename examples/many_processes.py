"""LeNet-5 on several processes: data parallel, or AdaSum.

    msrun --worker_num=4 --local_worker_num=4 --join=True examples/many_processes.py
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/many_processes.py --adasum

Each process trains on its part of the images. Rank 0 shows its own progress, and the accuracy over
all images. Data parallel averages the processes' gradients, AdaSum combines their updates.
"""

from __future__ import annotations

import argparse
from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Metric

from mindspore_boost_ext import BoostMonitor
from mindspore_boost_ext.bundled import LeNet5, Shard, digits_datasets


class Accuracy(Metric):
    """Share of images in the right class, over the images of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = ops.AllReduce()
        self.clear()

    def clear(self) -> None:
        """Forget all images."""
        self.right, self.seen = 0, 0

    def update(self, *inputs: Any) -> None:
        """Count a batch: logits ``[batch, classes]`` and labels ``[batch]``."""
        logits, labels = (self._convert_data(one) for one in inputs)
        self.right += int((logits.argmax(axis=1) == labels).sum())
        self.seen += len(labels)

    def eval(self) -> float:
        """Return the accuracy; all processes call this together."""
        right, seen = self.sum(ms.Tensor([self.right, self.seen], ms.float32)).asnumpy()
        return float(right / seen)


def main() -> None:
    """Train on the part of this process, and say what the boost did."""
    parser = argparse.ArgumentParser(description="Train LeNet-5 on several processes.")
    parser.add_argument("--adasum", action="store_true", help="combine steps, not gradients")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)  # the same on all ranks: they have to begin with equal weights
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    train, test = digits_datasets(32, shard=Shard(get_rank(), get_group_size()))
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    net = LeNet5()
    model = ms.Model(
        net,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        nn.Momentum(net.trainable_params(), learning_rate=0.03, momentum=0.9),
        metrics={"accuracy": Accuracy()},
        boost_level="O1",
        boost_config_dict={
            "boost": {**switches, "adasum": options.adasum},
            "common": {"device_number": 1},  # every process is a server of its own
        },
    )
    model.fit(options.epochs, train, test, callbacks=[BoostMonitor()])
    accuracy = model.eval(test)["accuracy"]
    if get_rank() == 0:
        print(model.train_network.report())
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
