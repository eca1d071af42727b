"""The training scripts of the THOR article: its own lines, with small networks in its places.

``test_article.py`` runs it as a script of a user: it must not import this package.
"""

# ruff: noqa: E501, I001  (the article's lines stand as they are)

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.amp import FixedLossScaleManager

# fmt: off
from mindspore.nn.optim import Lamb, Momentum, AdamWeightDecay, THOR  # noqa: F401
from mindspore.train.model import Model
from mindspore.train.train_thor import ConvertModelUtils
# fmt: on

STEPS = 4  # in an epoch
config = SimpleNamespace(
    epoch_size=6,
    pretrain_epoch_size=0,
    momentum=0.9,
    weight_decay=1e-4,
    loss_scale=128,
    batch_size=8,
    frequency=3,
)
cfg = SimpleNamespace(
    batch_size=8,
    Thor=SimpleNamespace(momentum=0.9, weight_decay=1e-4, loss_scale=1, frequency=3),
)
args_opt = SimpleNamespace(enable_data_sink="false", data_sink_steps=STEPS)
# Rates and dampings of each step, as arrays of NumPy: what the article's generators return.
lr = np.linspace(0.05, 0.01, STEPS * config.epoch_size).astype(np.float32)
damping = np.linspace(0.3, 0.1, STEPS * config.epoch_size).astype(np.float32)


class Losses(ms.train.Callback):
    """Keeps the mean loss of each epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs = [], []

    def on_train_step_end(self, run_context):
        found = run_context.original_args().net_outputs
        found = found[0] if isinstance(found, (tuple, list)) else found
        self.steps.append(float(found.asnumpy()))

    def on_train_epoch_end(self, run_context):
        self.epochs.append(float(np.mean(self.steps)))
        self.steps.clear()


def data():
    """Return four batches of images that show their class."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, STEPS * config.batch_size).astype(np.int32)
    images = generator.normal(0, 1, (len(labels), 1, 6, 6)) + labels.reshape(-1, 1, 1, 1)
    slices = ms.dataset.NumpySlicesDataset((images.astype(np.float32), labels), shuffle=False)
    return slices.batch(config.batch_size)


def network():
    return nn.SequentialCell(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dense(4 * 6 * 6, 3),
    )


def resnet50():
    """Train by the lines for ResNet50, with the call of train from the four lines."""
    dataset, net, cb = data(), network(), Losses()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    opt = Momentum(net.trainable_params(), 0.1, config.momentum, loss_scale=config.loss_scale)
    loss_scale = FixedLossScaleManager(config.loss_scale, drop_overflow_update=False)
    # fmt: off
    model = Model(net, loss_fn=loss, optimizer=opt, loss_scale_manager=loss_scale, metrics={'acc'},
                  amp_level="O2", keep_batchnorm_fp32=False)
    split_indices = [26, 53]
    opt = THOR(net, lr, Tensor(damping), config.momentum, config.weight_decay, config.loss_scale,
               config.batch_size, split_indices=split_indices)
    model = ConvertModelUtils().convert_to_thor_model(model=model, network=net, loss_fn=loss, optimizer=opt,
                                                      loss_scale_manager=loss_scale, metrics={'acc'},
                                                      amp_level="O2", keep_batchnorm_fp32=False,
                                                      frequency=config.frequency)
    model.train(config.epoch_size, dataset, callbacks=cb, sink_size=dataset.get_dataset_size(), dataset_sink_mode=True)
    # fmt: on
    return cb.epochs, opt


class BertTrainOneStepCell(nn.TrainOneStepCell):
    """A step that leaves differentiating to MindSpore's."""


def bert():
    """Train by the lines for BERT: a network with its loss, in a step cell."""
    ds, network_alone, callback, new_repeat_count = data(), network(), Losses(), config.epoch_size
    net_with_loss = nn.WithLossCell(
        network_alone, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    )
    split_indices = [28, 55, 82, 109, 136, 163, 190, 205]
    # fmt: off
    optimizer = THOR(network_alone, lr, damping, cfg.Thor.momentum,
                     cfg.Thor.weight_decay, cfg.Thor.loss_scale, cfg.batch_size,
                     decay_filter=lambda x: 'layernorm' not in x.name.lower() and 'bias' not in x.name.lower(),
                     split_indices=split_indices)
    net_with_grads = BertTrainOneStepCell(net_with_loss, optimizer=optimizer)
    model = Model(net_with_grads)
    model = ConvertModelUtils().convert_to_thor_model(model, network=net_with_grads, optimizer=optimizer,
                                                      frequency=cfg.Thor.frequency)
    model.train(new_repeat_count, ds, callbacks=callback,
                dataset_sink_mode=(args_opt.enable_data_sink == "true"), sink_size=args_opt.data_sink_steps)
    # fmt: on
    return callback.epochs, optimizer


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    for train in (resnet50, bert):
        epochs, optimizer = train()
        refreshes = optimizer.observations()["thor.refreshes"]
        print("found", json.dumps({"losses": epochs, "refreshes": refreshes}))
