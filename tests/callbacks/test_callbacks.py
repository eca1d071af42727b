"""BoostMonitor, its history file and its plot."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import stat
import sys
import types

import mindspore as ms
import nets
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import Callback, LossMonitor

from mindspore_boost_ext import recipe, save_checkpoint
from mindspore_boost_ext.callbacks import display as _display
from mindspore_boost_ext.callbacks import history
from mindspore_boost_ext.callbacks import monitor as callbacks
from mindspore_boost_ext.callbacks.epoch import batches_of_epoch
from mindspore_boost_ext.callbacks.history import HistoryWriter, plot_history, read_history
from mindspore_boost_ext.callbacks.monitor import BoostMonitor, read_learning_rate
from mindspore_boost_ext.cli.results import applied
from mindspore_boost_ext.report import Report, Row

MODES = [pytest.param(ms.GRAPH_MODE, id="graph"), pytest.param(ms.PYNATIVE_MODE, id="pynative")]
STEPS = 3  # an epoch: 11 samples in batches of 4, the last one smaller
SIZES = [4, 4, 3]


@pytest.fixture(params=MODES)
def mode(request):
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)


@pytest.fixture
def log(caplog):
    """What the package logs; the logger is made to propagate, so that each message counts once."""
    logger = logging.getLogger("mindspore_boost_ext")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


def dataset(shuffle=False, rows=11):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(rows, 4)).astype(np.float32)
    labels = inputs.sum(axis=1, keepdims=True)
    return ms.dataset.NumpySlicesDataset((inputs, labels), shuffle=shuffle).batch(4)


def dense_of_seed():
    rng = np.random.default_rng(1)
    net = nn.Dense(4, 1)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(rng.normal(size=parameter.shape).astype(np.float32)))
    return net


def model(rate=0.1, metrics=None, net=None):
    net = net or dense_of_seed()
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    return ms.Model(net, nn.MSELoss(), optimizer, metrics=metrics)


def train_monitored(path=None, epochs=1, rate=0.1, extra=(), progress=False, **monitor_arguments):
    monitor = BoostMonitor(path, progress=progress, **monitor_arguments)
    model(rate).train(epochs, dataset(), callbacks=[monitor, *extra])


def events(path, event):
    return [record for record in read_history(path) if record["event"] == event]


def strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"not strict JSON: {constant}")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# The learning rate.


def halve(step):
    return 0.5 ** (step + 1)


class Halving(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, global_step):
        return 0.5 ** (global_step.astype(ms.float32) + 1.0)


class Nested(nn.learning_rate_schedule.LearningRateSchedule):
    """A schedule made of another one."""

    def __init__(self):
        super().__init__()
        self.inner = Halving()

    def construct(self, global_step):
        return self.inner(global_step) * 2.0


TABLE = [0.5, 0.25, 0.125, 0.0625]  # exact in float32, as are all rates below
RATES = {
    "constant": (lambda: 0.25, [0.25] * 4),
    "table": (lambda: TABLE, TABLE),
    "schedule": (Halving, [halve(step) for step in range(4)]),
    "nested": (Nested, [2 * halve(step) for step in range(4)]),
}


def at_step(optimizer, step):
    optimizer.global_step.set_data(Tensor([step], ms.int32))
    return read_learning_rate(optimizer)


@pytest.mark.parametrize("name", RATES)
def test_learning_rate_is_the_one_of_the_coming_step(mode, name):
    make, expected = RATES[name]
    optimizer = nn.SGD(dense_of_seed().trainable_params(), make())
    assert [at_step(optimizer, step) for step in range(4)] == expected
    assert int(optimizer.global_step.asnumpy()[0]) == 3  # reading does not count as a step


@pytest.mark.parametrize(
    ("default", "expected"),
    [(0.5, [[0.25, 0.5], [0.25, 0.5]]), (TABLE, [[0.25, 0.5], [0.25, 0.25]])],
    ids=["constant", "table"],
)
def test_learning_rate_of_groups(mode, default, expected):
    first, second = nn.SequentialCell(nn.Dense(2, 2), nn.Dense(2, 2))
    groups = [
        {"params": first.trainable_params(), "lr": 0.25},
        {"params": second.trainable_params()},
    ]
    optimizer = nn.Momentum(groups, default, 0.9)
    read = [at_step(optimizer, step) for step in range(2)]
    # Beside a table MindSpore computes a constant rate as r + 1 - 1: one float32 rounding near 1.
    np.testing.assert_allclose(read, expected, rtol=0, atol=2.0**-23)


def test_learning_rate_behind_a_wrapper():
    inner = nn.Momentum(dense_of_seed().trainable_params(), 0.25, 0.9)
    assert read_learning_rate(types.SimpleNamespace(opt=inner)) == 0.25
    assert read_learning_rate(types.SimpleNamespace(optimizer=inner, learning_rate=0.0)) == 0.25


def test_learning_rate_unknown():
    assert read_learning_rate(None) is None
    assert read_learning_rate(object()) is None
    assert read_learning_rate(types.SimpleNamespace(learning_rate=0.0, relative_step=True)) is None


@pytest.mark.parametrize("name", RATES)
def test_history_holds_the_rate_each_step_used(mode, tmp_path, name):
    make, expected = RATES[name]
    train_monitored(tmp_path / "h", rate=make())
    steps = events(tmp_path / "h", "step")
    assert [step["learning_rate"] for step in steps] == expected[:STEPS]


def test_rate_when_the_update_is_skipped(tmp_path):
    """An update that does not happen leaves global_step: the same rate stands again."""

    class Rewind(Callback):
        def on_train_step_end(self, run_context):
            network = run_context.original_args().train_network
            # Not set_data, which cuts a Parameter off from operators that have run.
            ms.ops.assign(network.optimizer.global_step, Tensor([0], ms.int32))

    train_monitored(tmp_path / "h", rate=TABLE, extra=[Rewind()])
    assert [step["learning_rate"] for step in events(tmp_path / "h", "step")] == [0.5] * STEPS


def test_unreadable_rate_is_logged_once(tmp_path, log, monkeypatch):
    def fail(optimizer):
        raise RuntimeError("table too short")

    monkeypatch.setattr(callbacks, "read_learning_rate", fail)
    train_monitored(tmp_path / "h")
    assert [step["learning_rate"] for step in events(tmp_path / "h", "step")] == [None] * STEPS
    messages = [record.getMessage() for record in log.records]
    assert messages == ["BoostMonitor cannot read the learning rate: table too short"]


# The history of a run.


def test_history_of_train(mode, tmp_path):
    train_monitored(tmp_path / "h", epochs=2)
    records = strict_lines(tmp_path / "h")
    one_epoch = ["step"] * STEPS + ["epoch"]
    assert [record["event"] for record in records] == ["start", *one_epoch, *one_epoch]
    start = records[0]
    assert start["mode"] == {0: "GRAPH_MODE", 1: "PYNATIVE_MODE"}[mode]
    assert (start["device"], start["batch_size"]) == ("CPU", 4)
    assert (start["epochs"], start["steps_per_epoch"]) == (2, STEPS)
    assert start["versions"]["mindspore"] == ms.__version__
    steps = [record for record in records if record["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["epoch"] for step in steps] == [1, 1, 1, 2, 2, 2]
    assert all(step["seconds"] > 0 for step in steps)
    assert steps[0]["samples_per_second"] is None
    assert all(step["samples_per_second"] > 0 for step in steps[1:])
    for number, epoch in enumerate((r for r in records if r["event"] == "epoch"), start=1):
        mine = [step for step in steps if step["epoch"] == number]
        assert epoch["loss"] == sum(step["loss"] for step in mine) / STEPS
        assert (epoch["epoch"], epoch["step"], epoch["metrics"]) == (number, 3 * number, {})
        counted = [(n, s) for n, s in zip(SIZES, mine) if s["samples_per_second"] is not None]
        rate = sum(n for n, _ in counted) / sum(s["seconds"] for _, s in counted)
        assert epoch["samples_per_second"] == pytest.approx(rate, rel=1e-9)
        # Sums of differences of one clock: only float64 rounding.
        assert epoch["seconds"] == pytest.approx(sum(s["seconds"] for s in mine), abs=1e-6)


class Endless(ms.Callback):
    """Makes a training look like that of a Model whose loop has no number of epochs."""

    def on_train_begin(self, run_context):
        del run_context.original_args()["epoch_num"]


def test_a_loop_without_a_number_of_epochs(tmp_path, capsys):
    monitor = BoostMonitor(tmp_path / "h", progress=True)
    model().train(2, dataset(), callbacks=[Endless(), monitor])
    assert strict_lines(tmp_path / "h")[0]["epochs"] is None
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if "epoch" in line] == ["epoch 1", "epoch 2"]


def test_loss_equals_loss_monitor(mode, tmp_path, capsys):
    train_monitored(tmp_path / "h", extra=[LossMonitor()])
    printed = [line.split("loss is ")[1] for line in capsys.readouterr().out.splitlines()]
    assert printed == [str(step["loss"]) for step in events(tmp_path / "h", "step")]


def test_monitor_does_not_change_training(mode, tmp_path):
    weights = []
    for monitors in ([], [BoostMonitor(tmp_path / "h", progress=False)]):
        ms.set_seed(3)
        net = dense_of_seed()
        model(Nested(), net=net).train(2, dataset(shuffle=True), callbacks=monitors)
        weights.append([p.asnumpy().tobytes() for p in net.trainable_params()])
    assert weights[0] == weights[1]


def test_history_of_fit_has_metrics(mode, tmp_path, capsys):
    monitor = BoostMonitor(tmp_path / "h", progress=True, log_interval=1)
    trained = model(metrics={"mae"})
    trained.fit(2, dataset(), dataset(rows=8), valid_frequency=2, callbacks=[monitor])
    first, second = events(tmp_path / "h", "epoch")
    assert first["metrics"] == {}
    assert second["metrics"]["mae"] > 0
    assert len(events(tmp_path / "h", "step")) == 2 * STEPS
    assert f"mae {second['metrics']['mae']:.4g}" in capsys.readouterr().err
    result = trained.eval(dataset(rows=8), callbacks=[monitor])
    assert events(tmp_path / "h", "eval") == [{"event": "eval", "metrics": result}]


def test_resumed_run_appends_and_counts_on(tmp_path):
    train_monitored(tmp_path / "h")
    monitor = BoostMonitor(tmp_path / "h", progress=False)
    model().train(2, dataset(), callbacks=[monitor], initial_epoch=1)
    assert [step["step"] for step in events(tmp_path / "h", "step")] == [1, 2, 3, 4, 5, 6]
    assert len(events(tmp_path / "h", "start")) == 2


class ScaledCell(nn.TrainOneStepCell):
    """Answers as a loss-scaled cell does, and tells what its algorithms do."""

    def construct(self, *inputs):
        loss = super().construct(*inputs)
        return loss, Tensor(False), Tensor(1024.0)

    def observations(self):
        return {"frozen_layers": 2, "skipped": False, "ratio": math.inf, "idle": None}

    def report(self):
        return types.SimpleNamespace(rows=({"algorithm": "less_bn", "status": "applied"},))


def test_tuple_outputs_observations_and_report(mode, tmp_path):
    net = dense_of_seed()
    loss = nn.WithLossCell(net, nn.MSELoss())
    cell = ScaledCell(loss, nn.SGD(net.trainable_params(), 0.125)).set_train()
    ms.Model(cell).train(1, dataset(), callbacks=[BoostMonitor(tmp_path / "h", progress=False)])
    start, *steps = strict_lines(tmp_path / "h")[:-1]
    assert start["report"] == [{"algorithm": "less_bn", "status": "applied"}]
    assert all(isinstance(step["loss"], float) for step in steps)
    assert steps[0]["learning_rate"] == 0.125
    expected = {"frozen_layers": 2, "skipped": False, "ratio": "inf", "idle": None}
    assert steps[0]["boost"] == expected


def test_an_epoch_holds_the_report_that_its_batches_have_changed(tmp_path):
    """Only the first batch shows that images are no sequences, which "fast" would shorten."""
    net = nets.ConvNet()
    rates = nn.cosine_decay_lr(0.0, 0.01, 8, 4, 2)
    boosted = ms.Model(
        net,
        nets.loss_fn(),
        nn.Momentum(net.trainable_params(), rates, 0.9),
        boost_level="O1",
        boost_config_dict=recipe("fast", 8),
    )
    monitor = BoostMonitor(tmp_path / "h", progress=False)
    boosted.train(2, nets.dataset(4, image=True), callbacks=monitor)
    start, first, second = (one for one in strict_lines(tmp_path / "h") if one["event"] != "step")
    for record, status in ((start, "applied"), (first, "skipped")):
        rows = {row["algorithm"]: row["status"] for row in record["report"]["rows"]}
        assert rows["seq_length_warmup"] == status
    assert "report" not in second
    assert "seq_length_warmup skipped" in applied([start, first, second])


def test_report_of_the_package_goes_into_the_start_record(tmp_path):
    report = Report("AutoBoost")
    report.put(Row("less_bn", "level O1", "applied", "", {"batch_norms_removed": 2}))
    trained = {"with": Answers(0.5), "without": Answers(0.5)}
    trained["with"].report = lambda: report
    for name, cell in trained.items():
        monitor = BoostMonitor(tmp_path / name, progress=False)
        ms.Model(cell).train(1, dataset(), callbacks=[monitor], dataset_sink_mode=False)
    (start,) = events(tmp_path / "with", "start")
    assert start["report"] == report.to_dict()
    assert start["report"]["rows"][0]["counts"] == {"batch_norms_removed": 2}
    assert "report" not in events(tmp_path / "without", "start")[0]


class Answers(nn.Cell):
    """A step that returns what it was made with."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def construct(self, x, y):
        return self.outputs


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (Tensor([1.0, 3.0], ms.float32), 2.0),
        ((Tensor(1.5), True, 2.0), 1.5),
        ([Tensor(0.5, ms.bfloat16)], 0.5),
        (0.25, 0.25),
        ((), None),
        ({"loss": 1.0}, None),
    ],
    ids=["mean", "tuple", "bfloat16", "float", "empty", "unknown"],
)
def test_the_loss_in_what_a_step_returns(outputs, loss, tmp_path):
    ms.set_context(mode=ms.PYNATIVE_MODE)  # a step may return anything there
    monitor = BoostMonitor(tmp_path / "h", progress=False)
    ms.Model(Answers(outputs)).train(1, dataset(), callbacks=[monitor], dataset_sink_mode=False)
    assert [step["loss"] for step in events(tmp_path / "h", "step")] == [loss] * STEPS


