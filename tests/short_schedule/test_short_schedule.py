"""A shorter training: bit for bit plain training on every so-manieth rate, and it ends."""

from __future__ import annotations

import contextlib

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import model_of

from mindspore_boost_ext import AutoBoost, BoostConfigError, NoEffectWarning, make_train_step
from mindspore_boost_ext.config.parse import BoostConfig
from mindspore_boost_ext.short_schedule import FasterSchedule
from mindspore_boost_ext.stages.update import Update

TOTAL, SHARE = 10, 0.4
AT = (0, 2, 5, 7)  # the whole schedule's steps whose rates the four updates have: c * 10 // 4
RATES = [0.01 * (TOTAL - number) for number in range(TOTAL)]
SECTION = {"share": SHARE, "total_steps": TOTAL}


class Cosine(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule that is no list."""

    def construct(self, global_step):
        return 0.05 * (1 + ops.cos(ops.cast(global_step, ms.float32) / 3))


def config_of(**sections):
    off = dict.fromkeys(AutoBoost().boost_config, False)
    on = {name: True for name in sections if name in off}
    section = {**SECTION, **sections.pop("short_schedule", {})}
    return {"boost": {"mode": "manual", **off, **on}, "short_schedule": section, **sections}


def shortened(optimizer, net, manager=None, **sections):
    sections.setdefault("short_schedule", {})
    scale = {} if manager is None else {"loss_scale_manager": manager}
    own = optimizer(net.trainable_params())
    return model_of(net, config_of(**sections), own, metrics={"loss"}, **scale)


def on_list(params):
    return nn.Momentum(params, RATES, 0.9)


OPTIMIZERS = {
    "list": (on_list, lambda params: nn.Momentum(params, [RATES[one] for one in AT], 0.9)),
    "groups": (
        lambda params: nn.Adam(_two_groups(params, RATES), 0.02),
        lambda params: nn.Adam(_two_groups(params, [RATES[one] for one in AT]), 0.02),
    ),
    "schedule": (
        lambda params: nn.SGD(params, Cosine()),
        lambda params: nn.SGD(
            params, [float(Cosine()(Tensor([one], ms.int32)).asnumpy()[0]) for one in AT]
        ),
    ),
}


def _two_groups(params, rates):
    return [{"params": params[:2], "lr": rates}, {"params": params[2:]}]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_plain_training_on_some_of_the_rates(mode, kind):
    ours, plain = OPTIMIZERS[kind]
    net, expected = nets.MLP(), nets.MLP()
    model = shortened(ours, net)
    step = nn.TrainOneStepCell(
        nn.WithLossCell(expected, nets.loss_fn()), plain(expected.trainable_params())
    ).set_train()
    for x, y in nets.batches(len(AT)):
        model.train_network(Tensor(x), Tensor(y))
        step(Tensor(x), Tensor(y))
    found = nets.weights(net)
    for name, value in nets.weights(expected).items():
        if kind == "schedule":  # the cosine of a graph may differ in its last place
            np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("updates", "total"), [
    (1, 2), (4, 10), (9, 10), (333, 1000), (2**30 - 1, 2**30), (3, 2**30),
])  # fmt: skip
def test_the_count_of_steps_is_the_place_in_the_schedule(mode, updates, total):
    position = Parameter(Tensor([0], ms.int32), name="global_step")

    class Once(Update):
        def construct(self, loss, gradients):
            return ops.depend(loss, ops.assign_add(position, Tensor([1], ms.int32)))

    part = FasterSchedule(Once(nn.Identity()), position, updates, total)
    for made in [*range(min(updates, 12)), max(updates - 2, 0), updates - 1]:
        position.set_data(Tensor([made * total // updates], ms.int32))
        part.remainder.set_data(Tensor([made * total % updates], ms.int32))
        part(Tensor(0.0), ())
        assert int(position.asnumpy()[0]) == min((made + 1) * total // updates, total - 1), made
        assert int(part.remainder.asnumpy()[0]) == (made + 1) * total % updates, made


def epochs(count):
    inputs, labels = map(np.concatenate, zip(*nets.batches(count)))
    return ms.dataset.NumpySlicesDataset((inputs, labels), shuffle=False).batch(nets.BATCH)


class Count(ms.train.Callback):
    """Counts steps and epochs, and whether the training was ended as usual."""

    def __init__(self):
        super().__init__()
        self.steps = self.epochs = self.ends = 0

    def on_train_step_end(self, run_context):
        self.steps += 1

    def on_train_epoch_end(self, run_context):
        self.epochs += 1

    def on_train_end(self, run_context):
        self.ends += 1


@pytest.mark.parametrize("how", ["one call", "a call an epoch", "fit"])
def test_a_model_stops_at_the_end_of_the_schedule(mode, how):
    model, count = shortened(on_list, nets.MLP()), Count()
    if how == "one call":
        model.train(3, epochs(3), callbacks=count, dataset_sink_mode=False)
    elif how == "fit":
        model.fit(3, epochs(3), epochs(1), callbacks=[count], dataset_sink_mode=False)
    else:
        for _ in range(2):
            model.train(1, epochs(3), callbacks=(count,), dataset_sink_mode=False)
    assert (count.steps, count.epochs) == (4, 2)
    before = nets.weights(model.train_network)
    with pytest.warns(NoEffectWarning, match="the schedule of this training is over"):
        model.train(1, epochs(3), callbacks=count, dataset_sink_mode=False)
    assert count.steps == 4
    for name, value in nets.weights(model.train_network).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize(
    ("frequency", "validated"),
    [(1, [1, 2, 3, 4]), (3, [3, 4]), (5, [4]), ([1], [1, 4]), ([4], [4]), ([], [4])],
)
def test_fit_validates_the_weights_that_the_schedule_ends_with(graph_mode, frequency, validated):
    """Its last epoch is not one that the script knows."""
    found = []

    class Validations(ms.train.Callback):
        def on_eval_begin(self, run_context):
            found.append(run_context.original_args().cur_epoch_num)

    model = shortened(on_list, nets.MLP())
    model.fit(10, epochs(1), epochs(1), frequency, [Validations()], False, False)
    assert found == validated


def test_a_schedule_that_skips_one_rate_ends_with_the_last(pynative_mode):
    """The last but one is reached an update earlier."""
    model, count = shortened(on_list, nets.MLP(), short_schedule={"share": 0.9}), Count()
    model.train(1, epochs(TOTAL), callbacks=count, dataset_sink_mode=False)
    assert count.steps == 9


def test_a_loop_over_epochs_stops_there_too(mode):
    net, count = nets.MLP(), Count()
    optimizer = on_list(net.trainable_params())
    config = config_of(short_schedule={})
    step = make_train_step(net, nets.loss_fn(), optimizer, level="O1", config=config)
    batches = [(Tensor(x), Tensor(y)) for x, y in nets.batches(3)]
    for batch in step.over(batches, 3, [count]):
        step(*batch)
    assert (count.steps, count.epochs, count.ends) == (4, 2, 1)
    with pytest.warns(NoEffectWarning, match="the schedule of this training is over"):
        assert list(step.over(batches, 5, [count])) == []


def test_steps_behind_the_end_keep_the_last_rate(mode):
    net = nets.MLP()
    model = shortened(on_list, net)
    with pytest.warns(NoEffectWarning, match="short_schedule: the schedule is over") as said:
        _ = [model.train_network(Tensor(x), Tensor(y)) for x, y in nets.batches(7)]
    assert len(said) == 1
    assert model.train_network.optimizer.global_step.asnumpy().tolist() == [TOTAL - 1]


@pytest.mark.parametrize("parts", [1, 2])
def test_the_end_is_said_once_by_all_variants_of_a_step(mode, parts):
    freezing = {"param_groups": 2, "schedule": [0, 1], "total_steps": 2}
    section = {"parts": parts}
    step = shortened(
        on_list, nets.Normalised(), grad_freeze=freezing, short_schedule=section
    ).train_network
    with pytest.warns(NoEffectWarning, match="short_schedule: the schedule is over") as said:
        _ = [step(Tensor(x), Tensor(y)) for x, y in nets.batches(20)]
    assert len(said) == 1


def test_the_end_is_said_to_a_loop_that_went_on_from_a_file(pynative_mode):
    saved, step = (shortened(on_list, nets.MLP()).train_network for _ in range(2))
    batches = [(Tensor(x), Tensor(y)) for x, y in nets.batches(6)]
    _ = [saved(*one) for one in batches[:2]]
    ms.load_param_into_net(step, {one.name: one for one in saved.get_parameters()})
    _ = [step(*one) for one in batches[:2]]  # to the end
    with pytest.warns(NoEffectWarning, match="short_schedule: the schedule is over"):
        step(*batches[2])


def test_what_does_not_update_does_not_advance(mode):
    manager = ms.DynamicLossScaleManager(2.0**10, 2, 1000)
    model = shortened(on_list, nets.MLP(), manager, grad_accumulation={"grad_accumulation_step": 2})
    places = []
    for number, (x, y) in enumerate(nets.batches(6)):
        x = np.full_like(x, np.inf) if number in (2, 3) else x
        model.train_network(Tensor(x), Tensor(y))
        places.append(int(model.train_network.optimizer.global_step.asnumpy()[0]))
    assert places == [0, 2, 2, 2, 2, 5]


@pytest.mark.parametrize(("done", "epochs", "steps", "words"), [
    (0, 4, 3, "total_steps=10 ends this training after 4 of its 12 updates: set short_schedule"),
    (0, 5, 2, ""),
    (0, 2, 2, ""),  # as many as are made
    (0, 3, 2, r"has 6 updates, but short_.*total_steps=10: .* their end after 2 of the 4 that"),
    (0, 3, 3, ""),  # flushes may add one in each epoch
    (0, 2, 3, ""),  # the second epoch is not needed whole
    (0, 3, 1, r"has 3 updates, but its shorter schedule has 4 .* not reach its end: set short_s"),
    (0, 1, 3, ""),  # it may be called again
    (1, 3, 1, ""),  # goes on
    (1, 5, 2, "after 4 of its 11 updates"),
])  # fmt: skip
def test_a_training_of_another_length_is_warned_of(done, epochs, steps, words):
    model = shortened(on_list, nets.MLP())
    for x, y in nets.batches(done):
        model.train_network(Tensor(x), Tensor(y))
    with pytest.warns(NoEffectWarning, match=words) if words else contextlib.nullcontext():
        model.train_network.expect_training(epochs, steps)


@pytest.mark.parametrize(("updates", "is_told"), [(4, True), (8, False), (10, False)])
def test_rates_that_are_made_for_another_length_are_warned_of(updates, is_told):
    """A schedule of rates that ends with the training, though only a part of it is to be made."""
    net = nets.MLP()
    model = shortened(lambda params: nn.SGD(params, nn.CosineDecayLR(0.0, 0.1, updates)), net)
    with contextlib.ExitStack() as stack:
        if is_told:
            stack.enter_context(pytest.warns(NoEffectWarning, match="no longer change from step"))
        model.train_network.expect_training(2, 2)


def test_a_list_of_rates_may_end_with_equal_ones():
    """It has as many as ``total_steps`` says, so that it is made for these."""
    rates = [0.1, 0.08, 0.05, 0.02, *[0.01] * (TOTAL - 4)]
    model = shortened(lambda params: nn.SGD(params, rates), nets.MLP())
    model.train_network.expect_training(2, 2)


class InGraphsOnly(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, step):
        raise RuntimeError("operator by operator this does not run")


def test_a_schedule_that_the_host_cannot_run_is_no_reason_to_stop():
    net = nets.MLP()
    model = shortened(lambda params: nn.SGD(params, InGraphsOnly()), net)
    model.train_network.expect_training(2, 2)


def test_a_run_that_is_resumed_within_an_epoch_skips_the_batches_that_it_has_seen():
    """They count as made, and again as batches of the epoch that the loop reads anew."""
    model = shortened(on_list, nets.MLP())
    for x, y in nets.batches(1):
        model.train_network(Tensor(x), Tensor(y))
    model.train_network.was_restored = True
    model.train_network.expect_training(5, 2)
    with pytest.warns(NoEffectWarning, match="after 4 of its 13 updates"):
        model.train_network.expect_training(6, 2)


def test_batches_that_wait_in_a_window_count_for_the_length():
    model = shortened(on_list, nets.MLP(), grad_accumulation={"grad_accumulation_step": 3})
    for x, y in nets.batches(2):
        model.train_network(Tensor(x), Tensor(y))
    model.train_network.expect_training(2, 5)  # 12 batches in all, of which 4 updates are made
    with pytest.warns(NoEffectWarning, match="has 3 updates, but its shorter schedule has 4"):
        model.train_network.expect_training(2, 4)


@pytest.mark.parametrize("optimizer", [
    lambda params: nn.Momentum(params, 0.1, 0.9),
    lambda params: nn.ASGD(params, RATES),
    lambda params: nn.Rprop(params, RATES),  # takes step 1 for the first, and no other rate
])  # fmt: skip
def test_what_has_no_schedule_is_refused_or_left_alone(mode, optimizer):
    net = nets.MLP()
    with pytest.raises(ValueError, match=r"short_schedule .* leave short_schedule out"):
        shortened(optimizer, net)
    model = shortened(optimizer, net, short_schedule={"if_unfit": "skip"})
    assert model.train_network.report()["short_schedule"].status == "skipped"
    count = Count()
    model.train(2, epochs(3), callbacks=count, dataset_sink_mode=False)
    assert count.steps == 6


@pytest.mark.parametrize("grouped", [False, True])
def test_a_list_that_ends_before_the_schedule_is_refused(grouped):
    def optimizer(params):
        rates = RATES[:-1]
        return nn.Adam(_two_groups(params, rates), 0.02) if grouped else nn.SGD(params, rates)

    with pytest.raises(ValueError, match=r"total_steps=10 needs a rate for .* list of 9: set"):
        shortened(optimizer, nets.MLP(), short_schedule={"if_unfit": "skip"})


class Falling(nn.learning_rate_schedule.LearningRateSchedule):
    """A rate of its own for every five steps."""

    def __init__(self):
        super().__init__()
        self.learning_rate = Tensor([0.1, 0.05], ms.float32)

    def construct(self, global_step):
        return self.learning_rate[ops.cast(global_step, ms.int32)[0] // 5]


def test_a_schedule_that_holds_a_list_is_no_list(mode):
    net = nets.MLP()
    model = shortened(lambda params: nn.SGD(params, Falling()), net)
    for x, y in nets.batches(4):
        model.train_network(Tensor(x), Tensor(y))
    assert model.train_network.optimizer.global_step.asnumpy().tolist() == [TOTAL - 1]


def test_a_language_model_that_makes_all_updates_is_not_warned():
    """Only its first batch shows that it is left alone."""
    model = shortened(on_list, EachPlace(), short_schedule={"if_unfit": "skip"})
    model.train_network.expect_training(1, 2 * TOTAL)
    x = Tensor(np.ones((2, 3, nets.FEATURES), np.float32))
    model.train_network(x, Tensor(np.zeros(6, np.int32)))


def test_it_needs_to_know_the_whole_training():
    with pytest.raises(BoostConfigError, match=r"needs short_schedule\.total_steps"):
        BoostConfig.parse("O1", {"short_schedule": {"share": 0.5}})
    plan = BoostConfig.parse("O1", {"short_schedule": {"share": 0.9, "total_steps": 2}}).plan()
    (found,) = (one for one in plan if one.algorithm == "short_schedule")
    assert (found.wanted, found.reason) == (False, "short_schedule.share is rounded to all updates")


BESIDE = {
    "grad_freeze": {"grad_freeze": {"param_groups": 2, "freeze_p": 0.5, "total_steps": 3}},
    "less_bn": {"less_bn": {"heads": ["last"], "multiplier": 4.0}},
    "gradients": {"gradients": {"clip_norm": 0.1}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_other_algorithms_stand_on_the_same_rates(mode, name):
    """With what counts steps of its own the rates alone differ from those of a list of them."""
    ends = []
    short = shortened(on_list, nets.Deep(), **BESIDE[name])
    config = config_of(**BESIDE[name])
    del config["short_schedule"], config["boost"]["short_schedule"]
    net = nets.Deep()
    own = nn.Momentum(net.trainable_params(), [RATES[one] for one in AT], 0.9)
    picked = model_of(net, config, own)
    for model in (short, picked):
        for x, y in nets.batches(len(AT)):
            model.train_network(Tensor(x), Tensor(y))
        report = model.train_network.report()
        assert name == "gradients" or report[name].status == "applied"
        ends.append(nets.weights(model.train_network.network))
    for weight, value in ends[1].items():
        np.testing.assert_array_equal(ends[0][weight], value, err_msg=weight)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_thor_refreshes_by_the_schedule(mode):
    """Every fourth of the schedule's ten steps is every second of the four updates: 0 and 5."""
    ends, refreshes = [], []
    for short, frequency in ((True, 4), (False, 2)):
        net, section = nets.MLP(), {"damping": 0.1, "frequency": frequency}
        config = config_of(thor=section, short_schedule={})
        if not short:
            del config["short_schedule"], config["boost"]["short_schedule"]
        rates = RATES if short else [RATES[one] for one in AT]
        optimizer = nn.Momentum(net.trainable_params(), rates, 0.9)
        step = model_of(net, config, optimizer).train_network
        for x, y in nets.batches(len(AT)):
            step(Tensor(x), Tensor(y))
        assert step.report()["thor"].status == "applied"
        refreshes.append(step.observations()["thor.refreshes"])
        ends.append(nets.weights(net))
    assert refreshes == [2, 2]
    nets.assert_same(*ends)


class EachPlace(nn.Cell):
    """Logits for each place of a sequence."""

    def __init__(self):
        super().__init__()
        self.deep = nets.Deep()

    def construct(self, x):
        return self.deep(x.reshape((-1, nets.FEATURES)))


@pytest.mark.parametrize("beside", ["nothing", "grad_freeze"])  # freezing: a variant of the step
@pytest.mark.parametrize("if_unfit", ["refuse", "skip"])
def test_a_recipe_leaves_labels_of_each_place_alone(mode, if_unfit, beside):
    """Asked for by itself it shortens the training of a language model, too."""
    sections, rng = BESIDE.get(beside, {}), np.random.default_rng(2)
    inputs = rng.normal(size=(TOTAL, 2, 3, nets.FEATURES)).astype(np.float32)
    data = list(zip(inputs, rng.integers(0, nets.CLASSES, (TOTAL, 6)).astype(np.int32)))
    ours, others, made = EachPlace(), EachPlace(), Count()
    model = shortened(on_list, ours, short_schedule={"if_unfit": if_unfit}, **sections)
    batches = ms.dataset.GeneratorDataset(data, ["x", "y"], shuffle=False)
    model.train(1, batches, callbacks=made, dataset_sink_mode=False)
    assert made.steps == (4 if if_unfit == "refuse" else TOTAL)

    whole = config_of(**sections)
    del whole["short_schedule"], whole["boost"]["short_schedule"]
    plain = model_of(others, whole, on_list(others.trainable_params()))
    for x, y in data:
        plain.train_network(Tensor(x), Tensor(y))
    for one, other in zip(ours.trainable_params(), others.trainable_params()):
        same = np.array_equal(one.asnumpy(), other.asnumpy())
        assert same == (if_unfit == "skip"), one.name


def test_a_language_model_left_alone_goes_on_from_a_file(mode):
    """Behind total_steps, too: before the first batch nothing else says that it is left alone."""
    rng, ends = np.random.default_rng(2), []
    inputs = rng.normal(size=(TOTAL + 3, 2, 3, nets.FEATURES)).astype(np.float32)
    data = list(zip(inputs, rng.integers(0, nets.CLASSES, (TOTAL + 3, 6)).astype(np.int32)))
    for until in ((TOTAL + 3,), (TOTAL, TOTAL + 3)):
        made, saved = Count(), {}
        for begin, end in zip((0, *until), until):
            skip = {"if_unfit": "skip"}
            model = shortened(OPTIMIZERS["schedule"][0], EachPlace(), short_schedule=skip)
            ms.load_param_into_net(model.train_network, saved)
            batches = ms.dataset.GeneratorDataset(data[begin:end], ["x", "y"], shuffle=False)
            model.train(1, batches, callbacks=made, dataset_sink_mode=False)
            state = {one.name: one.asnumpy() for one in model.train_network.get_parameters()}
            saved = {name: Parameter(Tensor(value), name) for name, value in state.items()}
        assert made.steps == TOTAL + 3
        ends.append(state)
    nets.assert_same(*ends)


class Lengths(nn.Cell):
    """The mean over a sequence, of any length."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(nets.FEATURES, nets.CLASSES)
        nets.fill(self)

    def construct(self, x):
        return self.head(x.mean(1))


@pytest.mark.parametrize("total", [TOTAL, 4, 3])  # of the whole training, of what is made, of less
def test_inputs_grow_within_the_updates_that_are_made(mode, total):
    """Bit for bit plain training on the rates that are picked, on short sequences at first."""
    net, plain = Lengths(), Lengths()
    warmup = {"seq_length_warmup": {"phases": [[0.5, 0.5]], "total_steps": total}}
    step = shortened(on_list, net, **warmup).train_network
    own = nn.Momentum(plain.trainable_params(), [RATES[one] for one in AT], 0.9)
    reference = model_of(plain, optimizer=own).train_network
    random = np.random.default_rng(3)
    for length in (2, 2, 4, 4):
        x = random.normal(size=(nets.BATCH, 4, nets.FEATURES)).astype(np.float32)
        y = Tensor(random.integers(0, nets.CLASSES, nets.BATCH).astype(np.int32))
        found = step(Tensor(x), y).asnumpy()
        np.testing.assert_array_equal(found, reference(Tensor(x[:, :length]), y).asnumpy())
    nets.assert_same(nets.weights(net), nets.weights(plain))
    made = min(total, len(AT))
    reason = f"scale 0.5 until update 2 of {made}, then full size"
    assert step.report()["seq_length_warmup"].reason == reason


def test_in_a_graph_of_its_own_inputs_grow_within_them_too(graph_mode):
    """As in sink mode, where no batch is looked at before."""
    trained = []
    for wrap in (nets.Outer, lambda step: step):
        net = Lengths()
        warmup = {"seq_length_warmup": {"phases": [[0.5, 0.5]], "total_steps": TOTAL}}
        step = wrap(shortened(on_list, net, **warmup).train_network)
        for x, y in nets.batches(len(AT)):
            step(Tensor(np.stack([x, -x, x * x, x], 1)), Tensor(y))
        trained.append(nets.weights(net))
    nets.assert_same(*trained)


class NextTokens(nn.Cell):
    """Returns the loss of the tokens one place on; how long the sequences are stands last."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(nets.CLASSES, nets.CLASSES)

    def construct(self, words, targets, lengths):
        logits = self.table(words).reshape((-1, nets.CLASSES))
        return ops.cross_entropy(logits, targets.reshape((-1,)))


@pytest.mark.parametrize(("if_unfit", "status"), [("skip", "skipped"), ("skip_rate", "applied")])
def test_a_recipe_leaves_targets_that_do_not_stand_last_alone(mode, if_unfit, status):
    net, section = NextTokens(), {"if_unfit": if_unfit}
    words = np.random.default_rng(2).integers(0, nets.CLASSES, (2, 9)).astype(np.int32)
    config, optimizer = config_of(short_schedule=section), on_list(net.trainable_params())
    step = make_train_step(net, None, optimizer, level="O1", config=config)
    step(Tensor(words[:, :-1]), Tensor(words[:, 1:]), Tensor([8, 8], ms.int32))
    row = step.report()["short_schedule"]
    assert (row.status, "tokens shifted by one" in row.reason) == (status, status == "skipped")
