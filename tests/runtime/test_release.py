"""What was compiled for a Model goes when the Model does; its step may run on, and goes, too."""

from __future__ import annotations

import gc
import weakref

import contract
import mindspore as ms
import nets
import pytest
from mindspore import Tensor, nn
from models import model_of

from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.runtime.release import release_dropped

KINDS = ("nothing", "dynamic loss scale", "grad_accumulation", "grad_freeze", "thor")
KINDS += ("compiled_step", "dim_reduce, p-bfgs", "less_bn, head")
ALGORITHMS = [one for one in contract.ALGORITHMS if one.name in KINDS]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
def test_a_dropped_model_leaves_no_graph_and_its_step_goes_on(mode, algorithm):
    batches = nets.batches(6)
    _, whole = contract.switched_on(algorithm)
    for part in (batches[:4], batches[4:]):
        contract.run(whole, part)
        whole.train_network.flush_accumulation()
    before = compiled_graphs()
    _, model = contract.switched_on(algorithm)
    step = model.train_network
    contract.run(model, batches[:4])
    step.flush_accumulation()
    assert compiled_graphs() > before
    del model
    gc.collect()
    release_dropped()  # what building the next Model does
    assert compiled_graphs() == before
    for x, y in batches[4:]:
        step(Tensor(x), Tensor(y))
    step.flush_accumulation()
    nets.assert_same_weights(step, whole.train_network)
    gone = weakref.ref(step.network)
    del step
    gc.collect()
    assert gone() is None


class Scored(nn.Cell):
    """Has a second way to be called, which a graph must not take for its ``construct``."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(nets.FEATURES, nets.CLASSES)
        nets.fill(self, 0)

    def construct(self, x):
        return self.dense(x)

    @ms.jit
    def score(self, x):
        return self.dense(x) * 10


def test_a_batch_of_another_shape_compiles_construct(graph_mode):
    """As the last one of an epoch, after an evaluation by a function of ``ms.jit``."""
    weights = []
    for scored in (False, True):
        net = Scored()
        model = model_of(net, {"boost": {"mode": "disable_all"}})
        batches = nets.batches(2)
        contract.run(model, batches[:1])
        if scored:
            net.score(Tensor(batches[0][0]))
        contract.run(model, [tuple(one[:3] for one in batches[1])])
        weights.append(nets.weights(net))
    nets.assert_same(*weights)


class Holder(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = Scored()

    def construct(self, x):
        return self.inner(x)


def test_a_layer_put_in_between_two_modes_compiles_construct(graph_mode):
    weights = []
    for scored in (False, True):
        ms.set_context(mode=ms.PYNATIVE_MODE)
        net = Holder()
        model = model_of(net, {"boost": {"mode": "disable_all"}})
        batches = nets.batches(2)
        contract.run(model, batches[:1])
        fresh = Scored().set_train()
        fresh.dense = net.inner.dense
        net.inner = fresh
        if scored:
            fresh.score(Tensor(batches[0][0]))
        ms.set_context(mode=ms.GRAPH_MODE)
        contract.run(model, batches[1:])
        weights.append(nets.weights(net))
    nets.assert_same(*weights)
