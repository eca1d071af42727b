"""The section ``loss_scale``: a dynamic scale for a script that gives no manager."""

from __future__ import annotations

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from mindspore_boost_ext import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    make_train_step,
    recipe,
)

SECTION = {"init": 256.0, "factor": 4, "window": 2}
OVERFLOWS = 3


def config_of(**sections):
    return {
        "boost": {"mode": "manual", **dict.fromkeys(AutoBoost().boost_config, False)},
        **sections,
    }


def batches():
    data = nets.batches(6)
    data[OVERFLOWS][0][0, 0] = np.inf
    return data


def by_model(net, optimizer, config, **scale):
    loss = nets.loss_fn()
    return ms.Model(
        net, loss, optimizer, boost_level="O1", boost_config_dict=config, **scale
    ).train_network


def by_function(net, optimizer, config, **scale):
    step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config, **scale)
    return step.train_network


@pytest.mark.parametrize("make", [by_model, by_function])
def test_it_is_the_manager_of_the_same_numbers(mode, make):
    found, nets_of = [], []
    for config, scale in (
        (config_of(loss_scale=SECTION), {}),
        (config_of(), {"loss_scale_manager": ms.DynamicLossScaleManager(256, 4, 2)}),
    ):
        ms.set_seed(3)
        net = nets.MLP()
        step = make(net, nets.momentum(net.trainable_params()), config, **scale)
        nets_of.append(net)
        found.append([step(Tensor(x), Tensor(y))[2].asnumpy().item() for x, y in batches()])
    assert found[0] == found[1]
    assert found[0][OVERFLOWS + 1] == found[0][OVERFLOWS] / 4
    first, second = map(nets.weights, nets_of)
    for name, value in second.items():
        np.testing.assert_array_equal(first[name], value, err_msg=name)


@pytest.mark.parametrize("make", [by_model, by_function])
def test_a_manager_of_the_scripts_own_stays(make):
    net = nets.MLP()
    manager = ms.DynamicLossScaleManager(8, 2, 100)
    step = make(
        net,
        nets.momentum(net.trainable_params()),
        config_of(loss_scale=SECTION),
        loss_scale_manager=manager,
    )
    row = step.report()["loss_scale"]
    assert (row.status, row.asked_by) == ("skipped", "section loss_scale")
    x, y = nets.batches(1)[0]
    assert step(Tensor(x), Tensor(y))[2].asnumpy() == 8


def by_training_network(net, optimizer, config, **scale):
    level = scale.pop("amp_level")
    return ms.amp.build_train_network(
        net, optimizer, nets.loss_fn(), level, boost_level="O1", boost_config_dict=config, **scale
    )


@pytest.mark.parametrize("make", [by_model, by_function, by_training_network])
def test_the_manager_that_amp_level_o2_brings_is_not_the_scripts_own(make):
    """MindSpore begins at 2**24 there, and skips the first steps."""
    net = nets.MLP()
    config = config_of(loss_scale=SECTION)
    step = make(net, nets.momentum(net.trainable_params()), config, amp_level="O2")
    assert step.report()["loss_scale"].status == "applied"
    x, y = nets.batches(1)[0]
    assert step(Tensor(x), Tensor(y))[2].asnumpy() == SECTION["init"]


def test_level_o0_scales_nothing():
    net = nets.MLP()
    with pytest.warns(UserWarning, match="section 'loss_scale' has no effect: level O0"):
        model = ms.Model(
            net,
            nets.loss_fn(),
            nets.momentum(net.trainable_params()),
            boost_level="O0",
            boost_config_dict={"loss_scale": SECTION},
        )
    assert type(model.train_network) is nn.TrainOneStepCell


def test_a_step_cell_of_the_scripts_own_is_warned_of_unless_it_scales(recwarn):
    """Its scale is an argument."""
    manager = nn.DynamicLossScaleUpdateCell(2.0, 2, 2)
    for level, cell, warned in (
        ("O1", lambda *parts: BoostTrainOneStepWithLossScaleCell(*parts, manager), False),
        ("O1", BoostTrainOneStepCell, True),
        ("O0", BoostTrainOneStepCell, False),
    ):
        net = nets.MLP()
        boost = AutoBoost(level, config_of(loss_scale=SECTION))
        parts = boost.network_auto_process_train(
            nn.WithLossCell(net, nets.loss_fn()), nets.momentum(net.trainable_params())
        )
        recwarn.clear()
        step = cell(*parts)
        told = [str(one.message) for one in recwarn if "make_train_step" in str(one.message)]
        assert bool(told) == warned
        found = [row.status for row in step.report() if row.algorithm == "loss_scale"]
        assert found == (["skipped"] if level == "O1" else [])


class Faint(nn.Cell):
    """The gradient of its weight is 2 ** -30: none in float16, where 2 ** -24 is the least."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0], ms.float32), name="w")
        self.small = Tensor(2.0**-13, ms.float16)

    def construct(self, x):
        product = ops.cast(self.w, ms.float16) * self.small * x
        return ops.cast(product, ms.float32).sum() / 16  # scaled by 2 ** 16 it is no inf


@pytest.mark.parametrize(("settings", "moves"), [
    (lambda: recipe("fp16", 10), True), (config_of, False),
])  # fmt: skip
def test_the_recipe_lets_float16_learn_from_faint_gradients(mode, settings, moves):
    net = Faint()
    step = make_train_step(
        net, None, nn.SGD(net.trainable_params(), 2.0**20), level="O1", config=settings()
    )
    step(Tensor([2.0**-13], ms.float16))
    assert net.w.asnumpy()[0] == (1 - 2.0**-10 if moves else 1)


class TwoOutputs(nn.Cell):
    """Returns its loss and what it was made of."""

    def __init__(self):
        super().__init__()
        self.backbone, self.loss = nets.MLP(), nets.loss_fn()

    def construct(self, x, y):
        logits = self.backbone(x)
        outputs = self.loss(logits, y), logits
        return self.kind(outputs) if self.kind is not dict else {"loss": outputs[0]}


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_network_of_several_outputs_is_refused(mode, kind):
    net = TwoOutputs()
    net.kind = kind
    optimizer = nets.momentum(net.trainable_params())
    step = make_train_step(net, None, optimizer, level="O1", config=config_of(loss_scale=SECTION))
    (batch,) = nets.batches(1)
    with pytest.raises(TypeError, match="the loss scale needs a network with one output"):
        step(*map(Tensor, batch))
