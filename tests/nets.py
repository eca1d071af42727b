"""Small networks, data and optimizers for the tests. Everything is a function of its seed."""

from __future__ import annotations

import functools
import os
import tempfile

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

# Tensors of fewer than 8 elements: the CPU kernels of RMSProp and AdamOffload round larger ones in
# the last bit as their threads happen to share the work, which no two runs need to agree on.
CLASSES, FEATURES, HIDDEN, BATCH = 3, 3, 2, 8


def scaled_at_random(x):
    """Draw a factor by NumPy."""
    return x if np.random.random() < 0.5 else 2 * x


class MLP(nn.Cell):
    """Dense, ReLU, Dense with fixed weights, so that two of them are equal."""

    def __init__(self, seed=0, hidden=HIDDEN):
        super().__init__()
        self.first = nn.Dense(FEATURES, hidden)
        self.relu = nn.ReLU()
        self.second = nn.Dense(hidden, CLASSES)
        fill(self, seed)

    def construct(self, x):
        return self.second(self.relu(self.first(x)))


class Deep(nn.Cell):
    """Dense layers with shortcuts, two more than ``hidden``."""

    def __init__(self, seed=0, hidden=4):
        super().__init__()
        self.first = nn.Dense(FEATURES, HIDDEN)
        self.hidden = nn.SequentialCell(
            [nn.Dense(HIDDEN, HIDDEN, activation="tanh") for _ in range(hidden)]
        )
        self.last = nn.Dense(HIDDEN, CLASSES)
        fill(self, seed)

    def construct(self, x):
        x = self.first(x)
        for layer in self.hidden:
            x = x + layer(x)
        return self.last(x)


class Normalised(nn.Cell):
    """Dense, LayerNorm, GELU, Dense, softmax: layers that are slow on CPU."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.norm, self.gelu, self.softmax = nn.LayerNorm((HIDDEN,)), nn.GELU(), nn.Softmax()
        fill(self)

    def construct(self, x):
        return self.softmax(self.second(self.gelu(self.norm(self.first(x)))))


class ConvNet(nn.Cell):
    """Convolution, BatchNorm, dropout, Dense: statistics and random numbers in the step."""

    def __init__(self, seed=0):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.head = nn.Dense(4 * 6 * 6, CLASSES)
        fill(self, seed)

    def construct(self, x):
        return self.head(self.flatten(self.relu(self.norm(self.conv(x)))))


class Pooled(nn.Cell):
    """A convolution and a pooled head: for images of any size."""

    def __init__(self, channels=2, classes=CLASSES):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, channels, 3), nn.Dense(channels, classes)

    def construct(self, x):
        return self.head(self.conv(x).mean((2, 3)))


class Lookup(nn.Cell):
    """An embedding whose gradient is row-sparse in GRAPH_MODE."""

    def __init__(self, rows, width, outputs):
        super().__init__()
        self.table = nn.EmbeddingLookup(rows, width, sparse=True)
        self.head = nn.Dense(width, outputs)

    def construct(self, rows):
        return self.head(self.table(rows)).sum()


class Outer(nn.Cell):
    """Runs a step inside its own graph, as MindSpore does in sink mode."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, *inputs):
        return self.step(*inputs)


def fill(net, seed=0):
    """Give every parameter of the network values drawn from ``seed``."""
    generator = np.random.default_rng(seed)
    for parameter in net.trainable_params():
        values = generator.normal(0, 0.3, parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(values))
    return net


@functools.cache
def basis_file(net=MLP, rows=8, seed=0):
    """Return the path of a file with random directions and a mean for a network's weights."""
    from mindspore_boost_ext.dim_reduce.basis import (  # the built-in package's runs lack it
        Basis,
        save_basis,
    )

    parameters = net().trainable_params()
    layout = tuple((one.name, tuple(one.shape)) for one in parameters)
    mean = np.concatenate([one.asnumpy().reshape(-1) for one in parameters])
    columns = np.random.default_rng(seed).normal(size=(len(mean), rows))
    components = np.ascontiguousarray(np.linalg.qr(columns)[0].T, np.float32)
    path = os.path.join(tempfile.mkdtemp(), "basis.npz")
    save_basis(path, Basis(components, np.full(rows, 1 / rows), mean, layout))
    return path


def batches(count, seed=1, image=False):
    """Return ``count`` pairs (inputs, labels) as NumPy arrays."""
    generator = np.random.default_rng(seed)
    shape = (BATCH, 1, 6, 6) if image else (BATCH, FEATURES)
    return [
        (
            generator.normal(0, 1, shape).astype(np.float32),
            generator.integers(0, CLASSES, BATCH).astype(np.int32),
        )
        for _ in range(count)
    ]


def dataset(count=4, seed=1, image=False, batch=BATCH):
    """Return the same samples as a MindSpore dataset, in batches of this size."""
    pairs = batches(count, seed, image)
    inputs = np.concatenate([pair[0] for pair in pairs])
    labels = np.concatenate([pair[1] for pair in pairs])
    return ms.dataset.NumpySlicesDataset((inputs, labels), shuffle=False).batch(batch)


def loss_fn():
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def weights(net):
    """Return all parameters of a cell as a dict name -> NumPy array."""
    return {parameter.name: parameter.asnumpy().copy() for parameter in net.get_parameters()}


def set_weights(net, values):
    """Set parameters as ``load_checkpoint`` does, from a dict name -> NumPy array."""
    loaded = {name: ms.Parameter(Tensor(value), name=name) for name, value in values.items()}
    not_loaded, _ = ms.load_param_into_net(net, loaded, strict_load=True)
    assert not not_loaded


def assert_same(first, second):
    """Demand bit-identical arrays under the same names."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def assert_same_weights(one, two):
    """Demand bit-identical parameters."""
    assert_same(weights(one), weights(two))


def momentum(params, **kwargs):
    return nn.Momentum(params, learning_rate=0.05, momentum=0.9, **kwargs)


# Every optimizer of mindspore.nn with CPU kernels. Lamb and LARS have none.
OPTIMIZERS = {
    "SGD": lambda params: nn.SGD(params, learning_rate=0.05, momentum=0.9, weight_decay=1e-3),
    "Momentum": lambda params: nn.Momentum(params, 0.05, 0.9, weight_decay=1e-3),
    "Adam": lambda params: nn.Adam(params, 0.01, weight_decay=1e-3),
    "AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 0.01, weight_decay=1e-2),
    "RMSProp": lambda params: nn.RMSProp(params, 0.01),
    "Adagrad": lambda params: nn.Adagrad(params, learning_rate=0.01),
    "FTRL": lambda params: nn.FTRL(params, learning_rate=0.05),
    "LazyAdam": lambda params: nn.LazyAdam(params, 0.01),
    "AdaFactor": lambda params: nn.AdaFactor(
        params, learning_rate=0.01, scale_parameter=False, relative_step=False
    ),
    "AdaMax": lambda params: nn.AdaMax(params, 0.01),
    "Adadelta": lambda params: nn.Adadelta(params, 0.1),
    "ASGD": lambda params: nn.ASGD(params, 0.01),
    "Rprop": lambda params: nn.Rprop(params, 0.01),
    "ProximalAdagrad": lambda params: nn.ProximalAdagrad(params, learning_rate=0.05),
    "AdamOffload": lambda params: nn.AdamOffload(params, 0.01),
}


class Around(nn.Cell):
    """A user's own loop around the step, or sink mode: a graph of another's holds the step."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x, y):
        return self.step(x, y) * 1.0
