"""A run that is saved after each epoch and restored goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint
from models import model_of

from mindspore_boost_ext import (
    AutoBoost,
    BoostCheckpoint,
    BoostModel,
    BoostMonitor,
    BoostWarning,
    make_train_step,
    read_history,
    restore,
    save_checkpoint,
)
from mindspore_boost_ext.callbacks import checkpoint, resume
from mindspore_boost_ext.short_schedule import algorithm

STEPS = 3  # in an epoch: a window of two is half full at its end


def accumulating(weighting="equal", window=2, level="O1", net=None, numbers=(0.1, 0.9), **more):
    """Return a Model that accumulates; at level O0 a plain one. Numbers: rate and momentum."""
    net = net or nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), *numbers)
    switches = {"mode": "manual", "less_bn": False, "grad_freeze": False}
    config = {
        "boost": {**switches, "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": window, "weighting": weighting},
        **more,
    }
    config = None if level == "O0" else config
    return model_of(net, config, optimizer, BoostModel, boost_level=level)


def train(model, epochs, *callbacks, done=0, **sinking):
    sinking = sinking or {"dataset_sink_mode": False}
    model.train(epochs, nets.dataset(STEPS), [*callbacks], initial_epoch=done, **sinking)
    return nets.weights(model.train_network)


def as_rank(monkeypatch, rank, count):
    """Let checkpoints take this process for one of several ranks."""
    for module in (resume, checkpoint):
        monkeypatch.setattr(module, "launched_rank", lambda: rank)
    monkeypatch.setattr(resume, "launched_count", lambda: count)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_restored_run_ends_bit_identically(mode, level, tmp_path):
    """The half-full window, the moments and the counters included."""
    whole = train(accumulating(level=level), 3)
    path = tmp_path / "run"
    train(accumulating(level=level), 1, BoostCheckpoint(path))
    second = accumulating(level=level)
    done = restore(second.train_network, path)
    assert done == 1
    nets.assert_same(train(second, 3, done=done), whole)
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_a_file_of_mindspores_callback_is_restored(tmp_path):
    config = CheckpointConfig(save_checkpoint_steps=STEPS, append_info=["epoch_num", "step_num"])
    train(accumulating(), 2, ModelCheckpoint("run", str(tmp_path), config))
    second = accumulating()
    assert restore(second.train_network, tmp_path / f"run-2_{STEPS}.ckpt") == 2
    nets.assert_same(train(second, 4, done=2), train(accumulating(), 4))


def test_a_folder_is_no_path_to_save_to(tmp_path, monkeypatch):
    """But a file gets its suffix, and may stand beside a folder of its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert BoostCheckpoint("run").path == str(tmp_path / "run.ckpt")
    for folder in (".", "..", f"{tmp_path}/"):
        with pytest.raises(ValueError, match="path must name a file in a folder"):
            BoostCheckpoint(folder)


def test_only_every_second_epoch_is_saved(tmp_path):
    path = tmp_path / "run.ckpt"
    model = accumulating()
    train(model, 1, BoostCheckpoint(path, epochs=2))
    assert not path.exists()
    train(model, 3, BoostCheckpoint(path, epochs=2))
    assert restore(accumulating().train_network, path) == 4
    another = accumulating()
    train(another, 1, BoostCheckpoint(path, epochs=2))  # saves nothing
    with pytest.warns(BoostWarning, match="is the file of another training"):
        train(another, 1, BoostCheckpoint(path, epochs=2))


def test_epochs_are_counted_on_from_call_to_call(tmp_path):
    """And from the epoch that was restored; ``initial_epoch`` says it itself."""
    path = tmp_path / "run.ckpt"
    model = accumulating()
    for _ in range(3):
        train(model, 1, BoostCheckpoint(path))
    second = accumulating()
    assert restore(second.train_network, path) == 3
    train(second, 1, BoostCheckpoint(path))
    assert restore(second.train_network, path) == 4
    train(second, 6, BoostCheckpoint(path), done=4)
    assert restore(accumulating().train_network, path) == 6