def test_not_a_number_is_strict_json(tmp_path):
    train_monitored(tmp_path / "h", rate=1e30, epochs=3)
    written = [line["loss"] for line in strict_lines(tmp_path / "h") if line["event"] == "step"]
    assert {"nan", "inf"} & set(written)
    assert any(not math.isfinite(step["loss"]) for step in events(tmp_path / "h", "step"))


def test_sink_mode_counts_whole_sink_calls(tmp_path):
    """What MindSpore hands over in sink mode, which cannot run on CPU: no element, a jump."""
    params = {"net_outputs": Tensor(1.0), "cur_step_num": 0, "dataset_sink_mode": True}
    params.update(train_network=nn.Cell(), optimizer=None, train_dataset=dataset())
    params.update(cur_epoch_num=1, epoch_num=1, batch_num=20, train_dataset_element=())
    bag = types.SimpleNamespace(**params, get=params.get)
    context = types.SimpleNamespace(original_args=lambda: bag)
    monitor = BoostMonitor(tmp_path / "h", progress=False)
    monitor.on_train_begin(context)
    monitor.on_train_epoch_begin(context)
    for step in (10, 20, 30):
        bag.cur_step_num = step
        monitor.on_train_step_end(context)
    monitor.on_train_epoch_end(context)
    monitor.on_train_end(context)
    steps = events(tmp_path / "h", "step")
    assert [one["step"] for one in steps] == [10, 20, 30]
    # The first call holds the compilation; then 10 steps of 4 samples each time.
    assert steps[0]["samples_per_second"] is None
    assert steps[1]["samples_per_second"] * steps[1]["seconds"] == pytest.approx(40)
    (epoch,) = events(tmp_path / "h", "epoch")
    seconds = steps[1]["seconds"] + steps[2]["seconds"]
    assert epoch["samples_per_second"] * seconds == pytest.approx(80)


