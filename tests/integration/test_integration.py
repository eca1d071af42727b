"""install, uninstall and BoostModel: what a training script sees."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
import threading

import contract
import mindspore as ms
import mindspore.boost
import nets
import numpy as np
import pytest
import residual_nets
import scripts
from mindspore import Tensor, nn
from models import model_of

import mindspore_boost_ext
from mindspore_boost_ext import (
    AutoBoost,
    BoostModel,
    BoostTrainOneStepCell,
    BoostWarning,
    NoEffectWarning,
    install,
    installed,
    is_installed,
    uninstall,
)
from mindspore_boost_ext._compat import BuiltInConversion
from mindspore_boost_ext.integration.convert import ConvertModelUtils
from mindspore_boost_ext.integration.outside import settings_from_outside
from mindspore_boost_ext.integration.patch import (
    BUILD_FUNCTION_HOLDERS,
    INSTALL_VARIABLE,
    upstream_names,
)
from mindspore_boost_ext.runtime.machine import is_tuned, tune_machine

MISSING = object()
OFF = {"boost": {"mode": "disable_all"}}
MODELS = {"patched": ms.Model, "subclass": BoostModel}


@contextlib.contextmanager
def uninstalled():
    uninstall()
    try:
        yield
    finally:
        install()


def places():
    """Everything that install replaces, by name."""
    found = {
        f"Model.{name}": vars(ms.Model)[name]
        for name in ("_build_boost_network", "_build_train_network", "train", "fit")
    }
    found["train.model.AutoBoost"] = sys.modules["mindspore.train.model"].AutoBoost
    for module in BUILD_FUNCTION_HOLDERS:
        found[f"{module.__name__}.build_train_network"] = module.build_train_network
    for module, name, holders in upstream_names():
        for holder in holders:
            found[f"{holder.__name__}.{name} of {module}"] = vars(holder).get(name, MISSING)
    found["built-in conversion"] = vars(BuiltInConversion)["convert_to_thor_model"]
    return found


def build(model_class=ms.Model, net=None, **kwargs):
    net = net or nets.MLP()
    settings = {
        "loss_fn": nets.loss_fn(),
        "optimizer": nets.momentum(net.trainable_params()),
        "boost_level": "O1",
        "boost_config_dict": OFF,
    }
    settings.update(kwargs)
    return model_class(net, **settings)


def test_public_names_of_mindspore_boost_are_ours():
    for name in mindspore.boost.__all__:
        ours = getattr(mindspore_boost_ext, name)
        assert getattr(mindspore.boost, name) is ours
    assert mindspore.boost.boost.AutoBoost is AutoBoost
    assert sys.modules["mindspore.train.model"].AutoBoost is AutoBoost
    assert mindspore.boost.boost_cell_wrapper.BoostTrainOneStepCell is BoostTrainOneStepCell


def test_uninstall_restores_exactly_what_was_there():
    with uninstalled():
        original = places()
        install()
        ours = places()
        install()
        assert places() == ours
        assert all(ours[name] is not original[name] for name in original)
        uninstall()
        uninstall()
        assert all(places()[name] is original[name] for name in original)
        with installed():
            assert is_installed()
            with installed():
                assert is_installed()
            assert is_installed()
        assert not is_installed()


def test_an_installation_tunes_again_after_two_uninstallations():
    with uninstalled():
        uninstall()
        assert not is_tuned()
        install()
        assert is_tuned()


def test_an_installation_does_not_tune_what_the_script_has_switched_off():
    tune_machine(False)
    try:
        with uninstalled():
            install()
            assert not is_tuned()
    finally:
        tune_machine()


def test_an_installation_that_fails_leaves_nothing(monkeypatch):
    with uninstalled():
        original = places()
        with monkeypatch.context() as patched:
            patched.delattr(ConvertModelUtils, "convert_to_thor_model")  # the last of all
            with pytest.raises(AttributeError):
                install()
        assert not is_installed()
        assert all(places()[name] is original[name] for name in original)


def test_a_wrapper_that_someone_put_around_ours_survives():
    with uninstalled():
        original = ms.amp.build_train_network
        install()
        ours = ms.amp.build_train_network
        calls = []

        def theirs(*args, **kwargs):
            calls.append("theirs")
            return ours(*args, **kwargs)

        ms.amp.build_train_network = theirs
        try:
            uninstall()
            assert ms.amp.build_train_network is theirs
            net = nets.MLP()
            optimizer = nets.momentum(net.trainable_params())
            cell = theirs(net, optimizer, nets.loss_fn(), boost_level="O0")
            assert type(cell) is nn.TrainOneStepCell  # ours is transparent now
            install()
            cell = ms.amp.build_train_network(
                net, optimizer, nets.loss_fn(), boost_level="O1", boost_config_dict=OFF
            )
            assert isinstance(cell, BoostTrainOneStepCell)
            assert calls == ["theirs", "theirs"]
        finally:
            uninstall()
            ms.amp.build_train_network = original


def test_install_is_thread_safe():
    with uninstalled():
        original = places()
        threads = [threading.Thread(target=install) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert is_installed()
        uninstall()
        assert all(places()[name] is original[name] for name in original)


def test_contexts_of_several_threads_overlap():
    with uninstalled():
        entered, leave, seen = threading.Event(), threading.Event(), []

        def first():
            with installed():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=first)
        thread.start()
        entered.wait()
        with installed():
            leave.set()
            thread.join()
            seen.append(is_installed())
        assert seen == [True]
        assert not is_installed()


@pytest.mark.parametrize("variable", ["0", "1"])
def test_environment_variable_switches_installation_off(variable):
    program = "import mindspore_boost_ext as m; print(m.is_installed())"
    result = scripts.run("-c", program, env={**os.environ, INSTALL_VARIABLE: variable})
    assert result.stdout.strip() == str(variable == "1")


@pytest.mark.parametrize("metrics", [None, {"accuracy"}])
@pytest.mark.parametrize("kind", MODELS)
def test_a_boosted_model_trains_like_the_plain_one(mode, kind, metrics):
    plain, boosted = nets.MLP(), nets.MLP()
    build(net=plain, boost_level="O0", boost_config_dict=None).train(
        2, nets.dataset(), dataset_sink_mode=False
    )
    guard = uninstalled() if kind == "subclass" else contextlib.nullcontext()
    with guard:
        model = build(MODELS[kind], boosted, metrics=metrics)
        assert isinstance(model.train_network, BoostTrainOneStepCell)
        model.train(2, nets.dataset(), dataset_sink_mode=False)
        if metrics:
            assert 0 <= model.eval(nets.dataset(), dataset_sink_mode=False)["accuracy"] <= 1
        assert model.predict(Tensor(nets.batches(1)[0][0])).shape == (nets.BATCH, nets.CLASSES)
    nets.assert_same_weights(plain, boosted)


@pytest.mark.parametrize("kind", MODELS)
def test_loss_monitor_prints_the_loss(mode, kind):
    model = build(MODELS[kind])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.train(1, nets.dataset(2), callbacks=[ms.LossMonitor(1)], dataset_sink_mode=False)
    losses = re.findall(r"loss is ([\d.]+)", printed.getvalue())
    assert len(losses) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_a_with_loss_cell_of_the_user_works(mode, kind):
    class MyLoss(nn.Cell):
        def __init__(self, backbone):
            super().__init__(auto_prefix=False)
            self.backbone = backbone
            self.loss = nets.loss_fn()

        def construct(self, x, y):
            return self.loss(self.backbone(x), y)

    net = nets.MLP()
    model = build(
        MODELS[kind], MyLoss(net), loss_fn=None, optimizer=nets.momentum(net.trainable_params())
    )
    before = nets.weights(net)
    model.train(1, nets.dataset(2), dataset_sink_mode=False)
    assert any((before[name] != value).any() for name, value in nets.weights(net).items())


class Fixed(nn.Cell):
    """Holds its loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.backbone, self.loss = nets.Deep(), nets.loss_fn()

    def construct(self, x, y):
        return self.loss(self.backbone(x), y)