def test_a_monitor_counts_on_from_the_epoch_that_was_restored(tmp_path):
    """In a loop over calls of one epoch each, without ``initial_epoch``."""
    path, history = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    model = accumulating()
    train(model, 2, BoostCheckpoint(path), BoostMonitor(history, progress=False))
    second = accumulating()
    restore(second.train_network, path)
    monitor = BoostMonitor(history, progress=False)
    for _ in range(2):
        train(second, 1, monitor)
    steps = [one for one in read_history(history) if one["event"] == "step"]
    assert [(one["epoch"], one["step"]) for one in steps] == [
        (1 + step // STEPS, step + 1) for step in range(4 * STEPS)
    ]


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()


@pytest.mark.parametrize("sinking", [{}, {"dataset_sink_mode": True, "sink_size": 2}])
@pytest.mark.parametrize(("step", "done"), [(STEPS + 1, 1), (2 * STEPS - 1, 1), (2 * STEPS, 2)])
def test_an_epoch_that_is_broken_off_is_not_done(step, done, sinking, tmp_path):
    """The file is left as it was, and the run goes on from there as if nothing had been.

    On CPU MindSpore sinks nothing, whatever ``sink_size`` says.
    """
    path, model = tmp_path / "run.ckpt", accumulating()
    broken = pytest.warns(BoostWarning, match=r"epoch 2 was interrupted: .*run\.ckpt' was not")
    with broken if done == 1 else contextlib.nullcontext():
        train(model, 4, StopAt(step), BoostCheckpoint(path), **sinking)
    second = accumulating()
    assert restore(second.train_network, path) == done
    nets.assert_same(train(second, 3, done=done), train(accumulating(), 3))


class Varying:
    """Batches of which an epoch has four, then three, and so on; it says four."""

    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.epochs += 1
        return iter([tuple(map(Tensor, one)) for one in nets.batches(4 - (self.epochs - 1) % 2)])


def test_epochs_that_vary_in_length_are_done(tmp_path):
    net = nets.MLP()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    for batch in step.over(Varying(), 3, [BoostCheckpoint(tmp_path / "run.ckpt")]):
        step(*batch)
    assert restore(step.train_network, tmp_path / "run.ckpt") == 3


def test_the_end_that_an_algorithm_makes_is_saved(tmp_path, capsys):
    """Within an epoch, too, and whatever epochs lie between two files; a monitor says so."""
    path = tmp_path / "run.ckpt"
    rates = [0.1 - 0.01 * step for step in range(3 * STEPS)]
    config = {
        "boost": {"mode": "manual", "less_bn": False, "grad_freeze": False},
        "short_schedule": {"total_steps": 3 * STEPS, "share": 0.5},
    }

    def shorter():
        net = nets.MLP()
        return model_of(net, config, nn.SGD(net.trainable_params(), rates), BoostModel)

    train(shorter(), 3, BoostCheckpoint(path, epochs=10), BoostMonitor())
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "short_schedule ends the training, in epoch 2 of 3"
    second = shorter()
    assert restore(second.train_network, path) == 2
    assert second.train_network.optimizer.global_step.asnumpy().tolist() == [3 * STEPS - 1]


def test_a_parameter_that_no_file_could_hold_is_refused(tmp_path):
    net = nets.MLP()
    net.first.weight.name = "epoch"
    model = accumulating(net=net)
    with pytest.raises(ValueError, match=r"under the name 'epoch'.* rename the Parameter"):
        train(model, 1, BoostCheckpoint(tmp_path / "run.ckpt"))


def test_a_file_of_safetensors_is_restored(tmp_path):
    path, model = tmp_path / "run.safetensors", accumulating()
    train(model, 1, BoostCheckpoint(path))
    assert os.listdir(tmp_path) == ["run.safetensors"]
    second = accumulating()
    assert restore(second.train_network, path) == 1
    nets.assert_same(nets.weights(second.train_network), nets.weights(model.train_network))
    with pytest.raises(ValueError, match="grad_accumulation_step was 2 and is 4"):
        restore(accumulating(window=4).train_network, path)


def test_a_file_of_a_plain_step_is_refused_by_a_boosted_one(tmp_path):
    """And goes into one in which nothing is on."""
    path = tmp_path / "run.ckpt"
    train(accumulating(level="O0"), 1, BoostCheckpoint(path))
    net = nets.MLP()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    off = {"boost": {"mode": "disable_all"}}
    assert restore(model_of(net, off, optimizer, BoostModel).train_network, path) == 1
    clipping = {**off, "gradients": {"clip_norm": 1.0}}
    step = model_of(net, clipping, optimizer, BoostModel).train_network
    with pytest.raises(ValueError, match=r"clip_norm was None and is 1\.0"):
        restore(step, path)


# ---- what does not fit ----


@pytest.fixture
def saved(tmp_path):
    """Return the path of a run of one epoch."""
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    return tmp_path / "run.ckpt"


def assert_refused(step, path, message):
    before = nets.weights(step)
    with pytest.raises(ValueError, match=message):
        restore(step, path)
    nets.assert_same(nets.weights(step), before)


OTHERS = {
    "weighting": (
        {"weighting": "samples"},
        r"weighting was 'equal' and is 'samples'.*file's settings, or set allow_other_settings",
    ),
    "window": ({"window": 4}, "grad_accumulation_step was 2 and is 4"),
    "clipping": ({"gradients": {"clip_norm": 1.0}}, r"gradients\.clip_norm was None and is 1\.0"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_named_and_nothing_is_loaded(saved, name):
    settings, message = OTHERS[name]
    step = accumulating(**settings).train_network
    assert_refused(step, saved, message)


def test_a_file_from_before_there_was_a_switch_fits_while_it_is_off(tmp_path, monkeypatch):
    known = AutoBoost.settings_in_force

    def older(boost):
        found = known(boost)
        del found["boost.compiled_step"]
        return found

    monkeypatch.setattr(AutoBoost, "settings_in_force", older)
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    monkeypatch.undo()
    assert restore(accumulating().train_network, tmp_path / "run.ckpt") == 1


def test_a_switch_of_a_later_version_is_named(tmp_path, monkeypatch):
    known = AutoBoost.settings_in_force
    later = {"boost.of_later": "True"}
    monkeypatch.setattr(AutoBoost, "settings_in_force", lambda boost: {**known(boost), **later})
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    monkeypatch.undo()
    step = accumulating().train_network
    assert_refused(step, tmp_path / "run.ckpt", r"boost\.of_later was True and is not in force")


def test_another_number_of_ranks_is_named(tmp_path, monkeypatch):
    """What the others had in their windows, and their moments, would be lost without a word."""
    path = tmp_path / "run.ckpt"
    monkeypatch.setattr(checkpoint, "rank_count", lambda: 4)
    train(accumulating(), 1, BoostCheckpoint(path))
    monkeypatch.undo()
    assert_refused(accumulating().train_network, path, "number of ranks was 4 and is 1")


def test_a_file_that_says_no_number_of_ranks_fits(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    monkeypatch.setattr(checkpoint, "settings_of", lambda step: step.auto_boost.settings_in_force())
    train(accumulating(), 1, BoostCheckpoint(path))
    monkeypatch.undo()
    assert restore(accumulating().train_network, path) == 1


def test_other_settings_may_be_allowed(saved):
    step = accumulating(gradients={"clip_norm": 1.0}).train_network
    with pytest.warns(BoostWarning, match=r"clip_norm was None and is 1\.0; training goes on"):
        assert restore(step, saved, allow_other_settings=True) == 1
    moments = ms.load_checkpoint(str(saved))["moments.first.weight"].asnumpy()
    assert moments.any()
    np.testing.assert_array_equal(nets.weights(step)["moments.first.weight"], moments)


def test_other_settings_are_no_help_where_parameters_differ(saved):
    """So there is no warning first that training goes on."""
    step = accumulating(level="O0").train_network
    with pytest.raises(
        ValueError, match=r"does not fit this training: boost\.\S+ is .* missing he"
    ):
        restore(step, saved, allow_other_settings=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"net": nn.Dense(3, 3)}, r"does not fit this training: .* is missing in the file"),
        ({"level": "O0"}, r"other settings: boost\.grad_accumulation was True and is False"),
    ],
)
def test_other_parameters_are_named_and_nothing_is_loaded(saved, settings, message):
    step = accumulating(**settings).train_network
    assert_refused(step, saved, message)


def test_a_shape_that_differs_is_named(saved):
    message = rf"first\.weight is Float32 \({nets.HIDDEN}, .* in the file and Float32 \(9, "
    with pytest.raises(ValueError, match=message):
        restore(accumulating(net=nets.MLP(hidden=9)).train_network, saved)


def test_a_model_is_told_from_its_train_network(saved):
    with pytest.raises(TypeError, match=r"restore needs model\.train_network, a Cell, got Boost"):
        restore(accumulating(), saved)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    step = accumulating().train_network
    with pytest.raises(ValueError, match=r"none\.ckpt' cannot be read .*: there is no such file$"):
        restore(step, tmp_path / "none.ckpt")
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"text\.ckpt' cannot be read as a checkpoint"):
        restore(step, tmp_path / "text.ckpt")
    save_checkpoint(step, tmp_path / "bare")
    with pytest.raises(ValueError, match=r"bare\.ckpt' does not say how many epochs are done"):
        restore(step, tmp_path / "bare.ckpt")


