"""Parts of a user's own, wherever they were put: they act, or the report says that they do not."""

from __future__ import annotations

import contextlib
import functools

import mindspore as ms
import nets
import numpy as np
import pytest
from contract import switched
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import (
    THOR,
    Algorithm,
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
    ConvertModelUtils,
    FreezeOpt,
    NoEffectWarning,
    Update,
    UpdateAround,
    freeze_cell,
    make_train_step,
    restore,
    save_checkpoint,
)
from mindspore_boost_ext.base.mapping import call

RATE = 0.5
X, Y = np.full((2, 3), 2.0, np.float32), np.full((2, 2), 4.0, np.float32)


class Product(nn.Cell):
    """Its loss is the mean over samples of (W x) . y: each gradient is 8, whatever the weights."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2, has_bias=False, weight_init="zeros")

    def construct(self, x, y):
        return (self.dense(x) * y).sum() / x.shape[0]


def moved(step, net, times=1):
    for _ in range(times):
        step(Tensor(X), Tensor(Y))
    return set(net.dense.weight.asnumpy().ravel().tolist())


class Halving(UpdateAround):
    def construct(self, loss, gradients, *inputs):
        return call(self.inner, (loss, tuple(0.5 * one for one in gradients), *inputs))


class Halved(Algorithm):
    switch = "halved"

    def __init__(self, factor=0.5):
        self.factor = factor

    def compared_settings(self):
        return {"factor": self.factor}

    def join(self, step):
        step.update_part = Halving(step.update_part)


class HalvesInUpdate(BoostTrainOneStepCell):
    def update(self, loss, gradients, *inputs):
        return super().update(loss, tuple(0.5 * one for one in gradients), *inputs)


class HalvesLate(BoostTrainOneStepCell):
    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.update_part = Halving(self.update_part)


@pytest.mark.parametrize("kind", [HalvesInUpdate, HalvesLate])
def test_a_subclass_that_changes_the_update_is_heeded_without_a_loss_scale(mode, kind):
    net = Product()
    assert moved(kind(net, nn.SGD(net.trainable_params(), RATE)), net) == {-2.0}


class Probed(Product):
    """Adds a zero to the outputs: what is differentiated by it is their gradient."""

    def __init__(self):
        super().__init__()
        self.probe = Parameter(Tensor(np.zeros((2, 2), np.float32)), name="boost.probe.zero")

    def construct(self, x, y):
        return ((self.dense(x) + self.probe) * y).sum() / x.shape[0]


class Probes(nn.Cell):
    """A captures part: keeps the gradient of the probe."""

    def __init__(self, probe):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple([probe])
        zeros = Tensor(np.zeros((2, 2), np.float32))
        self.seen = Parameter(zeros, name="boost.probe.seen", requires_grad=False)

    def prepared(self, gradients, sens):
        return gradients

    def use(self, captured):
        return ops.assign(self.seen, captured[0])


class Capturing(Algorithm):
    switch = "capturing"

    def join(self, step):
        step.captures_part = Probes(step.network.probe)
        step.capture()


def test_what_a_part_of_ones_own_captures_reaches_it(mode):
    net = Probed()
    optimizer = nn.SGD([net.dense.weight], RATE)
    model = BoostModel(net, optimizer=optimizer, algorithms=[Capturing()])
    assert moved(model.train_network, net) == {-4.0}
    # The loss is a mean over two samples of the outputs times 4.
    assert model.train_network.captures_part.seen.asnumpy().tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_algorithms_may_come_one_by_one():
    net = Product()
    optimizer = nn.SGD(net.trainable_params(), RATE)
    step = make_train_step(net, None, optimizer, algorithms=(one for one in [Halved()]))
    assert step.report()["halved"].status == "applied"
    for build in (AutoBoost, lambda algorithms: BoostModel(net, algorithms=algorithms)):
        with pytest.raises(TypeError, match=r"must be a list of Algorithms, got <.*Halved"):
            build(algorithms=Halved())


class Numbered(Algorithm):
    switch = 3


class Section(Algorithm):
    switch = "gradients"


def test_a_switch_is_a_name_that_no_section_has():
    with pytest.raises(TypeError, match="algorithms: switch must be a name, got 3"):
        AutoBoost(algorithms=[Numbered()])
    with pytest.raises(ValueError, match="the switch 'gradients' of Section is taken"):
        AutoBoost(algorithms=[Section()])


def test_settings_of_ones_own_are_compared_when_a_run_goes_on(tmp_path, monkeypatch):
    def step_of(factor):
        net = Product()
        optimizer = nn.SGD(net.trainable_params(), RATE)
        return BoostModel(net, optimizer=optimizer, algorithms=[Halved(factor)]).train_network

    path = str(tmp_path / "run.ckpt")
    save_checkpoint(step_of(0.5), path, append_dict={"epoch": 1})
    restore(step_of(0.5), path)
    with pytest.raises(ValueError, match=r"halved\.factor"):
        restore(step_of(0.25), path)
    # A file from before the class named its settings.
    monkeypatch.setattr(Halved, "compared_settings", Algorithm.compared_settings)
    save_checkpoint(step_of(0.5), path, append_dict={"epoch": 1})
    monkeypatch.undo()
    assert restore(step_of(0.25), path) == 1


def test_a_network_that_is_refused_leaves_an_earlier_one_as_it_is():
    first, second = Product(), Product()
    undone = []

    class Undoable(Algorithm):
        switch = "undoable"

        def build(self, build):
            build.on_failure(lambda: undone.append(build.network))
            if build.network is not first:
                raise ValueError("refused")

    boost = AutoBoost(algorithms=[Undoable()])
    boost.network_auto_process_train(first, nn.SGD(first.trainable_params(), RATE))
    with pytest.raises(ValueError, match="refused"):
        boost.network_auto_process_train(second, nn.SGD(second.trainable_params(), RATE))
    assert undone == [second]


def test_a_conversion_to_thor_keeps_algorithms_of_ones_own():
    net = Product()
    optimizer = THOR(net, RATE, damping=0.03, momentum=0.0)
    model = BoostModel(net, optimizer=optimizer, algorithms=[Halved()])
    converted = ConvertModelUtils().convert_to_thor_model(model, net, None, optimizer)
    assert converted.train_network.report()["halved"].status == "applied"


class CallsTheOptimizer(BoostTrainOneStepCell):
    """Has a construct of its own, which does not update by our ``update``."""

    def construct(self, *inputs):
        gradients = self.grad_no_sens(self.network, self.weights)(*inputs)
        return ops.depend(self.network(*inputs), self.optimizer(gradients))


def test_one_that_a_construct_leaves_out_is_named():
    net = Product()
    with (
        AutoBoost(algorithms=[Halved()]).building(),
        pytest.warns(NoEffectWarning, match="halved has no effect"),
    ):
        step = CallsTheOptimizer(net, nn.SGD(net.trainable_params(), RATE))
    assert step.report()["halved"].status == "inactive"


class Unavailable(Halved):
    def unavailable(self, config):
        return "not today"

    def check_state(self, step, *inputs):
        raise AssertionError("it has not joined")


def test_one_that_is_unavailable_does_not_act(mode):
    net = Product()
    optimizer = nn.SGD(net.trainable_params(), RATE)
    step = BoostModel(net, optimizer=optimizer, algorithms=[Unavailable()]).train_network
    assert moved(step, net) == {-4.0}
    assert step.report()["halved"].status == "skipped"


class OwnOptimizer(Algorithm):
    switch = "own_optimizer"

    def build(self, build):
        build.optimizer = nn.SGD(build.network.trainable_params(), RATE)


@pytest.mark.parametrize(
    ("switch", "settings"),
    [
        ("grad_freeze", {"param_groups": 2}),
        ("thor", {"damping": 0.1}),
        ("gradient_centralization", {}),
        ("dim_reduce", {"n_components": 7, "pca_mat_path": nets.basis_file()}),
    ],
)
def test_what_was_made_into_an_optimizer_that_was_replaced_is_not_applied(switch, settings):
    net = nn.WithLossCell(nets.Deep() if switch == "grad_freeze" else nets.MLP(), nn.MSELoss())
    with pytest.warns(NoEffectWarning, match=f"{switch} has no effect: the optimizer of the step"):
        step = BoostModel(
            net,
            optimizer=nets.momentum(net.trainable_params()),
            boost_level="O1",
            boost_config_dict={**switched(**{switch: True}), switch: settings},
            algorithms=[OwnOptimizer()],
        ).train_network
    assert step.report()[switch].status == "skipped"


class KeepsInputs(UpdateAround):
    """Asks for the batch, and keeps its sum; counts the contexts that it runs in."""

    takes_inputs = True

    def __init__(self, inner):
        super().__init__(inner)
        self.total = Parameter(Tensor(0.0), name="boost.keeping.total", requires_grad=False)

    def construct(self, loss, gradients, *inputs):
        loss = ops.depend(loss, ops.assign(self.total, inputs[0].sum()))
        return super().construct(loss, gradients, *inputs)


class Keeping(Algorithm):
    switch = "keeping"

    def __init__(self, beside_adasum=False):
        self.beside_adasum = beside_adasum

    def join(self, step):
        step.update_part = KeepsInputs(step.update_part)
        step.enable_adasum = self.beside_adasum


@pytest.mark.parametrize("beside_adasum", [False, True])
def test_a_part_gets_the_batch_beside_adasum_and_when_a_window_closes_early(mode, beside_adasum):
    net = Product()
    window = {"mode": "manual", "less_bn": False, "grad_freeze": False, "grad_accumulation": True}
    config = {"boost": window, "grad_accumulation": {"grad_accumulation_step": 2}}
    step = BoostModel(
        net,
        optimizer=nn.SGD(net.trainable_params(), RATE),
        boost_level="O1",
        boost_config_dict=config,
        algorithms=[Keeping(beside_adasum)],
    ).train_network
    entered = []
    surrounding = step.surrounding_part
    step.surrounding_part = lambda: entered.append(1) or surrounding()
    moved(step, net, 3 if not beside_adasum else 2)
    if not beside_adasum:
        assert step.flush_accumulation()
        assert len(entered) == 4
    assert step.update_part.total.asnumpy() == X.sum()


class Unchanged(Algorithm):
    switch = "unchanged"

    def join(self, step):
        step.update_part = UpdateAround(step.update_part)


SCALES = {
    "window": None,
    "fixed": ms.FixedLossScaleManager(8.0, drop_overflow_update=False),
    "dynamic": ms.DynamicLossScaleManager(8, 2, 100),
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_part_around_a_search_hands_on_the_batch_and_divides_no_scale(mode, scale):
    """Not when a window is closed early, either."""
    config = switched(dim_reduce=True, grad_accumulation=scale == "window")
    config["dim_reduce"] = {"n_components": 7, "pca_mat_path": nets.basis_file()}
    if scale == "window":
        config["grad_accumulation"] = {"grad_accumulation_step": 2}
    manager = {"loss_scale_manager": SCALES[scale]} if SCALES[scale] else {}
    found = []
    for own in ([], [Unchanged()]):
        net = nets.MLP()
        # A warning, as of an optimizer that does not divide the scale, would be an error here.
        step = BoostModel(
            net,
            nets.loss_fn(),
            nets.momentum(net.trainable_params()),
            boost_level="O1",
            boost_config_dict=config,
            algorithms=own,
            **manager,
        ).train_network
        for batch in nets.batches(3):
            step(*map(Tensor, batch))
        assert scale != "window" or step.flush_accumulation()
        found.append(nets.weights(net))
    nets.assert_same(*found)


def test_what_the_host_sets_reaches_a_window_of_freeze_cell(graph_mode):
    """In PYNATIVE_MODE MindSpore's compiled optimizer keeps what it had."""
    net = Product()
    momentum = nn.Momentum(net.trainable_params(), RATE, 0.0)
    optimizer = FreezeOpt(momentum, [net.trainable_params()], [0])
    grad = ops.GradOperation(get_by_list=True, sens_param=True)
    (step,) = freeze_cell(False, net, optimizer, 1.0, grad, True, max_accumulation_step=2)
    assert moved(step, net, 2) == {-4.0}
    momentum.learning_rate.set_data(Tensor(0.25, ms.float32))
    assert moved(step, net, 2) == {-6.0}


