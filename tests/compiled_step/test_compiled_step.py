"""A step that is one graph in PYNATIVE_MODE trains as the same step operator by operator."""

from __future__ import annotations

import cProfile
import random
import sys
import threading

import contract
import mindspore as ms
import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.nn.utils import no_init_parameters

from mindspore_boost_ext import AutoBoost, make_train_step
from mindspore_boost_ext._compat import compiled_graphs
from mindspore_boost_ext.compiled_step.algorithm import StepGraph

SWITCH = "compiled_step"
# They stand for the places of the step; the others compile in -m slow.
QUICK = ("nothing", "dynamic loss scale", "grad_accumulation", "grad_freeze, prefix")
QUICK += ("loss_scale_group", "thor", "dim_reduce", "progressive_resizing")


@pytest.fixture(autouse=True)
def pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)


def losses_and_state(algorithm, compiled, steps=6):
    """Return losses and all state after some steps."""
    ms.set_seed(1)
    on = {**algorithm.on, "boost": {**algorithm.on["boost"], SWITCH: compiled}}
    _, model = contract.build(algorithm, on, model_arguments=algorithm.model)
    losses = contract.run(model, algorithm.batches(steps))
    return losses, nets.weights(model.train_network), model


def cases():
    for one in contract.ALGORITHMS:
        marks = () if one.name in QUICK else pytest.mark.slow
        yield pytest.param(one, id=one.name, marks=marks)


@pytest.mark.parametrize("algorithm", list(cases()))
def test_it_trains_as_the_step_operator_by_operator(algorithm):
    expected, plain_state, _ = losses_and_state(algorithm, compiled=False)
    losses, state, model = losses_and_state(algorithm, compiled=True)
    assert model.train_network.report()["compiled_step"].status == "applied"
    assert len(compiled_parts(model.train_network)) > 0
    # float32, six steps; fused operators of a graph round otherwise.
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert state.keys() == plain_state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(value, plain_state[name], rtol=1e-3, atol=1e-5, err_msg=name)


def compiled_parts(step):
    """Return the graphs that a step and its variants have compiled."""
    parts = [vars(cell).get("graph_part") for _, cell in step.cells_and_names()]
    return [cell for part in parts if isinstance(part, StepGraph) for cell in part.cells]


def compiled(network, optimizer=None, **config):
    """Return a step for a network that returns its own loss."""
    optimizer = optimizer or nn.Momentum(network.trainable_params(), 0.1, 0.9)
    return make_train_step(
        network, None, optimizer, level="O1", config={**switched(compiled_step=True), **config}
    )