# ---- a half-full window that MindSpore's own functions load ----


@pytest.mark.parametrize(("one", "other"), [("equal", "samples"), ("samples", "equal")])
def test_a_window_of_the_other_weighting_is_refused_before_it_is_used(mode, one, other, tmp_path):
    first, second = accumulating(one), accumulating(other)
    train(first, 1)
    ms.save_checkpoint(first.train_network, str(tmp_path / "run.ckpt"))
    ms.load_param_into_net(second.train_network, ms.load_checkpoint(str(tmp_path / "run.ckpt")))
    with pytest.raises(ValueError, match=rf"1 micro-batches .*weighting='{other}'"):
        train(second, 1)
    assert second.train_network.accumulation.micro_steps() == 1


# ---- what the first batch has shown ----


def test_a_window_of_the_other_weighting_is_refused_by_a_step_that_has_run(mode, tmp_path):
    path = tmp_path / "run.ckpt"
    train(accumulating("samples"), 1, BoostCheckpoint(path))
    model = accumulating("equal")
    train(model, 2)
    with pytest.warns(BoostWarning, match="other settings"):
        restore(model.train_network, path, allow_other_settings=True)
    before = nets.weights(model.train_network)
    with pytest.raises(ValueError, match="keep the weighting of the saved run"):
        train(model, 2, done=1)
    nets.assert_same(nets.weights(model.train_network), before)