class SizeOfGradient(UpdateAround):
    """Keeps the size of the last gradient."""

    def __init__(self, inner):
        super().__init__(inner)
        self.size = Parameter(Tensor(0.0), name="boost.measuring.size", requires_grad=False)

    def construct(self, loss, gradients, *inputs):
        loss = ops.depend(loss, ops.assign(self.size, ops.abs(gradients[-1]).sum()))
        return super().construct(loss, gradients, *inputs)


class Measuring(Algorithm):
    switch = "measuring"

    def join(self, step):
        step.update_part = SizeOfGradient(step.update_part)


@pytest.mark.parametrize("search", ["searches", "projects"])
def test_a_part_beside_dim_reduce_gets_gradients_without_the_scale(mode, search):
    config = switched(dim_reduce=True)
    config["dim_reduce"] = {"n_components": 7, "pca_mat_path": nets.basis_file()}
    if search == "projects":
        config["dim_reduce"]["method"] = "p-sgd"
    found = []
    for scale in (1.0, 8.0):  # rounds nothing
        net = nets.MLP()
        divided = 1.0 if search == "searches" else scale
        step = BoostModel(
            net,
            nets.loss_fn(),
            nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=divided),
            boost_level="O1",
            boost_config_dict=config,
            algorithms=[Measuring()],
            loss_scale_manager=ms.FixedLossScaleManager(scale, drop_overflow_update=False),
        ).train_network
        for batch in nets.batches(2):
            step(*map(Tensor, batch))
        size = step.parameters_dict()["boost.measuring.size"].asnumpy()
        found.append({"size": size, **nets.weights(net)})
    nets.assert_same(*found)
    assert found[0]["size"] > 0


