"""``recommend``: who reached plain's loss first, and what is written for it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from mindspore import nn
from mindspore.train import RunContext

from mindspore_boost_ext import BoostConfig, read_history
from mindspore_boost_ext.__main__ import main
from mindspore_boost_ext._compat import CallbackParameters as State
from mindspore_boost_ext.cli import recommend
from mindspore_boost_ext.cli import run as cli_run
from mindspore_boost_ext.cli.results import FAILED, Outcome, outcome, times_to_accuracy
from mindspore_boost_ext.cli.run import Bound

STEPS = 40


def history(first, later, loss, last=None):
    """Return records: a first step that compiles, then equal ones; the loss is a function."""
    seconds = [first] + [later] * (STEPS - 1)
    losses = [loss(step) for step in range(STEPS)]
    losses[-1] = losses[-1] if last is None else last
    return [
        {"event": "step", "step": step + 1, "seconds": seconds[step], "loss": losses[step]}
        for step in range(STEPS)
    ]


def falling(step):
    return 1.0 - step / STEPS


@pytest.fixture
def race(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command over given histories, by name of the run."""
    script = tmp_path / "train.py"
    script.write_text("")

    def run(**histories):
        def trial(one, title, display):
            name = one.name.split()[0]
            if histories.get(name) is None:
                return Outcome(one.name, FAILED, "a script may fail"), []
            found, rest = histories[name], {"stopped": run.stopped, "models": run.models}
            return outcome(one.name, found, rest), found

        monkeypatch.setattr(recommend, "run_trial", trial)
        written = tmp_path / "winner.json"
        code = main(["recommend", "--json", str(written), str(script)])
        settings = json.loads(written.read_text()) if written.exists() else None
        shown = capsys.readouterr()
        run.progress = shown.err.splitlines()
        return code, settings, shown.out

    run.folder, run.stopped, run.models = tmp_path, False, 1
    return run


def evaluated(records, *accuracies):
    """Return a history with accuracies, measured after equal shares of the steps."""
    share = STEPS // len(accuracies)
    for place, accuracy in reversed(list(enumerate(accuracies, start=1))):
        records.insert(place * share, {"event": "eval", "metrics": {"accuracy": accuracy}})
    return records


def test_a_script_of_several_models_is_told_and_raced(race):
    race.models = 2
    code, settings, printed = race(plain=history(2, 1.0, falling), half=history(5, 0.5, falling))
    assert code == 0
    assert "the script: it trains 2 Models" in printed
    assert settings["grad_freeze"]


def test_the_first_at_plains_loss_wins_and_is_a_configuration(race):
    """40 steps of 1 s plain; half frozen takes half as long, and ends at the same loss."""
    code, settings, printed = race(
        plain=history(2, 1.0, falling),
        half=history(5, 0.5, falling),
        cubic=history(2, 0.9, falling),
    )
    assert code == 0
    # The last mean over two steps, 0.0375, is reached by nobody before the 40th step:
    # 2 + 39 s plain, 5 + 39 / 2 s half frozen.
    assert "| plain | 41.0 | 1.00 |" in printed
    assert "| half frozen from 10 % on | 24.5 | 0.60 |" in printed
    assert "Recommended: half frozen from 10 % on, in 0.60 of plain's time" in printed
    assert "half frozen from 10 % on: reached plain's loss after 24.5 s" in race.progress
    assert settings["grad_freeze"]["total_steps"] == STEPS
    BoostConfig.parse("O1", settings)


def test_where_a_script_measures_accuracy_that_is_the_goal(race):
    """``fast`` smooths labels: its loss stays high, and its accuracy is the first at plain's."""
    code, settings, printed = race(
        plain=evaluated(history(2, 1.0, falling), 0.7, 0.9, 0.95, 0.98),
        recipe=evaluated(history(3, 0.5, lambda step: 2.0), 0.8, 0.985, 0.97, 0.98),
        cubic=evaluated(history(2, 0.1, falling), 0.7, 0.99, 0.99, 0.979),
    )
    assert code == 0
    # Both after the last of four evaluations: 2 + 39 s, and 3 + 39 / 2 s; 0.985 was not kept.
    assert "| run | seconds to plain's accuracy | over plain | accuracy | step, ms" in printed
    assert "| plain | 41.0 | 1.00 | 0.98 |" in printed
    assert "| recipe fast | 22.5 | 0.55 | 0.98 |" in printed
    assert "| cubic prefix | did not reach plain's accuracy | - | 0.979 |" in printed
    assert "in 0.55 of plain's time to plain's accuracy." in printed
    assert "Loss is not accuracy" not in printed
    assert settings["label_smoothing"]["smoothing"] == 0.1