def test_a_run_goes_back_in_the_process_that_saved_it(mode, tmp_path):
    path = tmp_path / "run.ckpt"
    model = accumulating()
    train(model, 1, BoostCheckpoint(path))
    there = train(model, 3, done=1)
    assert restore(model.train_network, path) == 1
    nets.assert_same(train(model, 3, done=1), there)


class Shift(nn.Cell):
    """Sequences [N, L] of numbers to one number each; the loss of a mean, whatever L is."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([0.5], ms.float32), name="weight")

    def construct(self, x, y):
        return ((x * self.weight).mean(1) - y).mean()


def of_numbers(**section):
    rates = np.linspace(0.1, 0.0, 24, dtype=np.float32).tolist()
    net = Shift()
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}, **section}
    optimizer = nn.SGD(net.trainable_params(), rates)
    return make_train_step(net, None, optimizer, level="O1", config=config)


def numbers(samples, length):
    return Tensor(np.ones((samples, length), np.float32)), Tensor(np.ones(samples, np.float32))


def gone_on(folder, first, then, **section):
    """Return the reports of a step after a batch, and of one that goes on with another batch."""
    kind, path = next(iter(section)), folder / "run.ckpt"
    whole, second = of_numbers(**section), of_numbers(**section)
    whole(*first)
    save_checkpoint(whole.train_network, path, append_dict={"epoch": 1})
    restore(second.train_network, path)
    second(*then)
    return whole.report()[kind], second.report()[kind]


def test_phases_are_those_of_the_first_batch_of_the_run_that_was_saved(mode, tmp_path):
    """A shorter one, in which two sizes are one token, would merge them."""
    phases = {"phases": [[0.34, 0.125], [0.34, 0.25]], "total_steps": 24}
    long, short = numbers(4, 16), numbers(4, 3)
    before, after = gone_on(tmp_path, long, short, seq_length_warmup=phases)
    assert before == after
    fresh = of_numbers(seq_length_warmup=phases)
    fresh(*short)
    assert fresh.report()["seq_length_warmup"] != before


def test_a_batch_that_a_step_has_seen_decides_before_a_file(pynative_mode, tmp_path):
    path, long, short = tmp_path / "run.ckpt", numbers(4, 16), numbers(4, 3)
    phases = {"phases": [[0.34, 0.125], [0.34, 0.25]], "total_steps": 24}
    saved, second = (of_numbers(seq_length_warmup=phases) for _ in range(2))
    saved(*long)
    save_checkpoint(saved.train_network, path, append_dict={"epoch": 1})
    second(*short)
    before = second.report()["seq_length_warmup"]
    assert before != saved.report()["seq_length_warmup"]
    restore(second.train_network, path)
    second(*short)
    assert second.report()["seq_length_warmup"] == before


def test_an_epoch_that_was_broken_off_does_not_count_in_the_next_call(tmp_path):
    path, model = tmp_path / "run.ckpt", accumulating()
    with pytest.warns(BoostWarning, match="epoch 2 was interrupted"):
        train(model, 3, StopAt(STEPS + 1), BoostCheckpoint(path))
    train(model, 1, BoostCheckpoint(path))
    assert restore(accumulating().train_network, path) == 2


def test_phases_are_those_of_other_settings_that_were_allowed(mode, tmp_path):
    path, batch = tmp_path / "run.ckpt", numbers(4, 16)
    section = {"phases": [[0.34, 0.125], [0.34, 0.25]], "total_steps": 24}
    longer = {**section, "total_steps": 48}
    saved = of_numbers(seq_length_warmup=section)
    saved(*batch)
    save_checkpoint(saved.train_network, path, append_dict={"epoch": 1})
    second, fresh = (of_numbers(seq_length_warmup=longer) for _ in range(2))
    with pytest.warns(BoostWarning, match="total_steps was 24 and is 48; training goes on"):
        restore(second.train_network, path, allow_other_settings=True)
    for step in (second, fresh):
        step(*batch)
    assert second.report()["seq_length_warmup"] == fresh.report()["seq_length_warmup"]


def test_batches_stay_whole_or_cut_as_in_the_run_that_was_saved(mode, tmp_path, monkeypatch):
    """Weights that have trained may show something else: here the trial is not made again."""
    whole = {"total_steps": 24, "share": 0.5, "parts": 2, "whole_share": 0.6, "if_unfit": "skip"}
    batch, looks = numbers(64, 4), iter(["; batches stay whole, as they are", ""])
    monkeypatch.setattr(algorithm, "_why_whole", lambda *_: next(looks))
    before, after = gone_on(tmp_path, batch, batch, short_schedule=whole)
    assert before == after
    assert next(looks) == ""


class OfTokens(nn.Cell):
    """The mean of an embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def construct(self, tokens):
        return self.table(tokens).mean(1)


