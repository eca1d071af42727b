"""Loss scales by groups: markers, blame, scales, and the example of the API text."""

from __future__ import annotations

import warnings

import mindspore as ms
import nets
import numpy as np
import oracles
import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import (
    BoostTrainOneStepWithLossScaleCell,
    BoostWarning,
    GroupLossScaleManager,
    NoEffectWarning,
    make_train_step,
)
from mindspore_boost_ext.stages.overflow import choose_detector

ON = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False, "loss_scale_group": True}}


class Chain(nn.Cell):
    """x * w1 * w2 * ... summed, each factor in a group of its own; gradients are easy by hand."""

    def __init__(self, manager, factors, dtype=ms.float32, marked=None):
        super().__init__()
        self.manager = manager
        self.count = len(factors)
        self.factors = ms.ParameterTuple(
            [Parameter(Tensor([f], dtype), name=f"w{i}") for i, f in enumerate(factors, 1)]
        )
        self.marked = tuple(marked if marked is not None else range(self.count + 1))

    def construct(self, x):
        for index in range(self.count):
            if index in self.marked:
                x = self.manager(x, index, index + 1)
            x = x * self.factors[index]
        if self.count in self.marked:
            x = self.manager(x, self.count, self.count + 1)
        return x.sum()


def chain(scales, factors, dtype=ms.float32, rate=0.0, marked=None, **options):
    manager = GroupLossScaleManager(scales, [], **options)
    net = Chain(manager, factors, dtype, marked)
    manager.loss_scale_groups = [[factor] for factor in net.factors]
    optimizer = nn.SGD(list(net.factors), rate)
    return manager, BoostTrainOneStepWithLossScaleCell(net, optimizer, manager).set_train()


def run(step, value, dtype=ms.float32):
    loss, overflow, scales = step(Tensor([value], dtype))
    assert overflow.dtype == ms.bool_
    assert overflow.shape == ()
    return loss, bool(overflow.asnumpy()), scales.asnumpy().tolist()


def test_markers_scale_each_groups_gradients_only(mode):
    """With all factors of growth at 1 a step of SGD moves by the true gradient, group by group."""
    _, step = chain([8.0, 1024.0, 2.0], [2.0, 3.0, 5.0], rate=1.0, growth_factor=1.0)
    _, overflow, scales = run(step, 7.0)
    assert not overflow
    assert scales == [8.0, 1024.0, 2.0]
    # d/dw_i of 7 * 2 * 3 * 5: exact in float32, as are the scales.
    moved = [float(weight.asnumpy()[0]) for weight in step.weights]
    assert moved == [2 - 7 * 3 * 5, 3 - 7 * 2 * 5, 5 - 7 * 2 * 3]


class Apart(nn.Cell):
    """A marker behind its first layer; no layers share a weight."""

    def __init__(self, manager):
        super().__init__()
        self.manager = manager
        self.first, self.middle, self.last = (nn.Dense(2, 2, has_bias=False) for _ in range(3))

    def construct(self, x):
        x = self.manager(self.first(self.manager(x, 0, 1)), 1, 2)
        return self.manager(self.last(self.middle(x)), 2, 3).sum()


class Held(Apart):
    def __init__(self, manager):
        super().__init__(manager)
        self.last.weight = self.first.weight


class Attending(Apart):
    """MindSpore's attention hands on the weight of its projection, and does not call that."""

    def __init__(self, manager):
        super().__init__(manager)
        self.middle = nn.TransformerEncoderLayer(2, 1, 4)


class Read(Apart):
    def construct(self, x):
        return super().construct(ops.matmul(x, self.first.weight))


