"""Models of the tests: how one is built, and what its steps return."""

from __future__ import annotations

import mindspore as ms
import nets


def model_of(net, config=None, optimizer=None, kind=ms.Model, **arguments):
    """Return a Model with the tests' loss and optimizer: of level O1, or of O0 without a config."""
    optimizer = optimizer or nets.momentum(net.trainable_params())
    level = "O0" if config is None else "O1"
    arguments = {"boost_level": level, "boost_config_dict": config, **arguments}
    return kind(net, arguments.pop("loss_fn", nets.loss_fn()), optimizer, **arguments)


def loss_of(output):
    """Return the loss in what a step returns: alone, or before its flag and its scale."""
    return float((output[0] if isinstance(output, tuple) else output).asnumpy())
