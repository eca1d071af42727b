"""The loss-scaled step: overflow, skipping, scales, managers and amp levels, in both modes."""

from __future__ import annotations

import contextlib
import warnings

import mindspore as ms
import nets
import numpy as np
import oracles
import pytest
from mindspore import Parameter, Tensor, experimental, nn, ops
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostMonitor,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    BoostWarning,
    FreezeOpt,
    GroupLossScaleManager,
    make_train_step,
    read_history,
)

OFF = {"boost": {"mode": "disable_all"}}


class Product(nn.Cell):
    """sum(x * w) in one dtype: the gradient of w is x times the scale."""

    def __init__(self, dtype=ms.float16, size=1):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(size), dtype), name="w")

    def construct(self, x):
        return (x * self.w).sum()


def scaled_step(net, scale, optimizer=None):
    optimizer = optimizer or nn.SGD(net.trainable_params(), 1e-3)
    return BoostTrainOneStepWithLossScaleCell(net, optimizer, scale).set_train()


def train(cell, steps, image=False):
    for x, y in nets.batches(steps, image=image):
        cell(Tensor(x), Tensor(y))
    return cell


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32])
def test_overflow_on_the_values_of_the_specification(mode, dtype):
    """fp16 holds up to 65504: 8 * 40000 is inf there, and finite in the wider exponents."""
    step = scaled_step(Product(dtype), Tensor(8.0))
    assert "boost.loss_scale.scale" not in [one.name for one in step.trainable_params()]
    expected = [True, False, dtype == ms.float16, False, True]
    for value, overflow in zip((-np.inf, 0, 40000, 10, np.inf), expected):
        before = step.weights[0].astype(ms.float32).asnumpy().copy()
        loss, flag, scale = step(Tensor([value], dtype))
        assert flag.dtype == ms.bool_
        assert flag.shape == ()
        assert bool(flag.asnumpy()) is overflow
        assert float(scale.asnumpy()) == 8.0
        after = step.weights[0].astype(ms.float32).asnumpy()
        if overflow:
            np.testing.assert_array_equal(before, after)
    assert loss.shape == ()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scale_as_a_tensor_and_its_setter(mode, shape):
    step = scaled_step(Product(), Tensor(np.full(shape, 8.0, np.float32)))
    x = Tensor([40000.0], ms.float16)
    assert bool(step(x)[1].asnumpy())
    step.set_sense_scale(Tensor(np.full(shape, 1.0, np.float32)))
    _, overflow, scale = step(x)
    assert not bool(overflow.asnumpy())
    assert scale.shape == shape
    assert float(scale.asnumpy().reshape(())) == 1.0


@pytest.mark.parametrize("parallel", ["stand_alone", "data_parallel", "semi_auto_parallel"])
def test_ranks_agree_on_the_overflow_wherever_those_of_mindspore_do(parallel):
    """One that skipped a step alone would train other slices of the weights from then on."""
    ms.set_auto_parallel_context(parallel_mode=parallel, device_num=2)
    try:
        step = scaled_step(Product(), Tensor(8.0))
        net = Product()
        plain = nn.TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params()), Tensor(8.0))
    finally:
        ms.reset_auto_parallel_context()
    assert step.detector.distributed == step.is_distributed == plain.is_distributed
    assert hasattr(step, "allreduce") == plain.is_distributed  # for subclasses that use both


def test_a_scale_of_the_wrong_type_or_shape_is_refused():
    net = Product()
    optimizer = nn.SGD(net.trainable_params(), 1e-3)
    for scale in (1024.0, None, np.ones(1), "dynamic", nn.ReLU()):
        with pytest.raises(TypeError, match="scale_sense must be a Tensor or a Cell with get_loss"):
            BoostTrainOneStepWithLossScaleCell(net, optimizer, scale)
    with pytest.raises(TypeError, match=r"DynamicLossScaleManager.*: give its get_update_cell\(\)"):
        BoostTrainOneStepWithLossScaleCell(net, optimizer, ms.DynamicLossScaleManager())
    for shape in ((2,), (1, 1)):
        with pytest.raises(ValueError, match=r"scale_sense must have shape \(\) or \(1,\), got"):
            BoostTrainOneStepWithLossScaleCell(net, optimizer, Tensor(np.ones(shape, np.float32)))