def test_a_loss_is_no_accuracy_by_its_name():
    metrics = {"accumulated_loss": 0.5, "accuracy": 0.9}
    history = [{"event": "eval", "metrics": metrics}]
    name, _ = times_to_accuracy([outcome("plain", history, {})])
    assert name == "accuracy"


def test_an_accuracy_that_is_no_number_is_no_goal(race):
    plain = evaluated(history(2, 1.0, falling), float("nan"))
    _, _, printed = race(plain=plain, half=history(2, 0.5, falling))
    assert "| half frozen from 10 % on | 21.5 | 0.52 |" in printed
    assert "Loss is not accuracy" in printed


def test_a_lead_of_compilation_is_said(race):
    _, _, printed = race(plain=history(30, 1.0, falling), half=history(5, 0.95, falling))
    assert "Recommended: half frozen from 10 % on" in printed
    assert "Most of the difference is compilation" in printed
    _, _, printed = race(plain=history(30, 1.0, falling), half=history(20, 0.1, falling))
    assert "Most of the difference is compilation" not in printed


def test_who_does_not_keep_the_loss_has_not_reached_it(race):
    half = history(1, 0.1, falling, last=3.0)
    code, settings, printed = race(plain=history(2, 1.0, falling), half=half)
    assert code == 0
    assert "| half frozen from 10 % on | did not reach plain's loss | - |" in printed
    assert "Plain training wins" in printed
    assert settings == {"boost": {"mode": "disable_all"}}


@pytest.mark.parametrize(
    ("steps", "seconds", "stops", "late"),
    [(1, 0.0, True, False), (0, 1e-9, True, True), (1, 1e-9, True, False), (9, 9e9, False, False)],
)
def test_what_ends_a_training(steps, seconds, stops, late):
    bound, context = Bound(steps, seconds), RunContext(State(train_network=nn.Cell()))
    bound.on_train_begin(context)
    bound.on_train_step_end(context)
    assert context.get_stop_requested() is stops
    assert bound.stopped is late


def test_the_clock_of_a_script_goes_on_from_training_to_training(monkeypatch):
    now = iter([100.0, 103.0, 104.5])
    monkeypatch.setattr(cli_run.time, "perf_counter", lambda: next(now))
    bound, context = Bound(0, 4.0), RunContext(State(train_network=nn.Cell()))
    bound.on_train_begin(context)
    bound.on_train_step_end(context)
    assert not context.get_stop_requested()
    bound.on_train_begin(context)
    bound.on_train_step_end(context)
    assert context.get_stop_requested()