def of_tokens():
    ms.set_seed(1)
    net = OfTokens()
    rates = np.linspace(0.1, 0.0, 32, dtype=np.float32).tolist()
    optimizer = nn.SGD(net.trainable_params(), rates)
    section = {"total_steps": 32, "share": 0.5, "if_unfit": "skip"}
    config = {"boost": {"mode": "manual", "less_bn": False, "grad_freeze": False}}
    config["short_schedule"] = section
    config["label_smoothing"] = {"when": "shorter", "if_unfit": "skip"}
    loss = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
    return make_train_step(net, loss, optimizer, level="O1", config=config)


@pytest.mark.parametrize("unfit_first", [True, False])
def test_a_schedule_is_as_short_as_in_the_run_that_was_saved(mode, tmp_path, unfit_first):
    """Labels that exclude each other are classes; several of a sample are not."""
    tokens = Tensor(np.arange(16, dtype=np.int32).reshape(4, 4) % 8)
    classes = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    several = np.maximum(classes, [0, 0, 1]).astype(np.float32)
    first, then = (several, classes) if unfit_first else (classes, several)
    whole, second = of_tokens(), of_tokens()
    whole(tokens, Tensor(first))
    save_checkpoint(whole.train_network, tmp_path / "run.ckpt", append_dict={"epoch": 1})
    whole(tokens, Tensor(then))
    restore(second.train_network, tmp_path / "run.ckpt")
    second(tokens, Tensor(then))
    statuses = ("skipped",) * 2 if unfit_first else ("applied",) * 2
    for step in (whole, second):
        found = [step.report()[one].status for one in ("short_schedule", "label_smoothing")]
        assert tuple(found) == statuses
    position = whole.train_network.optimizer.global_step.asnumpy()
    assert second.train_network.optimizer.global_step.asnumpy() == position
    for name, value in nets.weights(whole.train_network).items():
        np.testing.assert_array_equal(nets.weights(second.train_network)[name], value)


def test_a_run_goes_on_with_a_batch_that_is_smaller_than_the_first(tmp_path):
    """Which could not be the first: that is cut into parts of two samples each."""
    cut = {"total_steps": 24, "share": 0.5, "parts": 3}
    before, after = gone_on(tmp_path, numbers(8, 4), numbers(4, 4), short_schedule=cut)
    assert before == after


# ---- paths and ranks ----


@pytest.mark.parametrize(
    ("path", "kind"), [("", ValueError), (b"run.ckpt", ValueError), (3, TypeError)]
)
def test_what_is_no_path_is_refused(path, kind):
    with pytest.raises(kind, match="path must be"):
        BoostCheckpoint(path)
    with pytest.raises(kind, match="path must be"):
        restore(accumulating().train_network, path)


def test_a_file_that_cannot_be_written_is_refused_before_the_training(tmp_path):
    for path in (tmp_path / "none" / "run", "/proc/run.ckpt/x"):
        with pytest.raises(ValueError, match="in a folder that can be written"):
            BoostCheckpoint(path)
    with pytest.raises(ValueError, match=r"epochs must be an int from 1 to .*, got 0"):
        BoostCheckpoint(tmp_path / "run", epochs=0)