def test_the_setter_refuses_what_does_not_fit():
    step = scaled_step(Product(), Tensor(8.0))
    with pytest.raises(TypeError, match="sens must be a Tensor, got 4"):
        step.set_sense_scale(4.0)
    with pytest.raises(ValueError, match=r"sens must have shape \(\), got \(1,\)"):
        step.set_sense_scale(Tensor([4.0]))
    manager = GroupLossScaleManager([8.0], [])
    net = Product()
    manager.loss_scale_groups = [net.trainable_params()]
    with pytest.raises(ValueError, match="set_loss_scale_status"):
        scaled_step(net, manager).set_sense_scale(Tensor(4.0))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -2.0])
def test_a_scale_that_cannot_be_divided_out_is_refused(value):
    step = scaled_step(Product(), Tensor(8.0))
    with pytest.raises(ValueError, match="sens must be finite and above 0, got"):
        step.set_sense_scale(Tensor(value, ms.float32))
    with pytest.raises(ValueError, match="scale_sense must be finite and above 0, got"):
        scaled_step(Product(), Tensor(value, ms.float32))
    assert float(step.scale_sense.asnumpy()) == 8.0


@pytest.mark.parametrize("value", [np.nan, -np.inf, 0.0])
def test_a_factor_that_cannot_be_divided_out_is_refused(value):
    net = Product()
    with pytest.raises(ValueError, match="sens must be finite and not 0, got"):
        BoostTrainOneStepCell(net, nn.SGD(net.trainable_params(), 1e-3), value)


def test_a_dynamic_scale_goes_on_from_the_one_that_is_set(mode):
    step = scaled_step(Product(), nn.DynamicLossScaleUpdateCell(8, 2, 2))
    step.set_sense_scale(Tensor(64.0))
    used = [float(step(Tensor([1.0], ms.float16))[2].asnumpy()) for _ in range(3)]
    assert used == [64.0, 64.0, 128.0]


def test_settings_of_an_experimental_optimizer_may_change_in_pynative_mode(pynative_mode):
    """The gradient is 0, so that nothing but the weight decay moves the weight."""
    net = nn.Dense(3, 1, weight_init="ones", has_bias=False)
    optimizer = experimental.optim.SGD(net.trainable_params(), lr=0.1)
    step = scaled_step(nn.WithLossCell(net, nn.MSELoss()), Tensor(1024.0), optimizer)
    batch = Tensor(np.zeros((2, 3), np.float32)), Tensor(np.zeros((2, 1), np.float32))
    step(*batch)
    optimizer.param_groups[0]["weight_decay"] = 1.0
    step(*batch)
    np.testing.assert_allclose(net.weight.asnumpy(), 0.9, rtol=1e-6)  # rounding of float32


class ByHand(BoostTrainOneStepWithLossScaleCell):
    """Puts the step together from its parts, under the names that MindSpore's step has."""

    def construct(self, x):
        loss = self.network(x)
        scale = self.scale_sense + 0.0
        status, sens = self.start_overflow_check(
            loss, ops.ones_like(loss) * scale.astype(loss.dtype)
        )
        (gradient,) = self.grad(self.network, self.weights)(x, sens)
        overflow = self._get_overflow_status(status, (gradient,))
        if not self.process_loss_scale(overflow):
            loss = ops.depend(loss, self.optimizer((gradient / scale.astype(gradient.dtype),)))
        return loss, overflow, scale


def test_a_subclass_finds_the_parts_of_the_step_under_mindspores_names(mode):
    net = Product()
    optimizer = nn.SGD(net.trainable_params(), 0.5)
    step = ByHand(net, optimizer, nn.DynamicLossScaleUpdateCell(8, 2, 2)).set_train()
    found = [step(Tensor([value], ms.float16)) for value in (1.0, 40000.0, 1.0)]
    assert [bool(one[1].asnumpy()) for one in found] == [False, True, False]
    assert [float(one[2].asnumpy()) for one in found] == [8.0, 8.0, 4.0]
    assert net.w.asnumpy().tolist() == [1.0 - 0.5 - 0.5]  # of two gradients of 1


class OnHost(nn.Cell):
    """A rule for the scale as one may write it for PYNATIVE_MODE."""

    factor = 2.0

    def get_loss_scale(self):
        return 8.0

    def construct(self, scale, overflow):
        ops.assign(scale, scale * (0.5 if bool(overflow.asnumpy()) else self.factor))
        return overflow