class ReadsBatch(UpdateAround):
    """Divides by the number of samples; it runs no network."""

    def construct(self, loss, gradients, *inputs):
        gradients = tuple(one / inputs[0].shape[0] for one in gradients)
        return super().construct(loss, gradients, *inputs)


class Reading(Algorithm):
    switch = "reading"

    def join(self, step):
        step.update_part = ReadsBatch(step.update_part)


def test_a_part_gets_the_batch_with_a_dynamic_scale_too(mode):
    found = []
    for manager in ({}, {"loss_scale_manager": ms.DynamicLossScaleManager(8, 2, 100)}):
        net = nets.MLP()
        optimizer = nets.momentum(net.trainable_params())
        arguments = {"algorithms": [Reading()], **manager}
        step = model_of(net, switched(), optimizer, BoostModel, **arguments).train_network
        for batch in nets.batches(2):
            step(*map(Tensor, batch))
        found.append(nets.weights(net))
    for weight, expected in found[0].items():  # a scale of 8 rounds nothing
        np.testing.assert_array_equal(found[1][weight], expected)


class UnderAnotherName(Update):
    """Holds the part that was in its place, which no variant restricts."""

    def __init__(self, old):
        super().__init__(old.optimizer)
        self.old = old

    def construct(self, loss, gradients, *inputs):
        return self.old(loss, gradients, *inputs)


