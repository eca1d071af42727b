"""Gradient centralization: the rule, what it is for, and where it stands in each optimizer."""

from __future__ import annotations

import os
import pathlib
import re

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
import scripts
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.optim.optimizer import opt_init_args_register
from models import model_of

from mindspore_boost_ext import BoostModel, FreezeOpt
from mindspore_boost_ext.base.centralization import (
    Centralization,
    centralize,
    install_centralization,
    output_axes,
)
from mindspore_boost_ext.base.rebuild import rebuilt
from mindspore_boost_ext.base.view import optimizer_view

SHAPES = [((4, 3), 0), ((3, 4), 1), ((2, 3, 2, 2), 0), ((3, 2, 2, 2), 1), ((1, 5), 0)]


def oracle(gradient, output_axis=0):
    """The rule in plain loops, float64."""
    result = np.array(gradient, np.float64)
    for output in range(result.shape[output_axis]):
        part = [slice(None)] * result.ndim
        part[output_axis] = output
        values = result[tuple(part)]
        result[tuple(part)] = values - values.sum() / values.size
    return result


def values(shape, seed=0):
    return np.random.default_rng(seed).normal(1, 2, shape).astype(np.float32)


# ---- The rule ----


# A mean of n numbers and one subtraction: a few roundings of numbers of about 5.
TOLERANCES = {ms.float32: 2e-6, ms.float16: 4e-3, ms.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_rule(shape, axis, dtype, mode):
    given = Tensor(values(shape)).astype(dtype)
    (result,) = Centralization([axis])((given,))
    assert (result.dtype, result.shape) == (dtype, shape)
    expected = oracle(given.astype(ms.float32).asnumpy(), axis)
    np.testing.assert_allclose(
        result.astype(ms.float32).asnumpy(), expected, atol=TOLERANCES[dtype], rtol=0
    )


def test_float16_means_do_not_overflow():
    given = Tensor(np.full((2, 4000), 60000), ms.float16)
    assert not centralize(given).asnumpy().any()


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_idempotent_and_no_longer(shape, axis):
    given = values(shape, 1)
    once = centralize(Tensor(given), axis).asnumpy()
    twice = centralize(Tensor(once), axis).asnumpy()
    np.testing.assert_allclose(twice, once, atol=1e-6)  # the mean of ``once`` is a rounding error
    assert np.linalg.norm(once) <= np.linalg.norm(given) * (1 + 1e-6)


def test_a_gradient_without_other_axes_stays():
    for given in (Tensor(3.0), Tensor([1.0, 2.0])):
        assert centralize(given) is given


def test_nan_stays_in_its_output():
    result = centralize(Tensor([[1.0, np.nan], [1.0, 3.0]])).asnumpy()
    assert np.isnan(result[0]).all()
    assert result[1].tolist() == [-1.0, 1.0]


# ---- Which parameters ----


class CommonHeadLastFN(nn.Cell):
    """Stands for the normalised head, ours or that of mindspore.boost."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(values((3, 2))), name="weight")


class Kinds(nn.Cell):
    """One Cell of every kind the rule knows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, has_bias=True)
        self.grouped = nn.Conv2d(4, 4, 3, group=2)
        self.depthwise = nn.Conv1d(4, 4, 3, group=4)
        self.pointwise = nn.Conv2d(1, 4, 1)
        self.transposed = nn.Conv2dTranspose(2, 4, 3)
        self.mint_transposed = ms.mint.nn.ConvTranspose2d(2, 4, 3)
        self.dense = nn.Dense(3, 2)
        self.of_four_heads = nn.Dense(3, 2)
        self.of_four_heads.group = 4  # of heads, or of experts: a matrix is no convolution
        self.single = nn.Dense(1, 5)
        self.table = nn.Embedding(7, 2)
        self.norm = nn.LayerNorm((2, 3))
        self.bias_net = nn.Dense(2, 2)
        self.position_bias = Parameter(Tensor(values((3, 4))), name="position_bias")
        self.scale = Parameter(Tensor(1.0), name="scale")
        self.head = CommonHeadLastFN()
        self.mint = ms.mint.nn.Conv2d(4, 4, 3, groups=2)


def test_chosen_parameters():
    assert output_axes(Kinds()) == {
        "conv.weight": 0,
        "transposed.weight": 1,  # [inputs, outputs, height, width]
        "mint_transposed.weight": 1,
        "dense.weight": 0,
        "of_four_heads.weight": 0,
        "table.embedding_table": 0,
        "bias_net.weight": 0,
    }