class Optional(Fixed):
    def construct(self, x, y=None, mask=None):
        logits = self.backbone(x)
        return self.loss(logits if mask is None else logits * mask, y)


class Defaults(Fixed):
    def construct(self, x, y, scale=1.0, flag=True):
        return self.loss(self.backbone(x) * scale, y) if flag else x.sum()


class Starred(Fixed):
    def construct(self, *batch):
        return self.loss(self.backbone(batch[0]), batch[1])


SETTINGS = (  # a way of their own to the gradients has each
    {},
    {"gradients": {"clip_norm": 0.1}},
    {"loss_scale": {"init": 64}},
    {"grad_freeze": {"param_groups": 2, "schedule": [0, 1]}},
)


@functools.cache
def trained_weights(mode, kind, index):
    """Return the weights of a network after four steps with one of ``SETTINGS``."""
    net, config = nets.fill(kind()), SETTINGS[index]
    switches = {"less_bn": False, "grad_freeze": "grad_freeze" in config}
    settings = {"boost": {"mode": "manual", **switches}, **config}
    model = build(net=net, loss_fn=None, boost_config_dict=settings)
    model.train(1, nets.dataset(4), dataset_sink_mode=False)
    return nets.weights(net)


@pytest.mark.parametrize("net", [Defaults, Starred, Optional])
def test_a_network_with_optional_inputs_trains_as_one_without(mode, net):
    for index in range(len(SETTINGS)):
        of_both = [trained_weights(mode, kind, index) for kind in (net, Fixed)]
        nets.assert_same(*of_both)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("where", ["by place", "by name", "none"])