@pytest.mark.parametrize(
    ("kind", "groups", "users"),
    [
        (Apart, 2, None),
        (Attending, 2, None),
        (Held, 1, None),
        (Held, 2, "first, last"),
        (Read, 2, "Read, first"),
    ],
)
def test_a_weight_that_may_act_in_two_groups_is_named(mode, kind, groups, users):
    manager = GroupLossScaleManager(8.0, [])
    net = kind(manager)
    first, *others = net.trainable_params()
    manager.loss_scale_groups = [[first], others] if groups == 2 else [[first, *others]]
    optimizer = nn.SGD([first, *others], 0.1)
    step = BoostTrainOneStepWithLossScaleCell(net, optimizer, manager).set_train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.look_before_first(Tensor(np.ones((1, 2), np.float32)))
    said = [str(one.message) for one in caught if issubclass(one.category, BoostWarning)]
    named = [one for one in said if one.startswith("loss_scale_group: several Cells use ")]
    assert [one.partition(". ")[0] for one in named] == (
        [f"loss_scale_group: several Cells use the weight 'first.weight' ({users})"]
        if users
        else []
    )


@pytest.mark.parametrize("guilty", [1, 2, 3])
def test_only_the_group_that_overflows_shrinks(mode, guilty):
    """fp16, gradients of size 1: a scale of 2 ** 17 is inf there, wherever it stands."""
    scales = [16.0, 16.0, 16.0]
    scales[guilty - 1] = 2.0**17
    manager, step = chain(scales, [1.0, 1.0, 1.0], ms.float16, rate=1.0)
    _, overflow, used = run(step, 1.0, ms.float16)
    assert overflow
    assert used == scales
    expected = oracles.group_scales(scales, [[group == guilty for group in (1, 2, 3)]])
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-6)  # float32
    assert all(float(weight.asnumpy()[0]) == 1.0 for weight in step.weights)
    assert step.observations()["skipped_steps"] == 1


class OtherRank(nn.Cell):
    """In place of the reduction of flags: rows are groups, and group 2 has overflowed there."""

    def construct(self, flags):
        # It handed on, was entered, was so before, had an entry; overflowed itself; has no marker.
        return flags + Tensor([[1.0, 1, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0]], ms.float32)


class Infinite(nn.Cell):
    """In place of the reduction of gradients, those of the other rank being infinite."""

    def construct(self, gradients):
        return tuple([gradient * np.inf for gradient in gradients])


def test_what_another_rank_hands_down_is_not_blamed_on_a_lower_group(mode):
    """All of it is clean here, but for the gradients that come out of the reduction."""
    manager, step = chain([8.0, 64.0], [2.0, 3.0], growth_factor=2.0, shrink_factor=0.5)
    step.detector.distributed, step.detector.all_reduce = True, OtherRank()
    step.grad_reducer = Infinite()
    _, overflow, _ = run(step, 1.0)
    assert overflow
    assert manager.group_scales() == [16.0, 32.0]


class Finish(nn.Cell):
    """The end of a step that trains group 1 alone, of two with one weight each."""

    def __init__(self, manager):
        super().__init__(auto_prefix=False)
        weights = [one for group in manager.loss_scale_groups for one in group]
        self.part = manager.scale_of_step(choose_detector(), weights).restricted((0,))

    def construct(self, gradient, record):
        _, _, scale = self.part.start(gradient)
        _, skip = self.part.finish(gradient, scale, (gradient,), (record,))
        return skip


def finished(gradient, *flags):
    """Return whether the step is skipped, and the next scales; before they are 4.

    ``flags`` are what the markers of both groups have seen: whether it handed on an overflow, was
    entered by one, was so before, had an entry.
    """
    manager = GroupLossScaleManager(4.0, groups(["a"], ["b"]), growth_factor=2.0, shrink_factor=0.5)
    nothing = [0, 0, 0, 0]  # of input and output
    record = Tensor([nothing, *flags, nothing], ms.float32)
    skip = Finish(manager)(Tensor([gradient], ms.float32), record)
    return bool(skip.asnumpy()), manager.group_scales()


SEEN = {
    "nothing": [0, 0, 0, 1],
    "no backward pass": [0, 0, 0, 0],
    "an overflow that reaches no weight": [1, 0, 0, 1],
}


@pytest.mark.parametrize("seen", SEEN)
def test_the_scale_of_a_group_that_rests_stays(mode, seen):
    assert finished(1.0, [0, 0, 0, 1], SEEN[seen]) == (False, [8.0, 4.0])