class Replacing(Algorithm):
    switch = "replacing"

    def __init__(self, make):
        self.make = make

    def join(self, step):
        step.update_part = self.make(step.update_part)


@pytest.mark.parametrize(
    ("make", "switches", "error"),
    [
        (UnderAnotherName, {}, "must derive from UpdateAround, .* in its place, Update, and run"),
        (
            lambda old: Update(old.optimizer),
            {"short_schedule": True},
            "Update must derive from UpdateAround, .* FasterSchedule, and run it",
        ),
        (lambda old: nn.Identity(), {}, "update_part must be an Update, got Identity"),
    ],
)
def test_a_part_that_runs_the_one_before_by_itself_is_refused(make, switches, error):
    config = switched(**switches)
    if switches:
        config["short_schedule"] = {"total_steps": 8}
    net = nets.MLP()
    optimizer = nn.SGD(net.trainable_params(), nn.cosine_decay_lr(0.0, 0.1, 8, 1, 8))
    with pytest.raises((TypeError, ValueError), match=f"replacing: .*{error}"):
        model_of(net, config, optimizer, BoostModel, algorithms=[Replacing(make)])


class Totals(UpdateAround):
    """Adds up gradients in Parameters of a list, and updates with the totals."""

    def __init__(self, inner):
        super().__init__(inner)
        weights = enumerate(inner.optimizer.parameters)
        zeros = [(number, np.zeros(weight.shape, np.float32)) for number, weight in weights]
        self.totals = [Parameter(zero, name=f"boost.adding.{number}") for number, zero in zeros]

    def construct(self, loss, gradients, *inputs):
        totals = tuple(ops.assign_add(*pair) for pair in zip(self.totals, gradients))
        return super().construct(loss, totals, *inputs)