def test_training_goes_on_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    callback = BoostCheckpoint(tmp_path / "run.ckpt")
    monkeypatch.setattr(resume, "save_checkpoint", full)
    with pytest.warns(BoostWarning) as seen:
        found = train(accumulating(), 2, callback)
    assert [str(one.message) for one in seen] == [  # Python shows one that is repeated only once
        f"epoch {epoch} is not saved: No space left on device; training goes on" for epoch in (1, 2)
    ]
    nets.assert_same(found, train(accumulating(), 2))


def test_every_rank_tells_of_its_own_file(tmp_path, monkeypatch):
    callback = BoostCheckpoint(tmp_path / "run{rank}.ckpt")
    as_rank(monkeypatch, 1, 2)
    monkeypatch.setattr(resume, "save_checkpoint", lambda *_, **__: (tmp_path / "no/run").open())
    with pytest.warns(BoostWarning, match="^rank 1: epoch 1 is not saved: No such file"):
        train(accumulating(), 1, callback)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_file_that_is_too_large_is_an_os_error_of_either_kind(tmp_path, kind):
    """A limit of the process stands in for the full disk."""
    path = tmp_path / f"run.{kind}"
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    net = nn.Dense(100, 100)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"cannot save the checkpoint .*run.{kind}.* unchanged"):
            save_checkpoint(net, path, format=kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_step_that_has_trained_goes_on_from_what_is_restored(mode, level, tmp_path):
    """In PYNATIVE_MODE loading gives Parameters other memory; MindSpore's optimizer keeps its."""
    config = {"boost": {"mode": "disable_all"}} if level == "O1" else None
    net = nets.MLP()
    step = make_train_step(
        net, nets.loss_fn(), nets.momentum(net.trainable_params()), config=config
    )
    batches = [[Tensor(one) for one in pair] for pair in nets.batches(3)]
    step(*batches[0])
    save_checkpoint(step.train_network, tmp_path / "run.ckpt", append_dict={"epoch": 1})
    expected = [float(step(*pair)) for pair in batches]
    restore(step.train_network, tmp_path / "run.ckpt")
    assert [float(step(*pair)) for pair in batches] == expected


def test_the_rank_may_stand_in_the_name_of_the_folder(tmp_path):
    (tmp_path / "rank0").mkdir()
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "rank{rank}" / "run.ckpt"))
    assert (tmp_path / "rank0" / "run.ckpt").is_file()
    assert restore(accumulating().train_network, tmp_path / "rank{rank}" / "run.ckpt") == 1


def test_each_rank_has_a_file_of_its_own(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    with pytest.raises(
        ValueError, match=r"file for each of the 2 ranks, .*run\.rank\{rank\}\.ckpt"
    ):
        train(accumulating(), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "run{rank}.ckpt"))
    assert os.listdir(tmp_path) == ["run1.ckpt"]
    assert restore(accumulating().train_network, tmp_path / "run{rank}.ckpt") == 1


def test_a_rank_keeps_the_file_before(tmp_path, monkeypatch):
    """Of ranks that are killed while they save, one may be an epoch ahead."""
    as_rank(monkeypatch, 1, 2)
    path, before = tmp_path / "run{rank}.ckpt", tmp_path / "run{rank}.before.ckpt"
    train(accumulating(), 3, BoostCheckpoint(path))
    assert sorted(os.listdir(tmp_path)) == ["run1.before.ckpt", "run1.ckpt"]
    assert restore(accumulating().train_network, path) == 3
    second = accumulating()
    assert restore(second.train_network, before) == 2
    nets.assert_same(train(second, 3, done=2), train(accumulating(), 3))


def test_a_rank_keeps_the_file_before_where_a_link_leads(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    (tmp_path / "far").mkdir()
    (tmp_path / "run1.ckpt").symlink_to(tmp_path / "far" / "run.ckpt")
    train(accumulating(), 3, BoostCheckpoint(tmp_path / "run{rank}.ckpt"))
    for name, epoch in (("run1.ckpt", 3), ("run1.before.ckpt", 2)):
        assert (
            restore(accumulating().train_network, tmp_path / name.replace("1", "{rank}")) == epoch
        )


def test_a_file_before_that_cannot_be_kept_is_told_and_the_new_one_is_saved(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    (tmp_path / "run1.before.ckpt").mkdir()
    (tmp_path / "run1.saving.ckpt").touch()  # of a process that was killed
    path = tmp_path / "run{rank}.ckpt"
    with pytest.warns(BoostWarning, match=r"rank 1: cannot keep .*run1\.before\.ckpt' \(Is a dir"):
        train(accumulating(), 3, BoostCheckpoint(path))
    assert restore(accumulating().train_network, path) == 3


def no_links(*paths):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), *paths)