def test_the_scale_of_a_group_that_rests_shrinks_where_it_spoils_another(mode):
    assert finished(np.inf, [0, 1, 1, 1], [1, 0, 0, 1]) == (True, [8.0, 2.0])


def test_an_overflow_between_groups_is_not_missed(mode):
    """The gradient that group 2 hands on overflows, but the one of its own weight does not."""
    # dL/dw2 = S2 * x * w1 = 1024 * 2 ** -10; what is handed on: S2 * w2 = 1024 * 128 = inf in fp16.
    manager, step = chain([1024.0, 1024.0], [2.0**-10, 128.0], ms.float16)
    _, overflow, _ = run(step, 1.0, ms.float16)
    assert overflow
    expected = oracles.group_scales([1024.0, 1024.0], [[False, True]])
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-6)


class Loud(Chain):
    """Its gradients are inf before they meet a marker."""

    def construct(self, x):
        return super().construct(x) * 1e30 * 1e30


def test_an_overflow_of_the_loss_is_blamed_on_the_group_that_it_enters(mode):
    manager = GroupLossScaleManager(4.0, [])
    net = Loud(manager, [1.0, 1.0, 1.0])
    manager.loss_scale_groups = [[factor] for factor in net.factors]
    optimizer = nn.SGD(list(net.factors), 1.0)
    step = BoostTrainOneStepWithLossScaleCell(net, optimizer, manager).set_train()
    loss, overflow, _ = run(step, 2.0**-100)
    assert np.isfinite(loss.asnumpy())
    assert overflow
    assert [float(factor.asnumpy()[0]) for factor in net.factors] == [1.0, 1.0, 1.0]
    expected = oracles.group_scales([4.0] * 3, [[False, False, True]])
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-6)


@pytest.mark.parametrize("marked", [[], [0], [0, 1], [0, 2]])
def test_a_missing_marker_is_refused_before_anything_is_changed(mode, marked):
    """Gradients that do not carry a group's scale would be divided by it all the same."""
    _, step = chain([4.0, 4.0], [1.0, 1.0], rate=1.0, marked=marked)
    with pytest.raises(ValueError, match=r"no marker leads into some group.*for i = 0 to 2"):
        run(step, 1.0)
    assert all(float(weight.asnumpy()[0]) == 1.0 for weight in step.weights)


def test_the_first_marker_may_be_left_out(mode):
    """It scales the gradient of the network's input only, which nobody uses."""
    _, step = chain([4.0, 8.0], [2.0, 3.0], rate=1.0, marked=[1, 2], growth_factor=1.0)
    _, overflow, _ = run(step, 5.0)
    assert not overflow
    assert [float(weight.asnumpy()[0]) for weight in step.weights] == [2 - 15.0, 3 - 10.0]


class TwoWaysIn(nn.Cell):
    """Group 3 has two ways in: through group 2, and past it from group 1."""

    def __init__(self, manager):
        super().__init__()
        self.manager = manager
        self.factors = ms.ParameterTuple(
            [Parameter(Tensor([1.0], ms.float16), name=f"w{i}") for i in (1, 2, 3)]
        )

    def construct(self, x, loud):
        x = self.manager(x, 0, 1) * self.factors[0]
        way = self.manager(self.manager(x, 1, 2) * self.factors[1], 2, 3) * self.factors[2]
        past = self.manager(x, 1, 3) * loud
        return self.manager(way + past, 3, 4).sum()


@pytest.mark.parametrize("loud", [1.0, 60000.0])
def test_an_overflow_on_a_branch_is_blamed_on_the_group_it_is_in(mode, loud):
    manager = GroupLossScaleManager(4.0, [])
    net = TwoWaysIn(manager)
    manager.loss_scale_groups = [[factor] for factor in net.factors]
    optimizer = nn.SGD(list(net.factors), 0.0)
    step = BoostTrainOneStepWithLossScaleCell(net, optimizer, manager).set_train()
    _, overflow, _ = step(Tensor([1.0], ms.float16), Tensor([loud], ms.float16))
    guilty = loud > 1  # 4 * 60000 is inf in float16, inside group 3
    assert bool(overflow.asnumpy()) == guilty
    expected = oracles.group_scales([4.0] * 3, [[False, False, guilty]])
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-6)