def test_a_train_that_somebody_has_wrapped_gets_our_callbacks(monkeypatch, kind, where):
    """A tracker's function need not name its arguments; short_schedule ends by a callback."""
    seen = []

    class Counts(ms.train.Callback):
        def on_train_step_end(self, run_context):
            seen.append(run_context.original_args().cur_step_num)

    section = {"short_schedule": {"total_steps": 6, "share": 0.5}}
    config = {**contract.switched(short_schedule=True), **section}
    net = nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), [0.1] * 6, 0.9)
    given = [Counts()] if where == "by place" else []
    named = {"callbacks": Counts()} if where == "by name" else {}
    with uninstalled(), monkeypatch.context() as patch:
        plain = ms.Model.train
        patch.setattr(ms.Model, "train", lambda *args, **kwargs: plain(*args, **kwargs))
        with installed():
            model = model_of(net, config, optimizer, MODELS[kind])
            model.train(2, nets.dataset(3), *given, **named)
    assert seen == ([] if where == "none" else [1, 2, 3])
    assert int(optimizer.global_step.asnumpy()[0]) == 5  # its last step: nothing would follow


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("wrapped", "given"),
    [
        (lambda plain: lambda self, n, data, seen=(): plain(self, n, data, [*seen]), True),
        (lambda plain: lambda self, n, data, *rest: plain(self, n, data, *rest), True),
        (lambda plain: lambda self, n, data, *rest: plain(self, n, data, *rest), False),
        (lambda plain: lambda self, n, data: plain(self, n, data), False),
    ],
)
def test_a_wrapped_train_that_takes_no_callbacks_by_name(monkeypatch, kind, wrapped, given):
    """Where it is given none by place, none can be added: a warning says so, at O0 nothing."""
    section = {"short_schedule": {"total_steps": 6, "share": 0.5}}
    config = {**contract.switched(short_schedule=True), **section}
    with uninstalled(), monkeypatch.context() as patch:
        patch.setattr(ms.Model, "train", wrapped(ms.Model.train))
        with installed():
            for settings, last in ((None, 6), (config, 5)):
                net = nets.MLP()
                optimizer = nn.Momentum(net.trainable_params(), [0.1] * 6, 0.9)
                model = model_of(net, settings, optimizer, MODELS[kind])
                words = [
                    "takes no callbacks, so short_sched",
                    "the schedule is over, and your loop",
                ]
                with contextlib.ExitStack() as stack:
                    for one in words if settings and not given else ():
                        stack.enter_context(pytest.warns(NoEffectWarning, match=one))
                    model.train(2, nets.dataset(3), *([[]] if given else []))
                assert int(optimizer.global_step.asnumpy()[0]) == last


@pytest.mark.parametrize("kind", MODELS)
def test_an_eval_network_of_the_user_works(kind):
    net = nets.MLP()
    evaluator = nn.WithEvalCell(net, nets.loss_fn())
    model = build(
        MODELS[kind], net, metrics={"loss"}, eval_network=evaluator, eval_indexes=[0, 1, 2]
    )
    model.train(1, nets.dataset(2), dataset_sink_mode=False)
    assert model.eval(nets.dataset(2), dataset_sink_mode=False)["loss"] > 0


def test_two_models_keep_their_own_configuration():
    plain = build(boost_level="O0", boost_config_dict=None)
    first = build()
    with pytest.raises(ValueError, match="freeze_p"):
        build(boost_config_dict={"grad_freeze": {"freeze_p": 2}})
    second = build(
        boost_level="O2",
        boost_config_dict={
            "boost": {"mode": "manual", **dict.fromkeys(AutoBoost().boost_config, False)}
        },
    )
    assert type(plain.train_network) is nn.TrainOneStepCell
    assert first.train_network.auto_boost.level == "O1"
    assert second.train_network.auto_boost.level == "O2"
    assert AutoBoost().level == "O0"