LOOPS = {
    "evaluated": "while True:\n    model.train(1, data())\n    model.eval(data())\n",
    "with what a callback has recorded": (
        "class Last(ms.Callback):\n"
        "    def on_train_step_end(self, context):\n"
        "        self.loss = context.original_args().net_outputs\n"
        "for _ in range(100):\n    last = Last()\n    model.train(1, data(), last)\n"
        "    last.loss.asnumpy()\n    model.eval(data())['loss']\n"
    ),
    "evaluated by a callback": (
        "class Evaluates(ms.Callback):\n"
        "    def on_train_epoch_end(self, context):\n        model.eval(data())\n"
        "while True:\n    model.train(1, data(), Evaluates())\n"
    ),
    "fit": "while True:\n    model.fit(1, data(), data())\n",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_ends_after_its_bound(tmp_path, loop):
    """Also one that trains until a loss is small; the evaluations of the last epoch are made."""
    script = tmp_path / "train.py"
    script.write_text(_TRAINS + LOOPS[loop])
    ran, records = trial(tmp_path, script, most_steps=3)
    assert (ran["ended"], ran["stopped"]) == (True, False)
    assert [one["event"] for one in records].count("step") == 3
    measured = [one for one in records if one.get("metrics")]
    assert len(measured) == 2  # data of two batches: in the second epoch one is trained on


def test_what_is_measured_after_several_trainings_is_measured(tmp_path):
    """Also if the bound is in the first of them."""
    script = tmp_path / "train.py"
    script.write_text(
        _TRAINS + "model.train(1, data())\nmodel.train(9, data())\nmodel.eval(data())"
    )
    ran, records = trial(tmp_path, script, most_steps=1)
    assert not ran["ended"]
    events = [one["event"] for one in records if one["event"] in ("step", "eval")]
    assert events == ["step", "step", "eval"]  # each training makes one step at least


_TRAINS = """
import mindspore as ms, numpy as np
from mindspore import nn
net = nn.Dense(2, 1)
model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.01), metrics={"loss"})
def data():
    pair = np.ones((2, 2), np.float32), np.ones((2, 1), np.float32)
    return ms.dataset.NumpySlicesDataset(pair, shuffle=False).batch(1)
"""


def trial(folder, script, **bounds):
    """Return what a run of a script in a process of its own writes: results, and records."""
    written = folder / "trial.json"
    written.write_text(json.dumps({"name": "plain", "script": str(script), **bounds}))
    command = [sys.executable, "-m", "mindspore_boost_ext.cli.run", str(written)]
    subprocess.run(command, check=True, timeout=120)
    return json.loads((folder / "result.json").read_text()), read_history(folder / "history.jsonl")


@pytest.mark.parametrize("stopped", [True, False])
def test_who_was_stopped_by_the_minutes_is_told_so(race, stopped):
    race.stopped = stopped
    _, _, printed = race(plain=history(2, 1.0, falling), half=history(2, 1.0, lambda step: 2.0))
    words = " in its share of the time" if stopped else ""
    assert f"| half frozen from 10 % on | did not reach plain's loss{words} | - |" in printed
    start = {"event": "start", "mode": "GRAPH_MODE", "epochs": 10, "steps_per_epoch": 41}
    plain = [{**start, "report": {"rows": []}}, *history(2, 1.0, falling)]
    _, _, printed = race(plain=plain, half=history(2, 0.5, falling))
    assert "Recommended: half frozen from 10 % on" in printed
    words = "Plain was stopped after 40 of 410 steps by its share of the minutes, so these are"
    assert (words in printed) == stopped
    assert ("time to end: --minutes 103.\n" in printed) == stopped  # of 10, for 40 steps


@pytest.mark.parametrize("mode", ["GRAPH_MODE", "PYNATIVE_MODE"])
def test_everybody_has_the_time_that_plain_has(race, monkeypatch, mode):
    """Else who is but a little faster than a plain run that was stopped cannot win."""
    plain = [{"event": "start", "mode": mode, "report": {"rows": []}}]
    race(plain=plain + history(2, 1.0, falling))  # puts its own runs in the place of processes
    run, seconds = recommend.run_trial, []

    def noted(one, title, display):
        seconds.append(one.most_seconds)
        return run(one, title, display)

    monkeypatch.setattr(recommend, "run_trial", noted)
    main(["recommend", "--json", str(race.folder / "x.json"), str(race.folder / "train.py")])
    assert len(seconds) == (8 if mode == "GRAPH_MODE" else 9)
    assert min(seconds) == seconds[0]
    assert sum(seconds) == pytest.approx(600)


def test_a_lead_within_the_noise_is_no_recommendation(race):
    _, settings, printed = race(plain=history(2, 1.0, falling), cubic=history(2, 0.98, falling))
    assert "Plain training wins" in printed
    assert "failed: a script may fail" in printed  # the others; they do not end the race
    assert settings == {"boost": {"mode": "disable_all"}}


@pytest.mark.parametrize(
    ("statuses", "idle"),
    [(["skipped"], True), (["applied"], False), (["applied", "skipped"], False)],
)
def test_who_changed_nothing_is_no_winner(race, statuses, idle):
    """Its lead is that of plain training over itself, which is noise. Of several trainings, all."""
    half = []
    for status in statuses:
        rows = [
            {"algorithm": "grad_freeze", "asked by": "boost.grad_freeze=True", "status": status},
            {"algorithm": "machine: x", "asked by": "import", "status": "applied"},
            {"algorithm": "first steps", "asked by": "-", "status": "applied"},
        ]
        half.append({"event": "start", "report": {"rows": rows}})
    half += history(2, 0.5, falling)
    _, settings, printed = race(plain=history(2, 1.0, falling), half=half)
    if not idle:
        assert "Recommended: half frozen from 10 % on" in printed
    else:
        said = "changed nothing: none of it was applied"
        assert f"| half frozen from 10 % on | {said} | - |" in printed
        assert settings == {"boost": {"mode": "disable_all"}}


def test_compilation_counts(race):
    _, _, printed = race(plain=history(2, 1.0, falling), half=history(60, 0.1, falling))
    assert "Plain training wins" in printed


def test_a_plain_run_that_fails_is_said(race):
    code, settings, printed = race()
    assert (code, settings) == (1, None)
    assert "the plain run of the script failed: a script may fail" in printed


def test_a_training_without_a_loss_of_one_number_gives_no_goal(race):
    code, settings, printed = race(plain=history(2, 1.0, lambda step: None, last=None))
    assert (code, settings) == (1, None)
    assert (
        "the plain run of the script gives no goal: no loss of its steps is one number" in printed
    )


def test_a_winner_that_cannot_be_written_is_one_line(race, capsys):
    race(plain=history(2, 1.0, falling))  # puts its own runs in the place of processes
    assert main(["recommend", "--json", "/dev/full", str(race.folder / "train.py")]) == 1
    shown = capsys.readouterr()
    assert "Plain training wins" in shown.out
    assert "written: " not in shown.out
    assert "cannot write /dev/full: No space left on device\n" in shown.out


def test_no_winner_is_named_where_plain_training_diverges(race):
    code, settings, printed = race(plain=history(2, 1.0, lambda step: float("nan")))
    assert (code, settings) == (1, None)
    assert "the plain run of the script ends with the loss nan" in printed


def test_a_file_that_cannot_be_written_is_refused_before_the_first_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "recommended.json").mkdir()
    with pytest.raises(SystemExit):
        main(["recommend", "train.py"])
    assert (
        "--json: give a file in a writable folder, not 'recommended.json'"
        in capsys.readouterr().err
    )


