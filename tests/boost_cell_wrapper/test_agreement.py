"""Ranks that were not given the same say so, every one of them, before they train."""

from __future__ import annotations

import nets
import pytest
import unequal_worker
from mindspore import Tensor
from models import model_of

from mindspore_boost_ext.boost_cell_wrapper.flush import Flush

REFUSED = {
    "clip": "gradients.clip_norm is 1.0 on rank 0, None on rank 1. Give every rank the same",
    "window": "grad_accumulation.grad_accumulation_step is 2 on rank 0, 3 on rank 1",
    "level": "boost_level is O1 on rank 0, O0 on rank 1",
    "shape": "weight 0.weight is Float32 (6, 3) on rank 0, Float32 (5, 3) on rank 1",
    "rate": "learning rate is 0.1 on rank 0, 0.2 on rank 1",
    "rates": "learning rate is _IteratorLearningRate(learning_rate 0.4, 0.3, 0.2, 0.1) on rank 0",
    "schedule": "on rank 0, CosineDecayLR(decay_steps 4, ",
    "scale": "loss scale is 64 on rank 0, 65 on rank 1",
    "dynamic scale": "loss scale is 64 on rank 0, 128 on rank 1",
    "batches": "number of batches in an epoch is 2 on rank 0, 3 on rank 1",
    "first batch": "updates of a batch is 2 on rank 0, 1 on rank 1. Give every rank batches of one",
    "labels": "labels that are classes of samples is True on rank 0, False on rank 1. Give every",
    "lengths": "first updates of the sizes of seq_length_warmup is [0, 1, 2] on rank 0, [0, 0, 2]",
    "padding": "seq_length_warmup is applied on rank 0, skipped on rank 1. Give every rank batches",
}


def test_every_case_is_judged():
    assert set(unequal_worker.NAMES) == {*REFUSED, "seed", "equal"}


@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_raises_the_same_error_and_trains_nothing(ended, mode, name):
    _, results = ended(2, mode)
    for result in results:
        message = result["unequal"][name]["messages"][0]
        assert REFUSED[name] in message
        assert not result["unequal"][name]["moved"]


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_ranks_that_begin_with_other_weights_are_warned_and_train(ended, mode):
    _, results = ended(2, mode)
    (message,) = results[0]["unequal"]["seed"]["messages"]
    assert "the weights are not the same on all ranks" in message
    assert "mindspore.set_seed" in message
    assert results[1]["unequal"]["seed"]["messages"] == []  # rank 0 speaks for the job
    assert all(result["unequal"]["seed"]["moved"] for result in results)


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_ranks_that_were_given_the_same_are_told_nothing(ended, mode):
    _, results = ended(2, mode)
    for result in results:
        assert result["unequal"]["equal"] == {"messages": [], "moved": True}


def test_weights_alone_are_broadcast_when_a_part_compiles_in_mid_training(graph_mode):
    """MindSpore asks at every compilation; buffers and moments may differ by rank by then."""
    net = nets.Deep()
    net.trainable_params()[0].requires_grad = False
    every = net.trainable_params()
    config = {"grad_accumulation": {"grad_accumulation_step": 2}}
    config["boost"] = {"mode": "manual", "less_bn": False, "grad_accumulation": True}
    config["grad_freeze"] = {"param_groups": 3, "schedule": [0, 0, 1]}
    step = model_of(net, config, nets.momentum(every)).train_network
    assert set(step.parameters_broadcast_dict()) == {one.name for one in net.get_parameters()}
    x, y = nets.batches(1)[0]
    step(Tensor(x), Tensor(y))
    names = {one.name for one in every}
    assert set(step.parameters_broadcast_dict()) == names
    for variant in step.choice_part.variants:
        assert set(Flush(variant).parameters_broadcast_dict()) <= names