@pytest.mark.parametrize(("sinking", "batches"), [(False, STEPS), (True, 2)])
def test_a_sink_size_is_an_epoch_where_it_sinks(sinking, batches):
    params = {"train_dataset": dataset(), "batch_num": 2, "dataset_sink_mode": sinking}
    assert batches_of_epoch(params) == batches


def test_throughput_is_the_ratio_of_fading_sums():
    rate = callbacks._Throughput()
    assert rate.update(4, 100.0) is None
    assert rate.update(4, 2.0) == 2.0
    assert rate.update(8, 1.0) == pytest.approx((0.9 * 4 + 8) / (0.9 * 2 + 1))  # float64 rounding
    assert callbacks._Throughput().update(None, 1.0) is None


@pytest.mark.parametrize(("variable", "rank"), [("3", 3), ("0", 0), ("", 0), ("x", 0)])
def test_rank_before_init(monkeypatch, variable, rank):
    monkeypatch.setenv("RANK_ID", variable)
    assert callbacks.launched_rank() == rank


def test_other_ranks_do_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK_ID", "1")
    train_monitored(tmp_path / "missing" / "h", progress=True)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


# Display.


def without_rich(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def test_plain_lines_without_rich(monkeypatch, capsys):
    without_rich(monkeypatch)
    train_monitored(progress=True, log_interval=2)
    step, epoch = capsys.readouterr().err.splitlines()
    assert step.startswith("epoch 1/1  step 2/3  loss ")
    assert "  lr 0.1" in step
    assert epoch.startswith("epoch 1/1  loss ")
    assert "samples/s" in epoch


@pytest.mark.parametrize(("interval", "lines"), [(None, 1), (10, 11), (30, 4)])
def test_plain_lines_default_to_one_an_epoch(interval, lines, capsys):
    display = _display.PlainDisplay(interval)
    display.begin_epoch("epoch 1/1", 100)
    for step in range(1, 101):
        display.step(step, "")
    display.line("epoch 1/1  loss 0.1")
    assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_shows_a_bar_only_with_widgets(monkeypatch, widgets):
    """Without them rich would show nothing, and warn."""
    console = pytest.importorskip("rich.console")
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    find = _display.importlib.util.find_spec
    found = {"ipywidgets": object() if widgets else None}
    monkeypatch.setattr(
        _display.importlib.util,
        "find_spec",
        lambda name: found[name] if name in found else find(name),
    )
    kind = _display.RichDisplay if widgets else _display.PlainDisplay
    assert isinstance(_display.make_display(3), kind)


def test_a_warning_that_is_an_error_ends_the_bar_alone():
    console = pytest.importorskip("rich.console")
    display = _display.RichDisplay(console.Console(file=io.StringIO(), force_terminal=True))

    def warns():
        raise UserWarning

    display._draw(warns)
    display.begin_epoch("epoch 1/1", 3)  # draws nothing any more
    display.close()


def test_an_end_that_was_planned_is_not_news(capsys):
    """An algorithm says that it is over in the last step, too."""

    class Ends(Callback):
        def on_train_step_end(self, run_context):
            params = run_context.original_args()
            if params.cur_step_num == self.at:
                params["ended_by"] = "short_schedule"
                run_context.request_stop()

    for at, said in ((6, 0), (5, 1), (3, 1)):
        ends = Ends()
        ends.at = at
        net = nn.Dense(4, 1)
        model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
        model.train(2, dataset(), callbacks=[BoostMonitor(), ends], dataset_sink_mode=False)
        assert capsys.readouterr().err.count("short_schedule ends the training") == said


def test_a_run_is_shown_before_its_first_epoch(capsys):
    _display.PlainDisplay(None).begin_run("plain (1/2)")
    assert capsys.readouterr().err == "plain (1/2) runs\n"
    console = pytest.importorskip("rich.console")
    screen = io.StringIO()
    display = _display.RichDisplay(console.Console(file=screen, force_terminal=True, width=120))
    display.begin_run("plain (1/2)")
    assert "plain (1/2)" in screen.getvalue()
    display.begin_epoch("plain (1/2)", 3)
    display.step(1, "loss 0.1")
    display.close()
    assert "1/3" in screen.getvalue()


def test_broken_standard_error_does_not_stop_training(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    train_monitored(progress=True)


def test_rich_bar_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    from rich.console import Console

    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    monkeypatch.setattr("rich.console.Console", lambda stderr: terminal)
    monkeypatch.setattr(_display, "_REFRESH_SECONDS", 0.0)
    train_monitored(progress=True, epochs=2)
    shown = screen.getvalue()
    assert "3/3" in shown
    assert "epoch 1/2  loss " in shown
    assert "epoch 2/2  loss " in shown


class Terminal(io.StringIO):
    """One that goes away after so many writes."""

    def __init__(self, writes):
        super().__init__()
        self.writes, self.refused = writes, 0

    def write(self, text):
        if not self.writes:
            self.refused += 1
            raise OSError(errno.EIO, "Input/output error")
        self.writes -= 1
        return super().write(text)


@pytest.mark.parametrize("writes", [0, 1, 4])
def test_training_outlives_its_terminal(tmp_path, monkeypatch, writes):
    rich_console = pytest.importorskip("rich.console")
    screen = Terminal(writes)
    terminal = rich_console.Console(file=screen, force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr("rich.console.Console", lambda stderr: terminal)
    monkeypatch.setattr(_display, "_REFRESH_SECONDS", 0.0)
    own = io.StringIO()
    own.isatty = lambda: True  # so that rich puts its own in the place of it
    monkeypatch.setattr(sys, "stdout", own)
    train_monitored(tmp_path / "h", progress=True, epochs=2)
    assert sys.stdout is own
    assert screen.refused > 0
    assert len(events(tmp_path / "h", "step")) == 2 * STEPS


def test_plain_lines_when_rich_has_no_terminal(capsys):
    pytest.importorskip("rich")
    assert isinstance(_display.make_display(None), _display.PlainDisplay)


def test_failing_training_closes_the_display(tmp_path, monkeypatch):
    class Stop(Callback):
        def on_train_step_end(self, run_context):
            raise RuntimeError("stop")

    closed = []
    shown = types.SimpleNamespace(
        begin_epoch=lambda *words: None,
        step=lambda *words: None,
        line=lambda text: None,
        close=lambda: closed.append(True),
    )
    monkeypatch.setattr(callbacks, "make_display", lambda interval: shown)
    monitor = BoostMonitor(tmp_path / "h")
    with pytest.raises(RuntimeError, match="stop"):
        model().train(1, dataset(), callbacks=[monitor, Stop()])
    assert closed == [True]
    HistoryWriter(tmp_path / "h").close()  # which is refused while another has the file open
    assert [record["event"] for record in read_history(tmp_path / "h")] == ["start", "step"]


# Errors.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"history_path": 3}, TypeError, "history_path must be a path or None, got 3"),
        ({"history_path": ""}, ValueError, "history_path must not be empty, got ''"),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1"),
        ({"log_interval": 1.5}, TypeError, "log_interval must be an int or None, got 1.5"),
        ({"log_interval": True}, TypeError, "log_interval must be an int or None, got True"),
        ({"log_interval": 0}, ValueError, "log_interval must be at least 1, got 0"),
    ],
)
def test_argument_errors(arguments, error, message):
    with pytest.raises(error, match=f"^BoostMonitor: {message}$"):
        BoostMonitor(**arguments)


def test_unwritable_path_stops_before_the_first_step(tmp_path):
    net = dense_of_seed()
    before = net.weight.asnumpy().tobytes()
    for path in (tmp_path, tmp_path / "missing" / "h"):
        monitor = BoostMonitor(path, progress=False)
        with pytest.raises(ValueError, match="must name a file that can be written, got '"):
            model(net=net).train(1, dataset(), callbacks=[monitor])
    assert net.weight.asnumpy().tobytes() == before


def test_a_second_call_of_train_goes_on_counting(tmp_path):
    path = tmp_path / "history.jsonl"
    monitor, first, other = BoostMonitor(path, progress=False), model(), model()
    first.train(2, dataset(), callbacks=[monitor])
    first.train(1, dataset(), callbacks=[monitor])
    records = read_history(path)
    steps = [one["step"] for one in records if one["event"] == "step"]
    epochs = [(one["epoch"], one["step"]) for one in records if one["event"] == "epoch"]
    per_epoch = len(steps) // 3
    assert steps == list(range(1, 3 * per_epoch + 1))
    assert epochs == [(number, number * per_epoch) for number in (1, 2, 3)]
    other.train(1, dataset(), callbacks=[monitor])  # another Model begins anew
    assert read_history(path)[-1]["epoch"] == 1


@pytest.mark.parametrize("text", ["mine", '{"boost": {}}', '{\n  "boost": {}\n}\n', '{"ev": 1}\n'])
def test_a_file_that_is_no_history_is_left_alone(tmp_path, text):
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(ValueError, match=r"must name a new file or an earlier history.*notes\.txt"):
        HistoryWriter(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == text


class Disk:
    """A file, unbuffered as the history's is, that from some moment on writes ``written`` bytes."""

    def __init__(self, path, mode, **settings):
        self.file = open(path, mode, **settings)  # noqa: SIM115 (closed by the history)
        self.written = None
        self.name, self.fileno, self.close = path, self.file.fileno, self.file.close

    def write(self, data):
        if self.written is None:
            return self.file.write(data)
        if self.written == 0:
            raise OSError(28, "No space left on device")
        return self.written


@pytest.fixture
def disk(monkeypatch):
    """Return the list of files that histories open."""
    opened = []

    def open_on_disk(*words, **settings):
        opened.append(Disk(*words, **settings))
        return opened[-1]

    monkeypatch.setattr(history, "open", open_on_disk, raising=False)
    return opened


def test_full_disk_is_logged_once_and_training_completes(tmp_path, log, disk):
    monitor = BoostMonitor(tmp_path / "h", progress=False)
    done = []

    class FillDisk(Callback):
        def on_train_step_begin(self, run_context):
            step = run_context.original_args().cur_step_num
            if step == 2:
                disk[0].written = 0
            done.append(step)

    log.clear()
    model().train(2, dataset(), callbacks=[monitor, FillDisk()])
    assert done == [1, 2, 3, 4, 5, 6]
    messages = [record.getMessage() for record in log.records]
    path = tmp_path / "h"
    assert messages == [f"History '{path}' ends here, training goes on: No space left on device"]
    assert [record["event"] for record in read_history(path)] == ["start", "step"]


def test_short_write_counts_as_failure(tmp_path, log, disk):
    writer = HistoryWriter(tmp_path / "h")
    disk[0].written = 1
    writer.write({"event": "step"})
    assert "only a part of the line was written" in log.text
    writer.close()


# Reading.


def test_torn_last_line_is_tolerated_and_mended(tmp_path, log):
    path = tmp_path / "h"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert read_history(path) == [{"event": "step", "step": 1}]
    writer = HistoryWriter(path)
    writer.write({"event": "step", "step": 2})
    writer.close()
    assert [record["step"] for record in strict_lines(path)] == [1, 2]
    assert f"History '{path}': removed its last line, which was cut short." in log.text


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "h"
    path.write_text('{"event": "step", "step": 1}')
    writer = HistoryWriter(path)
    writer.write({"event": "step", "step": 2})
    writer.close()
    assert [record["step"] for record in strict_lines(path)] == [1, 2]


@pytest.mark.parametrize("damage", ["{oops", "[1, 2]", "", "\udcff"])
def test_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "h"
    text = f'{{"event": "start"}}\n{damage}\n{{"event": "step"}}\n'
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"h, line 2: must be one JSON object, got b'"):
        read_history(path)


def test_strict_json_of_what_metrics_hold():
    value = {"a": np.float32(0.5), "b": np.array([1.0, np.nan]), "c": Tensor(2), "d": (True, None)}
    expected = {"a": 0.5, "b": [1.0, "nan"], "c": 2, "d": [True, None], "e": "-inf", "f": "1j"}
    assert history.strict_json({**value, "e": -math.inf, "f": 1j}) == expected


# Drawing.


def write_run(path, start=1, count=40, scale=1.0, grouped=False):
    writer = HistoryWriter(path)
    writer.write({"event": "start"})
    for step in range(start, start + count):
        loss = scale * (math.exp(-step / 15) + 0.1 * math.sin(step))
        rate = 0.1 * 0.97**step
        writer.write(
            {
                "event": "step",
                "epoch": 1 + (step - 1) // 10,
                "step": step,
                "loss": math.inf if step == 5 else loss,
                "learning_rate": [rate, rate / 2] if grouped else rate,
                "samples_per_second": None if step == start else 900 + 30 * math.sin(step),
                "seconds": 0.1,
                "boost": {"frozen_layers": step // 10, "skipped": step % 7 == 0, "note": "text"},
            }
        )
        if step % 10 == 0:
            metrics = {"accuracy": 1 - math.exp(-step / 10) / scale, "classes": [1, 2]}
            record = {"event": "epoch", "epoch": step // 10, "step": step, "metrics": metrics}
            writer.write({**record, "loss": scale * math.exp(-(step - 5) / 15)})
    writer.close()
    return path


TITLES = ["loss", "learning rate", "samples per second", "accuracy", "frozen layers", "skipped"]


def test_plot_one_history(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "h", grouped=True)
    figure = plot_history(path, tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == TITLES
    thin, thick = figure.axes[0].lines
    assert thin.get_linewidth() < thick.get_linewidth()
    assert list(thick.get_xdata()) == [10, 20, 30, 40]
    assert len(figure.axes[1].lines) == 2  # one for each rate
    named = [[line.get_label() for line in axes.lines] for axes in figure.axes[:2]]
    # One line of a panel is in the legend; matplotlib leaves out what begins with "_".
    assert [[name[0] != "_" for name in names] for names in named] == [[False, True], [True, False]]
    assert not figure.legends


def test_plot_several_histories(tmp_path):
    pytest.importorskip("matplotlib")
    paths = [write_run(tmp_path / "plain.jsonl"), write_run(tmp_path / "boost.jsonl", scale=0.7)]
    figure = plot_history(paths)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["plain", "boost"]
    figure = plot_history({"a": paths[0], "b": paths[1]}, tmp_path / "both.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert (tmp_path / "both.png").exists()


def test_plot_after_resume_has_each_step_once(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_run(tmp_path / "h", count=34)
    write_run(path, start=21, count=20)
    thin, thick = plot_history(path).axes[0].lines
    assert list(thin.get_xdata()) == list(range(1, 41))
    assert list(thick.get_xdata()) == [10, 20, 30, 40]


def test_plot_leaves_pyplot_alone(tmp_path):
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    plot_history(write_run(tmp_path / "h", count=3))
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_plot_errors(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "h").write_text('{"event": "start"}\n')
    with pytest.raises(ValueError, match="h holds no step records; nothing can be drawn"):
        plot_history(tmp_path / "h")
    with pytest.raises(ValueError, match="history_path must name at least one history file"):
        plot_history([])
    with pytest.raises(FileNotFoundError):
        plot_history(tmp_path / "missing")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "mindspore_boost_ext\[plot\]"'):
        plot_history(tmp_path / "h")


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_a_history_is_a_regular_file(tmp_path, kind):
    path = tmp_path / "history.jsonl"
    if kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a reader for ever
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"history_path must name a regular file, got .*history"):
        HistoryWriter(path)


def test_a_history_has_one_writer_at_a_time(tmp_path):
    path = tmp_path / "history.jsonl"
    first = HistoryWriter(path)
    first.write({"event": "start"})
    with pytest.raises(ValueError, match="which another BoostMonitor is writing now"):
        HistoryWriter(path)
    first.write({"event": "end"})
    first.close()
    HistoryWriter(path).close()
    assert [record["event"] for record in read_history(path)] == ["start", "end"]


def test_an_evaluation_outlives_a_history_that_another_one_writes(tmp_path, caplog):
    """A callback may evaluate within a training, with a monitor of its own on the same file."""
    path = tmp_path / "history.jsonl"
    writer = HistoryWriter(path)
    model = ms.Model(nets.MLP(), nets.loss_fn(), metrics={"accuracy"})
    callbacks = [BoostMonitor(path, progress=False)]
    found = model.eval(nets.dataset(2), callbacks=callbacks, dataset_sink_mode=False)
    assert 0 <= found["accuracy"] <= 1
    assert "the metrics of this evaluation are not in the history" in caplog.text
    writer.close()


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path):
    """As the workers of a dataset, which live on behind an interrupted training."""
    path = tmp_path / "history.jsonl"
    first = HistoryWriter(path)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.read(reads, 1)  # until the test ends
        os._exit(0)
    first.close()
    HistoryWriter(path).close()
    os.close(writes)
    os.close(reads)
    os.waitpid(child, 0)


def test_a_history_needs_no_locks(tmp_path, monkeypatch):
    """Some network file systems have none."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    writer = HistoryWriter(tmp_path / "history.jsonl")
    writer.write({"event": "start"})
    writer.close()
    assert [one["event"] for one in read_history(tmp_path / "history.jsonl")] == ["start"]


def test_a_folder_that_cannot_be_flushed_has_its_checkpoint(tmp_path, monkeypatch):
    """The file is in its place by then."""
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_checkpoint(nets.MLP(0), tmp_path / "net.ckpt")
    assert "first.weight" in ms.load_checkpoint(str(tmp_path / "net.ckpt"))


def test_a_checkpoint_goes_through_a_link_to_its_target(tmp_path):
    target, link = tmp_path / "target.ckpt", tmp_path / "link.ckpt"
    save_checkpoint(nets.MLP(0), str(target))
    link.symlink_to(target)
    save_checkpoint(nets.MLP(1), str(link))
    assert link.is_symlink()
    found = ms.load_checkpoint(str(target))["first.weight"].asnumpy()
    np.testing.assert_array_equal(found, nets.MLP(1).first.weight.asnumpy())


@pytest.mark.parametrize("path", ["", b"run.ckpt"])
def test_a_checkpoint_needs_a_name(tmp_path, path):
    with pytest.raises(ValueError, match=r"path must be a non-empty str or os\.PathLike"):
        save_checkpoint(nets.MLP(), path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", "."])
def test_a_folder_is_no_history(path):
    with pytest.raises(ValueError, match="a history must be a regular file, got"):
        read_history(path)


def test_steps_are_counted_on_for_each_of_several_models(tmp_path):
    path = tmp_path / "history.jsonl"
    monitor, one, other = BoostMonitor(path, progress=False), model(), model()
    for each in (one, other, one):
        each.train(1, dataset(), callbacks=[monitor])
    steps = [record for record in read_history(path) if record["event"] == "step"]
    count = len(steps) // 3
    assert [record["step"] for record in steps[-count:]] == [*range(count + 1, 2 * count + 1)]
    assert steps[-1]["epoch"] == 2


def test_steps_are_counted_on_where_epochs_differ_in_length(tmp_path):
    path = tmp_path / "history.jsonl"
    monitor, one, data = BoostMonitor(path, progress=False), model(), dataset()
    one.train(2, data, callbacks=[monitor])
    one.train(3, dataset().take(1), callbacks=[monitor], initial_epoch=2)
    steps = [record["step"] for record in read_history(path) if record["event"] == "step"]
    assert steps == [*range(1, 2 * data.get_dataset_size() + 2)]