def test_a_rule_of_the_users_own_runs_in_python_in_pynative_mode(pynative_mode):
    rule = OnHost()
    step = scaled_step(Product(), rule)
    step(Tensor([1.0], ms.float16))
    rule.factor = 1.0
    used = [float(step(Tensor([1.0], ms.float16))[2].asnumpy()) for _ in range(2)]
    assert used == [16.0, 16.0]


@pytest.mark.parametrize("name", nets.OPTIMIZERS)
def test_a_power_of_two_costs_no_bit_in_fp32(mode, name):
    plain, boosted = nets.MLP(), nets.MLP()
    cell = nn.TrainOneStepCell(
        nn.WithLossCell(plain, nets.loss_fn()), nets.OPTIMIZERS[name](plain.trainable_params())
    )
    train(cell.set_train(), 5)
    step = scaled_step(
        nn.WithLossCell(boosted, nets.loss_fn()),
        Tensor(1024.0),
        nets.OPTIMIZERS[name](boosted.trainable_params()),
    )
    train(step, 5)
    nets.assert_same_weights(plain, boosted)


@pytest.mark.parametrize("name", nets.OPTIMIZERS)
def test_a_skipped_step_changes_nothing(mode, name):
    net = nets.MLP()
    optimizer = nets.OPTIMIZERS[name](net.trainable_params())
    step = scaled_step(nn.WithLossCell(net, nets.loss_fn()), Tensor(4.0), optimizer)
    train(step, 3)
    before, state = nets.weights(net), nets.weights(optimizer)
    ((x, y),) = nets.batches(1)
    x[0, 0] = np.inf
    _, overflow, _ = step(Tensor(x), Tensor(y))
    assert bool(overflow.asnumpy())
    np.testing.assert_equal(nets.weights(net), before)
    np.testing.assert_equal(nets.weights(optimizer), state)  # moments, global step, schedule
    assert step.observations()["skipped_steps"] == 1


def test_trace_of_the_dynamic_scale(mode):
    """From 16, window 3, overflow at step 5; the scale is the one after each step."""
    expected = [16, 16, 32, 32, 16, 16, 16, 32, 32]
    overflows = [step == 4 for step in range(9)]
    assert oracles.dynamic_scale(16, 2, 3, overflows) == expected
    step = scaled_step(Product(), nn.DynamicLossScaleUpdateCell(16, 2, 3))
    used, after = [], []
    for overflow in overflows:
        _, _, scale = step(Tensor([np.inf if overflow else 1.0], ms.float16))
        used.append(float(scale.asnumpy()))
        after.append(step.observations()["loss_scale"])
    assert after == expected
    assert used == [16, *expected[:-1]]


def test_growth_stops_before_the_scale_leaves_fp32(mode):
    step = scaled_step(Product(ms.float32), nn.DynamicLossScaleUpdateCell(2.0**124, 2, 1))
    for _ in range(6):
        step(Tensor([1e-3], ms.float32))
    assert step.observations()["loss_scale"] == 2.0**127


class InBfloat16(Product):
    """Its loss, of float32 weights."""

    def construct(self, x):
        return ops.cast((x * self.w).sum(), ms.bfloat16)


@pytest.mark.parametrize("scale", [Tensor(16.0), nn.DynamicLossScaleUpdateCell(16, 2, 3)])
def test_a_loss_of_bfloat16_trains(mode, scale):
    """MindSpore's ones_like does not take one in PYNATIVE_MODE."""
    net = InBfloat16(ms.float32)
    scaled_step(net, scale, nn.SGD(net.trainable_params(), 0.5))(Tensor([0.25], ms.float32))
    assert float(net.w.asnumpy()[0]) == 1 - 0.5 * 0.25


def test_the_largest_scale_trains(mode):
    """One over 2 ** 127 is no normal number of float32, and the CPU takes it for 0."""
    net = Product(ms.float32)
    scaled_step(net, Tensor(2.0**127), nn.SGD(net.trainable_params(), 0.5))(
        Tensor([1.0], ms.float32)
    )
    assert float(net.w.asnumpy()[0]) == 0.5