def test_every_candidate_is_a_configuration_without_idle_settings():
    for one in recommend.candidates(100, eager=True):
        assert BoostConfig.parse(one.level, one.config).notices() == (), one.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a script to run"),
        (["-m", "pkg.train", "--epochs", "3"], "-m is not supported, only the file of a script"),
        (["--minutes", "5", "-mpkg.train"], "-m is not supported, only the file of a script"),
        (["none.py"], "cannot open the script 'none.py'"),
        (["--minutes", "0", __file__], "--minutes must be in (0, 10000], got 0"),
        (["--seed", "-1", __file__], "--seed must be in 0..2**32-1, got -1"),
    ],
)
def test_wrong_words_are_explained(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["recommend", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("done", [0, 1, 3])
def test_what_is_done_is_shown_when_the_rest_is_broken_off(race, monkeypatch, capsys, done):
    half = history(5, 0.5, falling)
    race(
        plain=history(2, 1.0, falling), cheaper=half
    )  # puts its own runs in the place of processes
    run, runs = recommend.run_trial, []

    def broken_off(one, title, display):
        if len(runs) == done:
            raise KeyboardInterrupt
        runs.append(one.name)
        return run(one, title, display)

    monkeypatch.setattr(recommend, "run_trial", broken_off)
    written = race.folder / "x.json"
    assert main(["recommend", "--json", str(written), str(race.folder / "train.py")]) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err
    assert [
        line.split(" | ")[0][2:] for line in shown.out.splitlines()[2:] if line[:1] == "|"
    ] == runs
    assert ("Recommended: cheaper operators" in shown.out) is (done == 3)
    assert ("Interrupted; from these runs alone: " in shown.out) is (done > 0)
    assert written.exists() is (done == 3)  # that plain wins is not known yet


@pytest.mark.slow
def test_a_script_is_raced_in_processes_of_its_own(tmp_path, capsys):
    script = tmp_path / "train.py"
    text = """
        import mindspore as ms
        import numpy as np
        from mindspore import nn

        values = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        data = ms.dataset.NumpySlicesDataset((values, values[:, :2]), shuffle=False).batch(4)
        net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 2))
        ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.05)).train(3, data)
    """
    script.write_text(textwrap.dedent(text))
    written = tmp_path / "winner.json"
    assert main(["recommend", "--minutes", "3", "--json", str(written), str(script)]) == 0
    printed = capsys.readouterr().out
    for name in ("plain", "level O1", "cubic prefix", "half frozen from 10 % on"):
        assert f"| {name} | " in printed
    assert "failed" not in printed.replace("fewer BatchNorms", "")
    BoostConfig.parse("O1", json.loads(written.read_text()))


@pytest.mark.parametrize(("mode", "runs"), [("PYNATIVE_MODE", 1), ("GRAPH_MODE", 0)])
def test_a_compiled_step_is_tried_for_a_script_in_pynative_mode(race, mode, runs):
    start = [{"event": "start", "mode": mode}]
    code, settings, printed = race(
        plain=start + history(2, 1.0, falling), compiled=start + history(3, 0.2, falling)
    )
    assert code == 0
    assert printed.count("| compiled step | 10.8 |") == runs  # 3 + 39 * 0.2 s
    assert settings["boost"].get("compiled_step", False) is bool(runs)