def test_groups_cannot_change_once_they_are_in_use():
    manager, step = chain([4.0], [1.0])
    with pytest.raises(ValueError, match="loss_scale_groups cannot change"):
        manager.loss_scale_groups = [list(step.weights)]


@pytest.mark.parametrize("groups", [None, 0, [1]])
def test_groups_that_are_no_lists_are_refused(groups):
    with pytest.raises(TypeError, match="loss_scale_groups must be a list of lists"):
        GroupLossScaleManager(2, groups)


def test_a_loss_that_is_not_finite_skips_the_step(mode):
    _, step = chain([4.0, 4.0], [1.0, 1.0], ms.float32, rate=1.0)
    loss, overflow, _ = run(step, np.nan)
    assert np.isnan(loss.asnumpy())
    assert overflow
    assert all(float(weight.asnumpy()[0]) == 1.0 for weight in step.weights)


def test_trace_of_the_scales(mode):
    manager, step = chain([64.0, 2.0**15], [1.0, 1.0], ms.float16)
    overflows = []
    for value in [1.0] * 3 + [4.0] + [1.0] * 4:  # 4 * 2 ** 15 is inf in the top group's gradient
        run(step, value, ms.float16)
        overflows.append([False, value == 4.0])
    expected = oracles.group_scales([64.0, 2.0**15], overflows)
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-5)  # 8 float32 products


def test_a_thousand_clean_steps_double(graph_mode):
    manager, step = chain([3.0], [1.0])
    for _ in range(1000):
        run(step, 1.0)
    # 1000 float32 products, each off by at most 6e-8
    np.testing.assert_allclose(manager.group_scales(), [6.0], rtol=1e-4)


@pytest.mark.parametrize(
    ("start", "value", "limits", "bound"),
    [
        (3.0, 1.0, {"maximum": 4.0}, 4.0),
        (2.0**99.5, 1.0, {}, 2.0**100),
        (5.0, np.inf, {"minimum": 4.0}, 4.0),
    ],
)
def test_scales_stay_within_their_bounds(mode, start, value, limits, bound):
    manager, step = chain(start, [1.0], growth_factor=2.0, shrink_factor=0.5, **limits)
    with warnings.catch_warnings():  # the smallest scale is told; that has its own test
        warnings.simplefilter("ignore", BoostWarning)
        for _ in range(3):
            run(step, value)
    assert manager.group_scales() == [bound]


def test_groups_of_any_size_in_any_order_of_the_optimizer(mode):
    """Sizes 1, 4, 2 against an optimizer that lists the parameters backwards: plain training."""

    class Net(nn.Cell):
        def __init__(self, manager):
            super().__init__()
            self.manager = manager
            self.scale = Parameter(Tensor([1.0]), name="scale")
            self.a, self.b = nn.Dense(nets.FEATURES, 6), nn.Dense(6, 6)
            self.c = nn.Dense(6, nets.CLASSES)

        def construct(self, x):
            x = self.manager(x, 0, 1)
            x = x * self.scale
            x = self.manager(x, 1, 2)
            x = self.b(self.a(x))
            x = self.manager(x, 2, 3)
            return self.manager(self.c(x), 3, 4)

    class Plain(nn.Cell):
        def construct(self, x, first, second):
            return x

    def build(manager):
        net = nets.fill(Net(manager))
        return net, nets.momentum(net.trainable_params()[::-1])

    plain, optimizer = build(Plain())
    cell = nn.TrainOneStepCell(nn.WithLossCell(plain, nets.loss_fn()), optimizer).set_train()
    manager = GroupLossScaleManager([4.0, 512.0, 32.0], [], growth_factor=1.0)
    net, optimizer = build(manager)
    manager.loss_scale_groups = [
        [net.scale],
        [net.b.bias, net.a.weight, net.a.bias, net.b.weight],
        [net.c.weight, net.c.bias],
    ]
    step = BoostTrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nets.loss_fn()), optimizer, manager
    ).set_train()
    for x, y in nets.batches(3):
        cell(Tensor(x), Tensor(y))
        step(Tensor(x), Tensor(y))
    nets.assert_same_weights(net, plain)