class MeanOfSquares(nn.Cell):
    """A mean of squares, with dropout or statistics that differ in evaluation."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4, weight_init="ones")
        self.norm = nn.BatchNorm1d(4)

    def construct(self, x):
        return (self.norm(self.dense(x)) ** 2).mean()


X = Tensor(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))


def test_what_is_set_between_two_steps_acts_in_the_next():
    net = MeanOfSquares()
    step = compiled(net)
    step(X)
    weights = {one.name: one.asnumpy().copy() for one in net.trainable_params()}
    step.train_network.optimizer.learning_rate.set_data(Tensor(0.0, ms.float32))
    ms.load_param_into_net(net, {name: ms.Parameter(value) for name, value in weights.items()})
    for _ in range(2):
        step(X)
    for one in net.trainable_params():
        np.testing.assert_array_equal(one.asnumpy(), weights[one.name])


def test_a_layer_set_to_evaluation_between_two_steps_is_in_evaluation():
    """GRAPH_MODE trains on as before; here it costs one more graph."""
    net = MeanOfSquares()
    step = compiled(net)
    step(X)
    moved = net.norm.moving_mean.asnumpy().copy()
    net.norm.set_train(False)
    expected = float(net(X).asnumpy())  # eager, in evaluation mode
    assert abs(float(step(X).asnumpy()) - expected) < 1e-5 * abs(expected)
    np.testing.assert_array_equal(net.norm.moving_mean.asnumpy(), moved)
    net.norm.set_train(True)
    step(X)
    assert (net.norm.moving_mean.asnumpy() != moved).any()
    assert len(compiled_parts(step.train_network)) == 2


def test_a_number_that_is_set_in_a_group_acts_in_the_next_step():
    """With gradients of 0, the weight decay alone moves the weights."""
    net = NotFinite(0.0)
    optimizer = optim.SGD(net.trainable_params(), lr=0.125, weight_decay=0.0)
    step = compiled(net, optimizer)
    found = []
    for decay in (0.0, 4.0, 0.0):
        optimizer.param_groups[0]["weight_decay"] = decay
        step(X[0, :3])
        found.append(float(net.weight[0]))
    assert found == [1.0, 0.5, 0.5]


class NotFinite(nn.Cell):
    def __init__(self, value):
        super().__init__()
        self.weight = ms.Parameter(np.ones(3, np.float32), name="weight")
        self.value = value

    def construct(self, x):
        return self.weight * x * self.value


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_comes_out_as_it_is(value):
    """The branch in the graph asks whether the loss is NaN; a sum of inf and -inf is, too."""
    inputs = np.array([1, -1, 2], np.float32)
    loss = compiled(NotFinite(value))(Tensor(inputs))
    np.testing.assert_array_equal(loss.asnumpy(), inputs * value)


class Unfit(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(np.ones(4, np.float32), name="weight")

    def construct(self, x):
        return (self.weight * Tensor(np.sort(x.asnumpy()))).mean()


def test_overflow_and_scale_come_out_beside_the_loss():
    step = compiled(NotFinite(np.inf), loss_scale={"init": 4.0})
    step(X[0, :3])
    assert (bool(step.overflow), float(step.scale)) == (True, 4.0)


def test_a_network_that_does_not_compile_is_refused_with_the_remedy():
    net = Unfit()
    step = compiled(net)
    with pytest.raises(ValueError, match=r"(?s)compiled_step cannot run .* leave compiled_step"):
        step(X)
    np.testing.assert_array_equal(net.weight.asnumpy(), np.ones(4))


class TwoLosses(MeanOfSquares):
    def construct(self, x):
        return self.dense(x).mean(), self.dense(x).sum()


def test_the_reason_is_shown_whole():
    step = compiled(TwoLosses(), loss_scale={})
    with pytest.raises(ValueError, match=r"cannot run .* or remove section loss_scale, or the"):
        step(X)


def test_a_network_with_a_hook_is_refused():
    """A graph would leave it out."""
    net = MeanOfSquares()
    step = compiled(net)
    handle = net.dense.register_forward_hook(lambda cell, inputs, output: output * 0.5)
    with pytest.raises(ValueError, match="dense has a hook, which the graph of compiled_"):
        step(X)
    handle.remove()
    step(X)


class ByNumpy(MeanOfSquares):
    """Draws whether a layer runs, as networks of stochastic depth do."""

    def construct(self, x):
        return super().construct(x if np.random.rand() < 0.5 else 2 * x)


class ByPython(MeanOfSquares):
    def construct(self, x):
        return super().construct(x if random.randint(0, 1) else 2 * x)


class ByItsGenerator(MeanOfSquares):
    def __init__(self):
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def construct(self, x):
        return super().construct(x if self.numbers.random() < 0.5 else 2 * x)


class ByAFunction(MeanOfSquares):
    def construct(self, x):
        return super().construct(nets.scaled_at_random(x))


class ByAnObject(MeanOfSquares):
    """The object does it in a method, of which the code of the Cell says nothing."""

    def __init__(self):
        super().__init__()
        self.chance = Chance()

    def construct(self, x):
        return super().construct(x * self.chance.now())


class Chance:
    def now(self):
        return float(np.random.poisson(2))


class ByTheSystem(MeanOfSquares):
    def construct(self, x):
        return super().construct(x if random.SystemRandom().random() < 0.5 else 2 * x)


DRAWING = [ByNumpy, ByPython, ByItsGenerator, ByAFunction, ByAnObject, ByTheSystem]


@pytest.mark.parametrize("kind", DRAWING)
def test_a_network_that_draws_by_python_is_refused(kind):
    """A graph would keep what is drawn while it is compiled."""
    net = kind()
    before = nets.weights(net)
    with pytest.raises(
        ValueError, match=r"^the step draws a number by (Rand|Gen|posix).* leave compiled"
    ):
        compiled(net)(X)
    nets.assert_same(nets.weights(net), before)
    assert sys.getprofile() is None


class Words(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, embedding_table=Tensor(np.ones((10, 4), np.float32)))

    def construct(self, words):
        return (self.table(words) ** 2).mean()


def test_a_training_goes_on_after_a_batch_that_an_operator_refuses():
    """A graph of MindSpore's is broken by the error of an operator: it fails from then on."""
    step, eager = compiled(Words()), Words()
    step(Tensor([1, 2], ms.int32))
    before = compiled_graphs()
    for _ in range(2):  # the second one compiles
        with pytest.raises(RuntimeError, match="12"):
            float(step(Tensor([1, 12], ms.int32)))
    assert compiled_graphs() < before  # the broken ones are freed
    plain = nn.TrainOneStepCell(eager, nn.Momentum(eager.trainable_params(), 0.1, 0.9))
    for words in ([1, 2], [3, 4], [1, 3]):
        found = float(step(Tensor(words, ms.int32)))
    for words in ([1, 2], [1, 2], [3, 4], [1, 3]):
        expected = float(plain(Tensor(words, ms.int32)))
    assert abs(found - expected) < 1e-6 * expected  # one graph, or operator by operator


def test_a_profiler_goes_on():
    profiler = cProfile.Profile()
    step = compiled(MeanOfSquares())
    profiler.enable()
    try:
        step(X)
        nets.batches(1)
    finally:
        profiler.disable()
    assert nets.batches.__code__ in [one.code for one in profiler.getstats()]


class ByAnOperator(MeanOfSquares):
    def construct(self, x):
        return super().construct(x + ops.rand(x.shape))