@pytest.mark.parametrize("scale", [2.0**10, 2.0**24, 2.0**26, 2.0**30])
def test_large_scales_are_divided_out_of_float16_gradients(mode, scale):
    """One over 2 ** 26 is 0 in float16; the gradient itself, 2 ** -16, is not."""

    class Faint(Product):
        def construct(self, x):
            return super().construct(x).astype(ms.float32) * 9.5367431640625e-07  # 2 ** -20

    net = Faint()
    scaled_step(net, Tensor(scale), nn.SGD(net.trainable_params(), 1024.0))(
        Tensor([16.0], ms.float16)
    )
    # From 1 down by 1024 * 2 ** -16 = 2 ** -6, exactly; scales that overflow leave 1.
    carried = 16.0 * scale * 2.0**-20
    expected = 1.0 - 2.0**-6 if carried < 65504 else 1.0
    assert float(net.w.asnumpy()[0]) == expected


def test_the_smallest_scale_is_told_once(mode):
    step = scaled_step(Product(), nn.DynamicLossScaleUpdateCell(2, 2, 1000))
    x = Tensor([np.inf], ms.float16)
    step(x)  # 2 -> 1: not at the minimum yet
    with pytest.warns(BoostWarning, match="smallest loss scale") as caught:
        step(x)
    assert len(caught) == 1
    step(x)  # warnings are errors here: a second one would fail the test


@pytest.mark.parametrize("scale", [Tensor(8.0), nn.FixedLossScaleUpdateCell(8.0)])
def test_a_fixed_scale_that_skips_all_steps_is_told_once(pynative_mode, scale):
    step = scaled_step(Product(), scale)
    bad, good = Tensor([np.inf], ms.float16), Tensor([1.0], ms.float16)
    for x in (*[bad] * 9, good, *[bad] * 9):  # one step that is made begins the count anew
        step(x)
    with pytest.warns(BoostWarning, match="overflowed at the fixed loss scale 8 and were skipped"):
        step(bad)
    for x in (*[bad] * 9, good, *[bad] * 11):  # warnings are errors here: none a second time
        step(x)


def test_an_overflow_at_the_fixed_scale_1_is_told_at_once(pynative_mode):
    step = scaled_step(Product(), Tensor(1.0))
    with pytest.warns(BoostWarning, match="the network itself makes inf or nan"):
        step(Tensor([np.inf], ms.float16))


def test_it_is_told_once_though_two_groups_train_in_turn(pynative_mode):
    net = nets.MLP()
    every = net.trainable_params()
    optimizer = FreezeOpt(nets.momentum(every), [every, every[2:]], [0, 1])
    step = scaled_step(nn.WithLossCell(net, nets.loss_fn()), Tensor(8.0), optimizer)
    x, y = nets.batches(1)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(24):
            step(Tensor(x * np.inf), Tensor(y))
    (told,) = [str(one.message) for one in caught if issubclass(one.category, BoostWarning)]
    assert "overflowed at the fixed loss scale 8" in told


MANAGERS = {
    "default of the level": lambda: {},
    "none": lambda: {"loss_scale_manager": None},
    "dynamic": lambda: {"loss_scale_manager": ms.DynamicLossScaleManager(2**10, 2, 3)},
    "fixed, dropping": lambda: {"loss_scale_manager": ms.FixedLossScaleManager(1024.0)},
    "fixed, not dropping": lambda: {"loss_scale_manager": ms.FixedLossScaleManager(1024.0, False)},
}


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("amp_level", ["O0", "O1", "O2", "O3"])
def test_managers_and_amp_levels_train(mode, amp_level, manager):
    net = nets.ConvNet()
    own = 1024.0 if manager == "fixed, not dropping" else 1.0
    optimizer = nets.momentum(net.trainable_params(), loss_scale=own)
    model = model_of(net, OFF, optimizer, amp_level=amp_level, **MANAGERS[manager]())
    scaled = isinstance(model.train_network, BoostTrainOneStepWithLossScaleCell)
    dropping = manager in ("dynamic", "fixed, dropping")
    assert scaled == (dropping or (manager == "default of the level" and amp_level == "O2"))
    before = nets.weights(net)
    model.train(2, nets.dataset(3, image=True), dataset_sink_mode=False)
    after = nets.weights(net)
    assert all(np.isfinite(value).all() for value in after.values())
    moved = any((before[name] != after[name]).any() for name in before if "weight" in name)
    if manager == "default of the level" and amp_level == "O2":
        # It starts from 2 ** 24: the first steps may all be skipped, which is as it should be.
        assert moved or model.train_network.observations()["skipped_steps"] == 6
    else:
        assert moved


