"""What was compiled for a Model goes when the Model does; its step may run on, and goes, too."""

from __future__ import annotations

import gc
import weakref

import contract
import nets
import pytest
from mindspore import Tensor

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