def test_the_gradient_of_the_input_is_nobodys_overflow(mode):
    """It is inf here, but it is thrown away; the gradient of the weight is not."""
    manager = GroupLossScaleManager(1.0, [])

    class Steep(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(Tensor([[1e30]], ms.float32), name="weight")

        def construct(self, x):
            x = manager(x, 0, 1)
            return manager(ms.ops.matmul(x, self.weight), 1, 2).sum() * 1e10

    net = Steep()
    manager.loss_scale_groups = [net.trainable_params()]
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
    step = BoostTrainOneStepWithLossScaleCell(net, optimizer, manager).set_train()
    _, overflow, _ = step(Tensor([[1e-25]], ms.float32))  # d weight = 1e-15, d x = 1e40
    assert not bool(overflow)


def test_the_gradient_of_the_input_is_not_blamed_on_group_1_where_group_2_overflows(mode):
    """dw2 = 4 * 1e38 is inf, as is dx; what group 2 hands on is 4, and so is dw1."""
    manager, step = chain([4.0, 4.0], [1e38, 1.0])
    _, overflow, _ = run(step, 1.0)
    assert overflow
    expected = oracles.group_scales([4.0, 4.0], [[False, True]])
    np.testing.assert_allclose(manager.group_scales(), expected, rtol=1e-6)  # float32


class LeNet(nn.Cell):
    """The network of the API text: convolutions are group 1, dense layers group 2."""

    def __init__(self, enhanced_amp, num_class=10, num_channel=1):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, num_class)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.enhanced_amp = enhanced_amp

    def construct(self, x):
        x = self.enhanced_amp(x, 0, 1)
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.enhanced_amp(x, 1, 2)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        x = self.fc3(x)
        return self.enhanced_amp(x, 2, 3)


@pytest.mark.parametrize("amp_level", ["O0", "O1", "O2", "O3"])
def test_the_example_of_the_api_text_trains(mode, amp_level):
    ms.set_seed(0)
    manager = GroupLossScaleManager(4096, [])
    net = LeNet(manager)
    convolutions = [one for one in net.trainable_params() if "conv" in one.name]
    others = [one for one in net.trainable_params() if "conv" not in one.name]
    manager.loss_scale_groups = [convolutions, others]
    generator = np.random.default_rng(0)
    images = generator.normal(size=(16, 1, 32, 32)).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[generator.integers(0, 10, 16)]
    dataset = ms.dataset.NumpySlicesDataset((images, labels), shuffle=False).batch(8)
    model = ms.Model(
        net,
        loss_fn=nn.SoftmaxCrossEntropyWithLogits(),
        optimizer=nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9),
        metrics=None,
        amp_level=amp_level,
        loss_scale_manager=manager,
        boost_level="O1",
        boost_config_dict=ON,
    )
    before = nets.weights(net)
    model.train(2, dataset, dataset_sink_mode=False)
    after = nets.weights(net)
    assert list(after) == [one.name for one in (*convolutions, *others)]
    assert all(np.isfinite(value).all() for value in after.values())
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert {"conv1.weight", "fc3.weight"} <= moved
    # 4 clean steps: 4096 * 2 ** (4 / 1000), in float32
    np.testing.assert_allclose(manager.group_scales(), [4096 * 2 ** (4 / 1000)] * 2, rtol=1e-6)


def test_scales_stay_float32_inside_a_float16_network(mode):
    """2 ** 17 / 2 ** 17 would be inf / inf in float16; the gradients are exact instead."""

    class Faint(Chain):
        def construct(self, x):
            return super().construct(x) * 0.0009765625  # in a graph 2 ** -10 is the integer 0

    manager = GroupLossScaleManager(2.0**17, [], growth_factor=1.0)
    net = Faint(manager, [1.0, 1.0])
    manager.loss_scale_groups = [[factor] for factor in net.factors]
    net.to_float(ms.float16)
    step = BoostTrainOneStepWithLossScaleCell(
        net, nn.SGD(list(net.factors), 1.0), manager
    ).set_train()
    _, overflow, scales = run(step, 1.0)
    assert not overflow
    assert scales == [2.0**17] * 2
    assert [float(factor.asnumpy()[0]) for factor in net.factors] == [1 - 2.0**-10] * 2