class Adding(Algorithm):
    switch = "adding"

    def join(self, step):
        step.update_part = Totals(step.update_part)


def test_state_in_a_list_of_a_part_is_in_the_checkpoint(mode, tmp_path):
    def made():
        net = nets.MLP()
        optimizer = nn.SGD(net.trainable_params(), 0.1)
        return net, model_of(net, switched(), optimizer, BoostModel, algorithms=[Adding()])

    (net, first), (other_net, second) = made(), made()
    batches = [tuple(map(Tensor, batch)) for batch in nets.batches(3)]
    for batch in batches[:2]:
        first.train_network(*batch)
    save_checkpoint(first.train_network, tmp_path / "run.ckpt", append_dict={"epoch": 1})
    restore(second.train_network, tmp_path / "run.ckpt")
    first.train_network(*batches[2])
    second.train_network(*batches[2])
    nets.assert_same(nets.weights(other_net), nets.weights(net))


class FallingRate(UpdateAround):
    """Multiplies gradients by a number that the host sets before each batch: 1, 1/2, 1/3 ..."""

    def __init__(self, inner):
        super().__init__(inner)
        self.batches = 0
        self.rate = Parameter(Tensor(1.0), name="boost.falling.rate", requires_grad=False)

    def before_step(self, *inputs):
        super().before_step(*inputs)
        self.batches += 1
        self.rate.set_data(Tensor(1 / self.batches, ms.float32))

    def construct(self, loss, gradients, *inputs):
        gradients = tuple(gradient * self.rate for gradient in gradients)
        return super().construct(loss, gradients, *inputs)


class Falling(Algorithm):
    """Also counts how often the context of a step is entered."""

    switch = "falling"

    def join(self, step):
        step.update_part = FallingRate(step.update_part)
        self.entered, before = 0, step.surrounding_part

        @contextlib.contextmanager
        def counted():
            self.entered += 1
            with before():
                yield

        step.surrounding_part = counted


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_host_does_for_a_part_it_does_once_a_batch(mode, frozen):
    config, own = switched(grad_freeze=frozen), Falling()
    if frozen:
        config["grad_freeze"] = {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}
    net = nets.Deep()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    step = model_of(net, config, optimizer, BoostModel, algorithms=[own]).train_network
    rates = []
    for batch in nets.batches(4):
        step(*map(Tensor, batch))
        rates.append(step.update_part.rate.asnumpy().item())
    assert rates == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-6)  # float32
    assert own.entered == 4