def test_a_step_cell_of_the_user_finds_the_configuration_of_its_model():
    seen = []

    class Watching(nn.Cell):
        def set_grad(self, requires_grad=True):  # called while the Model builds its step cell
            seen.append(AutoBoost().level)
            return super().set_grad(requires_grad)

    class Net(Watching):
        def __init__(self):
            super().__init__()
            self.net = nets.MLP()

        def construct(self, x, y):
            return self.net(x).sum() + y.sum()

    net = Net()
    build(net=net, loss_fn=None, boost_level="O2", boost_config_dict=OFF)
    assert "O2" in seen


def test_level_zero_with_settings_tells_that_they_have_no_effect():
    with pytest.warns(NoEffectWarning, match="level O0"):
        model = build(
            boost_level="O0", boost_config_dict={"boost": {"mode": "manual", "less_bn": True}}
        )
    assert type(model.train_network) is nn.TrainOneStepCell


def test_a_model_without_optimizer_tells_that_boost_has_no_effect():
    with pytest.warns(NoEffectWarning, match="without an optimizer$"):
        model = build(optimizer=None, metrics={"accuracy"})
    assert 0 <= model.eval(nets.dataset(2), dataset_sink_mode=False)["accuracy"] <= 1


class TwoOptimizers(nn.Cell):
    """A step of the script's own."""

    def __init__(self, net):
        super().__init__()
        self.net = nn.WithLossCell(net, nets.loss_fn())
        first, *others = net.trainable_params()
        self.optimizers = nn.CellList([nn.SGD([first]), nn.Adam(others)])

    def construct(self, x, y):
        return self.net(x, y)


def test_a_model_of_ones_own_step_is_warned_of_with_the_remedy():
    step = TwoOptimizers(nets.MLP())
    with pytest.warns(
        NoEffectWarning, match="an optimizer: .* step cell, TwoOptimizers: .*make_train"
    ):
        build(net=step, loss_fn=None, optimizer=None)


def test_a_class_that_builds_the_step_itself_gets_its_network_as_it_was():
    net = residual_nets.ZooResNet()
    optimizer, loss = nets.momentum(net.trainable_params()), nets.loss_fn()

    class Own(ms.Model):
        def _build_train_network(self):
            return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer)

    before = [type(one) for _, one in net.cells_and_names()]
    settings = {"boost": {"mode": "manual"}}
    with pytest.warns(NoEffectWarning) as told:
        Own(net, loss, optimizer, boost_level="O1", boost_config_dict=settings)
    (message,) = [str(one.message) for one in told]
    assert "whose class builds the training step itself" in message
    assert [type(one) for _, one in net.cells_and_names()] == before


@pytest.mark.parametrize("kind", MODELS)
def test_acc_level_is_the_old_name_of_boost_level(kind):
    with pytest.warns(BoostWarning, match="acc_level is the old name"):
        model = build(MODELS[kind], boost_level="O0", acc_level="O2")
    assert model.train_network.auto_boost.level == "O2"


@pytest.mark.parametrize(
    "holder", ["mindspore", "mindspore.amp", "mindspore.train", "mindspore.train.amp"]
)
def test_build_train_network_configures_itself(holder):
    net = nets.MLP()
    cell = sys.modules[holder].build_train_network(
        net,
        nets.momentum(net.trainable_params()),
        nets.loss_fn(),
        boost_level="O1",
        boost_config_dict=OFF,
    )
    assert isinstance(cell, BoostTrainOneStepCell)
    assert cell.auto_boost.level == "O1"
    with pytest.raises(ValueError, match="freeze_p"):
        sys.modules[holder].build_train_network(
            net,
            nets.momentum(net.trainable_params()),
            boost_level="O1",
            boost_config_dict={"grad_freeze": {"freeze_p": -1}},
        )