class Passage(nn.Cell):
    def __init__(self, manager):
        super().__init__()
        self.manager = manager

    def construct(self, x):
        return self.manager(x, 0, 1)


@pytest.mark.parametrize("kind", [ms.float16, ms.bfloat16])
def test_a_marker_hands_on_the_precision_of_its_network(mode, kind):
    net = Passage(GroupLossScaleManager(4.0, groups(["w"]))).to_float(kind)
    assert net(Tensor([1.0], ms.float32)).dtype == kind


def groups(*names):
    return [[Parameter(Tensor([1.0]), name=name) for name in group] for group in names]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("4096", []), {}, TypeError, "init_loss_scale must be a finite number, got '4096'"),
        ((4096, [[]]), {}, ValueError, "group 1 is empty"),
        ((4096, [["w"]]), {}, TypeError, "group 1 must hold Parameters, got 'w'"),
        (([1.0, 2.0], groups(["a"])), {}, ValueError, "one for each of the 1 groups, got 2"),
        ((0.5, groups(["a"])), {}, ValueError, r"init_loss_scale must be in \[1, "),
        ((4096, []), {"growth_factor": 0.5}, ValueError, "growth_factor must be >= 1, got 0.5"),
        ((4096, []), {"shrink_factor": 1}, ValueError, r"shrink_factor must be in \(0, 1\), got 1"),
        ((4096, []), {"minimum": 0}, ValueError, "minimum must be > 0, got 0"),
        ((4096, []), {"maximum": True}, TypeError, "maximum must be a finite number, got True"),
        ((4096, []), {"minimum": 4, "maximum": 2}, ValueError, "maximum must be in"),
        ((4096, []), {"maximum": 2.0**101}, ValueError, r"maximum must be in \[minimum, 1.2"),
    ],
)
def test_wrong_arguments_have_their_messages(arguments, options, error, message):
    with pytest.raises(error, match=message):
        GroupLossScaleManager(*arguments, **options)


def test_refused_groups_leave_those_that_were_there():
    manager = GroupLossScaleManager([4.0, 8.0], groups(["a"], ["b"]))
    with pytest.raises(ValueError, match="one for each of the 3 groups, got 2"):
        manager.loss_scale_groups = groups(["a"], ["b"], ["c"])
    assert manager.loss_scale_number == len(manager.group_scales()) == 2


def test_a_parameter_in_two_groups_is_named():
    (first,) = groups(["shared"])
    with pytest.raises(ValueError, match="'shared' is given twice"):
        GroupLossScaleManager(4, [first, first])


def test_a_parameter_in_no_group_or_not_trained_is_named():
    manager = GroupLossScaleManager(4, [])
    net = nets.MLP()
    loss = nn.WithLossCell(net, nets.loss_fn())
    optimizer = nets.momentum(net.trainable_params())
    manager.loss_scale_groups = [[net.first.weight, net.first.bias], [net.second.weight]]
    with pytest.raises(ValueError, match=r"'second\.bias' is trained but in no group"):
        BoostTrainOneStepWithLossScaleCell(loss, optimizer, manager)
    manager.loss_scale_groups = [net.trainable_params(), *groups(["stranger"])]
    with pytest.raises(ValueError, match="'stranger' is in a group but not among"):
        BoostTrainOneStepWithLossScaleCell(loss, optimizer, manager)


@pytest.mark.parametrize("switched", [True, False])
def test_switch_and_manager_must_go_together(switched):
    net = nets.MLP()
    grouped = GroupLossScaleManager(4, [net.trainable_params()])
    manager = ms.DynamicLossScaleManager() if switched else grouped
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}}
    config["boost"]["loss_scale_group"] = switched
    with pytest.raises(ValueError, match=r"GroupLossScaleManager"):
        model_of(net, config, loss_scale_manager=manager)