def test_patterns_leave_out_more():
    found = output_axes(Kinds(), exclude=["*embedding*", "conv.*"])
    assert list(found) == [
        "transposed.weight",
        "mint_transposed.weight",
        "dense.weight",
        "of_four_heads.weight",
        "bias_net.weight",
    ]
    assert "dense.weight" not in output_axes(Kinds(), exclude="dense*")
    with pytest.raises(TypeError, match="exclude must be patterns of parameter names"):
        output_axes(Kinds(), exclude=[3])


def test_a_shared_parameter_is_left_out_if_one_owner_is():
    net = Kinds()
    net.dense.weight = net.head.weight
    names = [parameter.name for parameter in net.trainable_params()]
    assert names.count(net.head.weight.name) == 1
    assert net.head.weight.name not in output_axes(net)


# ---- In every optimizer ----

DECAYED = {
    "SGD": lambda p, d: nn.SGD(p, 0.05, momentum=0.9, weight_decay=d),
    "Momentum": lambda p, d: nn.Momentum(p, 0.05, 0.9, weight_decay=d, loss_scale=2.0),
    "Adam": lambda p, d: nn.Adam(p, 0.05, weight_decay=d),
    "Adam lazy": lambda p, d: nn.Adam(p, 0.05, weight_decay=d, use_lazy=True),
    "Adam offload": lambda p, d: nn.Adam(p, 0.05, weight_decay=d, use_offload=True),
    "Adam amsgrad": lambda p, d: nn.Adam(p, 0.05, weight_decay=d, use_amsgrad=True),
    "AdamOffload": lambda p, d: nn.AdamOffload(p, 0.05, weight_decay=d, loss_scale=2.0),
    "LazyAdam": lambda p, d: nn.LazyAdam(p, 0.05, weight_decay=d),
    "RMSProp": lambda p, d: nn.RMSProp(p, 0.05, weight_decay=d),
    "Adagrad": lambda p, d: nn.Adagrad(p, learning_rate=0.05, weight_decay=d),
    "FTRL": lambda p, d: nn.FTRL(p, learning_rate=0.05, weight_decay=d),
    "AdaMax": lambda p, d: nn.AdaMax(p, 0.05, weight_decay=d),
    "Adadelta": lambda p, d: nn.Adadelta(p, 0.5, weight_decay=d),
    "ASGD": lambda p, d: nn.ASGD(p, 0.05, weight_decay=d),
    "Rprop": lambda p, d: nn.Rprop(p, 0.05, weight_decay=d),
    "ProximalAdagrad": lambda p, d: nn.ProximalAdagrad(p, learning_rate=0.05, weight_decay=d),
}
DECOUPLED = {
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.05, weight_decay=0.1),
    "AdaFactor": lambda p: nn.AdaFactor(
        p, 0.05, weight_decay=0.1, scale_parameter=False, relative_step=False
    ),
}
DECAY = 0.25  # large, so that centralizing before it would show


def parameters():
    """A weight of two outputs and three inputs, and a bias."""
    return [
        Parameter(Tensor(values((2, 3), 3)), name="weight"),
        Parameter(Tensor(values((2,), 4)), name="bias"),
    ]


def gradients(step):
    return [values((2, 3), 10 + step), values((2,), 20 + step)]


def trained(optimizer, steps=3, prepare=lambda gradients: gradients):
    for step in range(steps):
        optimizer(tuple(Tensor(np.float32(one)) for one in prepare(gradients(step))))
    return [one.asnumpy().astype(np.float64) for one in optimizer.parameters]


@pytest.mark.parametrize("name", DECAYED)
def test_after_decay_and_before_moments(name, mode):
    """The same as a plain optimizer without decay that is given centralized, decayed gradients."""
    make = DECAYED[name]
    optimizer = rebuilt(make(parameters(), DECAY), centralize=["weight"])
    reference = make(parameters(), 0.0)
    scale = reference.loss_scale

    def decayed(raw):
        weight, bias = (
            np.float64(one) + scale * DECAY * held.asnumpy()
            for one, held in zip(raw, reference.parameters)
        )
        return oracle(weight), bias

    # Roundings of gradients of about 5; adaptive optimizers carry them through a division. Rprop
    # and the first steps of the Adams look at signs only.
    for result, expected in zip(trained(optimizer), trained(reference, prepare=decayed)):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECOUPLED)