def test_a_network_may_draw_by_operators_while_threads_draw_by_numpy():
    """Such threads make batches."""
    step, ended = compiled(ByAnOperator()), threading.Event()

    def draw():
        while not ended.is_set():
            np.random.rand()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert np.isfinite(float(step(X)))
    finally:
        ended.set()
        thread.join()


def test_an_optimizer_may_have_the_statistics_too():
    """As that of get_parameters(): they get no gradient, and move by themselves."""
    trained = []
    for section in ({}, {"compiled_step": {}}):
        net = nets.fill(MeanOfSquares())
        config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}, **section}
        optimizer = nn.SGD(list(net.get_parameters()), 0.1)
        step = make_train_step(net, None, optimizer, level="O1", config=config)
        step(X)
        trained.append(nets.weights(net))
    for one, other in zip(*(state.values() for state in trained)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # a graph rounds differently


def test_a_frozen_weight_is_refused():
    """A graph would train it; operator by operator it stays."""
    net = MeanOfSquares()
    step = compiled(net)
    net.dense.weight.requires_grad = False
    with pytest.raises(
        ValueError, match=r"would train dense\.weight, whose requires_grad is False"
    ):
        step(X)


def test_an_operator_that_hooks_gradients_is_refused():
    """A graph would leave it out, too."""
    net = MeanOfSquares()
    net.hooks = ops.HookBackward(lambda gradients: gradients)
    with pytest.raises(ValueError, match="the network has a hook, which the graph of compiled_"):
        compiled(net)(X)


@ms.jit
def _scaled(x):
    return x * 2.0


class WithJit(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = nets.Deep()

    def construct(self, x):
        return _scaled(self.net(x)).mean()


def test_functions_of_jit_in_the_network_may_freeze():
    """Operator by operator MindSpore would leave out gradients, so that such a step is refused."""
    net = WithJit()
    freezing = {"grad_freeze": {"param_groups": 3, "schedule": [2, 0], "total_steps": 2}}
    step = compiled(net, **switched(compiled_step=True, grad_freeze=True), **freezing)
    weight = net.net.first.weight
    before = weight.asnumpy().copy()
    (inputs, _), *_ = nets.batches(1)
    step(Tensor(inputs))
    np.testing.assert_array_equal(weight.asnumpy(), before)
    step(Tensor(inputs))
    assert (weight.asnumpy() != before).any()


def test_graph_mode_has_it_already():
    ms.set_context(mode=ms.GRAPH_MODE)
    step = compiled(MeanOfSquares())
    step(X)
    row = step.report()["compiled_step"]
    assert (row.status, row.reason) == ("inactive", "in GRAPH_MODE every step is one graph")
    assert compiled_parts(step.train_network) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_is_asked_for_by_its_section_and_by_no_level(level):
    assert AutoBoost(level).boost_config[SWITCH] is False
    assert AutoBoost(level, {"boost": {"mode": "enable_all"}}).boost_config[SWITCH] is False
    assert AutoBoost(level, {SWITCH: {}}).boost_config[SWITCH] is True


class Counting(nn.Cell):
    """Takes a number beside its input, and has a Parameter that a gradient changes, or none."""

    def __init__(self, trained):
        super().__init__()
        self.dense = nn.Dense(4, 1)
        self.dense.bias.requires_grad = not trained  # no state: a Dense leaves it as it is
        self.runs = ms.Parameter(Tensor(0.0), name="runs", requires_grad=trained)

    def construct(self, x, factor):
        return (self.dense(x) * factor + self.runs).mean()


class Normalising(MeanOfSquares):
    def construct(self, x, factor):
        return super().construct(x) * factor


@pytest.mark.parametrize("trained", [False, True])
def test_an_input_that_is_no_tensor_is_refused_where_state_would_move_twice(trained):
    """A graph of MindSpore's runs the network once for the loss and once for the gradient."""
    step = compiled(Counting(trained))
    if trained:
        step(X, 0.5)
        return
    with pytest.raises(ValueError, match=r"input is a float, .* would move runs twice"):
        step(X, 0.5)
    with pytest.raises(ValueError, match=r"would move norm\.moving_mean twice"):
        compiled(Normalising())(X, 0.5)


@pytest.mark.parametrize("section", [{SWITCH: {}}, {"loss_scale": {"init": 1024.0}}])
def test_an_optimizer_made_before_its_weights_have_values_keeps_its_state(section):
    """Its moments have no memory yet, which a compiled function would not give them."""
    with no_init_parameters():
        net = nn.Dense(2, 1, has_bias=False)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    values = {net.weight.name: ms.Parameter(np.ones((1, 2), np.float32), name=net.weight.name)}
    ms.load_param_into_net(net, values)
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}, **section}
    step = make_train_step(net, nn.MSELoss(), optimizer, level="O1", config=config)
    x, y = Tensor([[1.0, 2.0]]), Tensor([[0.0]])
    losses = []
    for _ in range(3):
        outputs = step(x, y)
        losses.append(float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy()))
    # By hand: w = (1, 1), gradient 2 (w . x) x, momentum 0.9, rate 0.1; the scale is a power of 2.
    np.testing.assert_allclose(losses, [9.0, 0.0, 7.29], atol=1e-5)  # float32 sums of 2