class ClipsAlone(Update):
    """An update that is around no other one."""

    def construct(self, loss, gradients, *inputs):
        return ops.depend(loss, self.optimizer(gradients))


class DividesAlone(ClipsAlone):
    divides_sens = True


def test_an_update_alone_is_refused_where_it_would_get_the_scale():
    def made(kind, scale):
        net = nets.MLP()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=scale)
        manager = ms.FixedLossScaleManager(scale, drop_overflow_update=False)
        own = [Replacing(lambda old: kind(old.optimizer))]
        arguments = {"algorithms": own, "loss_scale_manager": manager}
        model_of(net, switched(), optimizer, BoostModel, **arguments)

    made(ClipsAlone, 1.0)
    made(DividesAlone, 8.0)
    with pytest.raises(ValueError, match="ClipsAlone gets gradients times the loss scale, 8, whi"):
        made(ClipsAlone, 8.0)


class SkipsInner(UpdateAround):
    def construct(self, loss, gradients, *inputs):
        return ops.depend(loss, self.optimizer(gradients))


class RunsInnerAfterAll(SkipsInner):
    def construct(self, loss, gradients, *inputs):
        return call(self.inner, (loss, gradients, *inputs))


class SkipsAgain(RunsInnerAfterAll):
    def construct(self, loss, gradients, *inputs):
        return ops.depend(loss, self.optimizer(gradients))


def plainly(method):
    @functools.wraps(method)
    def wrapped(self, *inputs):
        return method(self, *inputs)

    return wrapped


class Decorated(UpdateAround):
    @plainly
    def construct(self, loss, gradients, *inputs):
        return call(self.inner, (loss, gradients, *inputs))

    def rate(self):
        return self.optimizer.get_lr()


def run_within(part, *inputs):
    return call(part.inner, inputs)


class ByFunction(UpdateAround):
    def construct(self, loss, gradients, *inputs):
        assert len(gradients) == len(self.optimizer.parameters)
        return run_within(self, loss, gradients, *inputs)


class HandsOnByName(UpdateAround):
    def construct(self, loss, gradients, *inputs):
        return UpdateAround.construct(self, loss, self.of_optimizer(gradients), *inputs)

    def of_optimizer(self, gradients):
        return gradients if self.optimizer is not None else ()


def test_a_part_that_runs_the_optimizer_past_others_is_refused():
    def made(kind, scale=1.0, **settings):
        net = nets.MLP()
        rates = nn.cosine_decay_lr(0.0, 0.1, 8, 1, 8)
        optimizer = nn.Momentum(net.trainable_params(), rates, 0.9, loss_scale=scale)
        manager = ms.FixedLossScaleManager(scale, drop_overflow_update=False)
        arguments = {"algorithms": [Replacing(kind)], "loss_scale_manager": manager}
        config = {**switched(**dict.fromkeys(settings, True)), **settings}
        model_of(net, config, optimizer, BoostModel, **arguments)

    shorter = {"total_steps": 8}
    made(SkipsInner)  # what it leaves out does nothing else
    made(HandsOnByName, 8.0)
    made(HandsOnByName, short_schedule=shorter)
    for kind in (RunsInnerAfterAll, Decorated, ByFunction):
        made(kind, short_schedule=shorter)
    with pytest.raises(ValueError, match=r"not self\.inner \(FasterSchedule\), which would do n"):
        made(SkipsInner, short_schedule=shorter)
    with pytest.raises(
        ValueError, match=r"self\.inner \(Update\), which multiplies by .* scale, 8, f"
    ):
        made(SkipsAgain, 8.0)


class Looking(UpdateAround):
    """Keeps the largest gradient that it has seen."""

    def __init__(self, inner):
        super().__init__(inner)
        self.largest = Parameter(Tensor(0.0), name="boost.looking.largest", requires_grad=False)

    def construct(self, loss, gradients, *inputs):
        loss = ops.depend(loss, ops.assign(self.largest, gradients[0].abs().max()))
        return call(self.inner, (loss, gradients, *inputs))