@pytest.mark.parametrize(("ranks", "links"), [(1, True), (2, True), (1, False)])
def test_the_file_of_another_training_is_kept(tmp_path, monkeypatch, ranks, links):
    """The same script, started again without ``restore``, would lose what it has done."""
    as_rank(monkeypatch, 0, ranks)
    if not links:  # as on FAT
        monkeypatch.setattr(os, "link", no_links)
    path, earlier = tmp_path / "run{rank}.ckpt", tmp_path / "run{rank}.earlier.ckpt"
    first = train(accumulating(), 3, BoostCheckpoint(path))
    assert not list(tmp_path.glob("*earlier*"))
    model = accumulating()
    with pytest.warns(BoostWarning, match=r"run0\.ckpt' is the file of another training"):
        train(model, 1, BoostCheckpoint(path))
    train(model, 1, BoostCheckpoint(path))  # not of another one any more
    assert restore(accumulating().train_network, path) == 2
    with pytest.warns(BoostWarning, match=r"it is kept as .*run0\.earlier1\.ckpt'"):
        train(accumulating(), 1, BoostCheckpoint(path))
    second = accumulating()
    assert restore(second.train_network, earlier) == 3
    nets.assert_same(nets.weights(second.train_network), first)


def test_two_trainings_that_write_to_one_file_keep_each_others(tmp_path):
    """As two processes with the same script: neither may end with the weights of the other."""
    path = tmp_path / "run.ckpt"
    first, second = accumulating(), accumulating()
    train(first, 1, BoostCheckpoint(path))
    for number, model in enumerate((second, first, second)):
        kept = rf"it is kept as .*run\.earlier{number or ''}\.ckpt'"
        with pytest.warns(BoostWarning, match=kept):
            train(model, 1, BoostCheckpoint(path))
    train(first, 1, BoostCheckpoint(path))  # each says so once, or they would fill the disk
    assert restore(accumulating().train_network, tmp_path / "run.earlier1.ckpt") == 1
    assert restore(accumulating().train_network, path) == 3
    assert len(os.listdir(tmp_path)) == 4


def test_a_file_that_the_script_saves_itself_is_the_trainings_own(tmp_path):
    path = tmp_path / "run.ckpt"
    model = accumulating()
    for epoch in range(3):  # a warning would be an error here
        train(model, 1, BoostCheckpoint(path))
        save_checkpoint(model.train_network, path, append_dict={"epoch": epoch + 1})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((0.1, 0.9), None),
        ((0.02, 0.9), "brings learning_rate 0.1 in place of 0.02, which the optimizer"),
        (
            (0.02, 0.5),
            "learning_rate 0.1 in place of 0.02; momentum 0.9 in place of 0.5, which",
        ),
    ],
)
def test_a_file_that_replaces_what_the_optimizer_was_given(saved, asked, message):
    """Such as the rate of a run that has diverged, and is resumed with a lower one."""
    model = accumulating(numbers=asked)
    with contextlib.nullcontext() if message is None else pytest.warns(BoostWarning, match=message):
        assert restore(model.train_network, saved) == 1