def test_decoupled_decay_stays_whole(name, mode):
    make = DECOUPLED[name]
    optimizer = rebuilt(make(parameters()), centralize=["weight"])
    reference = make(parameters())
    expected = trained(reference, prepare=lambda raw: (oracle(raw[0]), raw[1]))
    for result, wanted in zip(trained(optimizer), expected):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_momentum_against_the_formula(mode):
    optimizer = rebuilt(DECAYED["SGD"](parameters(), DECAY), centralize=["weight"])
    weight, velocity = values((2, 3), 3).astype(np.float64), 0.0
    for step in range(3):
        velocity = 0.9 * velocity + oracle(gradients(step)[0] + DECAY * weight)
        weight = weight - 0.05 * velocity
    np.testing.assert_allclose(trained(optimizer)[0], weight, rtol=1e-5)


@pytest.mark.parametrize("name", [*DECAYED, *DECOUPLED])
def test_half_precision_and_scalars(name, mode):
    """A 0-d parameter beside a float16 weight; what the plain optimizer refuses is not asked."""

    def make(params):
        return DECAYED[name](params, 0.1) if name in DECAYED else DECOUPLED[name](params)

    def cells():
        return [
            Parameter(Tensor(values((2, 3), 3), ms.float16), name="weight"),
            Parameter(Tensor(0.5), name="scale"),
        ]

    given = (Tensor(values((2, 3), 5), ms.float16), Tensor(1.0))
    try:
        make(cells())(given)
    except (TypeError, ValueError, RuntimeError):
        pytest.skip(f"plain {name} does not take float16 or 0-d parameters")
    optimizer = rebuilt(make(cells()), centralize=["weight", "scale"])
    optimizer(given)
    assert optimizer.grad_centralization_flags == (True, False)
    assert all(np.isfinite(one.asnumpy()).all() for one in optimizer.parameters)


def test_nan_gradients_pass_through(mode):
    optimizer = rebuilt(DECAYED["SGD"](parameters(), 0.0), centralize=["weight"])
    optimizer((Tensor([[np.nan, 1, 1], [1.0, 2, 3]], ms.float32), Tensor([1.0, 1.0])))
    weight = optimizer.parameters[0].asnumpy()
    assert np.isnan(weight[0]).all()
    assert np.isfinite(weight[1]).all()


def test_row_sparse_gradients(graph_mode):
    net = nets.fill(nets.Lookup(4, 3, 2))
    plain = nn.LazyAdam(net.trainable_params(), learning_rate=0.1, beta1=1e-6, beta2=1e-6, eps=1.0)
    plain.target = "CPU"
    before = net.table.embedding_table.asnumpy().copy()
    step = nn.TrainOneStepCell(net, rebuilt(plain, centralize=["table.embedding_table"]))
    weight = net.head.weight.asnumpy().astype(np.float64)
    step.set_train()(Tensor([1, 2, 2], ms.int32))
    row = oracle(weight.sum(0)[None])[0]
    expected = np.zeros((4, 3))
    for index, count in ((1, 1), (2, 2)):
        # Adam's first step with beta -> 0 is g / (|g| + eps).
        expected[index] = -0.1 * count * row / (np.abs(count * row) + 1)
    moved = net.table.embedding_table.asnumpy() - before
    np.testing.assert_allclose(moved, expected, atol=1e-5)  # beta1 is 1e-6, not 0


WITHOUT_KERNELS = {
    "Lamb": "nn.Lamb(parameters(), 0.1, weight_decay=0.1)",
    "LARSUpdate": "nn.LARS(nn.Momentum(parameters(), 0.1, 0.9, weight_decay=0.1))",
}