class Looks(Replacing):
    switch = "looks"


class Dividing(UpdateAround):
    divides_sens = True

    def construct(self, loss, gradients, *inputs):
        return call(self.inner, (loss, tuple(0.125 * one for one in gradients), *inputs))


def test_a_part_before_the_one_that_divides_the_scale_is_refused():
    def made(*own):
        net = Product()
        scale = ms.FixedLossScaleManager(8.0, drop_overflow_update=False)
        optimizer = nn.SGD(net.trainable_params(), RATE)
        model = BoostModel(net, optimizer=optimizer, algorithms=own, loss_scale_manager=scale)
        return model.train_network, net

    step, net = made(Looks(Looking), Replacing(Dividing))  # the last one runs first
    assert moved(step, net) == {-4.0}
    assert float(step.update_part.inner.largest.asnumpy()) == 8.0
    with pytest.raises(
        ValueError, match=r"^Dividing divides .*, but Looking runs before it, .* 8: gi"
    ):
        made(Replacing(Dividing), Looks(Looking))


class NoBatch(UpdateAround):
    def construct(self, loss, gradients):
        return super().construct(loss, gradients)


def test_a_construct_without_room_for_the_batch_is_refused():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    with pytest.raises(ValueError, match=r"replacing: construct of NoBatch must take \(loss, grad"):
        model_of(net, switched(), optimizer, BoostModel, algorithms=[Replacing(NoBatch)])


class AddingTwice(Adding):
    def join(self, step):
        super().join(step)
        super().join(step)


def test_state_of_one_name_in_two_parts_is_refused():
    net = nets.MLP()
    optimizer = nets.momentum(net.trainable_params())
    with pytest.raises(
        ValueError, match=r"named 'boost\.adding\.0': name that of Totals boost.<sw"
    ):
        model_of(net, switched(), optimizer, BoostModel, algorithms=[AddingTwice()])


class SetsAnAttribute(UpdateAround):
    """Multiplies each gradient by a number of Python's, which the host sets before a batch."""

    def __init__(self, inner):
        super().__init__(inner)
        self.factors = [1.0] * len(inner.optimizer.parameters)

    def set(self, factors):
        self.factors = factors

    def before_step(self, *inputs):
        super().before_step(*inputs)
        last = len(self.factors) - 1
        self.set([float(place == last) for place in range(last + 1)])

    def restricted(self, optimizer, positions):
        part = super().restricted(optimizer, positions)
        part.factors = [self.factors[place] for place in positions]
        return part

    def construct(self, loss, gradients, *inputs):
        gradients = tuple(one * factor for one, factor in zip(gradients, self.factors))
        return super().construct(loss, gradients, *inputs)


class SetsItInPlace(SetsAnAttribute):
    def set(self, factors):
        self.factors[:] = factors


class SetsAnArray(SetsAnAttribute):
    def __init__(self, inner):
        super().__init__(inner)
        self.factors = np.ones(len(self.factors))

    def set(self, factors):
        self.factors = np.array(factors)

    def restricted(self, optimizer, positions):
        part = UpdateAround.restricted(self, optimizer, positions)
        part.factors = self.factors[list(positions)]
        return part

    def construct(self, loss, gradients, *inputs):
        gradients = tuple(one * float(by) for one, by in zip(gradients, self.factors))
        return UpdateAround.construct(self, loss, gradients, *inputs)


class SetsAnArrayInPlace(SetsAnArray):
    def set(self, factors):
        self.factors[:] = factors


class Factor(nn.Cell):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def construct(self, gradients):
        return tuple(one * factor for one, factor in zip(gradients, self.factors))