@pytest.mark.parametrize("kind", MODELS)
def test_fixed_loss_scale_without_dropping_trains_like_no_scale(mode, kind):
    """A factor of 1024 in the backward pass, divided out by the optimizer, costs no bit in fp32."""
    plain, scaled = nets.MLP(), nets.MLP()
    build(MODELS[kind], plain).train(1, nets.dataset(), dataset_sink_mode=False)
    manager = ms.FixedLossScaleManager(1024, drop_overflow_update=False)
    optimizer = nets.momentum(scaled.trainable_params(), loss_scale=1024.0)
    model = build(MODELS[kind], scaled, optimizer=optimizer, loss_scale_manager=manager)
    model.train(1, nets.dataset(), dataset_sink_mode=False)
    nets.assert_same_weights(plain, scaled)


def test_unequal_fixed_loss_scale_is_told_when_the_model_is_built():
    manager = ms.FixedLossScaleManager(1024, drop_overflow_update=False)
    with pytest.warns(BoostWarning, match=r"loss_scale=1\.0"):
        build(loss_scale_manager=manager)


def test_a_loss_scale_manager_of_the_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match="loss_scale_manager must be a LossScaleManager or None"):
        build(loss_scale_manager=1024)


@pytest.mark.parametrize("amp_level", ["O0", "O3"])
@pytest.mark.parametrize("kind", MODELS)
def test_amp_levels_give_the_weights_of_the_plain_model(mode, kind, amp_level):
    plain, boosted = nets.MLP(), nets.MLP()
    settings = {"amp_level": amp_level, "loss_scale_manager": None}
    build(net=plain, boost_level="O0", boost_config_dict=None, **settings).train(
        1, nets.dataset(), dataset_sink_mode=False
    )
    build(MODELS[kind], boosted, **settings).train(1, nets.dataset(), dataset_sink_mode=False)
    nets.assert_same_weights(plain, boosted)


def test_declared_input_shapes_reach_the_step_cell():
    net = nets.MLP()
    net.set_inputs(Tensor(shape=[None, nets.FEATURES], dtype=ms.float32))
    loss = nets.loss_fn()
    loss.set_inputs(
        Tensor(shape=[None, nets.CLASSES], dtype=ms.float32), Tensor(shape=[None], dtype=ms.int32)
    )
    model = build(net=net, loss_fn=loss)
    plain = build(net=net, loss_fn=loss, boost_level="O0", boost_config_dict=None)
    given = model.train_network.get_inputs()
    assert [one.shape for one in given] == [one.shape for one in plain.train_network.get_inputs()]


def test_report_is_logged_once_when_a_model_is_built(caplog):
    with caplog.at_level(logging.INFO, logger="mindspore_boost_ext"):
        model = build()
    tables = [record.getMessage() for record in caplog.records]
    assert tables == [str(model.train_network.report())]
    assert "less_bn" in tables[0]


def test_other_ranks_stay_silent(caplog, monkeypatch, recwarn):
    monkeypatch.setenv("RANK_ID", "1")
    with caplog.at_level(logging.INFO, logger="mindspore_boost_ext"):
        build(boost_config_dict={"boost": {"mode": "disable_all", "less_bn": True}})
    assert not caplog.records
    assert not [one for one in recwarn if issubclass(one.category, BoostWarning)]


def test_two_models_train_in_turn(mode):
    """Neither Model disturbs the other: each ends where it ends alone."""
    alone = [nets.MLP(0), nets.MLP(1)]
    for net in alone:
        build(net=net).train(2, nets.dataset(), dataset_sink_mode=False)
    together = [nets.MLP(0), nets.MLP(1)]
    models = [build(net=net) for net in together]
    for x, y in nets.batches(4) * 2:
        for model in models:
            model.train_network(Tensor(x), Tensor(y))
    for one, two in zip(alone, together):
        np.testing.assert_equal(nets.weights(one), nets.weights(two))


def test_json_text_of_the_environment_gives_a_section_once(monkeypatch):
    """As a file does: the last of two would be used without a word."""
    text = '{"gradients": {"clip_norm": 1.0}, "gradients": {}}'
    monkeypatch.setenv("MINDSPORE_BOOST_EXT_CONFIG", text)
    with pytest.raises(ValueError, match="gradients given twice: keep one"):
        settings_from_outside()


def test_a_step_cell_of_the_scripts_own_takes_nothing_from_the_environment(monkeypatch):
    net = nets.MLP()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    own = nn.TrainOneStepCell(nn.WithLossCell(net, nets.loss_fn()), optimizer)
    monkeypatch.setenv("MINDSPORE_BOOST_EXT_LEVEL", "O1")
    with pytest.warns(NoEffectWarning, match="environment have no effect .* makes its own step"):
        BoostModel(own)