def test_fixed_scale_that_drops_equals_no_scale_in_fp32(mode):
    plain, boosted = nets.MLP(), nets.MLP()
    model_of(plain, OFF).train(1, nets.dataset(), dataset_sink_mode=False)
    model = model_of(boosted, OFF, loss_scale_manager=ms.FixedLossScaleManager(1024.0))
    model.train(1, nets.dataset(), dataset_sink_mode=False)
    nets.assert_same_weights(plain, boosted)


def test_two_models_at_amp_o2_do_not_share_their_scale():
    first, second = (model_of(nets.MLP(), OFF, amp_level="O2").train_network for _ in range(2))
    first.scale_sense.set_data(Tensor(2.0))
    assert second.observations()["loss_scale"] == 2.0**24


@pytest.mark.parametrize("bound", [0.05, 1e3])
@pytest.mark.parametrize("scheme", ["unscaled", "sens", "scaled"])
def test_clipping_bounds_the_norm_of_the_unscaled_gradients(mode, scheme, bound):
    """SGD with rate 1 moves the weights by minus the gradient: compared with the float64 rule."""
    net = nets.MLP()
    loss = nn.WithLossCell(net, nets.loss_fn())
    ((x, y),) = nets.batches(1)
    weights = ms.ParameterTuple(net.trainable_params())
    gradients = ops.GradOperation(get_by_list=True)(loss, weights)(Tensor(x), Tensor(y))
    expected = oracles.clip_by_global_norm([one.asnumpy() for one in gradients], bound)
    before = [one.asnumpy().copy() for one in net.trainable_params()]
    sens = 64.0 if scheme == "sens" else 1.0
    optimizer = nn.SGD(net.trainable_params(), 1.0, loss_scale=sens)
    config = {**OFF, "gradients": {"clip_norm": bound}}
    with AutoBoost("O1", config).building():
        if scheme == "scaled":
            step = BoostTrainOneStepWithLossScaleCell(loss, optimizer, Tensor(64.0))
        else:
            step = BoostTrainOneStepCell(loss, optimizer, sens if scheme == "sens" else None)
    step.set_train()(Tensor(x), Tensor(y))
    for old, parameter, gradient in zip(before, net.trainable_params(), expected):
        # float32 weights of size 1: one rounding of the subtraction, and one of the norm.
        np.testing.assert_allclose(old - parameter.asnumpy(), gradient, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("bound", [0.05, 1e3])
def test_clipping_leaves_a_climbing_step_its_direction(mode, bound):
    """A negative factor turns every step round; from 0, so that nothing is rounded."""
    moved = []
    for sens in (1.0, -1.0):
        net = nn.Dense(3, 2, weight_init="zeros", has_bias=False)
        optimizer = nn.SGD(net.trainable_params(), 1.0)
        with AutoBoost("O1", {**OFF, "gradients": {"clip_norm": bound}}).building():
            loss = nn.WithLossCell(net, nets.loss_fn())
            told = (
                contextlib.nullcontext() if sens > 0 else pytest.warns(BoostWarning, match="by s")
            )
            with told:
                step = BoostTrainOneStepCell(loss, optimizer, sens)
        train(step.set_train(), 1)
        moved.append(net.weight.asnumpy())
    assert np.abs(moved[0]).max() > 0
    np.testing.assert_array_equal(moved[1], -moved[0])


@pytest.mark.parametrize("make", [experimental.optim.SGD, nn.SGD, nn.AdamWeightDecay])
@pytest.mark.parametrize("drops", [True, False, None])
def test_a_factor_that_nobody_divides_out_is_told(make, drops):
    net = nn.Dense(4, 2)
    optimizer = make(net.trainable_params(), 0.1)
    manager = None if drops is None else ms.FixedLossScaleManager(1024.0, drops)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_train_step(
            net, nn.MSELoss(), optimizer, level="O1", config=OFF, loss_scale_manager=manager
        )
    told = [str(one.message) for one in caught if "by sens=" in str(one.message)]
    assert len(told) == (drops is False)
    for message in told:
        assert "use drop_overflow_update=True" in message
        assert ("give the optimizer loss_scale=1024.0" in message) == (make is nn.SGD)


@pytest.mark.parametrize("drops", [True, None])
def test_a_factor_that_only_the_optimizer_has_is_told(drops):
    """It divides by 1024 what nothing has multiplied; dropping is no remedy for that."""
    net = nn.Dense(4, 2)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    manager = None if drops is None else ms.FixedLossScaleManager(1024.0, drops)
    with pytest.warns(BoostWarning, match=r"give the optimizer loss_scale=1\.0$"):
        make_train_step(
            net, nn.MSELoss(), optimizer, level="O1", config=OFF, loss_scale_manager=manager
        )


def test_an_overflow_is_skipped_before_it_is_clipped(mode):
    config = {**OFF, "gradients": {"clip_norm": 1.0}}
    with AutoBoost("O1", config).building():
        step = scaled_step(Product(), Tensor(8.0))
    assert bool(step(Tensor([np.inf], ms.float16))[1].asnumpy())
    np.testing.assert_array_equal(step.weights[0].asnumpy(), [1.0])


class RowsTimes(nn.Cell):
    """Rows of a table, whose gradient is row-sparse in GRAPH_MODE."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingLookup(6, 2, param_init="ones", sparse=True)

    def construct(self, rows, x):
        return (self.table(rows) * x).sum()


@pytest.mark.parametrize("value", [3.0, np.inf])
def test_row_sparse_gradients(graph_mode, value):
    """In GRAPH_MODE only: in PYNATIVE_MODE no optimizer of MindSpore runs on this gradient."""
    net = RowsTimes()
    step = scaled_step(net, Tensor(8.0), nn.LazyAdam(net.trainable_params(), 0.1))
    _, overflow, _ = step(Tensor([1, 4], ms.int32), Tensor([[value], [1.0]], ms.float32))
    assert bool(overflow.asnumpy()) == np.isinf(value)
    changed = (net.table.embedding_table.asnumpy() != 1).any(axis=1)
    assert changed.tolist() == [not np.isinf(value) and row in (1, 4) for row in range(6)]


def test_monitor_shows_scale_and_skipped_steps(mode, tmp_path):
    net = nets.MLP()
    model = model_of(net, OFF, loss_scale_manager=ms.DynamicLossScaleManager(2**8, 2, 2))
    path = tmp_path / "history.jsonl"
    monitor = BoostMonitor(path, progress=False)
    model.train(1, nets.dataset(4), callbacks=[monitor], dataset_sink_mode=False)
    steps = [record["boost"] for record in read_history(path) if record["event"] == "step"]
    assert [one["loss_scale"] for one in steps] == [256, 512, 512, 1024]
    assert [one["skipped_steps"] for one in steps] == [0, 0, 0, 0]


def test_report_names_the_detector():
    model = model_of(nets.MLP(), OFF, loss_scale_manager=ms.DynamicLossScaleManager())
    row = model.train_network.report()["overflow detection"]
    assert row.status == "applied"
    assert row.reason.startswith("cpu_finite: CPU")


def test_an_optimizer_may_have_no_scale():
    class NoScale(nn.Momentum):
        def __init__(self, weights):
            super().__init__(weights, 0.1, 0.9)
            self.loss_scale = None

    net = nn.Dense(3, 2)
    BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), NoScale(net.trainable_params()))


class Holding(nn.Cell):
    """A user's own Cell around an optimizer."""

    def __init__(self, opt):
        super().__init__(auto_prefix=False)
        self.opt, self.parameters = opt, opt.parameters

    def construct(self, gradients):
        return self.opt(gradients)


def test_the_scale_of_an_optimizer_within_another_cell_counts():
    net = nn.Dense(3, 2)
    optimizer = Holding(nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=8.0))
    BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, 8.0)


def test_a_scale_within_an_optimizer_of_the_users_has_a_remedy():
    class Inner(nn.Momentum):
        def __init__(self, weights):
            super().__init__(weights, 0.1, 0.9, loss_scale=8.0)
            self.init_args = {}

    net = nn.Dense(3, 2)
    with pytest.warns(BoostWarning, match=r"by its loss_scale=8\.0: give the step sens=8\.0$"):
        BoostTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), Inner(net.trainable_params()))
