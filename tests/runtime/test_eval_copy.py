"""Copies of networks with layers in evaluation mode: they leave the network as it is."""

from __future__ import annotations

from mindspore import nn

from mindspore_boost_ext.runtime.eval_copy import EvalCopy


def test_the_flags_of_the_network_stay():
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5)).set_train()
    copy = EvalCopy(net, [net[1]]).network
    assert [copy[1].training, copy[1].get_flags()["training"]] == [False, False]
    copy.set_train(False)
    for cell in (net, net[1]):  # the Dense is in both
        assert [cell.training, cell.get_flags()["training"]] == [True, True]


def test_a_method_of_the_network_is_one_of_the_copy_also_if_it_is_set_later():
    net = nn.SequentialCell(nn.Dropout(p=0.5))
    copy = EvalCopy(net, [net[0]])
    net.along = [net[0].construct]
    copy.follow()
    assert copy.network.along[0].__self__ is copy.network[0]