def test_a_list_of_rates_that_is_replaced_is_named_by_its_first_step(tmp_path):
    """Two lists may begin alike, as with one warm-up."""

    def model(last):
        net = nets.MLP()
        rates = [0.1] * 8 + [last] * 4
        optimizer = nn.Momentum(net.trainable_params(), rates, 0.9)
        return model_of(net, {"boost": {"mode": "disable_all"}}, optimizer, BoostModel)

    train(model(0.1), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    assert restore(model(0.1).train_network, tmp_path / "run.ckpt") == 1
    with pytest.warns(
        BoostWarning, match=r"learning_rate 0\.1 in place of 0\.01 from step 8 on, whi"
    ):
        restore(model(0.01).train_network, tmp_path / "run.ckpt")


def test_a_rate_that_a_callback_has_set_is_gone_without_a_word(saved):
    """It is that of the run, which has gone back to the file."""
    model = accumulating()
    train(model, 1)
    rate = model.train_network.optimizer.learning_rate
    rate.set_data(Tensor(0.02, ms.float32))
    assert restore(model.train_network, saved) == 1
    assert float(rate.asnumpy()) == np.float32(0.1)


def test_a_file_that_was_restored_through_a_link_is_of_this_training(tmp_path):
    train(accumulating(), 1, BoostCheckpoint(tmp_path / "run.ckpt"))
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    model = accumulating()
    done = restore(model.train_network, tmp_path / "linked" / "run.ckpt")
    train(model, 2, BoostCheckpoint(tmp_path / "run.ckpt"), done=done)
    assert not list(tmp_path.glob("*earlier*"))


def test_a_path_stays_where_the_script_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    callback = BoostCheckpoint("run.ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(accumulating(), 1, callback)
    assert (tmp_path / "run.ckpt").is_file()


class StopAfter(Callback):
    """Ends the training at the end of an epoch, as EarlyStopping does."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == self.epoch:
            run_context.request_stop()


def test_a_stop_at_the_end_of_an_epoch_breaks_none_off_in_a_loop(tmp_path):
    """Even if the second epoch is shorter than the dataset has said, here three of four."""
    net = nets.MLP()
    step = make_train_step(net, nets.loss_fn(), nets.momentum(net.trainable_params()))
    callbacks = [StopAfter(2), BoostCheckpoint(tmp_path / "run.ckpt")]
    for batch in step.over(Varying(), 4, callbacks):
        step(*batch)
    assert restore(step.train_network, tmp_path / "run.ckpt") == 2


class Shrinking:
    """Has four batches, then three, and so on, and no length; a look at its size counts, too."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(nets.batches(4 - self.passes % 2))


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_stop_at_the_end_of_an_epoch_breaks_none_off(level, epoch, tmp_path):
    """One of the two has another length than the dataset has said."""
    dataset = ms.dataset.GeneratorDataset(Shrinking(), ["x", "y"], shuffle=False)
    model = accumulating(level=level)
    callbacks = [StopAfter(epoch), BoostCheckpoint(tmp_path / "run.ckpt")]
    model.train(4, dataset, callbacks, dataset_sink_mode=False)
    assert restore(model.train_network, tmp_path / "run.ckpt") == epoch


def test_a_monitor_goes_back_with_a_run_that_is_restored_in_its_process(tmp_path):
    path, history = tmp_path / "run.ckpt", tmp_path / "run.jsonl"
    model, monitor = accumulating(), BoostMonitor(history, progress=False)
    train(model, 1, BoostCheckpoint(path), monitor)
    train(model, 2, monitor)
    restore(model.train_network, path)
    train(model, 1, monitor)
    epochs = [one["epoch"] for one in read_history(history) if one["event"] == "epoch"]
    assert epochs == [1, 2, 3, 2]


@pytest.mark.parametrize("name", ["run.rank1.ckpt", "run.ckpt"])
def test_a_path_of_one_rank_is_refused_with_the_name_to_give(monkeypatch, name):
    as_rank(monkeypatch, 1, 2)
    with pytest.raises(ValueError, match=r"write 'run\.rank\{rank\}\.ckpt', with the braces"):
        restore(accumulating().train_network, name)


def test_a_window_of_the_other_weighting_is_refused_whoever_wrote_the_file(tmp_path):
    """A file of MindSpore's own callback does not say how its micro-batches were weighted."""
    config = CheckpointConfig(save_checkpoint_steps=STEPS, append_info=["epoch_num"])
    train(accumulating(), 1, ModelCheckpoint("run", str(tmp_path), config))
    other = accumulating("samples")
    restore(other.train_network, tmp_path / f"run-1_{STEPS}.ckpt")
    with pytest.raises(ValueError, match="were not weighted by"):
        train(other, 2, done=1)


def test_a_window_of_single_samples_goes_on(mode, tmp_path):
    """By their weights alone they look as if all micro-batches counted alike."""

    whole, first, second = (accumulating("samples").train_network for _ in range(3))
    (x, y), (x2, y2) = nets.batches(2)
    one, rest = (Tensor(x[:1]), Tensor(y[:1])), (Tensor(x2), Tensor(y2))
    whole(*one)
    whole(*rest)
    first(*one)
    save_checkpoint(first, str(tmp_path / "run.ckpt"), append_dict={"epoch": 1})
    restore(second, tmp_path / "run.ckpt")
    second(*rest)
    nets.assert_same_weights(second, whole)


def test_a_rank_saves_under_its_number_what_restore_reads_by_the_same_path(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK_ID", "1")
    step = accumulating().train_network
    path = tmp_path / "run.{rank}.ckpt"
    save_checkpoint(step, path, append_dict={"epoch": 2})
    assert os.listdir(tmp_path) == ["run.1.ckpt"]
    assert restore(step, path) == 2
