"""Batches cut into parts: bit for bit training on smaller batches, on as many rates."""

from __future__ import annotations

import contextlib

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from models import loss_of, model_of
from test_short_schedule import (
    BESIDE,
    RATES,
    TOTAL,
    Count,
    EachPlace,
    Lengths,
    config_of,
    epochs,
    on_list,
    shortened,
)

from mindspore_boost_ext import AutoBoost, BoostTrainOneStepCell, NoEffectWarning
from mindspore_boost_ext.integration.training import EndOfTraining

BATCHES, PARTS = 4, 2
CUT = {"parts": PARTS}
AT = [update * TOTAL // (BATCHES * PARTS) for update in range(BATCHES * PARTS)]


def reference(net, manager=None, **sections):
    """Return a step whose rates are those that the updates have."""
    config = config_of(**sections)
    del config["short_schedule"], config["boost"]["short_schedule"]
    scale = {} if manager is None else {"loss_scale_manager": manager}
    own = nn.Momentum(net.trainable_params(), [RATES[one] for one in AT], 0.9)
    return model_of(net, config, own, **scale).train_network


def halves(*batch):
    middle = len(batch[0]) // 2
    return [Tensor(one[:middle]) for one in batch], [Tensor(one[middle:]) for one in batch]


@pytest.mark.parametrize("beside", ["nothing", *BESIDE])
def test_it_is_training_on_smaller_batches(mode, beside):
    sections = BESIDE.get(beside, {})
    net, other = nets.Deep(), nets.Deep()
    step = shortened(on_list, net, short_schedule=CUT, **sections).train_network
    plain = reference(other, **sections)
    for batch in nets.batches(BATCHES):
        found = loss_of(step(*map(Tensor, batch)))
        expected = [loss_of(plain(*half)) for half in halves(*batch)]
        assert found == pytest.approx(sum(expected) / 2, rel=1e-6)  # a sum of two in float32
    nets.assert_same(nets.weights(net), nets.weights(other))
    row = step.report()["short_schedule"]
    assert row.reason == f"the training ends after {BATCHES} of {TOTAL} batches, 2 updates each"
    assert row.counts == {"updates": 8, "parts": 2}


@pytest.mark.parametrize("beside", ["nothing", "grad_freeze"])
def test_in_a_graph_of_its_own_it_is_the_same(graph_mode, beside):
    """As in sink mode."""
    trained = []
    for wrap in (nets.Outer, lambda step: step):
        net = nets.Deep()
        model = shortened(on_list, net, short_schedule=CUT, **BESIDE.get(beside, {}))
        step = wrap(model.train_network)
        for batch in nets.batches(BATCHES):
            step(*map(Tensor, batch))
        trained.append(nets.weights(net))
    nets.assert_same(*trained)


def test_each_batch_counts_as_several_updates_where_freezing_begins():
    """In the second half of 8 updates, so of 4 batches: a warning would be an error."""
    freezing = {"param_groups": 2, "schedule": "step", "prefix_start": 0.5, "total_steps": 8}
    step = shortened(on_list, nets.Deep(), short_schedule=CUT, grad_freeze=freezing).train_network
    step.expect_training(1, BATCHES)


@pytest.mark.parametrize("samples", [7, 3, 1])
def test_parts_need_not_be_equal(mode, samples):
    """Of seven three and four; of three none is cut off alone: BatchNorm needs two."""
    net, other = nets.MLP(), nets.MLP()
    step = shortened(on_list, net, short_schedule=CUT).train_network
    plain = reference(other)
    (x, y), *_ = nets.batches(1)
    for end in (len(x), samples):
        batch = x[:end], y[:end]
        step(*map(Tensor, batch))
        for part in halves(*batch) if end > 3 else [map(Tensor, batch)]:
            plain(*part)
    nets.assert_same(nets.weights(net), nets.weights(other))


@pytest.mark.parametrize("factor", [2.0, [1.0, 2.0, 3.0]], ids=["number", "of each class"])
def test_an_input_for_the_whole_batch_is_in_every_part(mode, factor):
    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            self.net = nets.MLP()

        def construct(self, x, factor, y):
            return nets.loss_fn()(self.net(x) * factor, y)

    trained = []
    for cut in (True, False):
        net = Weighted()
        own = nn.Momentum(net.trainable_params(), RATES if cut else [RATES[one] for one in AT], 0.9)
        config = config_of(short_schedule=CUT)
        if not cut:
            del config["short_schedule"], config["boost"]["short_schedule"]
        step = ms.Model(net, None, own, boost_level="O1", boost_config_dict=config).train_network
        for x, y in nets.batches(2):
            for a, b in halves(x, y) if not cut else [(Tensor(x), Tensor(y))]:
                step(a, Tensor(factor), b)
        trained.append(nets.weights(net))
    nets.assert_same(*trained)


def test_losses_of_samples_are_those_of_the_batch(mode):
    net = nets.MLP()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True)
    model = model_of(
        net, config_of(short_schedule=CUT), on_list(net.trainable_params()), loss_fn=loss
    )
    (x, y), *_ = nets.batches(1)
    expected = loss(nets.MLP()(Tensor(x[: len(x) // 2])), Tensor(y[: len(x) // 2])).asnumpy()
    found = model.train_network(Tensor(x), Tensor(y)).asnumpy()
    assert found.shape == (len(x),)
    np.testing.assert_array_equal(found[: len(x) // 2], expected)  # of the weights before


class Twice(nn.Cell):
    """Gives two losses of each sample."""

    def __init__(self):
        super().__init__()
        self.net, self.loss = nets.MLP(), nn.SoftmaxCrossEntropyWithLogits(sparse=True)

    def construct(self, x, y):
        loss = self.loss(self.net(x), y)
        return ms.ops.cat((loss, loss))


class Neighbours(Twice):
    """Gives one of each two neighbours in a batch."""

    def construct(self, x, y):
        loss = self.loss(self.net(x), y)
        return loss[1:] + loss[:-1]


@pytest.mark.parametrize(("kind", "samples"), [(Twice, 8), (Twice, 7), (Neighbours, 7)])
def test_losses_of_places_are_those_of_the_batch(mode, kind, samples):
    """Of seven samples the parts are not equal."""
    net, other = kind(), kind()
    own = on_list(net.trainable_params())
    step = model_of(net, config_of(short_schedule=CUT), own, loss_fn=None).train_network
    slower = nn.Momentum(other.trainable_params(), [RATES[one] for one in AT], 0.9)
    plain = nn.TrainOneStepCell(other, slower).set_train()
    (x, y), *_ = nets.batches(1)
    batch = x[:samples], y[:samples]
    found = step(*map(Tensor, batch)).asnumpy()
    expected = np.concatenate([plain(*half).asnumpy() for half in halves(*batch)])
    np.testing.assert_array_equal(found, expected)  # the same operators on the same numbers


class TwoTasks(nn.Cell):
    """Gives a loss for each of two tasks, stacked."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()

    def construct(self, x, y):
        loss = nets.loss_fn()(self.net(x), y)
        return ms.ops.stack((loss, 2 * loss))


def test_losses_of_tasks_are_means_over_the_parts(mode):
    net, other = TwoTasks(), TwoTasks()
    own = on_list(net.trainable_params())
    step = model_of(net, config_of(short_schedule=CUT), own, loss_fn=None).train_network
    slower = nn.Momentum(other.trainable_params(), [RATES[one] for one in AT], 0.9)
    plain = nn.TrainOneStepCell(other, slower).set_train()
    (batch,) = nets.batches(1)
    found = step(*map(Tensor, batch)).asnumpy()
    expected = np.mean([plain(*half).asnumpy() for half in halves(*batch)], 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # a sum of two in float32


@pytest.mark.parametrize("bad", [0, 1])  # the half that is not finite
def test_a_loss_scale_skips_a_part_and_says_so(mode, bad):
    manager, other = (ms.DynamicLossScaleManager(2.0**10, 2, 1000) for _ in range(2))
    net, expected = nets.MLP(), nets.MLP()
    step = shortened(on_list, net, manager, short_schedule=CUT).train_network
    plain = reference(expected, other)
    (x, y), *_ = nets.batches(1)
    x[bad * len(x) // 2] = np.inf
    _, overflow, scale = step(Tensor(x), Tensor(y))
    scales = [float(plain(*half)[2].asnumpy()) for half in halves(x, y)]
    assert bool(overflow.asnumpy())
    assert float(scale.asnumpy()) == scales[-1] == (512.0 if bad == 0 else 1024.0)
    nets.assert_same(nets.weights(net), nets.weights(expected))


def test_a_model_stops_after_its_batches(mode):
    model, count = shortened(on_list, nets.MLP(), short_schedule=CUT), Count()
    model.train(3, epochs(3), callbacks=count, dataset_sink_mode=False)
    assert (count.steps, count.epochs) == (BATCHES, 2)


@pytest.mark.parametrize("share", [0.4, 0.5, 0.6])  # 8, 10 and 12 updates at TOTAL rates
@pytest.mark.parametrize("short", [0, 1])
def test_the_end_is_the_last_update_also_where_several_have_the_last_rate(mode, share, short):
    """The second batch may have one sample, and makes one update: then one more batch is due."""
    section = {**CUT, "share": share}
    step = shortened(on_list, nets.MLP(), short_schedule=section).train_network
    end, over = EndOfTraining(step), []
    for number, (x, y) in enumerate(nets.batches(round(share * TOTAL) + short)):
        rows = 1 if number == short == 1 else len(x)
        step(Tensor(x[:rows]), Tensor(y[:rows]))
        over.append(end.is_now())
    assert over == [False] * (len(over) - 1) + [True]


def test_inputs_grow_by_the_updates(mode):
    """In half of the eight updates, which are two batches."""
    net, plain = Lengths(), Lengths()
    warmup = {"seq_length_warmup": {"phases": [[0.5, 0.5]], "total_steps": TOTAL}}
    step = shortened(on_list, net, short_schedule=CUT, **warmup).train_network
    own = reference(plain)
    random = np.random.default_rng(3)
    for length in (2, 2, 4, 4):
        x = random.normal(size=(nets.BATCH, 4, nets.FEATURES)).astype(np.float32)
        y = random.integers(0, nets.CLASSES, nets.BATCH).astype(np.int32)
        step(Tensor(x), Tensor(y))
        for a, b in halves(x, y):
            own(a[:, :length], b)
    nets.assert_same(nets.weights(net), nets.weights(plain))


def test_phases_are_shares_of_all_updates_on_parts():
    """Of six batches, whose updates are more than those of the whole training were."""
    warmup = {"seq_length_warmup": {"phases": [[0.5, 0.5]], "total_steps": TOTAL}}
    section = {**CUT, "share": 0.6}
    step = shortened(on_list, Lengths(), short_schedule=section, **warmup).train_network
    reason = "scale 0.5 until update 6 of 12, then full size"
    assert step.report()["seq_length_warmup"].reason == reason


def test_a_language_model_keeps_its_batches(mode):
    rng, nets_of = np.random.default_rng(2), (EachPlace(), EachPlace())
    ours = shortened(on_list, nets_of[0], short_schedule={"if_unfit": "skip", **CUT}).train_network
    plain = model_of(nets_of[1], optimizer=on_list(nets_of[1].trainable_params())).train_network
    for _ in range(2):
        x = Tensor(rng.normal(size=(2, 3, nets.FEATURES)).astype(np.float32))
        y = Tensor(rng.integers(0, nets.CLASSES, 6).astype(np.int32))
        ours(x, y)
        plain(x, y)
    for one, other in zip(*(net.trainable_params() for net in nets_of)):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_windows_and_other_constructs_are_refused():
    window = {"grad_accumulation": {"grad_accumulation_step": 2}}
    with pytest.raises(ValueError, match=r"parts=2 .* window .* leave it out"):
        shortened(on_list, nets.MLP(), short_schedule=CUT, **window)

    class Own(BoostTrainOneStepCell):
        def construct(self, *inputs):
            return super().construct(*inputs)

    net = nets.MLP()
    with (
        AutoBoost("O1", config_of(short_schedule=CUT)).building(),
        pytest.raises(ValueError, match=r"parts=2 cannot cut batches for Own"),
    ):
        Own(nn.WithLossCell(net, nets.loss_fn()), on_list(net.trainable_params()))
    with pytest.raises(ValueError, match=r"parts=1024 makes more updates than int32 can count"):
        shortened(on_list, nets.MLP(), short_schedule={"parts": 1024, "total_steps": 2**21})


def test_parts_of_one_sample_are_refused(mode):
    step = shortened(on_list, nets.MLP(), short_schedule=CUT).train_network
    x, y = np.ones((3, nets.FEATURES), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"parts=2 needs batches of at least 4 samples.* got 3"):
        step(Tensor(x), Tensor(y))


class OfNodes(nn.Cell):
    """A graph: features of its nodes, and its edges or its matrix."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()

    def construct(self, x, graph, y):
        mixed = ms.ops.matmul(graph, x) if graph.shape[0] == x.shape[0] else x[graph[0]] + x
        return nets.loss_fn()(self.net(mixed), y)


@pytest.mark.parametrize("kind", ["matrix", "edges"])
def test_a_recipe_cuts_no_graph(mode, kind):
    net = OfNodes()
    own = on_list(net.trainable_params())
    config = config_of(short_schedule={"if_unfit": "skip", **CUT})
    step = ms.Model(net, None, own, boost_level="O1", boost_config_dict=config).train_network
    graph = np.eye(64, dtype=np.float32)
    if kind == "edges":
        graph = np.tile(np.arange(64, dtype=np.int32)[::-1], (2, 1))
    x = np.ones((64, nets.FEATURES), np.float32)
    assert np.isfinite(step(Tensor(x), Tensor(graph), Tensor(np.zeros(64, np.int32))).asnumpy())
    assert "parts" not in step.report()["short_schedule"].counts


class OfOneSize(nn.Cell):
    """Holds states of the size of a batch."""

    def __init__(self):
        super().__init__()
        self.net, self.state = nets.MLP(), Tensor(np.ones((64, nets.CLASSES), np.float32))

    def construct(self, x, y):
        return nets.loss_fn()(self.net(x) + self.state, y)


class InBatch(nn.Cell):
    """Takes the other samples of a batch for wrong answers."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()

    def construct(self, x, y):
        found = self.net(x)
        return nets.loss_fn()(found @ found.T, ms.ops.arange(x.shape[0]).astype(ms.int32))


@pytest.mark.parametrize(
    ("net", "loss", "why"),
    [
        (OfOneSize, None, "; batches stay whole, as a part fails: "),
        (InBatch, None, "; batches stay whole, as the loss of a batch is neither the mean nor "),
        (nets.MLP, nets.loss_fn(), ""),
    ],
)
def test_a_recipe_cuts_no_batch_that_a_network_takes_whole(mode, net, loss, why):
    """One does not run on half of it, the other would be trained for another aim."""
    net = net()
    config = config_of(short_schedule={"if_unfit": "skip", **CUT})
    own = on_list(net.trainable_params())
    step = ms.Model(net, loss, own, boost_level="O1", boost_config_dict=config).train_network
    x = np.random.default_rng(0).normal(size=(64, nets.FEATURES)).astype(np.float32)
    assert np.isfinite(step(Tensor(x), Tensor(np.zeros(64, np.int32))).asnumpy())
    row = step.report()["short_schedule"]
    assert row.counts.get("parts") == (None if why else 2)
    assert why in row.reason
    assert ("stay whole" in row.reason) is bool(why)


class OverCounted(nn.Cell):
    """Divides the sum over samples by a count that comes with them: a number, or a mask's sum."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()
        self.loss = nn.CrossEntropyLoss(reduction="sum")

    def construct(self, x, given, y):
        count = given[0].sum() if isinstance(given, tuple) else given
        count = given["mask"].sum() if isinstance(given, dict) else count
        # In PYNATIVE_MODE MindSpore 2.7 divides no Tensor by a number of NumPy.
        return self.loss(self.net(x), y) * (1 / count)


ONES = Tensor(np.ones(64, np.float32))
NESTED = {"tuple": (ONES,), "dict": {"mask": ONES}}
COUNTS = {"number": 64.0, "of NumPy": np.float32(64), "scalar": Tensor(64.0), **NESTED}


def over_counted(if_unfit, given):
    net = OverCounted()
    config = config_of(short_schedule={"if_unfit": if_unfit, **CUT})
    own = on_list(net.trainable_params())
    step = ms.Model(net, None, own, boost_level="O1", boost_config_dict=config).train_network
    x = np.random.default_rng(0).normal(size=(64, nets.FEATURES)).astype(np.float32)
    step(Tensor(x), given, Tensor(np.arange(64, dtype=np.int32) % nets.CLASSES))
    return step.report()["short_schedule"]


@pytest.mark.parametrize("kind", COUNTS)
def test_a_recipe_cuts_no_batch_whose_count_would_stay_whole(mode, kind):
    """Else each part would have half the gradient."""
    row = over_counted("skip", COUNTS[kind])
    assert "parts" not in row.counts
    assert ("an input that is a number cannot be cut" in row.reason) is (kind not in NESTED)


@pytest.mark.parametrize("kind", NESTED)
def test_parts_of_a_batch_with_samples_within_a_tuple_are_refused(mode, kind):
    with pytest.raises(ValueError, match=r"parts=2 cuts Tensors, but not those in .* 64 samples"):
        over_counted("refuse", NESTED[kind])


def test_a_recipe_leaves_whole_what_it_cannot_cut(mode):
    """A window of accumulation, and batches of which a part would have fewer than 32 samples."""
    skip = {"if_unfit": "skip", "whole_share": 0.5, **CUT}
    window = {"grad_accumulation": {"grad_accumulation_step": 2}}
    for samples, sections, updates in ((63, {}, 5), (64, {}, 8), (64, window, 5)):
        step = shortened(on_list, nets.MLP(), short_schedule=skip, **sections).train_network
        x = np.ones((samples, nets.FEATURES), np.float32)
        batches = updates // (2 if updates == 8 else 1) * (2 if sections else 1)
        for number in range(batches):
            assert int(step.optimizer.global_step.asnumpy()[0]) < TOTAL - 1, number
            step(Tensor(x), Tensor(np.zeros(samples, np.int32)))
        assert step.optimizer.global_step.asnumpy().tolist() == [TOTAL - 1]
        assert step.report()["short_schedule"].counts["updates"] == updates


@pytest.mark.parametrize(("epochs", "words"), [
    (5, ""),
    (7, "total_steps=10 ends this training after 5 of its 14 updates"),
])  # fmt: skip
def test_what_is_said_of_the_length_counts_batches_that_stay_whole(pynative_mode, epochs, words):
    """That they do is known from the first batch on, which comes after the training has begun."""
    skip = {"if_unfit": "skip", "whole_share": 0.5, **CUT}
    batch = [
        Tensor(one) for one in (np.ones((8, nets.FEATURES), np.float32), np.zeros(8, np.int32))
    ]
    for done in (0, 2, 4):  # updates of earlier epochs, of a run that is resumed
        step = shortened(on_list, nets.MLP(), short_schedule=skip).train_network
        assert step.updates_per_batch == 2
        ms.load_param_into_net(
            step, {"global_step": Parameter(Tensor([done * TOTAL // 5], ms.int32))}
        )
        with pytest.warns(NoEffectWarning, match=words) if words else contextlib.nullcontext():
            step.expect_training(epochs - done // 2, 2)
            step(*batch)
        assert step.updates_per_batch == 1


class OfNumbers(nn.Cell):
    """Takes a number before its samples."""

    def __init__(self):
        super().__init__()
        self.net = nets.MLP()

    def construct(self, factor, x):
        return (self.net(x) * factor).mean()


@pytest.mark.parametrize("if_unfit", ["refuse", "skip_rate"])
def test_a_first_input_without_samples_is_not_cut(mode, if_unfit):
    net = OfNumbers()
    section = {"if_unfit": if_unfit, **CUT}
    model = ms.Model(
        net,
        optimizer=on_list(net.trainable_params()),
        boost_level="O1",
        boost_config_dict=config_of(short_schedule=section),
    )
    batch = Tensor(2.0), Tensor(np.ones((64, nets.FEATURES), np.float32))
    if if_unfit == "refuse":
        with pytest.raises(ValueError, match=r"parts=2 cuts batches along the first axis .* got"):
            model.train_network(*batch)
    else:
        assert np.isfinite(model.train_network(*batch).asnumpy())


def test_thor_and_a_compiled_step_run_on_parts(mode):
    """As THOR does on smaller batches."""
    ends = []
    thor = {"thor": {"damping": 0.1, "frequency": 2}, "compiled_step": {}}
    for cut in (True, False):
        net = nets.MLP()
        if cut:
            step = shortened(on_list, net, short_schedule=CUT, **thor).train_network
        else:
            step = reference(net, **thor)
        for batch in nets.batches(2):
            for one in [list(map(Tensor, batch))] if cut else halves(*batch):
                step(*one)
        ends.append(nets.weights(net))
    nets.assert_same(*ends)