class ReplacesItsCell(SetsAnAttribute):
    """Has its factors in a Cell, and another Cell for each batch."""

    def __init__(self, inner):
        super().__init__(inner)
        self.within = Factor(self.factors)

    def set(self, factors):
        self.within = Factor(factors)

    def restricted(self, optimizer, positions):
        part = UpdateAround.restricted(self, optimizer, positions)
        part.within = Factor([self.within.factors[place] for place in positions])
        return part

    def construct(self, loss, gradients, *inputs):
        return UpdateAround.construct(self, loss, self.within(gradients), *inputs)


def moved_beside(switch, part):
    """Return which weights move if the part's factors are 0 for all but the last one."""
    config = switched(**{switch: True})
    config[switch] = {
        "grad_freeze": {"param_groups": 2, "schedule": [0, 1], "total_steps": 2},
        "short_schedule": {"total_steps": 8, "parts": 2},
    }[switch]
    net = nets.Deep()
    before = nets.weights(net)
    optimizer = nn.SGD(net.trainable_params(), nn.cosine_decay_lr(0.0, 0.1, 8, 1, 8))
    own = [Replacing(part)]
    step = model_of(net, config, optimizer, BoostModel, algorithms=own).train_network
    for batch in nets.batches(2):
        step(*map(Tensor, batch))
    after = nets.weights(net)
    return [name for name in before if not np.array_equal(before[name], after[name])]


@pytest.mark.parametrize("switch", ["grad_freeze", "short_schedule"])
def test_an_attribute_that_the_host_sets_reaches_the_variants(mode, switch):
    assert moved_beside(switch, SetsAnAttribute) == ["last.bias"]


@pytest.mark.parametrize("kind", [SetsItInPlace, SetsAnArray, SetsAnArrayInPlace, ReplacesItsCell])
def test_other_ways_of_setting_it_reach_the_variants(pynative_mode, kind):
    assert moved_beside("grad_freeze", kind) == ["last.bias"]


class SetsATable(UpdateAround):
    """Has numbers, by chance as many as there are weights."""

    def before_step(self, *inputs):
        super().before_step(*inputs)
        self.table = (*[0.0] * 11, 1.0)

    def construct(self, loss, gradients, *inputs):
        gradients = tuple(one * self.table[11] for one in gradients)
        return super().construct(loss, gradients, *inputs)


def test_numbers_are_not_divided_because_there_are_as_many_weights(pynative_mode):
    assert len(nets.Deep().trainable_params()) == 12
    assert "last.bias" in moved_beside("grad_freeze", SetsATable)


class UnderOptimizer(nn.Optimizer):
    """Holds an optimizer under a name that this package does not know."""

    def __init__(self, optimizer):
        super().__init__(0.1, list(optimizer.parameters))
        for name in ("global_step", "learning_rate"):
            getattr(optimizer, name).name = f"inner.{name}"
        self.optimizer = optimizer

    def construct(self, gradients):
        return self.optimizer(gradients)


class Wrapping(Algorithm):
    switch = "wrapping"

    def build(self, build):
        build.optimizer = UnderOptimizer(build.optimizer)


def test_an_optimizer_that_is_wrapped_was_not_replaced():
    net = nets.MLP()
    settings = {"level": "O1", "config": switched(gradient_centralization=True)}
    optimizer = nets.momentum(net.trainable_params())
    step = make_train_step(net, nets.loss_fn(), optimizer, algorithms=[Wrapping()], **settings)
    assert step.report()["gradient_centralization"].status == "applied"


def test_an_update_that_is_set_later_leaves_dim_reduce_out(mode):
    config = switched(dim_reduce=True)
    config["dim_reduce"] = {"n_components": 7, "pca_mat_path": nets.basis_file()}
    net = nets.MLP()
    step = model_of(net, config, nets.momentum(net.trainable_params())).train_network
    step.update_part = Update(step.optimizer)
    with pytest.warns(NoEffectWarning, match="dim_reduce has no effect: the optimizer of the"):
        step(*map(Tensor, nets.batches(1)[0]))
    assert step.observations() == {}
    assert step.report()["dim_reduce"].status == "skipped"