@pytest.mark.parametrize("kernel", WITHOUT_KERNELS)
def test_optimizers_without_cpu_kernels_compile_with_it(kernel, tmp_path):
    """In a process of its own: MindSpore reads where to write graphs when it starts."""
    script = f"""
from mindspore import Tensor, nn
from mindspore_boost_ext.base.rebuild import rebuilt
from test_centralization import gradients, parameters
optimizer = rebuilt({WITHOUT_KERNELS[kernel]}, centralize=["weight"])
optimizer(tuple(Tensor(one) for one in gradients(0)))
"""
    root = pathlib.Path(__file__).parents[2]
    paths = [
        str(root),
        str(root / "tests"),
        str(root / "tests" / "base"),
        os.environ.get("PYTHONPATH", ""),
    ]
    variables = {
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_DUMP_IR_PASSES": "validate",
        "MS_DEV_SAVE_GRAPHS_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    run = scripts.run("-c", script, cwd=tmp_path, env={**os.environ, **variables})
    assert f"Unsupported op [{kernel}]" in run.stderr, run.stderr
    lines = [
        line
        for path in tmp_path.rglob("*validate*.ir")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    means = [line for line in lines if re.search(r"= \S*Mean\w*\(", line)]
    assert len(means) == 1, means  # one weight of the two parameters


# ---- Together with the rest ----


@pytest.mark.parametrize("name", ["Momentum", "AdamOffload", "AdamWeightDecay"])
def test_a_view_centralizes_what_it_keeps(name):
    make = DECOUPLED.get(name) or (lambda p: DECAYED[name](p, DECAY))
    whole = rebuilt(make(parameters()), centralize=["weight"])
    part = optimizer_view(rebuilt(make(parameters()), centralize=["weight"]), [0])
    whole(tuple(Tensor(one) for one in gradients(0)))
    part((Tensor(gradients(0)[0]),))
    np.testing.assert_array_equal(whole.parameters[0].asnumpy(), part.parameters[0].asnumpy())


def test_row_sums_stay_in_a_boosted_model(mode):
    """Dynamic loss scale, accumulation, clipping and freezing in one."""
    net = nets.Deep()
    plain = nn.SGD(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    optimizer = rebuilt(plain, centralize=output_axes(net))
    frozen = FreezeOpt(
        optimizer, [net.trainable_params(), net.last.trainable_params()], [0, 1, 1, 0]
    )
    config = {
        "boost": {"mode": "manual", "less_bn": False, "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": 2},
        "gradients": {"clip_norm": 1.0},
    }
    before = nets.weights(net)
    manager = ms.DynamicLossScaleManager(2**10, 2, 5)
    model = model_of(net, config, frozen, BoostModel, loss_scale_manager=manager)
    model.train(4, nets.dataset(4))
    after = nets.weights(net)
    for name in output_axes(net):
        np.testing.assert_allclose(after[name].sum(1), before[name].sum(1), atol=1e-6)
        assert np.abs(after[name] - before[name]).max() > 1e-3


# ---- Optimizers of the user's own ----


class Own(nn.Optimizer):
    """Calls the method in its place, as MindSpore's documentation shows."""

    def __init__(self, params, rate):
        super().__init__(rate, params)
        self.assign_sub = ops.AssignSub()

    def construct(self, gradients):
        gradients = self.gradients_centralization(self.decay_weight(gradients))
        for parameter, gradient in zip(self.parameters, gradients):
            gradients = ops.depend(gradients, self.assign_sub(parameter, gradient))
        return gradients


class Deaf(Own):
    """Never calls it."""

    def construct(self, gradients):
        return gradients


def test_own_optimizer_that_calls_the_method(mode):
    optimizer = Own(parameters(), 1.0)
    install_centralization(optimizer, [0, -1])
    expected = values((2, 3), 3) - oracle(gradients(0)[0])
    np.testing.assert_allclose(trained(optimizer, 1)[0], expected, atol=1e-5)


class Scaling(nn.Optimizer):
    """Calls ``scale_grad`` alone."""

    @opt_init_args_register
    def __init__(self, params, learning_rate, loss_scale=1.0):
        super().__init__(learning_rate, params, loss_scale=loss_scale)

    def construct(self, gradients):
        return ops.assign_sub(self.parameters[0], self.get_lr() * self.scale_grad(gradients)[0])


def test_own_optimizer_that_only_divides_by_its_loss_scale(mode):
    weight = Parameter(Tensor([[0.0, 0.0]]), name="weight")
    optimizer = Scaling([weight], 1.0, loss_scale=8.0)
    install_centralization(optimizer, [0])
    optimizer((Tensor([[8.0, 24.0]]),))
    assert weight.asnumpy().tolist() == [[1.0, -1.0]]  # -(gradient - 16) / 8


def scale_grad(gradients):
    return gradients


class OfAnotherName(Own):
    """Calls a function that has the name of a method, as MindCV's AdamW does."""

    def construct(self, gradients):
        return scale_grad(gradients)


@pytest.mark.parametrize("kind", [Deaf, OfAnotherName])
def test_own_optimizer_without_a_place_is_refused(kind):
    match = f"{kind.__name__} has no place for gradient centralization: call"
    with pytest.raises(ValueError, match=match):
        install_centralization(kind(parameters(), 1.0), [0, -1])


@pytest.mark.filterwarnings("ignore::mindspore_boost_ext.NoEffectWarning")  # no BatchNorm goes
def test_less_bn_leaves_it_out_where_it_has_no_place():
    net = nets.MLP()
    config = contract.switched(less_bn=True)
    step = model_of(net, config, Deaf(net.trainable_params(), 1.0)).train_network
    row = step.report()["gradient centralization"]
    assert (row.status, row.reason) == ("skipped", "Deaf never calls gradients_centralization")