def test_scales_are_read_and_set_by_upstreams_names():
    net = nets.MLP()
    groups = [net.first.trainable_params(), net.second.trainable_params()]
    manager = GroupLossScaleManager([8.0, 4.0], groups)
    assert manager.loss_scale_number == 2
    assert [float(one.asnumpy()) for one in manager.dynamic_loss_scale] == [1, 8, 4, 1]
    assert float(manager.update_loss_scale_status(1, 0.5).asnumpy()) == 2.0
    assert manager.group_scales() == [8.0, 2.0]
    manager.set_loss_scale_status(2, [Tensor(32.0), 4.0])
    assert manager.group_scales() == [32.0, 4.0]
    manager.set_loss_scale_status(2, 16.0)
    assert manager.group_scales() == [16.0, 16.0]
    for call, message in (
        (lambda: manager.set_loss_scale_status(3, 2.0), "loss_scale_number must be 2, .* got 3"),
        (lambda: manager.update_loss_scale_status(2, 2.0), r"layer must be in \[0, 2\), got 2"),
        (
            lambda: manager.update_loss_scale_status(0, 0.01),
            r"loss_scale must be in \[1, .*got 0.16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert manager.group_scales() == [16.0, 16.0]


def test_a_limit_holds_for_the_scales_that_are_there_and_for_later_ones():
    net = nets.MLP()
    groups = [net.first.trainable_params(), net.second.trainable_params()]
    manager = GroupLossScaleManager([4096.0, 4.0], groups)
    manager.limit_scales(1024.0)
    manager.limit_scales(2048.0)  # no longer possible
    assert manager.group_scales() == [1024.0, 4.0]
    with pytest.raises(ValueError, match=r"loss_scale must be in \[1, 1024\], got 1025"):
        manager.set_loss_scale_status(2, 1025.0)


class Capped(GroupLossScaleManager):
    """Would cap scales in a method that upstream's step calls."""

    def update_loss_scale_status(self, layer, update_ratio):
        return super().update_loss_scale_status(layer, min(update_ratio, 1))


def test_a_method_that_the_step_does_not_call_is_named():
    net = nets.MLP()
    manager = Capped(8.0, [net.first.trainable_params(), net.second.trainable_params()])
    with pytest.warns(NoEffectWarning, match="update_loss_scale_status of Capped is not called"):
        manager.scale_of_step(choose_detector(False), net.trainable_params())


class Marked(nn.Cell):
    """Two layers in groups with the scales 256 and 32."""

    def __init__(self, manager=None):
        super().__init__()
        self.one = nn.Dense(3, 3, weight_init="ones", bias_init="zeros")
        self.two = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        groups = [self.one.trainable_params(), self.two.trainable_params()]
        self.manager = manager or GroupLossScaleManager([256.0, 32.0], groups)

    def construct(self, x):
        x = self.one(self.manager(x, 0, 1))
        return self.manager(self.two(self.manager(x, 1, 2)), 2, 3).sum()


def moved(net, manager=None, config=None):
    """Return how far one step of rate 1 moves a weight of each layer."""
    step = make_train_step(
        net,
        None,
        nn.SGD(net.trainable_params(), 1.0),
        config=config or {"boost": {"mode": "disable_all"}},
        loss_scale_manager=manager,
    )
    before = [float(one.weight.asnumpy()[0, 0]) for one in (net.one, net.two)]
    step(Tensor(np.ones((2, 3), np.float32)))
    after = [float(one.weight.asnumpy()[0, 0]) for one in (net.one, net.two)]
    return [one - other for one, other in zip(before, after)]


@pytest.mark.parametrize("manager", [None, ms.DynamicLossScaleManager(4, 2, 9)])
def test_markers_of_a_manager_that_is_not_given_do_nothing(mode, manager):
    with pytest.warns(NoEffectWarning, match="not its loss_scale_manager: they have no effect"):
        found = moved(Marked(), manager)
    assert found == [4.0, 6.0]  # two samples of ones: 2 outputs behind one; 3 inputs before two


def test_markers_that_a_training_uses_are_not_trained_without_their_manager(mode):
    net = Marked()
    assert moved(net, net.manager, ON) == [4.0, 6.0]
    with pytest.raises(ValueError, match=r"the gradient of one\.weight would carry a scale that n"):
        moved(net)


class Before(nn.Cell):
    """As a generator, whose loss is that of a discriminator."""

    def __init__(self, behind):
        super().__init__()
        self.one = nn.Dense(3, 3, weight_init="ones", bias_init="zeros")
        self.behind = behind

    def construct(self, x):
        return self.behind(self.one(x))


def test_a_network_before_markers_of_another_training(mode):
    behind = Marked()
    moved(behind, behind.manager, ON)
    first, _, second, _ = (one.asnumpy().astype(float) for one in behind.trainable_params())
    net = Before(behind)
    alone = nn.SGD(net.one.trainable_params(), 1.0)
    step = make_train_step(net, None, alone, config={"boost": {"mode": "disable_all"}})
    step(Tensor(np.ones((2, 3), np.float32)))
    expected = 1 - 2 * (second.sum(0) @ first)  # two samples of ones
    found = net.one.weight.asnumpy()
    np.testing.assert_allclose(found, np.repeat(expected[:, None], 3, 1), rtol=1e-5)  # float32


class BothMarked(nn.Cell):
    def __init__(self, behind):
        super().__init__()
        self.one = nn.Dense(3, 3)
        self.manager = GroupLossScaleManager(64.0, [self.one.trainable_params()])
        self.behind = behind

    def construct(self, x):
        return self.behind(self.manager(self.one(self.manager(x, 0, 1)), 1, 2))


def test_a_graph_holds_the_markers_of_one_manager(graph_mode):
    behind = Marked()
    moved(behind, behind.manager, ON)
    net = BothMarked(behind)
    alone = nn.SGD(net.one.trainable_params(), 1.0)
    step = make_train_step(net, None, alone, config=ON, loss_scale_manager=net.manager)
    with pytest.raises(ValueError, match="and a graph holds one manager: use PYNATIVE_MODE"):
        step(Tensor(np.ones((2, 3), np.float32)))


@pytest.mark.parametrize("layers", [(-1, 1), (0, 4), (True, 2), (0, 1.0)])
def test_numbers_of_groups_that_do_not_exist_are_refused(mode, layers):
    net = Marked()
    net.manager.lock_groups(net.trainable_params())

    class Wrong(nn.Cell):
        def construct(self, x):
            return net.manager(x, *layers)

    with pytest.raises(ValueError, match=r"layer1 and layer2 must be ints in \[0, 4\), got"):
        Wrong()(Tensor(np.ones((2, 3), np.float32)))


def test_gradients_that_overflow_as_they_are_divided_skip_the_step(mode):
    """By a scale below 1, in 16 bits: 4e5 fits as 4e5 / 256 alone."""
    _, step = chain(2.0**-8, [1.0], ms.float16, rate=0.1, minimum=2.0**-10)
    _, overflow, _ = run(step, 4e4, ms.float16)
    assert not overflow
    _, step = chain(2.0**-8, [1.0, 10.0], ms.float16, rate=0.1, minimum=2.0**-10)
    (weight, _) = step.weights
    _, overflow, _ = run(step, 4e4, ms.float16)
    assert overflow
    assert weight.asnumpy() == 1.0


def test_a_sparse_lookup_is_refused_in_graph_mode(graph_mode):
    class Words(nn.Cell):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingLookup(5, 3, target="CPU", sparse=True)
            self.manager = GroupLossScaleManager(8.0, [self.table.trainable_params()])

        def construct(self, words):
            return self.manager(self.table(words), 1, 2).sum()

    net = Words()
    optimizer = nn.LazyAdam(net.trainable_params())
    step = make_train_step(net, None, optimizer, config=ON, loss_scale_manager=net.manager)
    with pytest.raises(ValueError, match="loss_scale_group in GRAPH_MODE needs dense gradients"):
        step(Tensor([1, 2], ms.int32))
